"""Figures of docs/numerics.md: what overflows, what a loss scale does, why BF16 weights stagnate.

All of it is computed: the sums by torch in each format, the gradients by backward passes of a small
GPT on Python's own sources (`charlm`), the curves by training it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ampwise
from _common import save
from ampwise.report.canvas import COLOURS, svg

IMAGES = Path(__file__).parent.parent / "docs" / "images"
FORMATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = range(-14, 25, 2)

SUMS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "40 x 40, summed over 64 (a score before its scaling)": lambda dtype: (
        torch.full((1, 64), 40.0, dtype=dtype) @ torch.full((64, 1), 40.0, dtype=dtype)
    ),
    "300 squared (the inside of a norm)": lambda dtype: torch.full((), 300.0, dtype=dtype).square(),
    "exp(12)": lambda dtype: torch.full((), 12.0, dtype=dtype).exp(),
    "-1e9 (a mask)": lambda dtype: torch.tensor(-1e9).to(dtype),
    "1e-8 (Adam's eps)": lambda dtype: torch.tensor(1e-8).to(dtype),
    "1e-6 squared": lambda dtype: torch.full((), 1e-6, dtype=dtype).square(),
    "1 - 0.0001 (a decay of 0.9999)": lambda dtype: torch.ones((), dtype=dtype) - 1e-4,
    "4096 + 1 (a position)": lambda dtype: torch.full((), 4096.0, dtype=dtype) + 1,
}


def overflows() -> dict[str, dict[str, float | str]]:
    """Some sums as each format has them."""
    return {
        name: {str(dtype).removeprefix("torch."): said(make(dtype).item()) for dtype in FORMATS}
        for name, make in SUMS.items()
    }


def said(value: float) -> float | str:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else str(value)


def made(seed: int = 0) -> tuple[Any, nn.Module]:
    task = ampwise.load_task("charlm", {"size": "tiny", "batch": "8"})
    torch.manual_seed(seed)
    return task, task.model()


def gradients(task: Any, model: nn.Module, batch: Any, scale: float, dtype: torch.dtype) -> Tensor:
    """All gradients of one batch, multiplied by the scale, from backward in a format."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = task.loss(model, batch)
    (loss * scale).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def scaling(steps: int) -> dict[str, Any]:
    """What float16 makes of gradients under each loss scale, after some steps of training."""
    task, model = made()
    train(task, model, steps, 1e-3, lambda *_: None)
    batch = next(iter(task.batches()))
    exact = gradients(task, model, batch, 1.0, torch.float32)
    there = exact != 0
    lost, overflow = [], []
    for power in SCALES:
        seen = gradients(task, model, batch, 2.0**power, torch.float16)
        lost.append(float((seen[there] == 0).float().mean()))
        overflow.append(float((~seen.isfinite()).float().mean()))
    sizes = exact[there].abs().log2()
    counts = torch.histc(sizes, bins=50, min=-50, max=0) / len(sizes)
    return {
        "log2_scale": list(SCALES), "share_lost": lost,
        "share_not_finite": overflow, "log2_size": list(range(-50, 0)), "share": counts.tolist(),
    }  # fmt: skip


def train(
    task: Any, model: nn.Module, steps: int, rate: float, each_step: Callable[..., None]
) -> list[float]:
    """A plain loop with bfloat16 autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in task.batches():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = task.loss(model, batch)
            loss.backward()
            before = [each.detach().clone() for each in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            each_step(before, model)
            if len(losses) == steps:
                break
    return losses


def stagnation(steps: int, rate: float) -> dict[str, Any]:
    """The same training with weights in float32 and in bfloat16."""
    arms: dict[str, Any] = {}
    for name in ("float32", "bfloat16"):
        task, model = made()
        model.to(getattr(torch, name))
        moved: list[float] = []

        def count(before: list[Tensor], model: nn.Module, moved: list[float] = moved) -> None:
            pairs = list(zip(before, model.parameters(), strict=True))
            changed = sum(int((a != b).sum()) for a, b in pairs)
            moved.append(changed / sum(each.numel() for each in before))

        losses = train(task, model, steps, rate, count)
        arms[name] = {"loss": losses, "moved": moved}
    return {"learning_rate": rate, "steps": steps, "arms": arms}


def smooth(values: list[float], over: int = 20) -> list[float]:
    return [
        sum(values[max(0, i - over) : i + 1]) / len(values[max(0, i - over) : i + 1])
        for i in range(len(values))
    ]


def draw(results: dict[str, Any]) -> None:
    """The figures, as SVG."""
    scale, stuck = results["scaling"], results["stagnation"]

    def sizes(axes: Any) -> None:
        axes.axvspan(-50, -25, color=COLOURS[2], alpha=0.15, lw=0)
        axes.axvspan(-24, -14, color=COLOURS[5], alpha=0.15, lw=0)
        axes.bar(scale["log2_size"], [100 * each for each in scale["share"]], 1, align="edge",
                 color=COLOURS[1])  # fmt: skip
        axes.text(-49, axes.get_ylim()[1] * 0.92, "0 in float16")
        axes.text(-23.5, axes.get_ylim()[1] * 0.92, "subnormal")
        axes.set_xlabel("size of a gradient, as a power of 2")
        axes.set_ylabel("% of gradients")

    def lost(axes: Any) -> None:
        powers = scale["log2_scale"]
        axes.plot(powers, [100 * each for each in scale["share_lost"]], color=COLOURS[1],
                  marker="o", ms=3, label="became 0")  # fmt: skip
        axes.plot(powers, [100 * each for each in scale["share_not_finite"]], color=COLOURS[2],
                  marker="s", ms=3, label="became inf or NaN: the step is skipped")  # fmt: skip
        axes.set_xlabel("loss scale, as a power of 2")
        axes.set_ylabel("% of gradients")
        axes.legend()

    def losses(axes: Any) -> None:
        for (name, arm), colour in zip(
            stuck["arms"].items(), (COLOURS[1], COLOURS[2]), strict=True
        ):
            axes.plot(smooth(arm["loss"]), color=colour, label=f"weights in {name}")
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, mean of 20 steps")
        axes.legend()

    def moves(axes: Any) -> None:
        for (name, arm), colour in zip(
            stuck["arms"].items(), (COLOURS[1], COLOURS[2]), strict=True
        ):
            axes.plot(smooth([100 * each for each in arm["moved"]]), color=colour,
                      label=f"weights in {name}")  # fmt: skip
        axes.set_ylim(0, 102)
        axes.set_xlabel("step")
        axes.set_ylabel("% of weights that a step changed")
        axes.legend(loc="center right")

    figures = {"sizes": sizes, "scale": lost, "stagnation": losses, "moved": moves}
    for name, figure in figures.items():
        file = IMAGES / f"numerics-{name}.svg"
        file.write_text(svg(f"numerics-{name}", figure, height=3) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=1e-4)
    options = parser.parse_args()
    results = {
        "overflow": overflows(),
        "scaling": scaling(200),
        "stagnation": stagnation(options.steps, options.rate),
    }
    draw(results)
    save("numerics-cpu", results)
    print(results["overflow"])


if __name__ == "__main__":
    main()
