"""Reports as JSON and back: written from the fields of dataclasses, read by their type hints.

One reader for every report. What it gives has the types that it says, so nothing behind it has to
ask again; what does not fit is a `UsageError` that names the place inside the document, such as
``precisions[2].step_ms.median: expected a number, got null``. Keys that are not known are left out,
so that an older version reads what a newer one wrote.

JSON has neither NaN nor inf. They are written as null, and null is read as NaN; or, in kinds with
`non_finite_words`, as the words "nan", "inf" and "-inf", which are read everywhere. Where a report
cannot do without a finite number, its field is `Finite`. A dict is held to the keys of a TypedDict
by ``Annotated[dict[str, Any], Keys]``.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import stat
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Required, Self, TypeVar

from ampwise.errors import UsageError

T = TypeVar("T")

MAX_BYTES = 64_000_000
"""Larger files are no reports: real ones have up to a few megabytes."""
MAX_INT = 2**63
"""No count in a file is as large as this."""
MAX_DEPTH = 40
"""Lists and objects inside each other; real reports have fewer than ten."""

Finite = Annotated[float, "finite"]
"""A number that is neither missing nor NaN nor inf."""

_TOO_DEEP = "is nested too deeply: expected a report"

_KINDS: Mapping[type, str] = {
    str: "a string", bool: "true or false", int: "an integer", float: "a number", list: "a list",
    dict: "an object", types.NoneType: "null",
}  # fmt: skip


_FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Document:
    """A report with a schema; a base of dataclasses.

    Attributes
    ----------
    schema
        What stands under ``schema`` in the JSON.
    non_finite_words
        Whether NaN and inf are written as words, not as null.
    """

    schema: ClassVar[str]
    non_finite_words: ClassVar[bool] = False

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"schema": self.schema, **_fields(self, words=self.non_finite_words)}

    @classmethod
    def from_json(cls, data: Any, where: object = "the report") -> Self:
        """The report that `to_json` wrote.

        Raises
        ------
        UsageError
            When `data` is something else, of another version, or damaged; the message begins with
            `where`.
        """
        found = data.get("schema") if isinstance(data, dict) else None
        if found != cls.schema:
            raise UsageError(
                f"{where}: expected a report of schema {cls.schema}, got {_shown(found)}"
            )
        return read(cls, data, where)


def load(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises
    ------
    UsageError
        When the file cannot be read, is no regular file, is too large, or holds something else.
    """
    try:
        with open_report(file) as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UsageError(f"{file}: more than {MAX_BYTES // 1_000_000} MB: expected a report")
        content = parsed(raw)
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror}; expected the folder of a run, such as runs/bench-digits-1"
        ) from None
    except ValueError as error:
        raise UsageError(f"{file} {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file}: expected the result of a run, got {_kind(content)}")
    return content  # pyright: ignore[reportUnknownVariableType]


