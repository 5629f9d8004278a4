"""``ampwise bench`` under torchrun: how a training step scales over processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from ampwise.cli.bench_options import Options
from ampwise.cli.options import device_of, policies, positive, saved_in
from ampwise.errors import EXIT_OK, UsageError, nearest
from ampwise_lint.base.output import say, tell
from ampwise_lint.base.results import write_json

if TYPE_CHECKING:
    import torch

    from ampwise.bench.scaling import ScalingConfig
    from ampwise.bench.scaling_report import ScalingReport
    from ampwise.distributed.launch import Launch
    from ampwise.distributed.wrap import Parallel
    from ampwise.policy import Policy
    from ampwise.telemetry.run import RunFolder


def run(options: Options, me: Launch) -> int:
    """Measure on all ranks; the first one prints and writes. The exit code."""
    positive("rank-timeout", options.rank_timeout)
    if options.gate != "off":
        raise UsageError(
            "gate: under torchrun bench measures scaling, which has no requirements; run "
            "ampwise bench in one process"
        )
    parallel = _ways(options.parallel)

    from ampwise.bench.scaling import begun, native, run_scaling
    from ampwise.cli.progress import bench_progress
    from ampwise.distributed.host_group import everyone
    from ampwise.distributed.launch import is_lost, joined
    from ampwise.errors import kind_and_words
    from ampwise.tasks import load_task

    device = device_of(options.device)
    quiet = options.quiet or not me.leads
    with joined(me, device.type, options.rank_timeout), bench_progress(quiet=quiet) as progress:
        chosen, left_out = everyone().first(
            lambda: native(policies(options.precisions), str(device))
        )
        task = load_task(options.task, options.settings())
        config = _config(options, device, chosen, parallel)
        with _folder(options, task.name, me) as folder:
            report = begun(task, config, me)
            report.left_out = left_out
            folder.write({"command": "bench", "task": report.task, "status": "running"})
            try:
                run_scaling(task, config, me, report, progress)
            except KeyboardInterrupt as interruption:
                # The others stand elsewhere: leave by the error, which waits for nobody. torchrun
                # asks again as soon as one process has left.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                report.interrupted = True
                if me.leads:
                    _finish(options, folder, report)
                    saved_in(interruption, folder.path)
                raise
            except Exception as error:
                report.failed = "a process died" if is_lost(error) else kind_and_words(error)
                if report.measured and me.leads:
                    _finish(options, folder, report)
                    saved_in(error, folder.path)
                raise
            if me.leads:
                _finish(options, folder, report)
    return EXIT_OK


def _ways(text: str | None) -> list[Parallel]:
    """Ways to spread a model, from a comma-separated list."""
    legal: dict[str, Parallel] = {"ddp": "ddp", "fsdp": "fsdp"}
    names = list(dict.fromkeys((text or "ddp").split(",")))
    for name in names:
        if name not in legal:
            raise UsageError(
                f"parallel {name!r}: expected ddp, fsdp or ddp,fsdp{nearest(name, legal)}"
            )
    return [legal[name] for name in names]


def _config(
    options: Options, device: torch.device, chosen: list[Policy], parallel: list[Parallel]
) -> ScalingConfig:
    from ampwise.bench.arm import Settings
    from ampwise.bench.scaling import ScalingConfig

    budgets = options.budgets()
    return ScalingConfig(
        settings=Settings(device, options.seed, options.accumulate, options.max_grad_norm),
        policies=chosen,
        parallel=parallel,
        max_rounds=budgets.rounds,
        budget_s=min(budgets.race_s, budgets.total_s) / len(chosen),
    )


def _folder(options: Options, task: str, me: Launch) -> RunFolder:
    """The run's folder: the first process makes it, the others look on."""
    from ampwise.distributed.host_group import everyone
    from ampwise.telemetry.run import RunFolder

    made: list[RunFolder] = []

    def make() -> str:
        name = f"scaling-{task}"
        made.append(RunFolder.create(options.out, name, say))
        return str(made[0].path)

    path = Path(everyone().first(make))
    return made[0] if me.leads else RunFolder.observe(path)


def _finish(options: Options, folder: RunFolder, report: ScalingReport) -> None:
    """Store a report, then show it, also when the disk is too full to store it."""
    from ampwise.report.scaling import render, to_html
    from ampwise_lint.base.console import Console
    from ampwise_lint.base.files import atomic_write_text

    result = report.to_json()
    try:
        folder.write(
            {
                "command": "bench",
                "task": report.task,
                "status": report.ended or "finished",
                "environment": report.environment,
                "result": result,
            }
        )
        atomic_write_text(folder.path / "report.html", to_html(report))
    finally:
        if options.json != "-":
            render(report, Console())
    if options.json != "-":
        tell("", f"report: {folder.path / 'run.json'} and {folder.path / 'report.html'}")
    write_json(json.dumps(result, indent=2, allow_nan=False), options.json)
