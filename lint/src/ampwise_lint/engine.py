"""Checks files: finds them, reads them in parallel, runs the rules, drops what is silenced."""

from __future__ import annotations

import ast
import gc
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from ampwise_lint.analysis import Analysis, analyse
from ampwise_lint.base.errors import UsageError, kind_and_words
from ampwise_lint.cache import Cache
from ampwise_lint.findings import Edit, Finding, LintReport, Skipped
from ampwise_lint.prefilter import Prefilter
from ampwise_lint.rule import Mistake
from ampwise_lint.rules import all_rules, all_triggers
from ampwise_lint.settings import Settings
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.project import Module, Project
from ampwise_lint.source.text import SUFFIXES, UnreadableError, check_syntax, read_text

NEVER = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
"""Folders that are not walked into; name them to have them checked."""

SECONDS = 20.0
"""Processor time for one file, so that a busy machine finds the same; the budget of nodes ends
nearly all of them long before.
"""

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Checked:
    """What came of one file."""

    path: Path
    findings: list[Finding] = field(default_factory=list[Finding])
    skipped: str = ""
    """Why it was not checked, or not to its end."""
    read: set[Path] = field(default_factory=set[Path])
    """Files that were read to understand it."""
    cached: bool = False


def lint(
    paths: Iterable[Path],
    settings: Settings | None = None,
    *,
    jobs: int = 0,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> LintReport:
    """Check files and folders.

    Parameters
    ----------
    jobs
        Processes; 0: one for each CPU, but none beside this one for a few files.
    progress
        Told how many of how many files are done.

    Raises
    ------
    UsageError
        For a path that is not there, and where there is no file to check.
    """
    settings = settings or Settings()
    paths = tuple(paths)
    files = list(find(paths, settings))
    if not files:
        raise UsageError(
            f"{', '.join(map(str, paths))}: no file to check: expected one that ends in "
            f"{', '.join(SUFFIXES)} and that exclude does not leave out"
        )
    report = LintReport(files=len(files))
    found: dict[tuple[object, ...], Finding] = {}
    led_to: set[tuple[str, str]] = set()
    for count, checked in enumerate(_check_all(files, jobs, use_cache), 1):
        if checked.skipped:
            report.skipped.append(Skipped(_printable(shown(checked.path)), checked.skipped))
        for each in filter(settings.wants, checked.findings):
            # What a file shows by itself is said so; of others, what the first one leads to.
            if each.place not in found or not each.reached_from:
                found[each.place] = each
        led_to |= {(each.path, each.code) for each in checked.findings if each.reached_from}
        report.cached += checked.cached
        if progress is not None:
            progress(count, len(files))
    rules = all_rules()
    echoes = {e.place for e in found.values() if (e.path, rules[e.code].echo_of) in led_to}
    report.findings = [_as_shown(each) for place, each in found.items() if place not in echoes]
    report.findings.sort(key=lambda each: (each.path, each.cell or 0, each.line, each.column))
    report.skipped.sort(key=lambda each: each.path)
    return report


def _as_shown(finding: Finding) -> Finding:
    way = finding.reached_from
    return replace(finding, path=shown(Path(finding.path)), reached_from=way and shown(Path(way)))


def shown(path: Path) -> str:
    """A path as a person would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _printable(name: str) -> str:
    """A name of any bytes, as text."""
    return os.fsencode(name).decode(errors="backslashreplace")


# ---------------------------------------------------------------------- files


def find(paths: Iterable[Path], settings: Settings) -> Iterator[Path]:
    """All files to check, each once: those named, and those below folders named.

    Also what has the name of one and is none (a pipe, a link to nothing), and folders that cannot
    be listed: reading them gives the reason.
    """
    seen: set[str] = set()
    for path in paths:
        if not os.path.lexists(path):
            raise UsageError(f"{path}: no such file or folder")
        found = _below(path.absolute(), settings) if path.is_dir() else [path.absolute()]
        for file in found:
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file


def _below(folder: Path, settings: Settings) -> Iterator[Path]:
    unlisted: list[Path] = []

    def keep(error: OSError) -> None:
        unlisted.append(Path(error.filename))

    # Links to folders are not followed: what they lead to is checked where it lies.
    for base, folders, names in os.walk(folder, onerror=keep, followlinks=False):
        here = Path(base)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in NEVER
            and not (here / name / "pyvenv.cfg").exists()
            and not settings.excludes(here / name)
        )
        for name in sorted(names):
            file = here / name
            # Emacs' locks, .#train.py, are links to nothing.
            if name.endswith(SUFFIXES) and name[:2] != ".#" and not settings.excludes(file):
                yield file
    yield from unlisted


def _check_all(files: list[Path], jobs: int, use_cache: bool) -> Iterator[Checked]:
    """Check files; in processes of their own where there are many."""
    known = frozenset(files)
    checker = Checker(known, use_cache)
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1 or len(files) < 2 * jobs:
        with _collecting_rarely():
            yield from map(checker, files)
        return
    # Not above: where files are few, loading these takes as long as checking them.
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # The largest go first: one that is begun last would keep the others waiting.
    files = sorted(files, key=_size, reverse=True)
    size = max(1, min(4, len(files) // (4 * jobs)))
    done = 0
    with ProcessPoolExecutor(jobs, initializer=_begin, initargs=(checker,)) as pool:
        try:
            for checked in pool.map(_check, files, chunksize=size):
                yield checked
                done += 1
        except BrokenProcessPool:
            pass  # by one of those that are left
    yield from _check_each(files[done:], checker)


def _check_each(files: list[Path], checker: Checker) -> Iterator[Checked]:
    """Check files one after another, in another process: a file that gets it killed is named."""
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    waiting = deque(files)
    while waiting:
        with ProcessPoolExecutor(1, initializer=_begin, initargs=(checker,)) as pool:
            try:
                while waiting:
                    yield pool.submit(_check, waiting[0]).result()
                    waiting.popleft()
            except BrokenProcessPool:
                why = "the process that checked it was killed; out of memory?"
                yield Checked(waiting.popleft(), skipped=why)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # gone since it was found: reading it says so
        return 0


# ---------------------------------------------------------------------- one file


class Checker:
    """Checks one file after another; each process has its own copy."""

    def __init__(self, files: frozenset[Path], use_cache: bool) -> None:
        self._project = Project(files)
        self._cache = Cache(files, self._project.requirements) if use_cache else None

    def __call__(self, path: Path) -> Checked:
        """Check a file, or remember what was found in it."""
        if _printable(name := shown(path)) != name:
            return Checked(path, skipped="its name is not UTF-8; rename it")
        if self._cache is not None and (kept := self._cache.load(path)) is not None:
            return Checked(path, kept[0], kept[1], cached=True)
        checked = check_file(path, self._project)
        if self._cache is not None:
            self._cache.store(path, checked.read, checked.findings, checked.skipped)
        return checked


_WORKER: list[Checker] = []
"""In a worker process: its checker, which would otherwise travel along with every few files."""


def _begin(checker: Checker) -> None:
    _WORKER.append(checker)
    gc.set_threshold(*_RARELY)


def _check(path: Path) -> Checked:
    return _WORKER[0](path)


_RARELY = 100_000, 20, 100
"""Trees are millions of objects in no cycle: collecting garbage at Python's own thresholds took
half of the time, and between two files it went through all that is kept of the project.
"""


@contextmanager
def _collecting_rarely() -> Generator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _TimeLimitError(Exception):
    """A file took too long."""


def check_file(path: Path, project: Project) -> Checked:
    """Check one file of a project; whatever is wrong with it is said in `Checked.skipped`."""
    checked = Checked(path)
    with _reason_kept(checked):
        text = read_text(path).text
        if _prefilter(project).concerns(path, text, checked.read):
            check_module(project.module(path), checked)
        else:
            check_syntax(text)
    return checked


def _prefilter(project: Project) -> Prefilter:
    return Prefilter(project, all_triggers())


def check_module(module: Module, checked: Checked) -> None:
    """Run the rules over a file that was read."""
    with _reason_kept(checked), _limits(SECONDS):
        code = analyse(module, _prefilter(module.project))
        if code.cut_short:
            checked.skipped = "too large to be walked to its end"
        checked.findings = list(_findings(code))
    checked.read |= module.used - {module.path}


@contextmanager
def _reason_kept(checked: Checked) -> Generator[None]:
    """Whatever ends the check of a file inside is kept as the reason; the other files go on."""
    try:
        yield
    except UnreadableError as error:
        checked.skipped = str(error)
    except RecursionError:
        checked.skipped = "nested too deeply to be walked"
    except MemoryError:
        checked.skipped = "takes more memory than there is"
    except _TimeLimitError:
        checked.skipped = f"not done after {SECONDS:.0f} s of processor time"
    except Exception as error:  # noqa: BLE001 - said with the file; the others go on
        where = traceback.extract_tb(error.__traceback__)[-1]
        checked.skipped = (
            f"a bug in ampwise: {kind_and_words(error)} ({Path(where.filename).name}, line "
            f"{where.lineno}); please report it"
        )


def _findings(code: Analysis) -> Iterator[Finding]:
    for rule in all_rules().values():
        for mistake in rule(code):
            source = mistake.module.source
            line, column, end = place_of(mistake.node)
            if any(source.ignores(each, rule.code) for each in {line, end}):
                continue
            text = source.lines[line - 1] if line <= len(source.lines) else ""
            cell = source.cell_of(line)
            yield Finding(
                path=str(source.path),
                line=cell[1] if cell is not None else line,
                column=len(text.encode()[:column].decode(errors="replace")) + 1,
                code=rule.code,
                name=rule.name,
                severity=mistake.severity or rule.severity,
                message=mistake.message,
                fix=mistake.fix or rule.fix,
                edits=own_edits(mistake),
                end_line=end,
                cell=cell[0] if cell is not None else None,
                source=text,
                reached_from="" if mistake.module is code.module else str(code.module.path),
            )


def own_edits(mistake: Mistake) -> tuple[Edit, ...]:
    """What mends a mistake; nothing if that is not all in its file, and in one cell of it."""
    module, edits = mistake.module, mistake.edits
    elsewhere = any(each.node is not None and not module.holds(each.node) for each in edits)
    lines = [number for each in edits for number in (each.line, each.end_line)]
    if elsewhere or not module.source.is_one_cell(lines):
        return ()
    return tuple(replace(each, node=None) for each in edits)


def place_of(node: Node) -> tuple[int, int, int]:
    """Line, column in bytes, last line of a node; of a chain of calls, where its last one is."""
    line, column = node.lineno, node.col_offset
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        end = node.func.end_lineno or line
        if end != line:
            line, column = end, (node.func.end_col_offset or 0) - len(node.func.attr.encode())
    return line, column, node.end_lineno or line


@contextmanager
def _limits(seconds: float) -> Generator[None]:
    """Room for deep code, and an end for code that takes too long."""
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(max(depth, 6000))
    timed = hasattr(signal, "SIGVTALRM") and threading.current_thread() is threading.main_thread()

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise _TimeLimitError

    before = signal.signal(signal.SIGVTALRM, expire) if timed else None
    if timed:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        sys.setrecursionlimit(depth)
