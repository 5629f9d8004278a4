"""``ampwise tune``: islands that a precision needs, or the fastest or smallest way to train."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ampwise.cli.options import Common, check_seeds, device_of, policies, positive, saved_in
from ampwise.errors import EXIT_GATE, EXIT_INTERRUPTED, EXIT_OK, UsageError
from ampwise_lint.base.output import tell
from ampwise_lint.base.results import write_json

if TYPE_CHECKING:
    from ampwise.cli.progress import BenchProgress
    from ampwise.tasks import Task
    from ampwise.telemetry.run import RunFolder
    from ampwise.tune.result import Tuned

_RACE_S, _PARITY_S = 30.0, 90.0
_BUDGET_S = {"islands": 60.0, "speed": 300.0, "memory": 300.0}
_SETTINGS = "settings.toml"


@dataclass
class Options(Common):
    """Find the fewest modules that must stay in float32 and the fastest policy that holds; or the
    fastest or smallest way to train: precision, compiler, checkpointing and more, together.
    """

    objective: Literal["islands", "speed", "memory"] = "islands"
    """islands: what precisions need to hold. speed: the most samples a second. memory: the lowest
    peak. The latter two end with a settings file for train --config."""

    precisions: str | None = None
    """Comma-separated precisions; default: bf16,fp16 to make hold, else those that gain here."""

    levers: str | None = None
    """For speed and memory, comma-separated levers to try (compile, fused-optimizer, channels-last,
    unfused-attention, checkpointing, batch=N, chunked-loss); default: all that fit."""

    steps: int = 20
    """For islands: steps of training that a policy must get through."""

    budget: float | None = None
    """Seconds: for islands those steps, for each precision (default 60); else the whole search but
    parity (default 300)."""

    least_sqnr: float = 20.0
    """For islands: decibels of SQNR that gradients must keep against float64; 20 is an error of a
    tenth."""

    least_speed: float = 1.0
    """For memory: the result is at least this many times as fast as fp32."""

    bench: bool = True
    """For islands: leave out the race against fp32, and parity, of the policies that hold."""

    seeds: int = 5
    """Paired seeds for parity; 0 leaves it out."""


def run(options: Options) -> int:
    """Search, race, print, write ``tune.json``; the exit code."""
    for name in ("steps", "budget", "least_sqnr", "least_speed"):
        positive(name.replace("_", "-"), getattr(options, name))
    check_seeds(options.seeds)
    if options.levers is not None and options.objective == "islands":
        raise UsageError("--levers is for --objective speed or memory; leave it out for islands")

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from ampwise.cli.progress import bench_progress
    from ampwise.report.tune import render
    from ampwise.tasks import load_task
    from ampwise.telemetry.run import RunFolder
    from ampwise_lint.base.console import Console

    search = _islands(options) if options.objective == "islands" else _settings(options)
    task = load_task(options.task, options.settings())
    with RunFolder.create(options.out, f"tune-{task.name}", tell) as folder:
        folder.write({"command": "tune", "task": task.name, "status": "running"})

        def save(found: Tuned) -> None:
            _store(folder, found, options)

        try:
            with bench_progress(quiet=options.quiet) as progress:
                found = search(task, progress, save)
        except BaseException as error:
            if (folder.path / "tune.json").exists():
                saved_in(error, folder.path)
            raise
        try:
            save(found)
        finally:
            if options.json != "-":
                render(found, Console())
    if options.json != "-":
        tell("", *_where(folder.path, found))
    write_json(_text(found), options.json)
    if found.interrupted:
        return EXIT_INTERRUPTED
    holds = found.settings is not None or any(each.policy for each in found.tried)
    return EXIT_OK if holds else EXIT_GATE


Search = Callable[["Task", "BenchProgress", "Callable[[Tuned], None]"], "Tuned"]


def _islands(options: Options) -> Search:
    """The search for islands that the options ask for."""
    from ampwise.bench.arm import Settings
    from ampwise.bench.config import BenchConfig
    from ampwise.tune.run import TuneConfig, tune

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
        policies("bf16,fp16" if options.precisions is None else options.precisions) or [],
        settings,
        options.steps,
        options.budget or _BUDGET_S[options.objective],
        options.least_sqnr,
        bench if options.bench else None,
    )
    return lambda task, progress, save: tune(task, config, progress, save)


def _settings(options: Options) -> Search:
    """The search for speed or memory."""
    from ampwise.bench.arm import Settings
    from ampwise.tasks.levers import spelled
    from ampwise.tune.settings import SearchConfig, search_settings

    config = SearchConfig(
        options.objective,
        Settings(device_of(options.device), options.seed),
        policies(options.precisions),
        None if options.levers is None else spelled(options.levers),
        options.budget or _BUDGET_S[options.objective],
        options.least_speed,
        options.seeds,
        _PARITY_S,
    )
    return lambda task, progress, save: search_settings(task, config, progress, save)


def _store(folder: RunFolder, found: Tuned, options: Options) -> None:
    """Write ``tune.json`` and ``run.json``, and at the end ``report.html`` and settings."""
    from ampwise.report.tune import to_html
    from ampwise.tune.setting import to_toml
    from ampwise_lint.base.files import atomic_write_text

    atomic_write_text(folder.path / "tune.json", _text(found) + "\n")
    status = "finished" if found.finished else "unfinished"
    folder.write({"command": "tune", "task": found.task, "status": status, "choice": found.choice})
    if found.verdict:
        atomic_write_text(folder.path / "report.html", to_html(found))
    if found.verdict and found.settings is not None:
        text = to_toml(options.task, options.settings(), found.settings.train)
        atomic_write_text(folder.path / _SETTINGS, text)


def _where(folder: Path, found: Tuned) -> list[str]:
    """Where the results are, and how to train with them."""
    said = [f"report: {folder / 'tune.json'} and {folder / 'report.html'}"]
    if found.settings is not None:
        said.append(f"train with it: ampwise train --config {folder / _SETTINGS}")
    return said


def _text(found: Tuned) -> str:
    from ampwise.telemetry.run import plain

    return json.dumps(plain(found.to_json()), indent=2, allow_nan=False)
