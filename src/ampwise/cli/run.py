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
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import tyro

from ampwise.cli.options import Gate, Shared, positive
from ampwise.errors import EXIT_GATE, EXIT_OK, UsageError, in_one_line, kind_and_words
from ampwise_lint.base.output import say, tell
from ampwise_lint.base.results import write_json

if TYPE_CHECKING:
    from ampwise.observe.result import RunReport
    from ampwise.observe.run import Observation
    from ampwise.observe.script import Ending, Target
    from ampwise.report.observed import ObservedRun
    from ampwise.telemetry.names import Metric
    from ampwise.telemetry.run import RunFolder
    from ampwise.trackers import TrackerSet


@dataclass
class Options(Shared):
    """Run a training script that nobody changed, and say what its precision did.

    Options go before SCRIPT; what stands after it is the script's own.
    """

    script: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGS]")
    ] = ()
    """A Python script and its arguments; or -m MODULE [ARGS], as Python's own -m."""

    race: Annotated[str, tyro.conf.arg(metavar="P[,Q]")] = ""
    """Run every other step in another precision (fp32, tf32, fp16, bf16), and measure what it
    would gain. Writes no checkpoints."""

    keep_checkpoints: bool = False
    """Write checkpoints while racing, too, though steps of several precisions made them."""

    steps: int | None = None
    """Stop the script after this many steps; default with --race: once the race is decided."""

    on_fault: Literal["diagnose", "stop", "off"] = "diagnose"
    """At a loss or gradient that is not finite: find out why, end the script then, or go on."""

    track: Annotated[str, tyro.conf.arg(metavar="A[,B]")] = ""
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

    if words and words[0] == "-m":
        if len(words) == 1:
            raise UsageError("-m: expected the name of a module")
        return Target(words[1], tuple(words[2:]), is_module=True)
    if not words:
        raise UsageError(
            "no script: expected ampwise run [OPTIONS] SCRIPT [ARGS], or -m MODULE [ARGS]"
        )
    return Target(words[0], tuple(words[1:]))


def run(options: Options) -> int:
    """Run the script, report; the exit code."""
    target = target_of(options.script)
    positive("steps", options.steps)
    target.check()
    _check_out(options.out)
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
    ending = observed.run(partial(files.store, observed))
    return files.store(observed, ending)


def _check_out(out: Path | None) -> None:
    """Refuse a folder that cannot be made, or holds a run: training would be for nothing.

    Raises
    ------
    UsageError
        When it is so.
    """
    if out is None:
        return
    if (out / "run.json").exists():
        raise UsageError(f"{out} already holds a run: another --out starts a new one")
    there = next(each for each in (out, *out.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "no permission to write there" if there.is_dir() else f"{there} is no folder"
        raise UsageError(f"--out {out}: {why}; name a writable folder")


class _Files:
    """The run's folder, made at the first step, and all that is written there.

    What cannot be written is said once, and the script goes on.
    """

    def __init__(self, options: Options, target: Target, *, leads: bool) -> None:
        from ampwise.trackers import check_names

        self._options, self._target, self._leads = options, target, leads
        self._folder: RunFolder | None = None
        self._trackers: TrackerSet | None = None
        self._track = tuple(each for each in options.track.split(",") if each)
        self._base, self._pid, self._stored, self._lost = Path.cwd(), os.getpid(), False, False
        check_names(self._track)
        self._stdout = _taken_stdout() if options.json == "-" else None

    def line(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """A step's line, to ``steps.jsonl`` and the trackers."""
        if not self._leads or (folder := self._made()) is None:
            return
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
        with _inside(self._base), self._losing("the report is incomplete"):
            self._report(report)
        return gated(report, self._options.gate)

    def _made(self) -> RunFolder | None:
        """The folder; None where it could not be made."""
        if self._folder is None and not self._lost:
            with self._losing("nothing is written"), _inside(self._base):
                self._make()
        return self._folder

    def _make(self) -> None:
        from ampwise.telemetry.run import RunFolder
        from ampwise.trackers import TrackerSet

        name = f"run-{self._target.label}"
        folder = RunFolder.create(self._options.out, name, say, logs=True)
        folder.path = folder.path.absolute()
        folder.write({"command": "run", "script": self._target.name, "status": "running"})
        self._folder = folder
        if self._track:
            config = {"script": self._target.name}
            self._trackers = TrackerSet(self._track, folder.path, folder.path.name, config, say)

    def _report(self, report: RunReport) -> None:
        """To the folder, the terminal, and where ``--json`` says."""
        from ampwise.report.observed import ObservedRun

        run, text = ObservedRun(report), json.dumps(report.to_json(), indent=2, allow_nan=False)
        folder = self._made() if report.steps else None
        if folder is not None:
            folder.close()
            with self._losing("the report is incomplete"):
                run = self._write(folder, report, text)
        if not self._options.quiet and self._options.json != "-":
            self._show(run)
        with self._losing("there is no JSON"), contextlib.ExitStack() as stack:
            if self._stdout is not None:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(self._stdout)))
            write_json(text, self._options.json)

    def _write(self, folder: RunFolder, report: RunReport, text: str) -> ObservedRun:
        from ampwise.report.observed import FILE, ObservedRun
        from ampwise.report.run import to_html
        from ampwise_lint.base.files import atomic_write_text

        if self._trackers is not None:
            self._trackers.finish()
        folder.write(
            {"command": "run", "script": report.script, "status": report.ending,
             "steps": report.steps, "exit_code": report.exit_code}
        )  # fmt: skip
        atomic_write_text(folder.path / FILE, text + "\n")
        run = ObservedRun.of(report, folder.path / FILE)
        atomic_write_text(folder.path / "report.html", to_html(run))
        return run

    def _show(self, run: ObservedRun) -> None:
        """On standard error: standard output is the script's."""
        from ampwise.report.run import render
        from ampwise_lint.base.console import Console

        render(run, Console(stderr=True))
        if self._folder is not None and not self._lost:
            path = os.path.relpath(self._folder.path)
            tell(f"report: {path}/observed.json, steps.jsonl and report.html", err=True)

    @contextlib.contextmanager
    def _losing(self, what: str) -> Generator[None]:
        """Inside, what fails is said, and what comes of it; the script's exit code is its own."""
        try:
            yield
        except Exception as error:
            if self._options.debug:
                raise
            self._lost = True
            known = isinstance(error, (OSError, UsageError))
            words = in_one_line(error) if known else f"{kind_and_words(error)}, a bug in ampwise"
            say(f"{words} ({what}; the script is not affected)")


def gated(report: RunReport, gate: Gate) -> int:
    """The script's exit code, unless the gate says no."""
    if report.exit_code:
        return report.exit_code
    return EXIT_OK if holds(report, gate) else EXIT_GATE


def holds(report: RunReport, gate: Gate) -> bool:
    """Whether the gate does; says why not."""
    from ampwise.report.observed import objections

    if gate == "off":
        return True
    failed = [f"the script {report.ending}"] if report.exit_code else []
    against = [*failed, *objections(report, strict=gate == "strict")]
    if against:
        say(f"gate: {'; '.join(against)}")
    return not against


@contextlib.contextmanager
def _inside(folder: Path) -> Generator[None]:
    """Inside, the working directory is this one: the script may have gone elsewhere."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        here = None
    os.chdir(folder)
    try:
        yield
    finally:
        if here is not None:
            os.chdir(here)


def _taken_stdout() -> TextIO:
    """Standard output, for us alone; what the script prints, at its exit too, goes to stderr."""
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours
