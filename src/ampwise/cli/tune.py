"""``ampwise tune``: the fewest modules that must stay in float32, and the fastest policy."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampwise.cli.options import Common, check_seeds, device_of, policies, positive, saved_in
from ampwise.errors import EXIT_GATE, EXIT_INTERRUPTED, EXIT_OK
from ampwise_lint.base.output import tell
from ampwise_lint.base.results import write_json

if TYPE_CHECKING:
    from ampwise.telemetry.run import RunFolder
    from ampwise.tune.result import Tuned

_RACE_S, _PARITY_S = 30.0, 90.0


@dataclass
class Options(Common):
    """Find the fewest modules that must stay in float32, and the fastest policy that holds."""

    precisions: str = "bf16,fp16"
    """Comma-separated precisions to make hold."""

    steps: int = 20
    """Steps of training that a policy must get through."""

    budget: float = 60.0
    """Seconds that those steps may take, for each precision."""

    least_sqnr: float = 20.0
    """Decibels of SQNR that gradients must keep against float64; 20 is an error of a tenth."""

    bench: bool = True
    """Leave out the race against fp32, and parity, of the policies that hold."""

    seeds: int = 5
    """Paired seeds for parity; 0 leaves it out."""


def run(options: Options) -> int:
    """Search, race, print, write ``tune.json``; the exit code."""
    for name in ("steps", "budget", "least_sqnr"):
        positive(name.replace("_", "-"), getattr(options, name))
    check_seeds(options.seeds)

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from ampwise.bench.arm import Settings
    from ampwise.bench.run import BenchConfig
    from ampwise.cli.progress import bench_progress
    from ampwise.report.tune import render
    from ampwise.tasks import load_task
    from ampwise.telemetry.run import RunFolder
    from ampwise.tune.run import TuneConfig, tune
    from ampwise_lint.base.console import Console

    settings = Settings(device_of(options.device), options.seed)
    bench = BenchConfig(
        settings.device,
        seed=options.seed,
        max_rounds=60,
        budget_s=_RACE_S,
        max_seeds=options.seeds,
        parity_budget_s=_PARITY_S,
    )
    config = TuneConfig(
        policies(options.precisions) or [],
        settings,
        options.steps,
        options.budget,
        options.least_sqnr,
        bench if options.bench else None,
    )
    task = load_task(options.task, options.settings())
    with RunFolder.create(options.out, f"tune-{task.name}", tell) as folder:
        folder.write({"command": "tune", "task": task.name, "status": "running"})
        try:
            with bench_progress(quiet=options.quiet) as progress:
                found = tune(task, config, progress, lambda found: _store(folder, found))
        except BaseException as error:
            if (folder.path / "tune.json").exists():
                saved_in(error, folder.path)
            raise
        try:
            _store(folder, found)
        finally:
            if options.json != "-":
                render(found, Console())
    if options.json != "-":
        tell("", f"report: {folder.path / 'tune.json'} and {folder.path / 'report.html'}")
    write_json(_text(found), options.json)
    if found.bench is not None and found.bench.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if any(each.policy for each in found.tried) else EXIT_GATE


def _store(folder: RunFolder, found: Tuned) -> None:
    """Write ``tune.json`` and ``run.json``, and at the end ``report.html``."""
    from ampwise.report.tune import to_html
    from ampwise_lint.base.files import atomic_write_text

    atomic_write_text(folder.path / "tune.json", _text(found) + "\n")
    status = "finished" if found.finished else "unfinished"
    folder.write({"command": "tune", "task": found.task, "status": status, "choice": found.choice})
    if found.verdict:
        atomic_write_text(folder.path / "report.html", to_html(found))


def _text(found: Tuned) -> str:
    from ampwise.telemetry.run import plain

    return json.dumps(plain(found.to_json()), indent=2, allow_nan=False)
