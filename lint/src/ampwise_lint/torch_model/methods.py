"""What calling a method does, by the kind of value it is called on."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from ampwise_lint.path.conditions import chosen
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.roles import LOADER, LOSS, SCHEDULER, dotted
from ampwise_lint.torch_model import casts, networks, steps, tensor_methods, tensors
from ampwise_lint.torch_model.tables import choices_in
from ampwise_lint.values.abstract import (
    NONE,
    Cast,
    Class,
    Const,
    DictValue,
    Function,
    Gradient,
    Instance,
    ListValue,
    Loader,
    Manager,
    Model,
    Optimizer,
    Parameter,
    Parameters,
    Region,
    Scaler,
    Scheduler,
    Super,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    is_low,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.contents import flatten, holds, loaders_in
from ampwise_lint.values.events import (
    Applied,
    Backward,
    GradientRead,
    HostSync,
    Managed,
    Read,
    Report,
    Save,
    Synchronize,
    ZeroGrad,
)

LOGS = re.compile(
    r"^(add_scalars?|log|log_metrics?|log_dict|info|debug|warning|write|set_postfix(_str)?"
    r"|set_description(_str)?|print|log_metric|log_scalar|update|append|add)$"
)
SHOWS = re.compile(
    r"^(add_scalars?|log|log_metrics?|log_dict|info|write|set_postfix(_str)?|set_description"
    r"|log_metric|log_scalar)$"
)
KNOWN_OPERATIONS = (library.OPS_LOW | library.OPS_FLOAT32 | library.PLAIN | library.INTEGER) - {
    "min", "max", "add", "split", "pad", "select", "index_select", "t", "div", "sub", "mul", "log",
    "repeat", "norm", "sum", "mean", "view", "dist", "where", "clip", "expand", "int", "bool",
    "roll",
}  # fmt: skip
"""Operations that hardly anything but a tensor has a method for."""
WAITS = {
    "info", "write", "set_description", "set_postfix_str", "add_scalar", "add_scalars",
}  # fmt: skip
"""Of `SHOWS`, those that turn a tensor into a number at once."""


def call(state: State, node: ast.Call, owner: Value, name: str, arguments: Arguments) -> Value:
    """Call `owner.name(...)`."""
    handler = _BY_KIND.get(type(owner))
    if handler is not None:
        return handler(state, node, owner, name, arguments)
    return state.unknown(node, "called", f"{key_of(owner)}.{name}()")


def walk_callbacks(state: State, node: ast.Call, a: Arguments) -> Value | None:
    """Functions of the project handed to one nobody showed us: it is likely to call them."""
    returned: Value | None = None
    for each in a.values:
        if isinstance(each, Function) and not isinstance(each.node, ast.Lambda):
            spec = each.node.args
            required = len(spec.posonlyargs) + len(spec.args) - len(spec.defaults)
            if required <= (each.owner is not None):
                returned = state.call(each, Arguments(), node)
    return returned


NETWORK_MADE = re.compile(r"from_pretrained|[mM]odel|[nN]et\b|resnet|create_model|(^|\.)[A-Z]\w*@")
"""What made something that is halved: by the words for networks, or a class."""
SAVES = re.compile(r"save|checkpoint|ckpt|snapshot", re.IGNORECASE)
LOADS = re.compile(r"load|resume|restore", re.IGNORECASE)
HARMLESS = re.compile(
    r"load|resume|restore|log|print|info|save|checkpoint|ckpt|isinstance", re.IGNORECASE
)


NORM = re.compile(r"grad\w*norm|norm\w*grad", re.IGNORECASE)


def note_norm(state: State, node: ast.Call, name: str, a: Arguments) -> None:
    """Note that a function nobody showed us reads gradients, by its name and what it is given."""
    owners = Parameters | Model | Instance | Optimizer
    if NORM.search(name) and any(isinstance(each, owners) for each in a.values):
        state.emit(GradientRead, node)


def note_gradients(state: State, node: ast.Call, a: Arguments, *, copies: bool = False) -> None:
    """Note that gradients are computed with, or shown; `copies`: or only put side by side."""
    if any(isinstance(e, Gradient) and not e.is_unscaled for e in flatten(a.values)):
        state.emit(GradientRead, node, copies=copies)


def given_away(
    state: State, node: ast.Call, name: str, a: Arguments, owner: Unknown | None = None
) -> None:
    """Note what a function nobody showed us is given: a checkpoint, a scaler, a loader."""
    for given in flatten(a.values):
        for loader in loaders_in(given):
            state.emit(Read, node, loader, name)
    to_save = a.named.get("to_save")
    if isinstance(to_save, DictValue):  # ignite's word for it
        state.emit(Save, node, to_save, to_save)
        return
    if SAVES.search(name):
        mappings = [each for each in a.values if isinstance(each, DictValue)]
        is_foreign = _is_made_elsewhere(owner) if owner else state.here.imports.full(node.func)
        if is_foreign and _saves_optimizer(name, a):
            may_hold_more = any(each.open for each in mappings)
            given = DictValue({**dict(enumerate(a.positional)), **a.named}, node, may_hold_more)
            state.emit(Save, node, given, given)
            return
        if mappings:
            state.emit(Save, node, mappings[0], mappings[0])
            return
    if not HARMLESS.search(name) and any(isinstance(each, Scaler) for each in a.values):
        state.emit(Managed, node, name)


def made_of(name: str, a: Arguments) -> Value | None:
    """What a function nobody showed us makes something of: a scaler, or what is optimized."""
    flat = flatten(a.values)
    scaler = next((each for each in flat if isinstance(each, Scaler)), None)
    if scaler is not None or "optim" not in name.lower():
        return scaler
    trained = [each for each in flat if isinstance(each, Parameters) or networks.is_net(each)]
    return trained[0] if len(trained) == 1 else None


def _is_made_elsewhere(owner: Unknown) -> bool:
    """Whether an object is of a class nobody showed us, and was made without a scaler."""
    return owner.made == "called" and not isinstance(owner.of, Scaler)


def _saves_optimizer(name: str, a: Arguments) -> bool:
    """Whether a function that saves is given an optimizer, or its state."""
    if a.open or LOADS.search(name):
        return False
    given = [each.of if isinstance(each, Parameters) else each for each in a.values]
    return any(isinstance(each, Optimizer) for each in given)


# ---------------------------------------------------------------------- the rest


def _manager(state: State, node: ast.Call, owner: Manager, name: str, a: Arguments) -> Value:
    """A context manager that is entered and left by hand."""
    if name == "__enter__":
        state.keep(owner)
        return owner.bound or owner
    if name == "__exit__":
        state.leave(owner)
    return NONE


def _parameters(state: State, node: ast.Call, owner: Parameters, name: str, a: Arguments) -> Value:
    if name == "item":  # a figure of the parameters, or of the optimizer's state
        state.emit(HostSync, node, owner, name)
    return owner


def _loader(state: State, node: ast.Call, owner: Loader, name: str, a: Arguments) -> Value:
    if name in ("next", "get_batch", "__next__"):
        state.emit(Read, node, owner)
        return Tensor(key=f"batch@{node.lineno}#{state.iteration}", data=True)
    return state.unknown(node, "called")


def _class(state: State, node: ast.Call, owner: Class, name: str, a: Arguments) -> Value:
    if name == "apply":
        state.emit(Applied, node, owner)
        tensors_ = [each for each in a.values if isinstance(each, Tensor)]
        return Tensor(key=f"{owner.node.name}@{node.lineno}", inputs=tuple(tensors_), op="apply")
    return state.unknown(node, "called")


def _mapping(state: State, node: ast.Call, owner: DictValue, name: str, a: Arguments) -> Value:
    first = a.positional[0] if a.positional else NONE
    match name:
        case "get" | "pop" | "setdefault" if isinstance(first, Const):
            if first.value in owner.items:
                return owner.items[first.value]
            return state.unknown(node, "called") if owner.open else a.get(1, "default") or NONE
        case "get" if choices := choices_in(owner):
            return chosen(state, choices, first)
        case "update":
            if isinstance(first, DictValue):
                owner.items |= first.items
                owner.open |= first.open
            else:
                owner.open = owner.open or bool(a.positional)
            for key, value in a.named.items():
                owner.items[key] = value
            return NONE
        case "items":
            return Unknown(f"items of {key_of(owner)}", op="items", operands=(owner,))
        case "values":
            return ListValue(list(owner.items.values()))
        case _:
            return state.unknown(node, "called")


def _sequence(state: State, node: ast.Call, owner: ListValue, name: str, a: Arguments) -> Value:
    if name == "append" and a.positional:
        value = a.positional[0]
        if isinstance(value, Tensor) and value.host:
            state.emit(Report, node, value, "list", True)
        if not isinstance(value, Const) and not holds(value, owner):
            owner.items = [*owner.items[:8], value]
    return NONE


def _unknown(state: State, node: ast.Call, owner: Unknown, name: str, a: Arguments) -> Value:
    match name:
        case "backward":
            if a.positional:
                state.emit(Managed, node, owner.key)
            else:
                scaled = owner if "scale" in owner.key.lower() else None
                state.emit(Backward, node, owner, scaled)
            return NONE
        case _ if name in tensor_methods.READS and not a.positional:
            return tensors.read(state, node, owner, name)
        case "decode" | "batch_decode" if _makes_text(owner, name, a):
            ids = a.first(*IDS)
            if isinstance(ids, Tensor) and (ids.moved or not ids.data):
                tensors.read(state, node, ids, name)
            return state.unknown(node, "called")
        case "half" | "bfloat16" if not a.count:
            return casts.halved(state, node, _as_made(state, node, owner), library.HALVES[name])
        case "parameters" | "named_parameters":
            return Parameters(owner, f"{owner.key}.parameters")
        case "zero_grad":
            state.emit(ZeroGrad, node, owner)
            return NONE
        case "step" if SCHEDULER.search(owner.key) and not LOADER.search(owner.key):
            return steps.scheduler(state, node, Scheduler(owner.key), name, a)
        case "state_dict" | "load_state_dict":
            return steps.state_dict(state, node, owner, name)
        case "synchronize" if not a.count:
            state.emit(Synchronize, node, "")
            return NONE
        case "no_sync":
            return Manager("other", node)
        case "autocast" if not a.count:  # of a trainer or a policy nobody showed us
            return Manager("autocast", node, Region(node, state.here, True, None, None))
        case "log_every" if a.positional:  # the logger of torchvision's references
            over = a.positional[0]
            return Unknown(f"{name}({key_of(over)})", op="tqdm", operands=(over,))
        case _ if library.CLIP_NAME.match(name):
            state.emit(Managed, node, owner.key)
            return steps.clipped(state, node, name)
        case "to" | "cuda" | "float" | "detach" | "clone" | "double" | "contiguous":
            return _passed(state, node, owner, name, a)
        case "lower" | "upper" | "strip" | "numel" | "nelement" if not a.count:
            return Unknown(f"{owner.key}.{name}()", "called", loop=owner.loop, of=owner.of)
        case "get" if (key := _setting(owner, a)) is not None:
            return Unknown(key, "called", loop=owner.loop, of=owner.of)
        case _ if name in KNOWN_OPERATIONS:
            made = tensors.apply(state, node, name, (owner, *a.positional), a.named)
            made.host = made.host or _is_on_host(owner)
            return made
        case _:
            _note_shown(state, node, name, a)
            given_away(state, node, name, a, owner)
            return _returned(state, node, owner, name, a)


def _is_on_host(value: Value) -> bool:
    """Whether it is an array, or was made of what is on the host: ``ids != 0``."""
    if isinstance(value, Unknown):
        return value.key.startswith(library.ON_HOST) or any(map(_is_on_host, value.operands))
    return isinstance(value, Tensor) and value.host


IDS = ("token_ids", "sequences", "ids")
"""What tokenizers of transformers call what they decode."""
TOKENIZER = re.compile(r"(Tokenizer|Processor)\w*\.from_pretrained")


def _makes_text(owner: Unknown, name: str, a: Arguments) -> bool:
    """Whether ids are made a text, on the host; the tokenizers of pictures make none."""
    asks = "skip_special_tokens" in a.named or name == "batch_decode"
    return asks or bool(TOKENIZER.search(owner.key))


def _setting(owner: Unknown, a: Arguments) -> str | None:
    """The key of ``cfg.get("use_amp", False)``: that of ``cfg["use_amp"]``, wherever it is read."""
    match a.positional:
        case [Const(value=str(key)), *_] if len(a.positional) < 3:
            return f"{owner.key}[{key!r}]"
        case _:
            return None


def _note_shown(state: State, node: ast.Call, name: str, a: Arguments) -> None:
    """Note what a logger or a progress bar is given."""
    if name == "add_histogram" or SHOWS.match(name):
        note_gradients(state, node, a)
    if SHOWS.match(name):
        tensors.shown_all(state, node, a.values, waits=name in WAITS)
    elif LOGS.match(name):
        nodes = [*node.args, *(each.value for each in node.keywords)]
        for each, value in zip(nodes, a.values, strict=False):
            if isinstance(value, Tensor) and value.host:
                tensors.shown(state, each, value, name, waits=False)


def _returned(state: State, node: ast.Call, owner: Unknown, name: str, a: Arguments) -> Value:
    """What a method nobody showed us returns, by its name and what it is given."""
    if LOSS.search(name) and a.count:
        scaled = owner if "scale" in name.lower() else None
        return Tensor(key=f"{owner.key}.{name}()", loss=True, scaled=scaled)
    if name == "log" and not a.count:
        return tensors.apply(state, node, name, (owner,))
    has_tensors = any(isinstance(each, Tensor) for each in flatten(a.values))
    if has_tensors and owner.made == "computed" and not SHOWS.match(name):
        return tensors.apply(state, node, name, (owner, *a.positional), a.named)
    made = state.unknown(node, "called", f"{owner.key}.{name}()")
    made.periodic = owner.periodic
    return made


def _passed(state: State, node: ast.Call, owner: Unknown, name: str, a: Arguments) -> Value:
    if name in ("float", "double"):
        return Tensor(key=owner.key, dtype="float32", of=owner)
    dtype = casts.dtype_given(a)
    if dtype in ("float16", "bfloat16"):
        return casts.halved(state, node, _as_made(state, node, owner), dtype)
    return owner


def _as_made(state: State, node: ast.Call, owner: Unknown) -> Value:
    """What is halved: a network where what made it is called so, or what it is bound to."""
    around = state.here.parents.get(id(node))
    bound = dotted(around.targets[0]) if isinstance(around, ast.Assign) else ""
    is_network = bool(bound) and state.here.roles.of(bound) == "network"
    return Model(owner.key) if is_network or NETWORK_MADE.search(owner.key) else owner


def _super(state: State, node: ast.Call, owner: Super, name: str, a: Arguments) -> Value:
    if name == "__init__":
        return NONE
    if isinstance(owner.owner, Instance):
        return networks.network(state, node, owner.owner, name, a)
    return state.unknown(node, "called")


def _const(state: State, node: ast.Call, owner: Const, name: str, a: Arguments) -> Value:
    text = owner.value
    if not isinstance(text, str):
        return state.unknown(node, "called")
    match name, a.positional:
        case "format" | "join", given:
            for each, value in zip(node.args, given, strict=False):
                tensors.shown(state, each, value, f"{name}()")
        case "startswith" | "endswith", [Const(value=str(part)), *_]:
            return Const(getattr(text, name)(part))
        case "lower" | "upper" | "strip", [] if not a.named:
            return Const(getattr(text, name)())
        case _:
            pass
    return state.unknown(node, "called")


def _parameter(state: State, node: ast.Call, owner: Parameter, name: str, a: Arguments) -> Value:
    dtype = library.HALVES.get(name) or (casts.dtype_given(a) if name in ("to", "type") else None)
    if name in ("float", "double"):
        return Tensor(dtype="float32", of=owner)
    if is_low(dtype):
        assert dtype is not None
        return Tensor(dtype=dtype, cast=Cast(node, state.here, dtype), of=owner)
    return Unknown(f"parameter.{name}()", of=owner)


_BY_KIND: dict[type[Value], Callable[[Any, ast.Call, Any, str, Arguments], Value]] = {
    Scaler: steps.scaler,
    Optimizer: steps.optimizer,
    Scheduler: steps.scheduler,
    Wrapper: steps.wrapper,
    Model: networks.network,
    Instance: networks.network,
    Tensor: tensor_methods.tensor,
    Gradient: tensor_methods.gradient,
    Manager: _manager,
    Parameters: _parameters,
    Parameter: _parameter,
    Loader: _loader,
    Class: _class,
    DictValue: _mapping,
    ListValue: _sequence,
    Unknown: _unknown,
    Super: _super,
    Const: _const,
}
