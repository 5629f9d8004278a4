"""``ampwise bench``: every precision side by side on one task."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ampwise.cli import scaling
from ampwise.cli.bench_options import Options
from ampwise.cli.options import Gate, check_seeds, device_of, policies, positive, saved_in
from ampwise.distributed.launch import launch
from ampwise.errors import EXIT_GATE, EXIT_INTERRUPTED, EXIT_OK, RunError, UsageError
from ampwise_lint.base.output import say, tell
from ampwise_lint.base.results import write_json

if TYPE_CHECKING:
    from ampwise.bench.result import BenchReport
    from ampwise.telemetry.run import RunFolder


def run(options: Options) -> int:
    """Measure, print, write ``bench.json``; the exit code."""
    positive("steps", options.steps)
    positive("accumulate", options.accumulate)
    positive("max-grad-norm", options.max_grad_norm)
    positive("parity-steps", options.parity_steps)
    positive("budget", options.budget)
    check_seeds(options.seeds)
    # The profiler's library announces each start on stderr, in the middle of our progress.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    me = launch()
    if me.size > 1:
        return scaling.run(options, me)
    if options.parallel is not None:
        raise UsageError(
            f"--parallel {options.parallel} is for several processes; start them with "
            "torchrun --nproc-per-node 2 -m ampwise bench ..."
        )

    from ampwise.bench.config import BenchConfig
    from ampwise.bench.requirements import Thresholds
    from ampwise.bench.run import run_bench
    from ampwise.cli.progress import bench_progress
    from ampwise.tasks import load_task
    from ampwise.telemetry.run import RunFolder

    budgets = options.budgets()
    config = BenchConfig(
        device=device_of(options.device),
        precisions=policies(options.precisions),
        seed=options.seed,
        accumulate=options.accumulate,
        max_grad_norm=options.max_grad_norm,
        max_rounds=budgets.rounds,
        budget_s=budgets.race_s,
        max_seeds=options.seeds,
        parity_steps=options.parity_steps,
        parity_budget_s=budgets.parity_s,
        metric=options.metric,
        levers_s=budgets.lever_s if options.levers else 0.0,
        compiled=options.compile,
        total_s=budgets.total_s,
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
    from ampwise_lint.base.words import joined

    text = json.dumps(report.to_json(), indent=2, allow_nan=False)
    try:
        written = _store(folder, text, report)
    finally:
        if options.json != "-":
            render(report, Console())
    if options.json != "-":
        tell("", f"report: {joined(map(str, written))}")
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
