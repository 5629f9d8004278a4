"""The script itself, run as Python would: its own argv, ``__main__``, path, signals and exit code.

What it raises is shown by its own ``sys.excepthook``, without our frames.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

from ampwise.errors import EXIT_INTERRUPTED, UsageError

_RUNPY = "<frozen runpy>"
_OURS = str(Path(__file__).parents[1]) + "/"


@dataclass(frozen=True)
class Target:
    """What to run.

    Attributes
    ----------
    name
        Path of a script, or name of a module.
    """

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Refuse what is not there, before anything else is done.

        Raises
        ------
        UsageError
            For a path that is no file or folder with a ``__main__.py``.
        """
        if self.is_module:
            return
        path = Path(self.name)
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise UsageError(f"{self.name}: a folder without __main__.py; expected a Python script")
        if not path.exists():
            raise UsageError(
                f"no such script: {self.name}; expected a path, or -m and a module's name"
            )
        if not os.access(path, os.R_OK):
            raise UsageError(f"{self.name}: no permission to read it")

    @property
    def is_archive(self) -> bool:
        """Whether it is a folder or a zip file, with a ``__main__.py`` in it."""
        return not self.is_module and pkgutil.get_importer(self.name) is not None

    @property
    def first_on_path(self) -> str:
        """What Python puts first on ``sys.path`` for it."""
        if self.is_archive:
            return str(Path(self.name).absolute())
        return str(Path.cwd() if self.is_module else Path(self.name).resolve().parent)

    @property
    def label(self) -> str:
        """A short name, for the run's folder."""
        if self.is_module:
            return self.name
        path = Path(self.name)
        return path.resolve().stem if path.suffix in ("", ".py") else path.name


class Stopped(BaseException):
    """The script has made as many steps as it was to make."""


@dataclass(frozen=True)
class Ending:
    """How a script ended.

    Attributes
    ----------
    exit_code
        What Python would have exited with.
    words
        ``finished``, ``stopped``, ``interrupted``, ``exited with 3``, or what it raised.
    """

    exit_code: int
    words: str


def run(
    target: Target,
    on_terminate: Callable[[], None],
    when: Callable[[Callable[[], None]], None],
    *,
    all_frames: bool = False,
) -> Ending:
    """Run it to its end.

    Parameters
    ----------
    on_terminate
        Called when SIGTERM ends the process, just before it does.
    when
        Makes the call that ends the process, as soon as nothing is lost by it.
    all_frames
        Show our own frames, too, when it raises.
    """
    show = _show_all if all_frames else _show
    with _as_if_alone(target), _terminable(on_terminate, when):
        try:
            _execute(target)
        except Stopped:
            return Ending(0, "stopped")
        except SystemExit as leaving:
            if _is_runpys(leaving):
                raise UsageError(_refusal(leaving, target)) from None
            return _exited(leaving)
        except KeyboardInterrupt as error:
            show(error)
            return Ending(EXIT_INTERRUPTED, "interrupted")
        except BaseException as error:  # noqa: BLE001 - as Python does at its end
            show(error)
            return Ending(1, f"raised {type(error).__name__}")
    return Ending(0, "finished")


def _execute(target: Target) -> None:
    """Run it in a ``__main__`` of its own, with the names that Python puts there."""
    as_main: Callable[..., Any] = vars(runpy)["_run_module_as_main"]  # what ``python -m`` calls
    before, main = sys.modules["__main__"], ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        if target.is_module:
            as_main(target.name)
        elif target.is_archive:
            as_main("__main__", alter_argv=False)
        else:
            path = str(Path(target.name).absolute())
            loader = SourceFileLoader("__main__", path)
            vars(main).update(__file__=path, __cached__=None, __loader__=loader, __annotations__={})
            exec(compile(loader.get_data(path), path, "exec"), vars(main))  # noqa: S102
    finally:
        sys.modules["__main__"] = before


def _exited(leaving: SystemExit) -> Ending:
    """As Python takes ``sys.exit``: None is 0, a number is itself, anything else is said."""
    code = leaving.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201 - the script's own words
        code = 1
    number = (code or 0) & 0xFF
    return Ending(number, f"exited with {number}" if number else "finished")


@contextlib.contextmanager
def _as_if_alone(target: Target) -> Generator[None]:
    """Inside, arguments, path, streams and signals are as if Python had started the script."""
    argv, path = sys.argv, list(sys.path)
    stdout, stderr = sys.stdout, sys.stderr
    sys.argv = [target.name, *target.args]
    sys.stdout, sys.stderr = sys.__stdout__ or stdout, sys.__stderr__ or stderr
    if target.is_archive or not sys.flags.safe_path:
        sys.path[0] = target.first_on_path
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    if _in_main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        sys.argv, sys.path[:] = argv, path
        if _in_main_thread():
            for each, handler in before.items():
                signal.signal(each, handler)


@contextlib.contextmanager
def _terminable(
    on_terminate: Callable[[], None], when: Callable[[Callable[[], None]], None]
) -> Generator[None]:
    """Inside, SIGTERM ends the process as it would, but for a call just before."""
    if not _in_main_thread():
        yield
        return
    own = os.getpid()

    def end() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() == own:
            on_terminate()
        os.kill(os.getpid(), signal.SIGTERM)

    def terminated(_: int, __: FrameType | None) -> None:
        when(end)

    signal.signal(signal.SIGTERM, terminated)
    yield


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _show(error: BaseException) -> None:
    """Have the script's own hook show an error, with the script's own frames."""
    error.__traceback__ = _without_ours(error.__traceback__)
    each: BaseException | None = error
    while (each := each.__cause__ or each.__context__) is not None:
        each.__traceback__ = _without_ours(each.__traceback__)
    _show_all(error)


def _show_all(error: BaseException) -> None:
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)


def _is_runpys(error: BaseException) -> bool:
    """Whether what finds a module complains, and not the code that it was to run."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _is_of_runpy(trace)


def _refusal(leaving: SystemExit, target: Target) -> str:
    """Its complaint as ours."""
    why = str(leaving.code).removeprefix(f"{sys.executable}: ")
    if target.is_module:
        return f"-m: {why}; expected a module that python -m takes"
    return f"{target.name}: {why}; expected a Python script"


def _is_of_runpy(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename == _RUNPY


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without frames of ours and of what runs the script."""
    kept: list[TracebackType] = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        ours = file.startswith((_OURS, "<importlib._bootstrap: ampwise>"))
        if not ours and not _is_of_runpy(trace):
            kept.append(trace)
        trace = trace.tb_next
    following: Any = None
    for each in reversed(kept):
        each.tb_next = following
        following = each
    return following
