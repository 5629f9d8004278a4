"""From a command line and a configuration file to a command's ``Options`` dataclass, by tyro.

A file given with ``--config`` names the same options. It is read as the flags it stands for, by the
same parser, and gives the defaults for the command line, so flags win. Everything that does not fit
is a `UsageError` of one line.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import os
import re
import reprlib
import tomllib
import typing
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from ampwise.cli.options import Common, Gate
from ampwise.document import MAX_INT, regular
from ampwise.errors import UsageError, in_one_line, nearest

T = TypeVar("T")


def parse(kind: type[T], arguments: Sequence[str], program: str) -> T | None:
    """Options of type `kind`; None when help was asked for (and printed).

    Raises
    ------
    UsageError
        For an unknown flag, a value that does not fit, or a config file that does not.
    """
    arguments = _with_gate_value(arguments)
    if "-h" in arguments or "--help" in arguments:
        with contextlib.suppress(SystemExit):
            tyro.cli(_for_help(kind), args=["--help"], prog=program, config=_STYLE)
        return None
    layers = [_Layer(arguments)]
    options = _stacked(kind, layers, program)
    path: Path | None = getattr(options, "config", None)
    if path is not None:
        layers.insert(0, _layer(lambda: _content(path), kind, f"config file {path}: "))
        options = _stacked(kind, layers, program)
    if isinstance(options, Common) and (earlier := options.earlier()):
        layers.insert(0, _layer(lambda: earlier, kind, f"options of the run in {options.out}: "))
        options = _stacked(kind, layers, program)
    return options


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Flags, and where they come from, for the beginning of an error's line."""

    flags: Sequence[str]
    source: str = ""


def _layer(content: Callable[[], Mapping[Any, Any]], kind: type, source: str) -> _Layer:
    """The flags that stored options stand for."""
    try:
        return _Layer(_as_flags(content(), kind), source)
    except UsageError as error:
        raise UsageError(f"{source}{error}") from None


def _stacked(kind: type[T], layers: Sequence[_Layer], program: str) -> T:
    """What several layers of flags say; a later one wins."""
    options = kind()
    for layer in layers:
        try:
            options = _over(options, layer.flags, program)
        except UsageError as error:
            raise UsageError(f"{layer.source}{error}") from None
    return options


def _over(options: T, flags: Sequence[str], program: str) -> T:
    """What flags say, and what `options` say where they do not."""
    kind = type(options)
    # A switch that is on by default would be called --no-... on the command line.
    switches = {name: False for name in _switches(kind) if getattr(options, name)}
    on = dict.fromkeys(switches, True)
    default = dataclasses.replace(options, **switches)  # pyright: ignore[reportArgumentType]
    options = _tyro(kind, flags, program, default)
    return dataclasses.replace(options, **on)  # pyright: ignore[reportArgumentType]


_STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)


def _for_help(kind: type) -> type[Any]:
    """The same options, which say their default only where it is a value, in whole paragraphs."""
    annotations: dict[str, Any] = {}
    told = _told(kind)
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        bare, *marks = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        shown: Any = tyro.conf.arg()
        for place, mark in enumerate(marks):
            if isinstance(mark, type(shown)):
                shown = marks.pop(place)
                break
        shown = dataclasses.replace(shown, help_behavior_hint=_default, help=told.get(name))
        annotations[name] = Annotated[(bare, *marks, shown)]
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    members = {"__annotations__": annotations, "__doc__": kind.__doc__, **defaults}
    return dataclasses.dataclass(type(kind.__name__, (kind,), members))


def _told(kind: type) -> dict[str, str]:
    """What stands below each option; tyro would break its lines where the source does."""
    told: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (made,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(made, ast.ClassDef)
        for option, text in itertools.pairwise(made.body):
            match option, text:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(said))):
                    told[name] = " ".join(said.split())
                case _:
                    pass
    return told


def _default(label: str) -> str:
    """Nothing for a switch, nor for an option that is not given unless it is given."""
    return "" if label in ("", "''", "None", "True", "False") else f"(default: {label})"


def _tyro(kind: type[T], arguments: Sequence[str], program: str, default: T) -> T:
    """What tyro makes of some arguments; its report of an error as one line."""
    said = io.StringIO()
    for word in arguments:
        flag, equals, _ = word.partition("=")
        if equals and flag.removeprefix("--").replace("-", "_") in _switches(kind):
            raise UsageError(f"{flag}: takes no value")
    try:
        with _wide(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            options, rest = tyro.cli(
                kind,
                args=arguments,
                prog=program,
                default=default,
                return_unknown_args=True,
                config=_STYLE,
            )
    except SystemExit:
        raise UsageError(_one_line(said.getvalue(), kind)) from None
    if rest:
        raise UsageError(_unknown(rest[0], kind, program))
    for name, value in vars(options).items():
        if isinstance(value, int) and abs(value) >= MAX_INT:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag}: expected an integer below 2^63, got {_spelled(value)}")
    return options


@contextlib.contextmanager
def _wide() -> Generator[None]:
    """Room for any report on one line, so that nothing in it is broken."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _one_line(report: str, kind: type) -> str:
    """What tyro's boxed report says, in our words where we know the case."""
    text = _first_paragraph(report)
    if found := re.fullmatch(r"Missing value for argument '(\S+)'.*", text):
        return f"{found[1]}: expected a value"
    if found := re.fullmatch(r"invalid choice '(.*)' for argument '(\S+)'.*", text):
        given, legal = found[1], typing.get_args(_hint(kind, found[2]))
        return (
            f"{found[2]}: expected one of {', '.join(legal)}, got {given!r}{nearest(given, legal)}"
        )
    if found := re.fullmatch(r"Error parsing (\S+): .*?['\"](.*)['\"]\]?\.?", text):
        hint = _hint(kind, found[1])
        kinds = {int: "an integer", float: "a number"}
        expected = next(
            (kinds[each] for each in (hint, *typing.get_args(hint)) if each in kinds), ""
        )
        return f"{found[1]}: expected {expected or hint}, got {found[2]!r}"
    return text or "the options do not parse"


