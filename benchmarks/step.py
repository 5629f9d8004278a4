"""Figure 2: a whole ampwise step against the loop one would write by hand with torch.amp.

Same model, batch, fused AdamW, clipping at 1.0. The hand-written loop comes in two kinds: bare, and
with what ampwise does anyway: loss, loss scale and grad norm of every step in a log. It has to read
them step by step; ampwise records them by itself and hands them out together, here every ten steps
(``poll``), in both comparisons. Arms take turns, one sample a round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _common import paired_ratio, save, show, take_turns
from ampwise import load_task
from ampwise.data import to_device
from ampwise.step import TrainStep
from ampwise.tasks.levers import pulled

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Loss = Callable[[nn.Module, Any], Tensor]


def mlp() -> tuple[nn.Module, Any, Loss]:
    """Two layers of width 64: nothing but fixed overhead."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    batch = (torch.randn(32, 64), torch.randint(0, 10, (32,)))
    return model, batch, classify


def cnn() -> tuple[nn.Module, Any, Loss]:
    """Three convolutions with BatchNorm on 32 x 32 images."""
    torch.manual_seed(0)

    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]

    model = nn.Sequential(
        *block(3, 32), *block(32, 64), *block(64, 64), nn.Flatten(), nn.Linear(1024, 10)
    )
    return model, (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))), classify


def charlm(
    size: str = "tiny", windows: int = 8, levers: Sequence[str] = ()
) -> tuple[nn.Module, Any, Loss]:
    """The built-in task on real data, 8 windows a batch."""
    task = pulled(load_task("charlm", {"size": size, "batch": str(windows)}), levers)
    torch.manual_seed(0)
    return task.model(), next(iter(task.batches())), task.loss


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "charlm": charlm,
    "charlm small": partial(charlm, "small"),
    "charlm base": partial(charlm, "base"),
}


def by_hand(make: Callable[..., Any], precision: str, *, logging: bool) -> Callable[[], object]:
    model, batch, loss_fn = make()
    model, batch, dtype = model.to(DEVICE), to_device(batch, DEVICE), DTYPES[precision]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=precision == "fp16")
    log: list[tuple[float, float, float]] = []

    def run() -> None:
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype is not None):
            loss = loss_fn(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if logging:
            log.append((loss.item(), scaler.get_scale(), norm.item()))

    return run


def by_ampwise(make: Callable[..., Any], precision: str) -> Callable[[], object]:
    model, batch, loss_fn = make()
    model, batch = model.to(DEVICE), to_device(batch, DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = TrainStep(model, optimizer, policy=precision, max_grad_norm=1.0)
    log: list[Any] = []

    def run() -> None:
        step(loss_fn, batch)
        if step.steps % 10 == 0:
            log.extend(step.poll())

    return run


def compare(name: str, precision: str, rounds: int, inner: int) -> dict[str, Any]:
    make = MODELS[name]
    arms = {
        "ampwise": by_ampwise(make, precision),
        "hand-written": by_hand(make, precision, logging=False),
        "hand-written, logging": by_hand(make, precision, logging=True),
    }
    sync = torch.cuda.synchronize if DEVICE.type == "cuda" else (lambda: None)
    samples = take_turns(arms, rounds, inner=inner, synchronize=sync)
    ratios = {n: paired_ratio(samples["ampwise"], samples[n]) for n in arms if n != "ampwise"}
    for other, ratio in ratios.items():
        print(show(f"{name} {precision}: ampwise / {other}", ratio))
    medians = {arm: statistics.median(values) for arm, values in samples.items()}
    return {"median_ms": medians, "ampwise_time_relative_to": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    # Many calls of the short one: its first pays for what the arm before left in the caches.
    plans = [("mlp", p, 100) for p in DTYPES] + [(m, "fp32", 1) for m in ("cnn", "charlm")]
    plans += [(m, "bf16", 1) for m in ("cnn", "charlm")]
    torch.set_num_threads(1)
    results = {}
    for name, precision, inner in plans:
        torch.set_num_threads(1 if name == "mlp" else 2)
        results[f"{name} {precision}"] = compare(name, precision, rounds, inner)
    save(f"step-{DEVICE.type}", {"comparisons": results})


if __name__ == "__main__":
    main()
