"""``ampwise run``: a training script that nobody changed, under observation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ampwise.cli.options import Gate, Shared, positive, write_json
from ampwise.cli.output import say, tell
from ampwise.errors import EXIT_GATE, UsageError

if TYPE_CHECKING:
    from ampwise.observe.result import RunReport
    from ampwise.observe.run import Observation
    from ampwise.observe.script import Ending, Target
    from ampwise.telemetry.names import Metric
    from ampwise.telemetry.run import RunFolder
    from ampwise.trackers import TrackerSet


@dataclass
class Options(Shared):
    """Run a training script that nobody changed, and say what its precision did.

    What stands after SCRIPT is the script's own. -m MODULE runs a module, as Python's -m does.
    """

    race: Annotated[str, tyro.conf.arg(metavar="P[,Q]")] = ""
    """Run every other step in another precision (fp32, tf32, fp16, bf16), and measure what it
    would gain. Writes no checkpoints."""

    keep_checkpoints: bool = False
    """Write checkpoints while racing, too, though steps of several precisions made them."""

    steps: int | None = None
    """Stop the script after this many steps; default with --race: once the race is decided."""

    on_fault: Literal["diagnose", "stop", "off"] = "diagnose"
    """At a loss or gradient that is not finite: find out why, end the script then, or go on."""

    track: str = ""
    """Comma-separated trackers that get every step: csv, tensorboard, mlflow, wandb."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the run; default: a new numbered one under runs/, once the script trains."""

    quiet: bool = False
    """No report on the terminal, only files."""

    gate: Gate = "off"
    """Exit with 1 on findings that are errors, on faults and on a precision that was not active;
    "strict": on any finding."""


def script_at(arguments: Sequence[str]) -> int:
    """Where the script begins in a command line: what stands before are our own options."""
    named = [each.name for each in dataclasses.fields(Options) if each.default is False]
    switches = {f"--{name.replace('_', '-')}" for name in named}
    place = 0
    while place < len(arguments):
        word = arguments[place]
        if word == "-m" or not word.startswith("-"):
            return place
        alone = word in switches or "=" in word or word in ("-h", "--help")
        following = arguments[place + 1 : place + 2]
        if word == "--gate" and following not in (["off"], ["fail"], ["strict"]):
            alone = True
        place += 1 if alone else 2
    return len(arguments)


def target_of(words: Sequence[str]) -> Target:
    """The script, or module, and its arguments.

    Raises
    ------
    UsageError
        When none is named.
    """
    from ampwise.observe.script import Target

    if words[:1] == ["-m"]:
        if len(words) == 1:
            raise UsageError("-m: expected the name of a module")
        return Target(words[1], tuple(words[2:]), is_module=True)
    if not words:
        raise UsageError(
            "no script: expected ampwise run [OPTIONS] SCRIPT [ARGS], or -m MODULE [ARGS]"
        )
    return Target(words[0], tuple(words[1:]))


def run(options: Options, words: Sequence[str]) -> int:
    """Run the script that `words` name, report; the exit code."""
    target = target_of(words)
    positive("steps", options.steps)
    target.check()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from ampwise.distributed.launch import launch
    from ampwise.observe.race import racers
    from ampwise.observe.run import Observation, RunConfig

    race = racers(options.race) if options.race else ()
    files = _Files(options, target, leads=launch().leads)
    config = RunConfig(
        target, options.steps, options.on_fault, race,
        options.keep_checkpoints, launch().size, options.debug,
    )  # fmt: skip
    observed = Observation(config, files.line)
    with _own_stdout(taken=options.json == "-"):
        ending = observed.run(partial(files.store, observed))
    return files.store(observed, ending)


class _Files:
    """The run's folder, made at the first step, and all that is written there."""

    def __init__(self, options: Options, target: Target, *, leads: bool) -> None:
        from ampwise.trackers import check_names

        self._options, self._target, self._leads = options, target, leads
        self._folder: RunFolder | None = None
        self._trackers: TrackerSet | None = None
        self._track = tuple(each for each in options.track.split(",") if each)
        self._base, self._pid, self._stored = Path.cwd(), os.getpid(), False
        check_names(self._track)
        if options.out is not None and (options.out / "run.json").exists():
            raise UsageError(f"{options.out} already holds a run: another --out starts a new one")

    def line(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """A step's line, to ``steps.jsonl`` and the trackers."""
        if not self._leads:
            return
        folder = self._made()
        folder.append({"step": step, **metrics})
        if self._trackers is not None:
            self._trackers.log(metrics, step)

    def store(self, observed: Observation, ending: Ending) -> int:
        """Write and show the report; the exit code. Once, and not in a forked process."""
        if self._stored or os.getpid() != self._pid:
            return ending.exit_code
        self._stored = True
        report = observed.report(ending)
        if not self._leads:
            return ending.exit_code
        text = json.dumps(report.to_json(), indent=2, allow_nan=False)
        if report.steps:
            self._write(report, text)
        if not self._options.quiet and self._options.json != "-":
            self._show(report)
        write_json(text, self._options.json)
        return gated(report, self._options.gate)

    def _made(self) -> RunFolder:
        from ampwise.telemetry.run import RunFolder
        from ampwise.trackers import TrackerSet

        if self._folder is None:
            name, here = f"run-{self._target.label}", Path.cwd()
            os.chdir(self._base)  # the script may have gone elsewhere
            try:
                self._folder = RunFolder.create(self._options.out, name, say, logs=True)
                self._folder.path = self._folder.path.absolute()
            finally:
                os.chdir(here)
            self._folder.write({"command": "run", "script": self._target.name, "status": "running"})
            if self._track:
                self._trackers = TrackerSet(
                    self._track, self._folder.path, self._folder.path.name,
                    {"script": self._target.name}, say,
                )  # fmt: skip
        return self._folder

    def _write(self, report: RunReport, text: str) -> None:
        from ampwise.report.run import to_html
        from ampwise.telemetry.files import atomic_write_text

        folder = self._made()
        folder.close()
        if self._trackers is not None:
            self._trackers.finish()
        atomic_write_text(folder.path / "observed.json", text + "\n")
        atomic_write_text(folder.path / "report.html", to_html(report))
        folder.write(
            {"command": "run", "script": report.script, "status": report.ending,
             "steps": report.steps, "exit_code": report.exit_code}
        )  # fmt: skip

    def _show(self, report: RunReport) -> None:
        """On standard error: standard output is the script's."""
        from ampwise.report.console import Console
        from ampwise.report.run import render

        render(report, Console(stderr=True))
        if self._folder is not None:
            path = os.path.relpath(self._folder.path, self._base)
            tell("", f"report: {path}/observed.json, steps.jsonl and report.html", err=True)


def gated(report: RunReport, gate: Gate) -> int:
    """The script's exit code, unless the gate says no."""
    if gate == "off" or report.exit_code:
        return report.exit_code
    errors = [each for each in report.findings if gate == "strict" or each.severity == "error"]
    against = [f"{counted}" for counted in _against(report, errors)]
    if against:
        say(f"gate: {'; '.join(against)}")
    return EXIT_GATE if against else report.exit_code


def _against(report: RunReport, findings: Sequence[object]) -> list[str]:
    from ampwise.words import counted

    found: list[str] = []
    if findings:
        found.append(counted(len(findings), "finding"))
    if report.faults:
        found.append(counted(len(report.faults), "fault"))
    if not report.precision.active:
        found.append("the precision asked for was not active")
    return found


@contextlib.contextmanager
def _own_stdout(*, taken: bool) -> Generator[None]:
    """Inside, what the script prints goes to standard error where standard output is taken."""
    if not taken:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
