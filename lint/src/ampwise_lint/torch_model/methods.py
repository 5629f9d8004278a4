"""What calling a method does, by the kind of value it is called on."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from ampwise_lint.path.conditions import exists
from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import LOADER, LOSS, SCHEDULER
from ampwise_lint.torch_model import tensors
from ampwise_lint.values.abstract import (
    FALSE,
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
    Ref,
    Region,
    Scaler,
    Scheduler,
    Super,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.contents import flatten, holds
from ampwise_lint.values.events import (
    Applied,
    Backward,
    CastDown,
    Clip,
    GradientRead,
    HostSync,
    Managed,
    Moved,
    OptimizerStep,
    Report,
    Save,
    ScalerStep,
    SchedulerStep,
    StateDict,
    Unscale,
    Update,
    ZeroGrad,
)

READS = {"item", "tolist", "cpu", "numpy"}
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
RUNS_STEP = {
    "fit", "train", "step", "clip_grad_norm_", "clip_gradients", "prepare", "setup",
    "optimizer_step",
}  # fmt: skip
HALVES = {"half": "float16", "bfloat16": "bfloat16"}


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


def note_gradients(state: State, node: ast.Call, a: Arguments) -> None:
    """Note that gradients are computed with, or shown."""
    if any(isinstance(each, Gradient) for each in flatten(a.values)):
        state.emit(GradientRead, node)


def given_away(
    state: State, node: ast.Call, name: str, a: Arguments, owner: Unknown | None = None
) -> None:
    """Note what a function nobody showed us is given: a checkpoint to save, a scaler to step."""
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


def _is_made_elsewhere(owner: Unknown) -> bool:
    """Whether an object is of a class nobody showed us, and was made without a scaler."""
    return owner.made == "called" and not isinstance(owner.of, Scaler)


def _saves_optimizer(name: str, a: Arguments) -> bool:
    """Whether a function that saves is given an optimizer, or its state."""
    if a.open or LOADS.search(name):
        return False
    given = [each.of if isinstance(each, Parameters) else each for each in a.values]
    return any(isinstance(each, Optimizer) for each in given)


# ---------------------------------------------------------------------- scalers and optimizers


def _scaler(state: State, node: ast.Call, scaler: Scaler, name: str, a: Arguments) -> Value:
    exists(state, scaler)
    first = a.first("optimizer", "outputs")
    result = Unknown(f"{scaler.key}.{name}()", scale=name == "get_scale", loop=state.iteration)
    if scaler.opaque:
        state.emit(Managed, node, scaler.key)
        if name == "scale" and isinstance(first, Tensor):
            return first.but(scaled=Unknown(scaler.key, "called"))
        return result
    is_on = not isinstance(scaler.enabled, Const) or bool(scaler.enabled.value)
    match name:
        case "scale":
            return _scaled(state, scaler, first, node) if is_on else first or NONE
        case "step":
            if is_on:
                closure = next((each for each in a.values if each is not first), None)
                state.emit(ScalerStep, node, scaler, first, closure)
            elif isinstance(first, Optimizer):
                state.emit(OptimizerStep, node, first)
            return state.unknown(node)
        case "unscale_":
            if is_on:
                state.emit(Unscale, node, scaler, first)
            return NONE
        case "update":
            if is_on:
                state.emit(Update, node, scaler)
            return NONE
        case "get_scale":
            state.emit(HostSync, node, scaler, name)
            return result
        case "is_enabled":
            return scaler.enabled
        case "state_dict" | "load_state_dict":
            return _state(state, node, scaler, name)
        case _ if a.count and not name.startswith(("_", "set_")):  # a derived class's own
            state.emit(Managed, node, scaler.key)
            return result
        case _:
            return result


def _scaled(state: State, scaler: Scaler, value: Value | None, node: Node) -> Value:
    match value:
        case Tensor():
            return value.but(scaled=scaler)
        case ListValue(items=items):
            return ListValue([_scaled(state, scaler, each, node) for each in items])
        case None:
            return state.unknown(node)
        case _:
            return Tensor(key=key_of(value), scaled=scaler, loss=True, of=value)


def _state(state: State, node: ast.Call, owner: Value, name: str) -> Parameters:
    """``state_dict`` and ``load_state_dict``."""
    state.emit(StateDict, node, owner, name == "load_state_dict")
    return Parameters(owner, f"{key_of(owner)}.state_dict")


def _optimizer(state: State, node: ast.Call, owner: Optimizer, name: str, a: Arguments) -> Value:
    exists(state, owner)
    match name:
        case "step":
            state.emit(OptimizerStep, node, owner)
        case "zero_grad":
            state.emit(ZeroGrad, node, owner)
        case "state_dict" | "load_state_dict":
            return _state(state, node, owner, name)
        case "backward" | "clip_master_grads" | "update_master_grads":  # apex FP16_Optimizer
            state.emit(Managed, node, owner.key)
        case _ if a.named.get("zero_grad") is not None:  # the two steps of SAM
            state.emit(ZeroGrad, node, owner)
        case _:
            pass
    return state.unknown(node, "called")


def _scheduler(state: State, node: ast.Call, owner: Scheduler, name: str, a: Arguments) -> Value:
    if name in ("step", "step_update", "step_batch"):
        state.emit(SchedulerStep, node, owner, a.count > 0)
    return state.unknown(node, "called")


def _wrapper(state: State, node: ast.Call, owner: Wrapper, name: str, a: Arguments) -> Value:
    match name:
        case "backward":
            loss = a.first("loss") or NONE
            own = loss.scaled if isinstance(loss, Tensor) else None
            state.emit(Backward, node, loss, own if isinstance(own, Scaler) else owner)
            state.emit(Managed, node, owner.path)
        case _ if name in RUNS_STEP:
            state.emit(Managed, node, owner.path)
        case "autocast":
            return Manager("autocast", node, Region(node, state.here, True, None, None))
        case "accumulate" | "no_sync" | "no_backward_sync":
            return Manager("other", node)
        case "save":
            what = a.first("obj") or NONE
            state.emit(Save, node, what, what if isinstance(what, DictValue) else None)
        case "log" | "print":
            tensors.shown_all(state, node, a.values, waits=False)
        case "state_dict" | "load_state_dict" if owner.has_state:
            return _state(state, node, owner, name)
        case _:
            pass
    return state.unknown(node, "called", f"{owner.path}.{name}()")


# ---------------------------------------------------------------------- networks


def _network(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    found = OF_NETWORKS.get(name)
    value = found(state, node, owner, name, a) if found is not None else None
    if value is not None:
        return value
    if LOSS.search(name):
        return Tensor(key=f"{key_of(owner)}.{name}()", loss=True)
    if any(isinstance(each, Tensor) for each in flatten(a.values)):
        return tensors.apply(state, node, name, a.values)
    return state.unknown(node, "called", f"{key_of(owner)}.{name}()")


def _parameters_of(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    return Parameters(owner, f"{key_of(owner)}.parameters")


def _mode(state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments) -> Value:
    trains = name == "train" and not (a.positional and a.positional[0] is FALSE)
    (state.evaluating.discard if trains else state.evaluating.add)(key_of(owner))
    return owner


def _network_moved(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    dtype = _dtype_given(a)
    if dtype in ("float16", "bfloat16"):
        return halved(state, node, owner, dtype)
    if isinstance(owner, Model):
        owner.cpu = _device_given(a) == "cpu"
    return owner


def _network_as_it_is(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    if isinstance(owner, Model):
        owner.cpu = name == "cpu"
    return owner


def _network_zeroed(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> None:
    state.emit(ZeroGrad, node, owner)


def _network_clipped(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> None:
    state.emit(Clip, node, owner)


def _network_steps(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> None:
    """``engine.step()``, ``engine.backward(loss)``: of a network that runs its own step."""
    if name == "step" or a.count:
        state.emit(Managed, node, key_of(owner))


def halved(state: State, node: Node, owner: Value, dtype: str) -> Value:
    """A network or tensor made half."""
    cast = Cast(node, state.here, dtype)
    state.emit(CastDown, node, owner, dtype)
    if isinstance(owner, Model | Instance):
        return owner
    if isinstance(owner, Tensor):
        return owner.but(dtype=dtype, guessed=False, cast=cast)
    return Tensor(key=key_of(owner), dtype=dtype, cast=cast, of=owner)


def dtype_named(value: Value) -> str | None:
    """The dtype a value names: ``torch.float16`` or ``"float16"``."""
    if isinstance(value, Ref):
        return library.DTYPES.get(value.path)
    if isinstance(value, Const) and isinstance(value.value, str):
        return library.DTYPES.get(value.value) or library.DTYPES.get(f"torch.{value.value}")
    return None


def _halved(
    state: State, node: ast.Call, owner: Model | Instance | Tensor, name: str, a: Arguments
) -> Value:
    return halved(state, node, owner, HALVES[name])


def _same(state: State, node: ast.Call, owner: Value, name: str, a: Arguments) -> Value:
    return owner


def _appended(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value | None:
    """``ModuleList.append``."""
    inner = owner.inner if isinstance(owner, Model) else None
    if not isinstance(inner, ListValue) or not a.positional:
        return None
    if isinstance(a.positional[0], Model | Instance):
        inner.items = [*inner.items[:MODULES], a.positional[0]]
    return owner


MODULES = 8
"""Modules of a list that are followed."""


def _no_sync(state: State, node: ast.Call, owner: Value, name: str, a: Arguments) -> Value:
    return Manager("other", node)


def _state_of(state: State, node: ast.Call, owner: Value, name: str, a: Arguments) -> Value:
    return _state(state, node, owner, name)


def _dtype_given(a: Arguments) -> str | None:
    """The dtype that ``.to(...)`` is told, if any."""
    return next((dtype for each in a.values if (dtype := dtype_named(each)) is not None), None)


def _device_given(a: Arguments) -> str | None:
    """The device that ``.to(...)`` is told as text, if any."""
    return next(
        (e.value for e in a.values if isinstance(e, Const) and isinstance(e.value, str)), None
    )


# ---------------------------------------------------------------------- tensors and gradients


def _tensor(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    found = OF_TENSORS.get(name)
    if found is not None:
        return found(state, node, owner, name, a)
    return tensors.apply(state, node, name, (owner, *a.positional), a.named)


def _backward(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    gradient = a.first("gradient")
    scaled = owner.scaled
    if scaled is None and gradient is not NONE:
        scaled = gradient.scaled if isinstance(gradient, Tensor) else gradient
    state.emit(Backward, node, owner, scaled)
    return NONE


def _read(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    if owner.data and not owner.moved:
        return owner.but(host=True)
    return tensors.read(state, node, owner, name)


def _as_float32(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    return owner.but(dtype="float32", cast=None)


def _as_other(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    first = a.first("other")
    return owner.but(dtype=first.dtype if isinstance(first, Tensor) else None)


def _scaled_by(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    kind = "div" if name.startswith(("div", "true")) else "mul"
    result = tensors.arithmetic(state, node, kind, owner, a.first("other") or NONE)
    if name.endswith("_") and isinstance(result, Tensor):
        owner.divided, owner.divisor = result.divided, result.divisor
        owner.factor = result.factor
    return result


def _extent(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    return Unknown(f"{key_of(owner)}.{name}()", of=owner)


def _entries(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    return owner if owner.forward else owner.but(op="items")


def _zeroed(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    state.emit(ZeroGrad, node, None)
    return NONE


def _hooked(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    return NONE


def _moved(state: State, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    dtype = _dtype_given(a)
    if dtype in ("float16", "bfloat16"):
        return halved(state, node, owner, dtype)
    # A variable may be "cpu" for want of a GPU only.
    named = [each for each in node.args if not isinstance(each, ast.IfExp)]
    if any("cpu" in state.here.unparsed(each) for each in named):
        return owner if owner.data else tensors.read(state, node, owner, "cpu")
    owner = owner.but(host=False) if owner.host and (dtype is None or a.count > 1) else owner
    if dtype is None and not owner.moved and (owner.data or not (owner.forward or owner.loss)):
        non_blocking = "non_blocking" in a.named or (name == "cuda" and a.count > 1) or a.open
        state.emit(Moved, node, owner, non_blocking, _device_given(a))
        owner = owner.but(moved=owner.data)
    return owner if dtype is None else owner.but(dtype=dtype)


def _gradient(state: State, node: ast.Call, owner: Gradient, name: str, a: Arguments) -> Value:
    if name in ("zero_", "detach_", "requires_grad_") or (name == "fill_" and a.count == 1):
        if name in ("zero_", "fill_"):
            state.emit(ZeroGrad, node, owner.of)
        return owner
    if name in ("clamp_", "clip_", "clamp"):
        state.emit(Clip, node, owner.of, True)
        return owner
    if name in ("mul_", "div_"):
        text = ast.unparse(node).lower()
        if "clip" in text or "max_norm" in text or "clamp" in text:
            state.emit(Clip, node, owner.of, True)
        else:
            state.emit(GradientRead, node, True, a.first("other"))
        return owner
    if name in ("detach", "data", "view", "flatten", "clone"):
        state.emit(GradientRead, node)
        return owner
    state.emit(GradientRead, node, name.endswith("_"))
    return Tensor(key=f"gradient {name}", op=f"grad.{name}", inputs=(owner,))


# ---------------------------------------------------------------------- the rest


def _parameters(state: State, node: ast.Call, owner: Parameters, name: str, a: Arguments) -> Value:
    return owner


def _loader(state: State, node: ast.Call, owner: Loader, name: str, a: Arguments) -> Value:
    if name in ("next", "get_batch", "__next__"):
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
            return state.unknown(node, "called")
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
        case _ if name in READS and not a.positional:
            return tensors.read(state, node, owner, name)
        case "half" | "bfloat16" if not a.count:
            return halved(state, node, _as_made(owner), HALVES[name])
        case "parameters" | "named_parameters":
            return Parameters(owner, f"{owner.key}.parameters")
        case "zero_grad":
            state.emit(ZeroGrad, node, owner)
            return NONE
        case "step" if SCHEDULER.search(owner.key) and not LOADER.search(owner.key):
            return _scheduler(state, node, Scheduler(owner.key), name, a)
        case "state_dict" | "load_state_dict":
            return _state(state, node, owner, name)
        case "no_sync":
            return Manager("other", node)
        case "log_every" if a.positional:  # the logger of torchvision's references
            over = a.positional[0]
            return Unknown(f"{name}({key_of(over)})", op="tqdm", operands=(over,))
        case _ if library.CLIP_NAME.match(name):
            state.emit(Managed, node, owner.key)
            return state.unknown(node)
        case "to" | "cuda" | "float" | "detach" | "clone" | "double" | "contiguous":
            return _passed(state, node, owner, name, a)
        case _ if name in KNOWN_OPERATIONS:
            return tensors.apply(state, node, name, (owner, *a.positional), a.named)
        case _:
            _note_shown(state, node, name, a)
            given_away(state, node, name, a, owner)
            return _returned(state, node, owner, name, a)


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
                tensors.shown(state, each, value, waits=False)


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
    dtype = _dtype_given(a)
    if dtype in ("float16", "bfloat16"):
        return halved(state, node, _as_made(owner), dtype)
    return owner


def _as_made(owner: Unknown) -> Value:
    """What is halved: a network where what made it is called so."""
    return Model(owner.key) if NETWORK_MADE.search(owner.key) else owner


def _super(state: State, node: ast.Call, owner: Super, name: str, a: Arguments) -> Value:
    if name == "__init__":
        return NONE
    if isinstance(owner.owner, Instance):
        return _network(state, node, owner.owner, name, a)
    return state.unknown(node, "called")


def _const(state: State, node: ast.Call, owner: Const, name: str, a: Arguments) -> Value:
    text = owner.value
    if not isinstance(text, str):
        return state.unknown(node, "called")
    match name, a.positional:
        case "format" | "join", given:
            for each, value in zip(node.args, given, strict=False):
                tensors.shown(state, each, value)
        case "startswith" | "endswith", [Const(value=str(part)), *_]:
            return Const(getattr(text, name)(part))
        case "lower" | "upper" | "strip", [] if not a.named:
            return Const(getattr(text, name)())
        case _:
            pass
    return state.unknown(node, "called")


def _parameter(state: State, node: ast.Call, owner: Parameter, name: str, a: Arguments) -> Value:
    return Unknown(f"parameter.{name}()", of=owner)


OF_NETWORKS: dict[
    str, Callable[[State, ast.Call, Model | Instance, str, Arguments], Value | None]
] = {
    **dict.fromkeys(("parameters", "named_parameters"), _parameters_of),
    **dict.fromkeys(("train", "eval"), _mode),
    **dict.fromkeys(HALVES, _halved),
    **dict.fromkeys(("float", "double"), _same),
    **dict.fromkeys(("to", "type"), _network_moved),
    **dict.fromkeys(
        ("cuda", "cpu", "requires_grad_", "apply", "compile", "xpu", "share_memory"),
        _network_as_it_is,
    ),
    **dict.fromkeys(("state_dict", "load_state_dict"), _state_of),
    **dict.fromkeys(("backward", "step"), _network_steps),
    "zero_grad": _network_zeroed,
    "clip_grad_norm_": _network_clipped,
    "no_sync": _no_sync,
    "append": _appended,
}
"""What methods of networks do; where it is None, they return what others of that name do."""

OF_TENSORS: dict[str, Callable[[State, ast.Call, Tensor, str, Arguments], Value]] = {
    **dict.fromkeys(READS, _read),
    **dict.fromkeys(
        (
            "detach",
            "clone",
            "requires_grad_",
            "contiguous",
            "detach_",
            "retain_grad",
            "unbind",
            "data_ptr",
        ),
        _same,
    ),
    **dict.fromkeys(("float", "double"), _as_float32),
    **dict.fromkeys(HALVES, _halved),
    **dict.fromkeys(("to", "cuda", "type", "xpu", "npu"), _moved),
    **dict.fromkeys(
        ("div_", "mul_", "div", "mul", "divide", "true_divide", "multiply"), _scaled_by
    ),
    **dict.fromkeys(("size", "dim", "numel", "ndimension", "get_device", "nelement"), _extent),
    **dict.fromkeys(("values", "items", "keys"), _entries),
    "backward": _backward,
    "type_as": _as_other,
    "zero_grad": _zeroed,
    "register_hook": _hooked,
}
"""What methods of tensors do; any other is an operation on them."""

_BY_KIND: dict[type[Value], Callable[[Any, ast.Call, Any, str, Arguments], Value]] = {
    Scaler: _scaler,
    Optimizer: _optimizer,
    Scheduler: _scheduler,
    Wrapper: _wrapper,
    Model: _network,
    Instance: _network,
    Tensor: _tensor,
    Gradient: _gradient,
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
