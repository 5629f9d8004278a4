"""From a command line and a configuration file to a command's ``Options`` dataclass.

The annotation of a field says how its flag is read, a string beside it (``Annotated[T, "FILE"]``)
what help calls the value, and the text below the field what help says about it::

    bool             --flag                     int, float, str, Path    --flag VALUE
    Literal[...]     --flag ONE_OF              tuple[str, ...]          --flag VALUE, repeatable
    T | None         as T; None: not given      the field ``task``       the one positional

A file given with ``--config`` names the same options; flags win. Everything that does not fit is a
`UsageError` of one line. argparse does the splitting, and its help the layout.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from ampwise.cli.options import Gate
from ampwise.errors import UsageError, nearest

T = TypeVar("T")

_EXPECTED = {int: "an integer", float: "a number", str: "text", Path: "a path"}
_METAVARS = {int: "N", float: "X"}


@dataclass(frozen=True)
class Flag:
    """One option, as its field declares it."""

    field: str
    kind: type
    """The type of one value."""

    choices: tuple[str, ...] = ()
    repeatable: bool = False
    metavar: str = ""
    default: Any = None
    help: str = ""

    @property
    def spelling(self) -> str:
        """The flag as one types it."""
        return f"--{self.field.replace('_', '-')}"

    def read(self, text: str, where: str) -> Any:
        """The value that `text` spells; a `UsageError` that begins with `where` otherwise."""
        if self.choices:
            if text not in self.choices:
                legal = ", ".join(self.choices)
                raise UsageError(
                    f"{where}: expected one of {legal}, got {text!r}{nearest(text, self.choices)}"
                )
            return text
        try:
            return self.kind(text)
        except ValueError:
            raise UsageError(f"{where}: expected {_EXPECTED[self.kind]}, got {text!r}") from None


def parse(kind: type[T], arguments: Sequence[str], program: str) -> T | None:
    """Options of type `kind`; None when help was asked for (and printed).

    Raises
    ------
    UsageError
        For an unknown flag, a value that does not fit, or a config file that does not.
    """
    flags = flags_of(kind)
    if "-h" in arguments or "--help" in arguments:
        _parser(flags, program, inspect.getdoc(kind) or "").print_help()
        return None
    given = _given(flags, _with_gate_value(arguments), program)
    path = given.get("config")
    return kind(**{**(_from_file(path, flags) if path else {}), **given})


def flags_of(kind: type) -> dict[str, Flag]:
    """The flags of an ``Options`` dataclass, by field name."""
    hints = typing.get_type_hints(kind, include_extras=True)
    texts = _field_texts(kind)
    return {
        each.name: _flag(each.name, hints[each.name], each.default, texts.get(each.name, ""))
        for each in dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    }


def _flag(name: str, hint: Any, default: Any, text: str) -> Flag:
    metavar = ""
    if typing.get_origin(hint) is typing.Annotated:
        hint, metavar = typing.get_args(hint)[:2]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    choices: tuple[str, ...] = ()
    repeatable = typing.get_origin(hint) is tuple
    if repeatable:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        choices, hint = typing.get_args(hint), str
    metavar = metavar or "|".join(choices) or _METAVARS.get(hint, name.upper())
    return Flag(name, hint, choices, repeatable, metavar, default, text)


def _field_texts(kind: type) -> dict[str, str]:
    """The text below each field, from the source of the class and its bases."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as text)),
                ):
                    texts[name] = " ".join(text.split())
                case _:
                    pass
    return texts