def parsed(raw: bytes) -> Any:
    """The value in some JSON.

    Raises
    ------
    ValueError
        When it is none, or is nested more deeply than reports are.
    """
    try:
        value = json.loads(raw.decode(), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    if _is_deep(value, MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


class NotAFileError(OSError):
    """A folder, pipe, socket or device, where a file was expected."""


def regular(path: Path) -> Path:
    """The path itself, if reading it comes to an end.

    Raises
    ------
    NotAFileError
        When it is a folder, pipe, socket or device.
    OSError
        When it is not there, or cannot be asked for.
    """
    _check_mode(path.stat().st_mode, path)
    return path


def open_regular(path: Path) -> typing.BinaryIO:
    """Open such a file to read: a pipe would wait for a writer, and a device never end.

    Raises
    ------
    NotAFileError, OSError
        As of `regular`; also where something else has come in its place since.
    """
    # Without the first it waits at a pipe; without the second Windows ends a file at Ctrl-Z.
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(regular(path), os.O_RDONLY | flags), "rb")
    try:
        _check_mode(os.fstat(file.fileno()).st_mode, path)
    except NotAFileError:
        file.close()
        raise
    return file


def _check_mode(mode: int, path: Path) -> None:
    kind = stat.S_IFMT(mode)
    if kind != stat.S_IFREG:
        is_a = _FILE_KINDS.get(kind, "something else")
        raise NotAFileError(errno.EINVAL, f"expected a file, it is {is_a}", str(path))


def open_report(file: Path) -> typing.BinaryIO:
    """Open a file of a run to read, if it is one.

    Raises
    ------
    UsageError, OSError
        When it is something else, or cannot be opened.
    """
    try:
        return open_regular(file)
    except NotAFileError:
        raise UsageError(f"{file}: expected a file, got a folder, pipe or device") from None


def read(kind: type[T], data: Any, where: object = "the report") -> T:
    """A value of plain JSON as what a type says.

    Raises
    ------
    UsageError
        When it does not fit; the message begins with `where` and the place inside.
    """
    if _is_deep(data, MAX_DEPTH):
        raise UsageError(f"{where} {_TOO_DEEP}")
    try:
        return _read(kind, data, "")
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _read(hint: Any, value: Any, at: str) -> Any:
    origin = typing.get_origin(hint) or hint
    if origin is Annotated:
        _, mark = typing.get_args(hint)
        return _finite(value, at) if mark == "finite" else _read(mark, value, at)
    if origin is Required:
        return _read(typing.get_args(hint)[0], value, at)
    if origin in (types.UnionType, typing.Union):
        return _one_of(typing.get_args(hint), value, at)
    if origin is Literal:
        legal = typing.get_args(hint)
        if not any(value == each and type(value) is type(each) for each in legal):
            raise _misfit(at, f"one of {', '.join(map(str, legal))}", _shown(value))
        return value
    if typing.is_typeddict(origin) or dataclasses.is_dataclass(origin):
        return _object(origin, value, at)
    return _READERS[origin](hint, value, at)


def _any(_hint: Any, value: Any, _at: str) -> Any:
    return value


def _number(_hint: Any, value: Any, at: str) -> float:
    if value is None:
        return math.nan
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return _finite(value, at)


def _finite(value: Any, at: str) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise _misfit(at, "a number", _kind(value))
    if not abs(value) < 1e300:  # also keeps sums and products of a few from overflowing
        raise _misfit(at, "a number", "one that is too large")
    return value


def _integer(_hint: Any, value: Any, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _misfit(at, "an integer", _kind(value))
    if abs(value) >= MAX_INT:
        raise _misfit(at, "an integer", "one that is too large")
    return value


def _exactly(hint: Any, value: Any, at: str) -> Any:
    if not isinstance(value, hint):
        raise _misfit(at, _KINDS[hint], _kind(value))
    return value


def _path(_hint: Any, value: Any, at: str) -> Path:
    return Path(_exactly(str, value, at))


def _list(hint: Any, value: Any, at: str) -> list[Any]:
    _exactly(list, value, at)
    (inner,) = typing.get_args(hint)
    return [_read(inner, each, f"{at}[{place}]") for place, each in enumerate(value)]


def _mapping(hint: Any, value: Any, at: str) -> dict[str, Any]:
    _exactly(dict, value, at)
    inner = typing.get_args(hint)[1]
    return {key: _read(inner, each, _under(at, key)) for key, each in value.items()}


def _object(kind: Any, value: Any, at: str) -> Any:
    """A dataclass; or a dict with the keys that a TypedDict names, whatever else is in it."""
    _exactly(dict, value, at)
    typed = typing.is_typeddict(kind)
    if issubclass(kind, Document) and at and value.get("schema") != kind.schema:
        raise _misfit(_under(at, "schema"), kind.schema, _shown(value.get("schema")))
    found: dict[str, Any] = _mapping(dict[str, Any], value, at) if typed else {}
    needed = _needed(kind)
    for name, hint in _hints(kind).items():
        if name in value:
            found[name] = _read(hint, value[name], _under(at, name))
        elif name in needed:
            raise _misfit(_under(at, name), "a value", "nothing")
    return found if typed else kind(**found)


def _one_of(hints: tuple[Any, ...], value: Any, at: str) -> Any:
    """The first of several types that takes a value; null is never NaN where None is meant."""
    if value is None and types.NoneType in hints:
        return None
    hints = tuple(each for each in hints if each is not types.NoneType)
    for hint in hints[:-1]:
        try:
            return _read(hint, value, at)
        except UsageError:
            pass
    return _read(hints[-1], value, at)


_READERS: Mapping[Any, Callable[[Any, Any, str], Any]] = {
    Any: _any, float: _number, int: _integer, str: _exactly, bool: _exactly, Path: _path,
    list: _list, dict: _mapping, Mapping: _mapping,
}  # fmt: skip


def _is_deep(value: Any, left: int) -> bool:
    """Whether lists and objects are more than so many levels inside each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_deep(each, left - 1) for each in inner)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: each for name, each in hints.items() if typing.get_origin(each) is not ClassVar}


@cache
def _needed(kind: Any) -> set[str]:
    """What must be there: required keys, and fields without a default."""
    if typing.is_typeddict(kind):
        # Not __required_keys__: Python 3.11 does not see Required in postponed annotations.
        hints = _hints(kind).items()
        return {name for name, e in hints if kind.__total__ or typing.get_origin(e) is Required}
    missing = dataclasses.MISSING
    return {
        each.name
        for each in dataclasses.fields(kind)
        if each.default is missing and each.default_factory is missing
    }


def _fields(value: Any, *, words: bool) -> dict[str, Any]:
    return {
        each.name: _plain(getattr(value, each.name), words=words)
        for each in dataclasses.fields(value)
    }


def _plain(value: Any, *, words: bool) -> Any:
    """The value as plain JSON."""
    if isinstance(value, Document):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return _fields(value, words=words)
    if isinstance(value, Mapping):
        return {str(key): _plain(each, words=words) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, words=words) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value) if words else None
    return str(value) if isinstance(value, Path | str) else value


def _under(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _misfit(at: str, wanted: str, got: str) -> UsageError:
    return UsageError(f"{at}{': ' if at else ''}expected {wanted}, got {got}")


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    """A value that should have been a certain word; of anything but a short string, its kind."""
    return repr(value) if isinstance(value, str) and len(value) <= 60 else _kind(value)


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no value")
