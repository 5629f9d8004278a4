"""What Python's own functions make of what torch made: a row of `FUNCTIONS` each."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from ampwise_lint.path.conditions import chosen
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.defaults import setting_in
from ampwise_lint.source.roles import LOADER
from ampwise_lint.torch_model import tensors
from ampwise_lint.values.abstract import (
    FALSE,
    NONE,
    TRUE,
    Const,
    DictValue,
    Function,
    Gradient,
    Instance,
    ListValue,
    Loader,
    Parameters,
    Ref,
    Scaler,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.contents import loaders_in
from ampwise_lint.values.events import Read

TENSORS = {"torch.Tensor", "torch.nn.Parameter", "torch.autograd.Variable"}


def call(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Call ``builtins.name``."""
    name = path.removeprefix("builtins.")
    return FUNCTIONS.get(name, _other)(state, node, name, a)


def _first(a: Arguments) -> Value:
    return a.positional[0] if a.positional else NONE


def _print(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    tensors.shown_all(state, node, a.values, waits=True)
    return NONE


def _number(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    value = _first(a)
    if name == "round" and isinstance(value, Tensor):
        value.host = True  # tensors cannot be rounded by it: it is a number
        return value
    if isinstance(value, Tensor) and not value.data:
        return tensors.read(state, node, value, f"{name}()")
    if isinstance(value, Const):
        try:
            return Const({"float": float, "int": int, "round": round}[name](value.value))
        except (TypeError, ValueError, OverflowError):
            return state.unknown(node)
    return Unknown(
        f"{name}({key_of(value)})", loop=value.loop if isinstance(value, Unknown) else None
    )


def _zip(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    values = a.positional if name == "zip" else [_first(a)]
    key = f"{name}({', '.join(map(key_of, values))})"
    return Unknown(key, op=name, operands=tuple(values))


def _same_items(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    """``list``, ``sorted``: what was in it is in it still."""
    value = a.positional[-1] if name == "filter" and a.positional else _first(a)
    if isinstance(value, Parameters | ListValue | Loader | Tensor):
        return value
    return Unknown(f"{name}({key_of(value)})", of=value, op="tqdm", operands=(value,))


def _map(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    """``map(lambda x: x.to(device), batch)``: what the function makes of each item."""
    match a.positional:
        case [Function() as function, ListValue(items=items, repeats=repeats)]:
            made = [state.call(function, Arguments([each]), node) for each in items]
            return ListValue(made, repeats)
        case [Function() as function, Tensor() as batch]:
            return ListValue([state.call(function, Arguments([batch]), node)], repeats=True)
        case _:
            return _other(state, node, name, a)


def _next(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    first = _first(a)
    for loader in loaders_in(first):
        state.emit(Read, node, loader)
    if isinstance(first, Loader) or (isinstance(first, Unknown) and is_loader(first)):
        source = "Loader" if isinstance(first, Loader) else key_of(first)
        return Tensor(key=f"batch of {source}@{node.lineno}#{state.iteration}", data=True)
    return state.unknown(node, "called")


def _sum(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    first = _first(a)
    if isinstance(first, Tensor):
        return tensors.apply(state, node, "sum", (first,))
    if isinstance(first, ListValue) and first.items:
        if any(isinstance(each, Tensor) for each in first.items):
            return tensors.apply(state, node, "sum", first.items)
        return state.unknown(node)
    return _other(state, node, name, a)


PRECISION = re.compile(r"dtype|precision|amp", re.IGNORECASE)
FLOATS: dict[str, Value] = {each: Ref(f"torch.{each}") for each in ("float16", "bfloat16")}
"""What an option for the precision names, of the attributes of torch."""


CHOSEN_OF = {
    "torch.optim": "torch.optim.Optimizer",
    "torch.optim.lr_scheduler": "torch.optim.lr_scheduler.LRScheduler",
}
"""What an option names of a module: one of the classes derived from this one."""


def class_chosen(state: State, home: str, option: Value) -> Ref:
    """The class that an option names of a module: what it is by default, or any."""
    name = setting_in(option.key) if isinstance(option, Unknown) else ""
    default = state.here.text_defaults.get(name) or state.module.text_defaults.get(name, "")
    path = f"{home}.{default}"
    return Ref(path if library.is_optimizer(path) else CHOSEN_OF[home])


def _vars(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    first = _first(a)
    if isinstance(first, Ref):
        return Ref(f"{first.path}.__dict__")
    return _other(state, node, name, a)


def _is_named(state: State, dtype: str) -> bool:
    """Whether the text of the files at hand has a dtype: what an option chooses from."""
    word = re.compile(rf"torch\.{dtype}\b|['\"]{dtype}['\"]")
    return any(word.search(each.source.text) for each in (state.here, state.module))


def _has_autocast(state: State) -> bool:
    return any("autocast" in each.source.text for each in (state.here, state.module))


def _is_not(state: State, option: Unknown, name: str) -> bool:
    """Whether an option was found to name something else on this path."""
    return state.oracle.decided.get(f"({key_of(option)} Eq {name!r})") is False


def _getattr(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    match a.positional:
        case [Ref(path=path), Const(value=str(attr)), *_]:
            return Ref(library.canonical(f"{path}.{attr}"))
        case [Instance(attributes=known), Const(value=str(attr)), *_] if attr in known:
            return known[attr]
        case [Ref(path="torch"), Unknown() as option, *_] if PRECISION.search(option.key):
            named = {name: each for name, each in FLOATS.items() if _is_named(state, name)}
            other = {
                name: each for name, each in FLOATS.items() if not _is_not(state, option, name)
            }
            if len(other) < len(FLOATS):
                named = other  # the file names the one to tell the other from it
            if a.count > 2:
                return chosen(state, FLOATS, option)  # a default is one of several
            if not named and not _has_autocast(state):
                return state.unknown(node, "given")  # of 16 bits nobody speaks
            return chosen(state, named or FLOATS, option)
        case [Ref(path=path), option, *_] if path in CHOSEN_OF:
            return class_chosen(state, path, option)
        case [owner, Const(value=attr), *_]:
            return Unknown(f"{key_of(owner)}.{attr}", "given")
        case _:
            return _other(state, node, name, a)


def _hasattr(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    match a.positional:
        case [Ref(path=path), *_] if path.partition(".")[0] == "torch":
            return TRUE  # it is asked for the sake of an older torch
        case [owner, attr, *_]:
            return Unknown(f"hasattr({key_of(owner)}, {key_of(attr)})")
        case _:
            return _other(state, node, name, a)


def _isinstance(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    if not a.positional:  # isinstance(*pair)
        return _other(state, node, name, a)
    value, class_ = a.positional[0], a.positional[-1]
    if _is_no_tensor(value, class_):
        return FALSE
    if (known := _is_of_class(value, class_)) is not None:
        return TRUE if known else FALSE
    return Unknown(f"isinstance({key_of(value)}, {key_of(class_)})")


def _is_of_class(value: Value, class_: Value) -> bool | None:
    """Whether something is of a class that is no builtin, as far as that is in sight."""
    if not isinstance(class_, Ref) or class_.path.startswith("builtins."):
        return None
    if isinstance(value, Const):
        return False  # ``isinstance("none", NativeScaler)``
    last = class_.path.rpartition(".")[2]
    is_one = isinstance(value, Wrapper | Scaler) and value.path.rpartition(".")[2] == last
    return True if is_one else None


def _is_no_tensor(value: Value, class_: Value) -> bool:
    """Whether a value that is asked to be a tensor is something else for sure."""
    wanted = class_.items if isinstance(class_, ListValue) else [class_]
    names = {each.path for each in wanted if isinstance(each, Ref)}
    known = Parameters | ListValue | DictValue | Const | Loader
    return len(names) == len(wanted) and names <= TENSORS and isinstance(value, known)


def _dict(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    return DictValue(dict(a.named), node, open=bool(a.positional) or a.open)


def _len(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    return Unknown(f"len({key_of(_first(a))})")


def _range(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    return Unknown(f"range({', '.join(map(key_of, a.positional))})", op="range")


def _bool(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    return _first(a)


def _text(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    first = _first(a)
    if node.args:
        tensors.shown(state, node.args[0], first, f"{name}()")
    return Unknown(f"str({key_of(first)})")


def _other(state: State, node: ast.Call, name: str, a: Arguments) -> Value:
    first = _first(a)
    return first if isinstance(first, Gradient) else state.unknown(node, "called", name)


def is_loader(value: Value) -> bool:
    """Whether something yields batches."""
    match value:
        case Loader():
            return True
        case Unknown(op="enumerate" | "tqdm" | "zip", operands=operands):
            return any(is_loader(each) for each in operands)
        case Unknown(key=key):
            return bool(LOADER.search(key.partition("@")[0])) and not key.startswith(
                ("range", "len")
            )
        case _:
            return False


FUNCTIONS: dict[str, Callable[[State, ast.Call, str, Arguments], Value]] = {
    "print": _print,
    **dict.fromkeys(("float", "int", "round"), _number),
    **dict.fromkeys(("enumerate", "zip"), _zip),
    **dict.fromkeys(("list", "tuple", "set", "filter", "iter", "reversed", "sorted"), _same_items),
    **dict.fromkeys(("str", "repr", "format"), _text),
    "map": _map,
    "next": _next,
    "sum": _sum,
    "getattr": _getattr,
    "hasattr": _hasattr,
    "isinstance": _isinstance,
    "dict": _dict,
    "len": _len,
    "range": _range,
    "bool": _bool,
    "vars": _vars,
}
