"""``ampwise bench``: every precision side by side on one task."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ampwise.cli.options import Common, Gate, check_seeds, positive, saved_in
from ampwise.distributed.launch import launch
from ampwise.errors import EXIT_GATE, EXIT_INTERRUPTED, EXIT_OK, RunError, UsageError
from ampwise_lint.base.output import say, tell
from ampwise_lint.base.results import write_json

if TYPE_CHECKING:
    import torch

    from ampwise.bench.result import BenchReport
    from ampwise.policy import Policy
    from ampwise.telemetry.run import RunFolder

BUDGETS = {"full": (200, 300.0, 1200.0, 30.0), "quick": (60, 45.0, 120.0, 8.0)}
"""Rounds of the race, its seconds, the seconds of parity, and those of each lever."""


@dataclass
class Options(Common):
    """Measure every precision side by side: speed, memory, held-out loss, and what to use."""

    precisions: str | None = None
    """Comma-separated precisions beside fp32; default: those that gain here, and fp16."""

    steps: int | None = None
    """Rounds at most (each precision makes one step a round); default 200, with --quick 60."""

    quick: bool = False
    """A first answer in a few minutes: fewer rounds, shorter training."""

    seeds: int = 12
    """Paired seeds for accuracy parity, at most; 5 or more decide, 0 leaves it out."""

    parity_steps: int | None = None
    """Steps of each training run for parity; default: what five seeds have time for."""

    metric: str | None = None
    """What parity compares; default: the first metric that the task's evaluate() gives."""

    accumulate: int = 1
    """Micro-batches in an accumulation window."""

    max_grad_norm: float | None = None
    """Clip the gradient norm to this."""

    min_speedup: float = 1.5
    """Requirement: at least this many times faster than fp32."""

    min_memory_reduction: float = 0.40
    """Requirement: at least this share of fp32's peak memory saved."""

    max_accuracy_difference: float = 0.01
    """Requirement: held-out metric within this of fp32's; relative to it, but for scores from 0
    to 1, such as an accuracy."""

    levers: bool = True
    """Leave out what else helps, beside precision."""

    compile: bool = False
    """Try torch.compile as one of the levers; it takes a while and needs a compiler."""

    parallel: str | None = None
    """Under torchrun, which measures how training scales: ddp, fsdp (FSDP2) or ddp,fsdp."""

    rank_timeout: float = 600.0
    """Seconds that processes wait for one that does not come along."""

    gate: Gate = "off"
    """Exit with 1 when a requirement fails; "strict": also when one is not measured."""


def run(options: Options) -> int:
    """Measure, print, write ``bench.json``; the exit code."""
    positive("steps", options.steps)
    positive("accumulate", options.accumulate)
    positive("max-grad-norm", options.max_grad_norm)
    positive("parity-steps", options.parity_steps)
    check_seeds(options.seeds)
    # The profiler's library announces each start on stderr, in the middle of our progress.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    me = launch()
    if me.size > 1:
        from ampwise.cli import scaling

        return scaling.run(options, me)
    if options.parallel is not None:
        raise UsageError(
            f"--parallel {options.parallel} is for several processes; start them with "
            "torchrun --nproc-per-node 2 -m ampwise bench ..."
        )

    from ampwise.bench.requirements import Thresholds
    from ampwise.bench.run import BenchConfig, run_bench
    from ampwise.cli.progress import bench_progress
    from ampwise.tasks import load_task
    from ampwise.telemetry.run import RunFolder

    rounds, budget_s, parity_budget_s, levers_s = BUDGETS["quick" if options.quick else "full"]
    config = BenchConfig(
        device=device_of(options.device),
        precisions=policies(options.precisions),
        seed=options.seed,
        accumulate=options.accumulate,
        max_grad_norm=options.max_grad_norm,
        max_rounds=options.steps or rounds,
        budget_s=budget_s,
        max_seeds=options.seeds,
        parity_steps=options.parity_steps,
        parity_budget_s=parity_budget_s,
        metric=options.metric,
        levers_s=levers_s if options.levers else 0.0,
        compiled=options.compile,
        thresholds=Thresholds(
            options.min_speedup, options.min_memory_reduction, options.max_accuracy_difference
        ),
    )
    task = load_task(options.task, options.settings())
    partial: list[BenchReport] = []
    with RunFolder.create(options.out, f"bench-{task.name}", say) as folder:
        folder.write({"command": "bench", "task": task.name, "status": "running"})
        try:
            with bench_progress(quiet=options.quiet) as progress:
                report = run_bench(task, config, progress, failed=partial.append)
        except Exception as error:
            for each in partial:
                _finish(options, folder, each)
                saved_in(error, folder.path)
            raise
        _finish(options, folder, report)
    if report.interrupted:
        return EXIT_INTERRUPTED
    return gate_exit_code(report, options.gate)


def _finish(options: Options, folder: RunFolder, report: BenchReport) -> None:
    """Store a report, then show it, also when the disk is too full to store it."""
    from ampwise.report.bench import render
    from ampwise_lint.base.console import Console

    text = json.dumps(report.to_json(), indent=2, allow_nan=False)
    try:
        written = _store(folder, text, report)
    finally:
        if options.json != "-":
            render(report, Console())
    if options.json != "-":
        tell("", f"report: {' and '.join(map(str, written))}")
    write_json(text, options.json)


def _store(folder: RunFolder, text: str, report: BenchReport) -> list[Path]:
    """Write ``bench.json`` and ``report.html``; the files there are now."""
    from ampwise.report.html import to_html
    from ampwise_lint.base.files import atomic_write_text

    written = [folder.path / "bench.json"]
    try:
        atomic_write_text(written[0], text + "\n")
    except OSError as error:
        raise RunError(f"cannot write {written[0]}: {error.strerror}; free disk space") from None
    folder.write(
        {
            "command": "bench",
            "task": report.task,
            "status": report.ended or "finished",
            "environment": report.environment,
            "report": "bench.json",
        }
    )
    try:
        atomic_write_text(folder.path / "report.html", to_html(report))
        written.append(folder.path / "report.html")
    except OSError as error:
        say(
            f"report.html: {error.strerror}; ampwise report {folder.path} --format html tries again"
        )
    return written


def gate_exit_code(report: BenchReport, gate: Gate) -> int:
    """The exit code that ``--gate`` asks for."""
    if gate == "off":
        return EXIT_OK
    bad = {"fail"} if gate == "fail" else {"fail", "not measured"}
    against = [
        f"{each.name}: {name} {requirement.status}"
        for each in report.precisions
        for name, requirement in each.requirements.items()
        if requirement.status in bad
    ]
    if against:
        say(f"gate: {'; '.join(against)}")
    return EXIT_GATE if against else EXIT_OK


def policies(text: str | None) -> list[Policy] | None:
    """Policies of a comma-separated list; None if none was given."""
    from ampwise.policy import Policy

    if text is None:
        return None
    names = [each for each in text.split(",") if each.strip()]
    if not names:
        raise UsageError("precisions: expected a comma-separated list such as bf16,fp16")
    return [Policy.parse(each) for each in names]


def device_of(name: str | None) -> torch.device:
    """The device to use; an absent one becomes the CPU, and that is said."""
    import torch

    from ampwise.capability import present_devices
    from ampwise.policy import choose_device

    device, reason, moved = choose_device(name, present_devices())
    if moved:
        say(f"{reason}; using {device}")
    return torch.device(device)
