"""``ampwise diagnose``: train until a step goes wrong, then say where, why, and what mends it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ampwise.cli.options import Common, device_of, positive, saved_in
from ampwise.errors import EXIT_GATE, EXIT_OK
from ampwise_lint.base.output import say, tell
from ampwise_lint.base.results import check_target, write_json, write_report
from ampwise_lint.base.words import joined

if TYPE_CHECKING:
    from ampwise.distributed.watchdog import NoWatchdog
    from ampwise.numerics.progress import Progress
    from ampwise.numerics.result import Diagnosis
    from ampwise.tasks import Task
    from ampwise.telemetry.run import RunFolder
    from ampwise_lint.base.console import Console
    from ampwise_lint.base.progress import Line


@dataclass
class Options(Common):
    """Find where and why a precision fails: operation, module, line, cause, fixes by replay."""

    precision: str = "fp16"
    """Precision to examine, used as asked even where it is emulated."""

    steps: int = 50
    """Steps to make when none goes wrong; the last is then compared with float64."""

    budget: float = 60.0
    """Seconds after which no further step is begun."""

    accumulate: int = 1
    """Micro-batches in an accumulation window."""

    max_grad_norm: float | None = None
    """Clip the gradient norm to this."""

    patch: Annotated[Path | None, tyro.conf.arg(metavar="FILE.diff")] = None
    """Write the best patch of the task's source to this file, for git apply; verified means that
    the patched source was run in a process of its own."""

    fix: bool = False
    """Apply the patch if it is verified; the file must be committed, so that it can be taken
    back."""

    force: bool = False
    """With --fix: also a file with changes that are not committed, or in no git tree."""

    rank_timeout: float = 600.0
    """Under torchrun: seconds after which a process that hangs ends all, and is named; the longest
    step must fit in, the first one included. Replays have ten times as long."""


def run(options: Options) -> int:
    """Train, examine, print, write ``diagnosis.json`` and ``report.html``; the exit code."""
    for name in ("steps", "budget", "accumulate", "max_grad_norm", "rank_timeout"):
        positive(name.replace("_", "-"), getattr(options, name))
    check_target("patch", options.patch)

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from ampwise.bench.arm import Settings
    from ampwise.distributed import launch as ranks
    from ampwise.distributed.watchdog import watched
    from ampwise.numerics.diagnose import DiagnoseConfig, run_diagnosis
    from ampwise.numerics.progress import Silent
    from ampwise.numerics.remedy.handover import TaskSource
    from ampwise.policy import Policy
    from ampwise.tasks import load_task

    # A last collection would walk all of PyTorch and its compiler, for a second.
    atexit.register(gc.freeze)
    me, device = ranks.launch(), device_of(options.device)
    policy = Policy.parse(options.precision)
    with ranks.joined(me, device.type, options.rank_timeout) as met_at:
        settings = Settings(device, options.seed, options.accumulate, options.max_grad_norm)
        source = TaskSource(options.task, options.settings())
        config = DiagnoseConfig(policy, settings, options.steps, options.budget, source)
        task = load_task(options.task, options.settings())

        def diagnosed(progress: Progress) -> Diagnosis:
            with watched(met_at, me, options.rank_timeout) as dog:
                return run_diagnosis(task, config, _Beating(progress, dog))

        found = _led(task, diagnosed, options) if me.leads else diagnosed(Silent())
    return EXIT_GATE if found.status == "fault" else EXIT_OK


def _led(task: Task, diagnosed: Callable[[Progress], Diagnosis], options: Options) -> Diagnosis:
    """Diagnose, show it and store it; with several processes, the first one does this."""
    from ampwise.telemetry.run import RunFolder
    from ampwise_lint.base.console import Console
    from ampwise_lint.base.progress import Line

    console = None if options.json == "-" else Console()
    line = Line(quiet=options.quiet)
    with RunFolder.create(options.out, f"diagnose-{task.name}", tell) as folder:
        folder.write({"command": "diagnose", "task": task.name, "status": "running"})
        shown = _Shown(line, console, folder)
        try:
            found = diagnosed(shown)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            if interrupted or (folder.path / "diagnosis.json").exists():
                status = "interrupted" if interrupted else "failed"
                record = {"status": status, "steps": shown.steps}
                folder.write({"command": "diagnose", "task": task.name, **record})
                saved_in(error, folder.path)
            raise
        finally:
            line.clear()
        try:
            store(found, folder)
            patch = _stored_patch(found, folder.path / "patch.diff")
        finally:
            shown.rest(found)
    if console is not None:
        tell("", f"report: {folder.path / 'diagnosis.json'} and {folder.path / 'report.html'}")
    write_json(_text(found), options.json)
    if options.patch is not None or options.fix:
        _use_patch(found, patch, options)
    return found


def _stored_patch(found: Diagnosis, file: Path) -> Path | None:
    """The best patch, in the run's folder, where there is one."""
    from ampwise.numerics.remedy import apply
    from ampwise_lint.base.files import atomic_write_text

    patch = apply.best(found)
    if patch is None:
        return None
    atomic_write_text(file, apply.text_of(patch))
    return file


