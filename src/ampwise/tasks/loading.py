"""From the word on the command line to a `Task`.

    charlm, digits            a built-in task
    text:PATH                 charlm on a text file or folder
    path/to/file.py[:name]    a function in a file
    package.module[:name]     a function in an importable module

The function is called with the ``--set key=value`` pairs, converted to what its annotations say.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ampwise.errors import TaskError, nearest
from ampwise.tasks.checks import user_code
from ampwise.tasks.task import Task

BUILT_IN = {
    "charlm": "ampwise.tasks.charlm",
    "digits": "ampwise.tasks.digits",
    "text": "ampwise.tasks.text",
}
"""Built-in tasks and the module of each; ``text`` is spelled ``text:PATH``."""


def load_task(spec: str, settings: Mapping[str, str] | None = None) -> Task:
    """The task that `spec` names.

    Parameters
    ----------
    spec
        A name, a file or a module, as in this module's docstring.
    settings
        Keyword arguments of the task's function, as text.

    Raises
    ------
    TaskError
        When there is no such task, or its function does not give a `Task`.
    """
    function, values = _find(spec)
    return _call(function, spec, {**values, **_converted(function, spec, settings or {})})


def _find(spec: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The task function, and arguments that the spelling itself carries."""
    if spec.startswith("text:"):
        module = importlib.import_module(BUILT_IN["text"])
        return module.task, {"path": Path(spec.removeprefix("text:"))}
    if spec == "text":
        raise TaskError("task 'text' needs a path: write text:PATH, a text file or folder")
    if spec in BUILT_IN:
        return importlib.import_module(BUILT_IN[spec]).task, {}
    place, _, name = spec.partition(":") if ".py:" not in spec else spec.rpartition(":")
    name = name or "task"
    module = _load_file(place) if place.endswith(".py") else _load_module(place, spec)
    function = getattr(module, name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        what = "is no function" if function is not None else "does not exist"
        raise TaskError(
            f"task {spec!r}: {name!r} {what} in {place}{nearest(name, defined)}"
            + ("" if nearest(name, defined) else f"; it defines {', '.join(defined) or 'none'}")
        )
    return function, {}


def _load_file(place: str) -> types.ModuleType:
    path = Path(place)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        siblings = [str(each) for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TaskError(
            f"task file {place!r} {what}: expected a Python file{nearest(place, siblings)}"
        )
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a script, so that siblings import
    module_spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if module_spec is None or module_spec.loader is None:
        raise TaskError(f"task file {place!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up
    with user_code(f"importing {place}"):
        module_spec.loader.exec_module(module)
    return module


def _load_module(place: str, spec: str) -> types.ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise TaskError(
            f"task {spec!r}: no such built-in task, file or module{nearest(place, BUILT_IN)}"
            f"{'' if nearest(place, BUILT_IN) else '; built in are charlm, digits and text:PATH'}"
        )
    with user_code(f"importing {place}"):
        return importlib.import_module(place)


def _call(function: Callable[..., Any], spec: str, values: Mapping[str, Any]) -> Task:
    needed = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in values
    ]
    if needed:
        raise TaskError(
            f"task {spec!r} needs {', '.join(needed)}: pass --set {needed[0]}=VALUE, or give the "
            "argument a default"
        )
    with user_code(f"task function {spec}"):
        task = function(**values)
    if not isinstance(task, Task):
        raise TaskError(f"task {spec!r} returned {type(task).__name__}: expected an ampwise.Task")
    return task


def _converted(
    function: Callable[..., Any], spec: str, settings: Mapping[str, str]
) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = get_type_hints(function)
    values: dict[str, Any] = {}
    for key, text in settings.items():
        if key not in parameters and not takes_any:
            legal = ", ".join(parameters) or "none"
            raise TaskError(
                f"task {spec!r} has no setting {key!r}: expected one of {legal}"
                f"{nearest(key, parameters)}"
            )
        try:
            values[key] = _convert(text, hints.get(key, str))
        except ValueError:
            raise TaskError(
                f"task {spec!r}: {key}={text!r} does not fit: expected "
                f"{_spelled(hints.get(key, str))}"
            ) from None
    return values


def _convert(text: str, kind: Any) -> Any:
    """`text` as the annotation says; ValueError when it does not fit."""
    origin = get_origin(kind)
    if origin is Literal:
        matching = [value for value in get_args(kind) if str(value) == text]
        if not matching:
            raise ValueError(text)
        return matching[0]
    if origin in (Union, types.UnionType):
        if type(None) in get_args(kind) and text.lower() == "none":
            return None
        return _first_that_fits(text, [each for each in get_args(kind) if each is not type(None)])
    if kind is bool:
        words = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]
    return kind(text) if kind in (int, float, Path) else text


def _first_that_fits(text: str, kinds: list[Any]) -> Any:
    for kind in kinds:
        try:
            return _convert(text, kind)
        except ValueError:
            continue
    raise ValueError(text)


def _spelled(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(kind))
    return getattr(kind, "__name__", str(kind))
