"""The folder of a run: `run.json`, `steps.jsonl`, `checkpoints/`; a kill loses a second of lines.

`run.json` is replaced whole, by renaming. `steps.jsonl` is appended to, one object a step, and
handed to the system about once a second: a line is a few hundred bytes, and a system call each
would cost more than a small step. On resume the lines after the checkpoint are cut off, and with
them a line that a kill tore.

JSON knows neither NaN nor inf; they stand as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

from ampwise.document import MAX_INT, load, open_report, parsed
from ampwise.errors import UsageError
from ampwise.telemetry import names
from ampwise_lint.base.files import atomic_write_text

FLUSH_EVERY_S = 1.0
_LONGEST = 1_000_000
"""Bytes of a line; a step's has a few hundred."""


class RunFolder:
    """A run's folder, new or continued; see `create` and `resume`.

    As a context manager it is closed at the end, and removed again if an error comes before there
    is anything in it but a record that it runs.

    Attributes
    ----------
    path
        Where it is.
    """

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self.path = path
        self._report = report
        self._made = False
        self._observes = False
        self._lines: TextIO | None = None
        self._flushed = time.monotonic()

    @classmethod
    def create(
        cls,
        path: Path | None,
        name: str,
        report: Callable[[str], None],
        *,
        trains: bool = False,
        logs: bool = False,
    ) -> RunFolder:
        """A new folder: `path`, or the next free ``runs/<name>-<n>``.

        Parameters
        ----------
        report
            Told, once, when lines can no longer be written.
        trains
            Whether it gets steps and checkpoints.
        logs
            Whether it gets steps only.

        Raises
        ------
        UsageError
            When `path` holds a run already, or cannot be written.
        """
        try:
            made = path is None or not path.exists()
            path = _next_free(Path("runs"), name) if path is None else _fresh(path, resumes=trains)
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path, report)
            folder._made = made
            if trains:
                folder.checkpoints.mkdir(exist_ok=True)
            if trains or logs:
                folder._lines = (path / "steps.jsonl").open("w")
        except OSError as error:
            raise UsageError(
                f"run folder {error.filename}: {error.strerror}; name a writable folder with --out"
            ) from None
        return folder

    @classmethod
    def resume(cls, path: Path, report: Callable[[str], None]) -> RunFolder:
        """An existing run's folder.

        Raises
        ------
        UsageError
            When there is no run in it.
        """
        if not (path / "run.json").exists():
            raise UsageError(
                f"nothing to resume in {path}: expected the folder of a run, with its run.json"
            )
        return cls(path, report)

    @classmethod
    def observe(cls, path: Path) -> RunFolder:
        """A run's folder that another process writes; this one writes nothing."""
        folder = cls(path, lambda _: None)
        folder._observes = True
        return folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if error is not None and not self._observes:
            with contextlib.suppress(OSError, UsageError):
                self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        held = {each.name for each in self.path.iterdir()}
        if held == {"run.json"} and self.read().get("status") == "running":
            (self.path / "run.json").unlink()
            held = set()
        if self._made and not held:
            self.path.rmdir()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    def read(self) -> dict[str, Any]:
        """What `run.json` holds.

        Raises
        ------
        UsageError
            When it is damaged.
        """
        return load(self.path / "run.json")

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace `run.json`."""
        if self._observes:
            return
        atomic_write_text(self.path / "run.json", json.dumps(plain(content), indent=2) + "\n")

    def continue_after(self, step: int) -> None:
        """Keep the lines of steps up to `step`, and append from here."""
        if self._observes:
            return
        file = self.path / "steps.jsonl"
        kept = [line for line in _whole_lines(file) if line.get("step", 0) <= step]
        atomic_write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
        self._lines = file.open("a")

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line to `steps.jsonl`; a lost disk is reported once, and training goes on."""
        if self._lines is None:
            return
        try:
            self._lines.write(json.dumps(plain(line)) + "\n")
            now = time.monotonic()
            if now - self._flushed >= FLUSH_EVERY_S:
                self._lines.flush()
                self._flushed = now
        except OSError as error:
            self._lose(error)

    def flush(self) -> None:
        """Hand every line to the system."""
        try:
            if self._lines is not None:
                self._lines.flush()
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        """Finish writing lines."""
        self.flush()
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _lose(self, error: OSError) -> None:
        self._report(f"steps.jsonl: {error.strerror}; steps are no longer written there")
        self._lines = None


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's `steps.jsonl`; one that a kill tore is left out.

    Raises
    ------
    UsageError
        When the file or a line of it is damaged.
    """
    return _whole_lines(folder / "steps.jsonl")


def plain(value: Any) -> Any:
    """The value in what JSON knows; NaN and infinities as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    steps: list[dict[str, Any]] = []
    with open_report(file) as stream:
        for number, line in enumerate(iter(partial(stream.readline, _LONGEST), b""), start=1):
            if line.endswith(b"\n") or len(line) == _LONGEST:
                steps.append(_step(line, f"{file}, line {number}"))
    return steps


def _step(line: bytes, where: str) -> dict[str, Any]:
    """A line of `steps.jsonl`: a step's number, and figures and words by name."""
    try:
        found = parsed(line) if len(line) < _LONGEST else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not _is_step(values := cast("dict[str, Any]", found)):
        raise UsageError(
            f"{where} is damaged: expected an object with a step and its metrics, got "
            f"{line[:60].decode(errors='replace')!r}; remove that line"
        )
    return values


def _is_step(line: Mapping[str, Any]) -> bool:
    step = line.get("step")
    return (
        type(step) is int
        and 0 <= step < MAX_INT
        and all(_is_figure(each) or name == names.PRECISION for name, each in line.items())
    )


def _is_figure(value: Any) -> bool:
    """Whether something is a number as `plain` writes it."""
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < MAX_INT)


def _next_free(parent: Path, name: str) -> Path:
    """Make and return the first ``<name>-<n>`` that is not there yet; the name made harmless."""
    name, number = re.sub(r"[^\w.-]+", "-", name), 1
    while True:
        path = parent / f"{name}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def _fresh(path: Path, *, resumes: bool) -> Path:
    if (path / "run.json").exists():
        continues = "--resume continues it, " if resumes else ""
        raise UsageError(f"{path} already holds a run: {continues}another --out starts a new one")
    return path
