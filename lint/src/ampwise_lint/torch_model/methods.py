"""What calling a method does, by the kind of value it is called on."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from ampwise_lint.path.machine import Machine

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


def call(machine: Machine, node: ast.Call, owner: Value, name: str, arguments: Arguments) -> Value:
    """Call `owner.name(...)`."""
    handler = _BY_KIND.get(type(owner))
    if handler is not None:
        return handler(machine, node, owner, name, arguments)
    return machine.unknown(node, "called", f"{key_of(owner)}.{name}()")


def walk_callbacks(machine: Machine, node: ast.Call, a: Arguments) -> Value | None:
    """Functions of the project handed to one nobody showed us: it is likely to call them."""
    returned: Value | None = None
    for each in a.values:
        if isinstance(each, Function) and not isinstance(each.node, ast.Lambda):
            spec = each.node.args
            required = len(spec.posonlyargs) + len(spec.args) - len(spec.defaults)
            if required <= (each.owner is not None):
                returned = machine.call(each, Arguments(), node)
    return returned


NETWORK_MADE = re.compile(r"from_pretrained|[mM]odel|[nN]et\b|resnet|create_model")
SAVES = re.compile(r"save|checkpoint|ckpt|snapshot", re.IGNORECASE)
HARMLESS = re.compile(
    r"load|resume|restore|log|print|info|save|checkpoint|ckpt|isinstance", re.IGNORECASE
)


NORM = re.compile(r"grad\w*norm|norm\w*grad", re.IGNORECASE)


def note_norm(machine: Machine, node: ast.Call, name: str, a: Arguments) -> None:
    """Note that a function nobody showed us reads gradients, by its name and what it is given."""
    owners = Parameters | Model | Instance | Optimizer
    if NORM.search(name) and any(isinstance(each, owners) for each in a.values):
        machine.emit(GradientRead, node)


def given_away(machine: Machine, node: ast.Call, name: str, a: Arguments) -> None:
    """Note what a function nobody showed us is given: a checkpoint to save, a scaler to step."""
    if SAVES.search(name):
        for each in a.values:
            if isinstance(each, DictValue):
                machine.emit(Save, node, each, each)
                return
    if not HARMLESS.search(name) and any(isinstance(each, Scaler) for each in a.values):
        machine.emit(Managed, node, name)


# ---------------------------------------------------------------------- scalers and optimizers


def _scaler(machine: Machine, node: ast.Call, scaler: Scaler, name: str, a: Arguments) -> Value:
    machine.exists(scaler)
    first = a.first("optimizer", "outputs")
    result = Unknown(f"{scaler.key}.{name}()", scale=name == "get_scale", loop=machine.iteration)
    if scaler.opaque:
        machine.emit(Managed, node, scaler.key)
        if name == "scale" and isinstance(first, Tensor):
            return first.but(scaled=Unknown(scaler.key, "called"))
        return result
    is_on = not isinstance(scaler.enabled, Const) or bool(scaler.enabled.value)
    match name:
        case "scale":
            return _scaled(machine, scaler, first, node) if is_on else first or NONE
        case "step":
            if is_on:
                closure = next((each for each in a.values if each is not first), None)
                machine.emit(ScalerStep, node, scaler, first, closure)
            elif isinstance(first, Optimizer):
                machine.emit(OptimizerStep, node, first)
            return machine.unknown(node)
        case "unscale_":
            if is_on:
                machine.emit(Unscale, node, scaler, first)
            return NONE
        case "update":
            if is_on:
                machine.emit(Update, node, scaler)
            return NONE
        case "get_scale":
            machine.emit(HostSync, node, scaler, name)
            return result
        case "is_enabled":
            return scaler.enabled
        case "state_dict" | "load_state_dict":
            return _state(machine, node, scaler, name)
        case _ if a.count and not name.startswith(("_", "set_")):  # a derived class's own
            machine.emit(Managed, node, scaler.key)
            return result
        case _:
            return result


def _scaled(machine: Machine, scaler: Scaler, value: Value | None, node: Node) -> Value:
    match value:
        case Tensor():
            return value.but(scaled=scaler)
        case ListValue(items=items):
            return ListValue([_scaled(machine, scaler, each, node) for each in items])
        case None:
            return machine.unknown(node)
        case _:
            return Tensor(key=key_of(value), scaled=scaler, loss=True, of=value)


def _state(machine: Machine, node: ast.Call, owner: Value, name: str) -> Parameters:
    """``state_dict`` and ``load_state_dict``."""
    machine.emit(StateDict, node, owner, name == "load_state_dict")
    return Parameters(owner, f"{key_of(owner)}.state_dict")


def _optimizer(
    machine: Machine, node: ast.Call, owner: Optimizer, name: str, a: Arguments
) -> Value:
    machine.exists(owner)
    match name:
        case "step":
            machine.emit(OptimizerStep, node, owner)
        case "zero_grad":
            machine.emit(ZeroGrad, node, owner)
        case "state_dict" | "load_state_dict":
            return _state(machine, node, owner, name)
        case "backward" | "clip_master_grads" | "update_master_grads":  # apex FP16_Optimizer
            machine.emit(Managed, node, owner.key)
        case _:
            pass
    return machine.unknown(node, "called")


def _scheduler(
    machine: Machine, node: ast.Call, owner: Scheduler, name: str, a: Arguments
) -> Value:
    if name in ("step", "step_update", "step_batch"):
        machine.emit(SchedulerStep, node, owner, a.count > 0)
    return machine.unknown(node, "called")


def _wrapper(machine: Machine, node: ast.Call, owner: Wrapper, name: str, a: Arguments) -> Value:
    match name:
        case "backward":
            loss = a.first("loss") or NONE
            own = loss.scaled if isinstance(loss, Tensor) else None
            machine.emit(Backward, node, loss, own if isinstance(own, Scaler) else owner)
            machine.emit(Managed, node, owner.path)
        case _ if name in RUNS_STEP:
            machine.emit(Managed, node, owner.path)
        case "autocast":
            return Manager("autocast", node, Region(node, machine.here, True, None, None))
        case "accumulate" | "no_sync" | "no_backward_sync":
            return Manager("other", node)
        case "save":
            what = a.first("obj") or NONE
            machine.emit(Save, node, what, what if isinstance(what, DictValue) else None)
        case "log" | "print":
            tensors.shown_all(machine, node, a.values, waits=False)
        case "state_dict" | "load_state_dict" if owner.has_state:
            return _state(machine, node, owner, name)
        case _:
            pass
    return machine.unknown(node, "called", f"{owner.path}.{name}()")


# ---------------------------------------------------------------------- networks


def _network(
    machine: Machine, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    key = key_of(owner)
    match name:
        case "parameters" | "named_parameters":
            return Parameters(owner, f"{key}.parameters")
        case "train":
            machine.evaluating.discard(key)
            if a.positional and a.positional[0] is FALSE:
                machine.evaluating.add(key)
            return owner
        case "eval":
            machine.evaluating.add(key)
            return owner
        case "half" | "bfloat16":
            return halved(machine, node, owner, HALVES[name])
        case "float" | "double":
            return owner
        case "to" | "type":
            dtype = _dtype_given(a)
            if dtype in ("float16", "bfloat16"):
                return halved(machine, node, owner, dtype)
            if isinstance(owner, Model):
                owner.cpu = _device_given(a) == "cpu"
            return owner
        case "cuda" | "cpu" | "requires_grad_" | "apply" | "compile" | "xpu" | "share_memory":
            if isinstance(owner, Model):
                owner.cpu = name == "cpu"
            return owner
        case "zero_grad":
            machine.emit(ZeroGrad, node, owner)
        case "state_dict" | "load_state_dict":
            return _state(machine, node, owner, name)
        case "no_sync":
            return Manager("other", node)
        case "clip_grad_norm_":
            machine.emit(Clip, node, owner)
        case "backward" if a.count:
            machine.emit(Managed, node, key)
        case "step":
            machine.emit(Managed, node, key)
        case _ if LOSS.search(name):
            return Tensor(key=f"{key}.{name}()", loss=True)
        case _:
            pass
    inputs = tensors.flatten(a.values)
    if any(isinstance(each, Tensor) for each in inputs):
        return tensors.apply(machine, node, name, a.values)
    return machine.unknown(node, "called", f"{key}.{name}()")


def halved(machine: Machine, node: Node, owner: Value, dtype: str) -> Value:
    """A network or tensor made half."""
    cast = Cast(node, machine.here, dtype)
    machine.emit(CastDown, node, owner, dtype)
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


def _dtype_given(a: Arguments) -> str | None:
    """The dtype that ``.to(...)`` is told, if any."""
    return next((dtype for each in a.values if (dtype := dtype_named(each)) is not None), None)


def _device_given(a: Arguments) -> str | None:
    """The device that ``.to(...)`` is told as text, if any."""
    return next(
        (e.value for e in a.values if isinstance(e, Const) and isinstance(e.value, str)), None
    )


# ---------------------------------------------------------------------- tensors and gradients


def _tensor(machine: Machine, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    match name:
        case "backward":
            gradient = a.first("gradient")
            scaled = owner.scaled
            if scaled is None and gradient is not NONE:
                scaled = gradient.scaled if isinstance(gradient, Tensor) else gradient
            machine.emit(Backward, node, owner, scaled)
            return NONE
        case _ if name in READS:
            if owner.data and not owner.moved:
                return owner.but(host=True)
            return tensors.read(machine, node, owner, name)
        case "detach" | "clone" | "requires_grad_" | "contiguous" | "detach_" | "retain_grad":
            return owner
        case "float" | "double":
            return owner.but(dtype="float32", cast=None)
        case "half" | "bfloat16":
            return halved(machine, node, owner, HALVES[name])
        case "to" | "cuda" | "type" | "xpu" | "npu":
            return _moved(machine, node, owner, name, a)
        case "type_as":
            first = a.first("other")
            return owner.but(dtype=first.dtype if isinstance(first, Tensor) else None)
        case "div_" | "mul_" | "div" | "mul" | "divide" | "true_divide" | "multiply":
            other = a.first("other") or NONE
            kind = "div" if name.startswith(("div", "true")) else "mul"
            result = tensors.arithmetic(machine, node, kind, owner, other)
            if name.endswith("_") and isinstance(result, Tensor):
                owner.divided, owner.divisor = result.divided, result.divisor
                owner.factor = result.factor
            return result
        case "size" | "dim" | "numel" | "ndimension" | "get_device" | "nelement":
            return Unknown(f"{key_of(owner)}.{name}()", of=owner)
        case "values" | "items" | "keys" | "unbind" | "data_ptr":
            return owner
        case "zero_grad":
            machine.emit(ZeroGrad, node, None)
            return NONE
        case "register_hook":
            return NONE
        case _:
            return tensors.apply(machine, node, name, (owner, *a.positional), a.named)


def _moved(machine: Machine, node: ast.Call, owner: Tensor, name: str, a: Arguments) -> Value:
    dtype = _dtype_given(a)
    if dtype in ("float16", "bfloat16"):
        return halved(machine, node, owner, dtype)
    # A variable may be "cpu" for want of a GPU only.
    named = [each for each in node.args if not isinstance(each, ast.IfExp)]
    if any("cpu" in machine.here.unparsed(each) for each in named):
        return owner if owner.data else tensors.read(machine, node, owner, "cpu")
    owner = owner.but(host=False) if owner.host and (dtype is None or a.count > 1) else owner
    if dtype is None and (owner.data or not (owner.forward or owner.loss)):
        non_blocking = "non_blocking" in a.named or (name == "cuda" and a.count > 1) or a.open
        machine.emit(Moved, node, owner, non_blocking, _device_given(a))
        owner = owner.but(moved=owner.data)
    return owner if dtype is None else owner.but(dtype=dtype)


def _gradient(machine: Machine, node: ast.Call, owner: Gradient, name: str, a: Arguments) -> Value:
    if name in ("zero_", "detach_", "requires_grad_") or (name == "fill_" and a.count == 1):
        if name in ("zero_", "fill_"):
            machine.emit(ZeroGrad, node, owner.of)
        return owner
    if name in ("clamp_", "clip_", "clamp"):
        machine.emit(Clip, node, owner.of, True)
        return owner
    if name in ("mul_", "div_"):
        text = ast.unparse(node).lower()
        if "clip" in text or "max_norm" in text or "clamp" in text:
            machine.emit(Clip, node, owner.of, True)
        else:
            machine.emit(GradientRead, node, True, a.first("other"))
        return owner
    if name in ("detach", "data", "view", "flatten", "clone"):
        machine.emit(GradientRead, node)
        return owner
    machine.emit(GradientRead, node, name.endswith("_"))
    return Tensor(key=f"gradient {name}", op=f"grad.{name}", inputs=(owner,))


# ---------------------------------------------------------------------- the rest


def _parameters(
    machine: Machine, node: ast.Call, owner: Parameters, name: str, a: Arguments
) -> Value:
    return owner


def _loader(machine: Machine, node: ast.Call, owner: Loader, name: str, a: Arguments) -> Value:
    if name in ("next", "get_batch", "__next__"):
        return Tensor(key=f"batch@{node.lineno}#{machine.iteration}", data=True)
    return machine.unknown(node, "called")


def _class(machine: Machine, node: ast.Call, owner: Class, name: str, a: Arguments) -> Value:
    if name == "apply":
        machine.emit(Applied, node, owner)
        tensors_ = [each for each in a.values if isinstance(each, Tensor)]
        return Tensor(key=f"{owner.node.name}@{node.lineno}", inputs=tuple(tensors_), op="apply")
    return machine.unknown(node, "called")


def _mapping(machine: Machine, node: ast.Call, owner: DictValue, name: str, a: Arguments) -> Value:
    first = a.positional[0] if a.positional else NONE
    match name:
        case "get" | "pop" | "setdefault" if isinstance(first, Const):
            if first.value in owner.items:
                return owner.items[first.value]
            return machine.unknown(node, "called")
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
            return machine.unknown(node, "called")


def _sequence(machine: Machine, node: ast.Call, owner: ListValue, name: str, a: Arguments) -> Value:
    if name == "append" and a.positional:
        value = a.positional[0]
        if isinstance(value, Tensor) and value.host:
            machine.emit(Report, node, value, "list", True)
        if not isinstance(value, Const) and not tensors.holds(value, owner):
            owner.items = [*owner.items[:8], value]
    return NONE


def _unknown(machine: Machine, node: ast.Call, owner: Unknown, name: str, a: Arguments) -> Value:
    match name:
        case "backward":
            if a.positional:
                machine.emit(Managed, node, owner.key)
            else:
                scaled = owner if "scale" in owner.key.lower() else None
                machine.emit(Backward, node, owner, scaled)
            return NONE
        case _ if name in READS and not a.positional:
            return tensors.read(machine, node, owner, name)
        case "half" | "bfloat16" if not a.count:
            made = Model(owner.key) if NETWORK_MADE.search(owner.key) else owner
            return halved(machine, node, made, HALVES[name])
        case "parameters" | "named_parameters":
            return Parameters(owner, f"{owner.key}.parameters")
        case "zero_grad":
            machine.emit(ZeroGrad, node, owner)
            return NONE
        case "step" if SCHEDULER.search(owner.key) and not LOADER.search(owner.key):
            return _scheduler(machine, node, Scheduler(owner.key), name, a)
        case "state_dict" | "load_state_dict":
            return _state(machine, node, owner, name)
        case "no_sync":
            return Manager("other", node)
        case _ if library.CLIP_NAME.match(name):
            machine.emit(Managed, node, owner.key)
            return machine.unknown(node)
        case "to" | "cuda" | "float" | "detach" | "clone" | "double" | "contiguous":
            return _passed(machine, node, owner, name, a)
        case _ if name in KNOWN_OPERATIONS:
            return tensors.apply(machine, node, name, (owner, *a.positional), a.named)
        case _:
            _note_shown(machine, node, name, a)
            given_away(machine, node, name, a)
            return _returned(machine, node, owner, name, a)


def _note_shown(machine: Machine, node: ast.Call, name: str, a: Arguments) -> None:
    """Note what a logger or a progress bar is given."""
    if SHOWS.match(name):
        tensors.shown_all(machine, node, a.values, waits=name in WAITS)
    elif LOGS.match(name):
        nodes = [*node.args, *(each.value for each in node.keywords)]
        for each, value in zip(nodes, a.values, strict=False):
            if isinstance(value, Tensor) and value.host:
                tensors.shown(machine, each, value, waits=False)


def _returned(machine: Machine, node: ast.Call, owner: Unknown, name: str, a: Arguments) -> Value:
    """What a method nobody showed us returns, by its name and what it is given."""
    if LOSS.search(name) and a.count:
        scaled = owner if "scale" in name.lower() else None
        return Tensor(key=f"{owner.key}.{name}()", loss=True, scaled=scaled)
    if name == "log" and not a.count:
        return tensors.apply(machine, node, name, (owner,))
    has_tensors = any(isinstance(each, Tensor) for each in tensors.flatten(a.values))
    if has_tensors and owner.made == "computed" and not SHOWS.match(name):
        return tensors.apply(machine, node, name, (owner, *a.positional), a.named)
    made = machine.unknown(node, "called", f"{owner.key}.{name}()")
    made.periodic = owner.periodic
    return made


def _passed(machine: Machine, node: ast.Call, owner: Unknown, name: str, a: Arguments) -> Value:
    if name in ("float", "double"):
        return Tensor(key=owner.key, dtype="float32", of=owner)
    dtype = _dtype_given(a)
    if dtype in ("float16", "bfloat16"):
        return halved(machine, node, owner, dtype)
    return owner


def _super(machine: Machine, node: ast.Call, owner: Super, name: str, a: Arguments) -> Value:
    if name == "__init__":
        return NONE
    if isinstance(owner.owner, Instance):
        return _network(machine, node, owner.owner, name, a)
    return machine.unknown(node, "called")


def _const(machine: Machine, node: ast.Call, owner: Const, name: str, a: Arguments) -> Value:
    text = owner.value
    if not isinstance(text, str):
        return machine.unknown(node, "called")
    match name, a.positional:
        case "format" | "join", given:
            for each, value in zip(node.args, given, strict=False):
                tensors.shown(machine, each, value)
        case "startswith" | "endswith", [Const(value=str(part)), *_]:
            return Const(getattr(text, name)(part))
        case "lower" | "upper" | "strip", [] if not a.named:
            return Const(getattr(text, name)())
        case _:
            pass
    return machine.unknown(node, "called")


def _parameter(
    machine: Machine, node: ast.Call, owner: Parameter, name: str, a: Arguments
) -> Value:
    return Unknown(f"parameter.{name}()", of=owner)


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