def _first_paragraph(report: str) -> str:
    """The text of a box below its title, up to the next rule or empty line."""
    lines = (line.strip("│╭╮╰╯─ ") for line in report.splitlines()[1:])
    lines = ("" if set(line) == {"-"} else line for line in lines)
    body = itertools.dropwhile(lambda line: not line, lines)
    return " ".join(itertools.takewhile(bool, body))


def _hint(kind: type, flag: str) -> Any:
    return typing.get_type_hints(kind)[flag.lstrip("-").replace("-", "_")]


def _unknown(argument: str, kind: type, program: str) -> str:
    if not argument.startswith("-"):
        takes_task = "task" in _names(kind)
        why = "only one TASK can be given" if takes_task else f"{program} takes options only"
        return f"unexpected argument {argument!r}: {why}"
    spelling = argument.partition("=")[0]
    flags = [f"--{name.replace('_', '-')}" for name in _names(kind) if name != "task"]
    hint = nearest(spelling, flags) or f"; {program} --help lists the options"
    return f"unknown option {spelling}{hint}"


def _switches(kind: type) -> list[str]:
    """Fields that are bare flags, off by default."""
    off = {field.name for field in dataclasses.fields(kind) if field.default is False}
    return [name for name in _names(kind) if name in off]


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _with_gate_value(arguments: Sequence[str]) -> list[str]:
    """``--gate`` alone means ``--gate fail``: the word after it may be the TASK."""
    words: list[str] = []
    for word, following in itertools.zip_longest(arguments, arguments[1:]):
        words.append(word)
        if word == "--gate" and following not in typing.get_args(Gate):
            words.append("fail")
    return words


def _as_flags(content: Mapping[Any, Any], kind: type) -> list[str]:
    """The command line that a file stands for."""
    words: list[str] = []
    legal = [name for name in _names(kind) if name not in ("config", "debug")]
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in legal:
            hint = nearest(name, legal) or f"; expected one of {', '.join(legal)}"
            raise UsageError(f"unknown key {_spelled(key)}{hint}")
        words += _as_flag(name, value, _hint(kind, name))
    return words


def _as_flag(name: str, value: Any, hint: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if name == "set":
        if not isinstance(value, Mapping):
            raise _misfit("set", "a table of names and values", value)
        pairs = typing.cast("Mapping[Any, Any]", value)
        return [f"{flag}={key}={_word(f'set.{key}', each)}" for key, each in pairs.items()]
    if hint is bool:
        if not isinstance(value, bool):
            raise _misfit(name, "true or false", value)
        return [flag] if value else []
    if isinstance(value, bool):
        raise _misfit(name, "text or a number", value)
    if isinstance(value, list):
        several = typing.cast("list[Any]", value)
        value = ",".join(_word(name, each) for each in several)
    word = _word(name, value)
    return [word] if name == "task" else [f"{flag}={word}"]


def _word(name: str, value: Any) -> str:
    """A value as a command line has it."""
    if isinstance(value, str | float) or (isinstance(value, int) and abs(value) < MAX_INT):
        return str(value)
    raise _misfit(name, "text or a number", value)


def _misfit(name: str, expected: str, value: Any) -> UsageError:
    return UsageError(f"{name}: expected {expected}, got {_spelled(value)}")


def _spelled(value: Any) -> str:
    """A value as `repr` spells it, cut short; a number may have too many digits to be spelled."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"


_DEEPEST = 20
"""Levels of nesting in a YAML file; options need two."""


def _content(path: Path) -> Mapping[Any, Any]:
    """The content of a TOML or YAML file, read by safe loaders."""
    readers = {".toml": tomllib.loads, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in readers:
        raise UsageError("expected a .toml, .yaml or .yml file")
    try:
        content = readers[path.suffix](regular(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(str(error.strerror)) from None
    except RecursionError:
        raise UsageError(f"not valid {path.suffix[1:]}: nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"not valid {path.suffix[1:]}: {in_one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise UsageError(f"expected options by name, got a {type(content).__name__}")
    return typing.cast("Mapping[Any, Any]", content)


def _yaml(text: str) -> Any:
    """What a YAML text says; ValueError for what PyYAML refuses, and some that it does not.

    An alias stands for a value that may hold others, and so on: a short text for more than fits
    into memory. Deep nesting takes PyYAML minutes. Of a repeated key it keeps the last, silently.
    """
    import yaml

    try:
        _check_size(yaml.parse(text, yaml.SafeLoader))
        _check_keys(yaml.compose(text, yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _check_size(events: Iterable[Any]) -> None:
    """Refuse a YAML text that would get large: by aliases, or by nesting."""
    import yaml

    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise RecursionError
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name): write the value out")


def _check_keys(node: Any) -> None:
    """Refuse a mapping of YAML with a key twice."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_keys(each)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[Any] = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen if isinstance(key, yaml.ScalarNode) else True:
            what = "key twice" if isinstance(key, yaml.ScalarNode) else "key that is no word"
            raise ValueError(f"line {line} has a {what}: {_spelled(key.value)}")
        seen.add(key.value)
        _check_keys(value)
