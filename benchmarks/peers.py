"""Figure 3: whole steps against Accelerate, Lightning Fabric and Trainer, and Hugging Face Trainer.

Released packages (``pip install 'ampwise[peers]'``), the same model, batches, fused AdamW and
clipping at 1.0. The trainers own their loop, so each arm makes a block of steps and reports the
time per step from the end of its second step to the end of its last: starting a trainer is not
counted. Their logging, checkpoints and progress bars are off; ampwise keeps its record of every
step. Arms take turns, one block a round.

Precisions are fp32 and bf16. Not fp16: on a CPU Accelerate and Hugging Face run float32 under that
name, and Lightning bfloat16.

With ``--chosen`` ampwise trains with what it chose by itself, against bf16 in the others: ``auto``,
by a race on its first step, and ``tuned``, what ``ampwise tune`` found. Where that has a larger
batch, the time is that of as many samples as the others have in theirs.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from _common import paired_ratio, sample_in_turns, save, show
from ampwise.step import TrainStep
from step import MODELS, Loss

SAME = [*itertools.product([("mlp", 100), ("cnn", 15), ("charlm", 10)], ["fp32", "bf16"])]
CHOSEN = [*itertools.product([("charlm small", 5), ("charlm base", 4)], ["auto", "tuned"])]
"""Model, steps in a block, and precision."""

TUNED = {
    "charlm small": ("bf16-master", ("unfused-attention", "compile"), 2),
    "charlm base": ("bf16-master", ("unfused-attention",), 2),
}
"""Policy, levers, and windows for one of the others', as ``ampwise tune charlm --objective speed``
found them on the machine of the results (``--set size=small``; ``--set size=base --set batch=8``).
"""

Block = Callable[[], float]


class Clock:
    """Milliseconds per step from the second ``tick`` to the last."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def tick(self) -> None:
        self.at.append(time.perf_counter())

    @property
    def ms(self) -> float:
        return (self.at[-1] - self.at[1]) * 1e3 / (len(self.at) - 2)


class WithLoss(nn.Module):
    """The model and its loss in one forward, as the trainers want it."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        batch = inputs if labels is None else (inputs, labels)
        return {"loss": self.loss(self.model, batch)}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def in_a_loop(step: Callable[[Any], object], batch: Any, steps: int) -> Block:
    def block() -> float:
        clock = Clock()
        for each in itertools.repeat(batch, steps):
            step(each)
            clock.tick()
        return clock.ms

    return block


def ampwise(make: Callable[..., Any], precision: str, steps: int) -> Block:
    model, batch, loss = make()
    step = TrainStep(model, adamw(model), policy=precision, max_grad_norm=1.0)
    if precision == "auto":
        step(loss, batch)
        print(f"auto: {step.policy.text}", flush=True)

    def one(batch: Any) -> None:
        step(loss, batch)
        if step.steps % 10 == 0:
            step.poll()

    return in_a_loop(one, batch, steps)


def by_ampwise(name: str, precision: str, steps: int) -> Block:
    if precision != "tuned":
        return ampwise(MODELS[name], precision, steps)
    policy, levers, times = TUNED[name]
    make = partial(MODELS[name], windows=8 * times, levers=levers)
    block = ampwise(make, policy, steps)
    return lambda: block() / times


def accelerate(make: Callable[..., Any], precision: str, steps: int) -> Block:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model, batch, loss = make()
    AcceleratorState._reset_state(reset_partial_state=True)  # one precision a process otherwise
    accelerator = Accelerator(mixed_precision={"fp32": "no"}.get(precision, "bf16"), cpu=True)
    model, optimizer = accelerator.prepare(model, adamw(model))

    def one(batch: Any) -> None:
        with accelerator.autocast():
            value = loss(model, batch)
        accelerator.backward(value)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return in_a_loop(one, batch, steps)


def fabric(make: Callable[..., Any], precision: str, steps: int) -> Block:
    from lightning.fabric import Fabric

    model, batch, loss = make()
    made = Fabric(accelerator="cpu", devices=1, precision=_lightning(precision))
    model, optimizer = made.setup(model, adamw(model))

    def one(batch: Any) -> None:
        with made.autocast():
            value = loss(model, batch)
        made.backward(value)
        made.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return in_a_loop(one, batch, steps)


def lightning_trainer(make: Callable[..., Any], precision: str, steps: int) -> Block:
    from lightning.pytorch import Callback, LightningModule, Trainer

    model, batch, loss = make()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any) -> Tensor:
            return loss(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.net)

        # The trainer's own clipping refuses fused optimizers in mixed precision, in bf16 too.
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)

    module, data = Module(), _Repeated(batch, steps)

    def block() -> float:
        clock = Clock()

        class Ticks(Callback):
            def on_train_batch_end(self, *_: Any) -> None:
                clock.tick()

        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            precision=_lightning(precision),
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Ticks()],
        )
        trainer.fit(module, data)
        return clock.ms

    return block


def hf_trainer(make: Callable[..., Any], precision: str, steps: int) -> Block:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    model, made, loss = make()
    module = WithLoss(model, loss)
    tensors = made if isinstance(made, tuple) else (made,)
    batch = dict(zip(("inputs", "labels"), tensors, strict=False))

    def block() -> float:
        clock = Clock()

        class Ticks(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.tick()

        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),
            max_steps=steps,
            per_device_train_batch_size=1,  # one ready batch
            bf16=precision != "fp32",
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=1e-4,
            max_grad_norm=1.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        trainer = Trainer(
            module,
            arguments,
            train_dataset=[batch] * steps,
            data_collator=lambda ready: ready[0],
            callbacks=[Ticks()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return clock.ms

    return block


class _Repeated:
    """A loader whose batches are ready."""

    def __init__(self, batch: Any, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, self.steps)


def _lightning(precision: str) -> Any:
    return "32-true" if precision == "fp32" else "bf16-mixed"


PEERS = {
    "accelerate": accelerate,
    "fabric": fabric,
    "lightning trainer": lightning_trainer,
    "hf trainer": hf_trainer,
}


def compare(name: str, precision: str, rounds: int, steps: int) -> dict[str, Any]:
    arms = {peer: make(MODELS[name], precision, steps) for peer, make in PEERS.items()}
    arms["ampwise"] = by_ampwise(name, precision, steps)
    for block in arms.values():
        block()
    samples = sample_in_turns(arms, rounds)
    ratios = {
        peer: paired_ratio(times, samples["ampwise"])
        for peer, times in samples.items()
        if peer != "ampwise"
    }
    for peer, ratio in ratios.items():
        print(show(f"{name} {precision}: {peer} / ampwise", ratio), flush=True)
    medians = {peer: statistics.median(values) for peer, values in samples.items()}
    return {"median_ms": medians, "times_slower_than_ampwise": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chosen", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    results = {}
    for (name, steps), precision in CHOSEN if args.chosen else SAME:
        torch.set_num_threads(1 if name == "mlp" else 2)
        results[f"{name} {precision}"] = compare(name, precision, args.rounds, steps)
    packages = {each: version(each) for each in ("accelerate", "lightning", "transformers")}
    save(
        "peers-chosen-cpu" if args.chosen else "peers-cpu",
        {"packages": packages, "comparisons": results},
    )


if __name__ == "__main__":
    main()