class _Parser(argparse.ArgumentParser):
    """argparse that raises one line instead of printing a usage dump and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _parser(flags: Mapping[str, Flag], program: str, about: str = "") -> argparse.ArgumentParser:
    task = " [TASK]" if "task" in flags else ""
    parser = _Parser(
        program,
        usage=f"{program}{task} [OPTIONS]",
        description=about,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
    )
    if "task" in flags:
        parser.add_argument_group("TASK", _help(flags["task"]).replace("%%", "%"))
    options = parser.add_argument_group("options")
    for flag in flags.values():
        if flag.field != "task":
            _add(options, flag)
    options.add_argument("--debug", action="store_true", help="Show where an error came from.")
    options.add_argument("-h", "--help", action="store_true", help="Show this.")
    return parser


def _add(options: argparse._ArgumentGroup, flag: Flag) -> None:
    if flag.kind is bool:
        options.add_argument(flag.spelling, action="store_true", help=_help(flag))
        return
    options.add_argument(
        flag.spelling,
        dest=flag.field,
        metavar=flag.metavar,
        type=_reader(flag),
        action="append" if flag.repeatable else "store",
        help=_help(flag),
    )


def _reader(flag: Flag) -> Callable[[str], Any]:
    return lambda text: flag.read(text, flag.spelling)


def _help(flag: Flag) -> str:
    said = flag.help.replace("%", "%%")
    if flag.default is None or flag.default is False or flag.repeatable or "default" in said:
        return said
    return f"{said.removesuffix('.')}; default: {flag.default}."


def _given(flags: Mapping[str, Flag], arguments: Sequence[str], program: str) -> dict[str, Any]:
    """What the command line itself says, by field."""
    parsed, rest = _parser(flags, program).parse_known_args(arguments)
    given: dict[str, Any] = {
        name: tuple(value) if flags[name].repeatable else value
        for name, value in vars(parsed).items()
        if name in flags
    }
    if unknown := next((each for each in rest if each.startswith("-") and each != "--"), None):
        spelling = unknown.partition("=")[0]
        hint = nearest(spelling, _spellings(flags)) or f"; {program} --help lists the options"
        raise UsageError(f"unknown option {spelling}{hint}")
    positionals = [each for each in rest if each != "--"]
    room = 1 if "task" in flags else 0
    if len(positionals) > room:
        limit = "only one TASK can be given" if room else f"{program} takes options only"
        raise UsageError(f"unexpected argument {positionals[room]!r}: {limit}")
    return given | ({"task": positionals[0]} if positionals else {})


def _spellings(flags: Mapping[str, Flag]) -> list[str]:
    return [each.spelling for each in flags.values() if each.field != "task"]


def _with_gate_value(arguments: Sequence[str]) -> list[str]:
    """``--gate`` alone means ``--gate fail``: the word after it may be the TASK."""
    words: list[str] = []
    for word, following in itertools.zip_longest(arguments, arguments[1:]):
        words.append(word)
        if word == "--gate" and following not in typing.get_args(Gate):
            words.append("fail")
    return words


def _from_file(path: Path, flags: Mapping[str, Flag]) -> dict[str, Any]:
    """The options that a file sets, read like the flags of the same names."""
    values: dict[str, Any] = {}
    for key, value in _content(path).items():
        name = str(key).replace("-", "_")
        if name not in flags or name == "config":
            legal = [each for each in flags if each != "config"]
            hint = nearest(name, legal) or f"; expected one of {', '.join(legal)}"
            raise UsageError(f"{path}: unknown key {key!r}{hint}")
        values[name] = _fitting(value, flags[name], f"{path}: {key}")
    return values


def _fitting(value: object, flag: Flag, where: str) -> Any:
    """A file's value as the flag's type."""
    if flag.kind is bool:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: expected true or false, got {value!r}")
        return value
    if flag.repeatable:
        if not isinstance(value, Mapping):
            raise UsageError(f"{where}: expected a table of names and values, got {value!r}")
        return tuple(f"{key}={each}" for key, each in value.items())
    if isinstance(value, list) and flag.kind is str:
        return ",".join(map(str, typing.cast("Iterable[object]", value)))
    if isinstance(value, (Mapping, list, bool)) or value is None:
        raise UsageError(f"{where}: expected {_EXPECTED[flag.kind]}, got {value!r}")
    return flag.read(str(value), where)


def _content(path: Path) -> Mapping[Any, Any]:
    """The content of a TOML or YAML file, read by safe loaders."""
    import tomllib

    import yaml

    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
    }
    if path.suffix not in readers:
        raise UsageError(f"config file {path}: expected a .toml, .yaml or .yml file")
    try:
        content = readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise UsageError(f"config file {path} is not valid {path.suffix[1:]}: {first}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UsageError(
            f"config file {path}: expected options by name, got a {type(content).__name__}"
        )
    return typing.cast("Mapping[Any, Any]", content)
