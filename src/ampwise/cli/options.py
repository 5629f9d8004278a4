"""Options that several commands share, and how a command line or a file becomes them.

Each command declares a dataclass ``Options``; its fields are the flags, their docstrings the help.
tyro parses it. A file given with ``--config`` (TOML or YAML) sets defaults by the flags' names;
flags win.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from ampwise.errors import UsageError, nearest

T = TypeVar("T")


@dataclass
class Common:
    """What every command takes."""

    task: Annotated[str, tyro.conf.Positional] = "charlm"
    """Built-in task (charlm, digits, text:PATH), file.py[:function] or module[:function]."""

    set: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")
    ] = ()
    """Keyword argument for the task's function; may be given several times."""

    device: str | None = None
    """cpu, cuda, cuda:1, mps, xpu; default: the best device present."""

    seed: int = 0
    """Seed of initialisation, dropout and data order."""

    out: Path | None = None
    """Folder of the run; default: a new numbered one under runs/."""

    config: Path | None = None
    """TOML or YAML file with defaults for these options; flags win."""

    json: str | None = None
    """Write the result as JSON to this file; - for standard output, and nothing else there."""

    quiet: bool = False
    """No progress, only the result."""

    def settings(self) -> dict[str, str]:
        """The ``--set`` pairs."""
        pairs = [each.partition("=") for each in self.set]
        if bad := next((key for key, equals, _ in pairs if not (key and equals)), None):
            raise UsageError(f"--set {bad!r}: expected KEY=VALUE")
        return {key: value for key, _, value in pairs}


def parse(kind: type[T], arguments: Sequence[str], program: str) -> T | None:
    """Options of type `kind`; None when help was asked for (and printed).

    Raises
    ------
    UsageError
        For an unknown flag, a value that does not fit, or a config file that does not.
    """
    arguments = _with_gate_value(arguments)
    default = kind(**_from_file(kind, arguments))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            options, unknown = tyro.cli(
                kind,
                args=list(arguments),
                prog=program,
                default=default,
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as leaving:
        if not leaving.code:
            print(said.getvalue(), end="")
            return None
        raise UsageError(_one_line(said.getvalue())) from None
    if unknown:
        raise UsageError(_unknown(unknown[0], kind))
    return options


def positive(name: str, value: float | None) -> None:
    """Refuse a number that is zero or negative; None means not given."""
    if value is not None and not value > 0:
        kind = "integer" if isinstance(value, int) else "number"
        raise UsageError(f"{name}: expected a positive {kind}, got {value}")


def _with_gate_value(arguments: Sequence[str]) -> list[str]:
    """``--gate`` alone means ``--gate fail``; `tyro` has no optional values."""
    given: list[str] = []
    for index, each in enumerate(arguments):
        given.append(each)
        if each == "--gate" and arguments[index + 1 : index + 2] not in (["strict"], ["fail"]):
            given.append("fail")
    return given


def _unknown(argument: str, kind: type) -> str:
    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)]
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}: only one TASK can be given"
    flag = argument.partition("=")[0]
    return f"unknown option {flag}{nearest(flag, flags) or '; --help lists the options'}"


def _one_line(text: str) -> str:
    """tyro's boxed message without the box."""
    lines = [re.sub(r"[│╭╮╰╯─]+", " ", line).strip() for line in text.splitlines()]
    kept = [line for line in lines if line and "--help" not in line and "Parsing error" not in line]
    return re.sub(r"\s+", " ", " ".join(kept)).removesuffix(".") or "the options do not parse"


def _from_file(kind: type, arguments: Sequence[str]) -> dict[str, Any]:
    """Defaults from the file named by ``--config``, checked against the options' types."""
    path = _config_path(arguments)
    if path is None:
        return {}
    content = _read(path)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in fields or name == "config":
            raise UsageError(f"{path}: unknown key {key!r}{_legal(str(key), fields)}")
        values[name] = _fitting(value, kind, name, f"{path}: {key}")
    return values


def _legal(key: str, fields: Mapping[str, Any]) -> str:
    return nearest(key, fields) or f"; expected one of {', '.join(fields)}"


def _fitting(value: Any, kind: type, name: str, where: str) -> Any:
    """A value from a file as the option's type, by the same parser that reads flags."""
    if name == "set":
        if not isinstance(value, Mapping):
            raise UsageError(f"{where}: expected a table of settings, got {value!r}")
        return tuple(f"{key}={each}" for key, each in value.items())
    if name == "task":
        return str(value)
    flag = f"--{name.replace('_', '-')}"
    current = getattr(kind(), name)
    if isinstance(current, bool):
        if not isinstance(value, bool):
            raise UsageError(f"{where}: expected true or false, got {value!r}")
        return value
    words = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return getattr(tyro.cli(kind, args=[flag, words]), name)
    except SystemExit:
        raise UsageError(f"{where}: {_one_line(said.getvalue())}") from None


def _config_path(arguments: Sequence[str]) -> Path | None:
    for index, each in enumerate(arguments):
        if each == "--config" and index + 1 < len(arguments):
            return Path(arguments[index + 1])
        if each.startswith("--config="):
            return Path(each.removeprefix("--config="))
    return None


def _read(path: Path) -> Mapping[str, Any]:
    """The content of a TOML or YAML file, read by safe loaders."""
    import tomllib

    import yaml

    readers = {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    if path.suffix not in readers:
        raise UsageError(f"config file {path}: expected a .toml, .yaml or .yml file")
    try:
        content = readers[path.suffix](path.read_text())
    except OSError as error:
        raise UsageError(f"config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise UsageError(f"config file {path} is no valid {path.suffix[1:]}: {first}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UsageError(
            f"config file {path}: expected options by name, got a {type(content).__name__}"
        )
    return content


def write_json(text: str, target: str | None, *, err: Any = None) -> None:
    """Write a result where ``--json`` says; None: nowhere."""
    if target is None:
        return
    if target == "-":
        print(text)
        return
    file = Path(target)
    did = "replaced" if file.exists() else "wrote"
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write JSON to {target}: {error.strerror}; name a writable file"
        ) from None
    print(f"{did} {target}", file=err or sys.stderr)


Gate = Literal["off", "fail", "strict"]