def _use_patch(found: Diagnosis, stored: Path | None, options: Options) -> None:
    """Write and apply the best patch, as asked.

    Raises
    ------
    UsageError
        When it may not be applied.
    """
    from ampwise.numerics.remedy import apply

    patch = apply.best(found)
    if patch is None:
        say("no patch: no change of the code was verified" if found.fixes else "no patch: no fault")
        return
    if options.patch is not None:
        write_report(apply.text_of(patch), options.patch)
    if options.fix and not patch.verified:
        say(f"nothing changed: {patch.patch_status}")
    elif options.fix:
        apply.check(patch, force=options.force)
        apply.apply(patch)
        changed = joined(map(str, apply.files_of(patch)))
        say(f"changed {changed}: {patch.what}; back with: git apply -R {stored}")


def store(found: Diagnosis, folder: RunFolder) -> None:
    """Write ``diagnosis.json``, ``report.html`` and ``run.json``."""
    from ampwise.report.diagnosis import to_html
    from ampwise_lint.base.files import atomic_write_text

    atomic_write_text(folder.path / "diagnosis.json", _text(found) + "\n")
    folder.write({"command": "diagnose", "task": found.task, "status": found.status})
    atomic_write_text(folder.path / "report.html", to_html(found))


def _text(found: Diagnosis) -> str:
    return json.dumps(found.to_json(), indent=2, allow_nan=False)


class _Beating:
    """Passes progress on, and tells the watchdog of it; a stage may take longer than a step."""

    def __init__(self, shown: Progress, dog: NoWatchdog) -> None:
        self._shown, self._dog = shown, dog
        self._stage = contextlib.ExitStack()

    def step(self, number: int, planned: int, loss: float) -> None:
        self._stage.close()
        self._dog.beat(number + 1, "step")
        self._shown.step(number, planned, loss)

    def stage(self, what: str) -> None:
        self._stage.close()
        self._stage.enter_context(self._dog.paused())
        self._shown.stage(what)

    def found(self, diagnosis: Diagnosis) -> None:
        self._shown.found(diagnosis)


class _Shown:
    """Stores and shows the cause as soon as it is known; fixes are tried after that.

    Attributes
    ----------
    steps
        Steps made so far.
    """

    def __init__(self, line: Line, console: Console | None, folder: RunFolder) -> None:
        self.steps = 0
        self._line, self._console, self._folder = line, console, folder
        self._cause = False

    def step(self, number: int, planned: int, loss: float) -> None:
        self.steps = number
        self._line.show(f"step {number} of at most {planned}, loss {loss:.4f}")

    def stage(self, what: str) -> None:
        self._line.show(what, now=True)

    def found(self, diagnosis: Diagnosis) -> None:
        from ampwise.report.diagnosis import render_cause
        from ampwise_lint.base.files import atomic_write_text

        with contextlib.suppress(OSError):  # a full disk is an error when all of it is stored
            atomic_write_text(self._folder.path / "diagnosis.json", _text(diagnosis) + "\n")
        if self._console is not None:
            self._line.clear()
            render_cause(diagnosis, self._console)
            self._cause = True

    def rest(self, diagnosis: Diagnosis) -> None:
        """Show what is known at the end."""
        from ampwise.report.diagnosis import render_cause, render_fixes

        if self._console is None:
            return
        if not self._cause:
            render_cause(diagnosis, self._console)
        render_fixes(diagnosis, self._console)
