"""From the word on the command line to a `Task`.

    charlm, digits            a built-in task
    text:PATH                 charlm on a text file or folder
    path/to/file.py[:name]    a function in a file
    package.module[:name]     a function in an importable module

The function is called with the ``--set key=value`` pairs, converted to what its annotations say.
A task that has no name of its own is called by its function, or by its file where that is ``task``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
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
    task = _call(function, spec, {**values, **_converted(function, spec, settings or {})})
    return task if task.name else replace(task, name=_name(spec))


def _find(spec: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The task function, and arguments that the spelling itself carries."""
    if spec in ("text", "text:"):
        raise TaskError("task 'text' needs a path: write text:PATH, a text file or folder")
    if spec.startswith("text:"):
        module = importlib.import_module(BUILT_IN["text"])
        return module.task, {"path": Path(spec.removeprefix("text:")).expanduser()}
    if spec in BUILT_IN:
        return importlib.import_module(BUILT_IN[spec]).task, {}
    place, name = _place_and_name(spec)
    module = _load_file(place) if place.endswith(".py") else _load_module(place, spec)
    function = getattr(module, name, None)
    if not callable(function):
        raise TaskError(f"task {spec!r}: {_no_function(module, name, place)}")
    return function, {}


def _place_and_name(spec: str) -> tuple[str, str]:
    """File or module, and function; a colon elsewhere in a file's path belongs to the path."""
    file = re.fullmatch(r"(.+\.py)(?::(\w*))?", spec, re.DOTALL)
    place, name = file.groups() if file else spec.partition(":")[::2]
    return place, name or "task"


def _name(spec: str) -> str:
    """What to call a task of a file or module: by its function, or else by where that stands."""
    place, function = _place_and_name(spec)
    if function != "task":
        return function
    return Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]


def _no_function(module: types.ModuleType, name: str, place: str) -> str:
    defined = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if hasattr(module, name):
        kind = type(getattr(module, name)).__name__
        return f"{name!r} in {place} is of type {kind}: expected a function that returns a Task"
    hint = nearest(name, defined) or f"; it defines {', '.join(defined) or 'none'}"
    return f"there is no function {name!r} in {place}{hint}"


def _load_file(place: str) -> types.ModuleType:
    path = Path(place).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        siblings = [str(each) for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TaskError(
            f"task file {place!r} {what}: expected a Python file{nearest(place, siblings)}"
        )
    path = path.resolve()
    _search(path.parent)
    with user_code(f"importing {place}"):
        return _execute(path, _module_name(path))


def _module_name(path: Path) -> str:
    """The name `path` has for its siblings: qualified inside a package, so that ``from .`` works.

    A name that another module holds already (a task file called ``random.py``) is not taken over.
    """
    name, folder = path.stem, path.parent
    while (folder / "__init__.py").is_file():
        name, folder = f"{folder.name}.{name}", folder.parent
    if "." in name:
        _search(folder)
    taken = sys.modules.get(name)
    free = taken is None or getattr(taken, "__file__", None) == str(path)
    return name if free else f"task_file_{path.stem}"


def _execute(path: Path, name: str) -> types.ModuleType:
    """Run a file as module `name`, registered: dataclasses and pickles look their module up."""
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(module_spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _load_module(place: str, spec: str) -> types.ModuleType:
    _search(Path.cwd())
    if all(part.isidentifier() for part in place.split(".")):
        try:
            with user_code(f"importing {place}"):
                return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there; something that it imports is not
    hint = nearest(place, BUILT_IN) or "; built in are charlm, digits and text:PATH"
    raise TaskError(f"task {spec!r}: no such built-in task, file or module{hint}")


def _search(folder: Path) -> None:
    """Let imports find what is in `folder`, as Python does for the folder of a script."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


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
        hint = " (is a return missing?)" if task is None else ""
        raise TaskError(
            f"task {spec!r} returned {type(task).__name__}: expected an ampwise.Task{hint}"
        )
    return task


def _converted(
    function: Callable[..., Any], spec: str, settings: Mapping[str, str]
) -> dict[str, Any]:
    """The settings as values of the kinds that the function declares."""
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    legal = [
        name
        for name, each in parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    hints = _hints(function)
    values: dict[str, Any] = {}
    for key, text in settings.items():
        if key not in legal and not takes_any:
            raise TaskError(
                f"task {spec!r} has no setting {key!r}: expected one of "
                f"{', '.join(legal) or 'none'}{nearest(key, legal)}"
            )
        kind = hints.get(key) or _kind_of_default(parameters.get(key))
        try:
            values[key] = _convert(text, kind)
        except ValueError:
            raise TaskError(
                f"task {spec!r}: {key}={text!r} does not fit: expected {_spelled(kind)}"
            ) from None
    return values


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # names for type checkers only; not a function
        return {}


def _kind_of_default(parameter: inspect.Parameter | None) -> Any:
    """What an argument without annotation wants: values like its default."""
    kind = str if parameter is None else type(parameter.default)
    return kind if kind in (bool, int, float) else str


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
        return _truth(text)
    if kind in (int, float, str, Path):
        return kind(text)
    if kind in (Any, object):
        return text
    raise ValueError(text)


def _truth(text: str) -> bool:
    words = {"true": True, "1": True, "on": True, "yes": True}
    words |= {"false": False, "0": False, "off": False, "no": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


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
    if kind is bool:
        return "true or false"
    return kind.__name__ if isinstance(kind, type) else str(kind)
