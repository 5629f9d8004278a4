"""Figure 11: what summing gradients in bfloat16 (``reduce=bf16``) does to what is learnt.

Two processes over gloo train under DDP with `ampwise.distributed.replicate`, once with gradients
summed in float32 and once in bfloat16, everything else the same: a seed fixes initial weights and
the order of the data. Over the second half the learning rate falls to zero. Held-out metrics are
compared over paired seeds by the package's own test of equivalence (`ampwise.bench.equivalence`),
with Holm's adjustment over the precisions of a metric. ``python reduce.py --table`` prints the
table of docs/scale.md from the stored results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch

from _common import RESULTS, save
from _gloo import run
from ampwise import Policy, Task, load_task
from ampwise.bench.arm import Arm, Settings
from ampwise.bench.equivalence import decide, least_sd_of
from ampwise.distributed import replicate
from ampwise.tasks.checks import endless

RANKS = 2
SEEDS = 5
STEPS = {"charlm": 100, "digits": 150}
BATCH = {"charlm": 4, "digits": 32}
"""Samples of a rank: together the tasks' own batches."""

COMPUTE = ("fp32", "bf16")
MARGIN = 0.01

RELATIVE = {"loss": True, "accuracy": False}
"""Metrics, and whether their difference is relative to what float32 sums give."""


def train(rank: int, ranks: int, name: str) -> dict[str, list[dict[str, float]]]:
    """By precision the held-out metrics after training, one for each seed."""
    finals: dict[str, list[dict[str, float]]] = {}
    for seed in range(SEEDS):
        for precision in (text for each in COMPUTE for text in (each, f"{each}:reduce=bf16")):
            metrics = _train(_task(name, seed), Policy.parse(precision), seed, rank, ranks)
            finals.setdefault(precision, []).append(metrics)
            if rank == 0:
                print(name, f"seed {seed}", precision, metrics, flush=True)
    return finals


def _task(name: str, seed: int) -> Task:
    """With other data for each seed; digits is shuffled by the global one."""
    own = {"seed": str(seed)} if name == "charlm" else {}
    return load_task(name, {"batch": str(BATCH[name]), **own})


def _train(task: Task, policy: Policy, seed: int, rank: int, ranks: int) -> dict[str, float]:
    steps = STEPS[task.name.partition("-")[0]]
    arm = Arm(
        task,
        policy,
        Settings(torch.device("cpu"), seed),
        spread=lambda model: replicate(model, policy),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        arm.optimizer, lambda step: min(1.0, 2 * (steps - step) / steps)
    )
    torch.manual_seed(seed)  # in which order the data comes
    for batch in _dealt(endless(task), rank, ranks, steps):
        arm.run(batch)
        schedule.step()
    return arm.held_out()


def _dealt(batches: Iterator[Any], rank: int, ranks: int, steps: int) -> Iterator[Any]:
    """This rank's of every `ranks` batches."""
    for _ in range(steps):
        yield [next(batches) for _ in range(ranks)][rank]


def compared(finals: Mapping[str, list[dict[str, float]]], metric: str) -> dict[str, Any]:
    """By compute precision: what float32 sums give, and the paired differences of bfloat16's."""
    exact = {each: [run[metric] for run in finals[each]] for each in COMPUTE}
    summed = {each: [run[metric] for run in finals[f"{each}:reduce=bf16"]] for each in COMPUTE}
    differences = {
        each: [
            (b - a) / (a if RELATIVE[metric] else 1)
            for a, b in zip(exact[each], summed[each], strict=True)
        ]
        for each in COMPUTE
    }
    least_sd = {each: least_sd_of(_resolution(exact[each] + summed[each])) for each in COMPUTE}
    judged = decide(differences, MARGIN, least_sd={} if RELATIVE[metric] else least_sd)
    return {
        each: {
            "reduce_fp32": exact[each],
            "reduce_bf16": summed[each],
            "difference": asdict(judged[each]),
        }
        for each in COMPUTE
    }


def _resolution(values: list[float]) -> float:
    """Smallest difference between two values that were seen."""
    return min((b - a for a, b in pairwise(sorted(set(values)))), default=0.0)


def table(results: Mapping[str, Any]) -> str:
    """The table of docs/scale.md, in Markdown."""
    head = ("task, held-out metric", "compute", "summed in float32", "bfloat16 instead", "sd", "is")
    lines = ["| " + " | ".join(head) + " |", "| --- | --- " + "| ---: " * 3 + "| --- |"]
    for name, metrics in results["tasks"].items():
        for metric, precisions in metrics.items():
            for precision, found in precisions.items():
                values, said = found["reduce_fp32"], _write(found["difference"], metric)
                mean = sum(values) / len(values)
                lines.append(f"| {name}, {metric} | {precision} | {mean:.4f} | {said} |")
    return "\n".join(lines)


def _write(found: Mapping[str, Any], metric: str) -> str:
    form = "{:+.3%}" if RELATIVE[metric] else "{:+.5f}"
    mean, low, high = (form.format(found[key]) for key in ("difference", "low", "high"))
    return f"{mean} [{low}, {high}] | {form.format(found['sd'])[1:]} | {found['decision']}"


def main() -> None:
    if "--table" in sys.argv:
        print(table(json.loads((RESULTS / "reduce-cpu.json").read_text())))
        return
    tasks: dict[str, Any] = {}
    for name in STEPS:
        finals = run(train, RANKS, name, limit_s=1200)
        metrics = ("loss",) if name == "charlm" else ("loss", "accuracy")
        tasks[name] = {metric: compared(finals, metric) for metric in metrics}
    results = {
        "ranks": RANKS,
        "threads_per_rank": 1,
        "seeds": SEEDS,
        "steps": STEPS,
        "batch_per_rank": BATCH,
        "margin": MARGIN,
        "tasks": tasks,
    }
    print(table(results))
    save("reduce-cpu", results)


if __name__ == "__main__":
    main()
