"""What methods of scalers, optimizers, schedulers and wrappers do."""

from __future__ import annotations

import ast
import re

from ampwise_lint.path.conditions import exists
from ampwise_lint.path.state import State
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import SCALER
from ampwise_lint.torch_model import tensors, trainers
from ampwise_lint.values.abstract import (
    NONE,
    Const,
    DictValue,
    Function,
    Instance,
    ListValue,
    Manager,
    Optimizer,
    Parameters,
    Scaler,
    Scheduler,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.events import (
    Backward,
    HostSync,
    Managed,
    OptimizerStep,
    Save,
    ScalerStep,
    SchedulerStep,
    StateDict,
    Unscale,
    Update,
    ZeroGrad,
)

RUNS_STEP = {"fit", "train", "step", "optimizer_step"}


def scaler(state: State, node: ast.Call, scaler: Scaler, name: str, a: Arguments) -> Value:
    """Call a method of a scaler."""
    exists(state, scaler)
    first = _held(a.first("optimizer", "outputs"))
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
                given = a.first("optimizer", "outputs")
                closure = next((each for each in a.values if each is not given), None)
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
            return state_dict(state, node, scaler, name)
        case _ if a.count and not name.startswith(("_", "set_")):  # a derived class's own
            state.emit(Managed, node, scaler.key)
            return result
        case _:
            return result


def _held(value: Value | None) -> Value | None:
    """The optimizer in an object of the project's own class that steps it."""
    if not isinstance(value, Instance) or value.class_.lookup("step") is None:
        return value
    held = [each for each in value.attributes.values() if isinstance(each, Optimizer)]
    return held[0] if len(held) == 1 else value


def stepped(a: Arguments) -> Optimizer | None:
    """The optimizer of ``loss_scaler(loss, optimizer, ...)``."""
    return next((each for each in map(_held, a.values) if isinstance(each, Optimizer)), None)


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


def state_dict(state: State, node: ast.Call, owner: Value, name: str) -> Parameters:
    """``state_dict`` and ``load_state_dict``; a scaler's is read back from the device."""
    is_scaler = isinstance(owner, Scaler | Wrapper) or bool(SCALER.search(key_of(owner)))
    if is_scaler and _reads_scale(state, node):
        state.emit(HostSync, node, owner, "state_dict")
    state.emit(StateDict, node, owner, name == "load_state_dict")
    return Parameters(owner, f"{key_of(owner)}.state_dict")


def _reads_scale(state: State, node: ast.Call) -> bool:
    """``loss_scaler.state_dict()["scale"]``, which is for a report, and no checkpoint."""
    match state.here.parents.get(id(node)):
        case ast.Subscript(slice=ast.Constant(value="scale")):
            return True
        case _:
            return False


def optimizer(state: State, node: ast.Call, owner: Optimizer, name: str, a: Arguments) -> Value:
    """Call a method of an optimizer."""
    exists(state, owner)
    given = next((each for each in a.values if isinstance(each, Scaler)), None)
    match name:
        case "step" if given is not None:  # of a class that steps by it
            state.emit(Managed, node, given.key)
        case "step":
            closure = a.first("closure")
            if isinstance(closure, Function):
                state.call(closure, Arguments(), node)
            state.emit(OptimizerStep, node, owner)
        case "zero_grad":
            state.emit(ZeroGrad, node, owner)
        case "state_dict" | "load_state_dict":
            return state_dict(state, node, owner, name)
        case "backward" | "clip_master_grads" | "update_master_grads":  # apex FP16_Optimizer
            state.emit(Managed, node, owner.key)
        case "first_step" | "second_step":  # of SAM: the second one moves the weights
            if name == "second_step":
                state.emit(OptimizerStep, node, owner)
            if a.named.get("zero_grad") is not None:
                state.emit(ZeroGrad, node, owner)
        case _:
            pass
    return state.unknown(node, "called")


def clipped(state: State, node: Node, name: str) -> Value:
    """What a trainer's own clipping returns: the norm, which stays on the device."""
    made = state.unknown(node, "called")
    return Tensor(made.key, "float32", op="grad_norm") if "norm" in name else made


COUNT = re.compile(r"(step|iter|epoch|update|batch|idx|index|count)\w*$|^(it|i|n|num)$")
FIGURE = re.compile(r"loss|metric|acc|score|val|best|mean|avg|error")


def _counts(call: ast.Call) -> bool:
    """``step(epoch)``, ``step(epoch + i / len(loader))``: a place in the schedule, no metric.

    Where a schedule is given both, it is a metric that most pass by.
    """
    return any(map(_is_count, call.args[:1])) or any(
        COUNT.search(each.arg.lower()) or _is_count(each.value)
        for each in call.keywords
        if each.arg is not None and not FIGURE.search(each.arg.lower())
    )


def _is_count(given: ast.expr) -> bool:
    """Whether an argument is a count, by the names in it."""
    parts = list(ast.walk(given))
    names = [each.id for each in parts if isinstance(each, ast.Name)]
    names += [each.attr for each in parts if isinstance(each, ast.Attribute)]
    names += [e.value for e in parts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    is_figure = any(FIGURE.search(each.lower()) for each in names)
    return not is_figure and any(COUNT.search(each.lower()) for each in names)


OF_SCHEDULES = ("step", "step_update", "step_batch")
"""Methods of schedules that move them on."""


def scheduler(state: State, node: ast.Call, owner: Scheduler, name: str, a: Arguments) -> Value:
    """Call a method of a scheduler."""
    if name in OF_SCHEDULES:
        # By what it is given: of several schedulers that options choose from, one is known here.
        has_metric = a.count > 0 and name != "step_update" and not _counts(node)
        state.emit(SchedulerStep, node, owner, has_metric)
    return state.unknown(node, "called")


def wrapper(state: State, node: ast.Call, owner: Wrapper, name: str, a: Arguments) -> Value:
    """Call a method of an object that runs the step itself."""
    match name:
        case "backward":
            loss = a.first("loss") or NONE
            own = loss.scaled if isinstance(loss, Tensor) else None
            state.emit(Backward, node, loss, own if isinstance(own, Scaler) else owner)
            state.emit(Managed, node, owner.path, plain=not owner.divides)
        case "fit" | "train" | "validate" if owner.path.endswith("Trainer"):
            state.emit(Managed, node, owner.path, trainer=owner)
            trainers.fit(state, node, owner, a)
        case _ if name in RUNS_STEP:
            by = stepped(a) if owner.skips else None
            state.emit(Managed, node, owner.path, optimizer=by, off=owner.off)
        case _ if name in trainers.UNSCALES:
            state.emit(Managed, node, owner.path, unscales=True, plain=True)
            return clipped(state, node, name)
        case _ if name in trainers.PREPARES:
            state.emit(Managed, node, owner.path, plain=not owner.divides)
            return trainers.prepared(state, node, owner, name, a)
        case "unwrap_model":
            return a.first("model") or state.unknown(node, "called")
        case "get_state_dict":
            return Parameters(model := a.first("model") or NONE, f"{key_of(model)}.state_dict")
        case "autocast":
            region = trainers.region_of(state, node, owner)
            region.enabled = region.of_trainer = True
            return Manager("autocast", node, region)
        case "accumulate" | "no_sync" | "no_backward_sync":
            return Manager("other", node)
        case "save":
            what = a.first("obj") or NONE
            state.emit(Save, node, what, what if isinstance(what, DictValue) else None)
        case "add_event_handler":  # of ignite's: what a ModelCheckpoint is called with
            for each in a.values:
                if isinstance(each, DictValue):
                    state.emit(Save, node, each, each)
        case "log" | "print":
            tensors.shown_all(state, node, a.values, waits=False)
        case "state_dict" | "load_state_dict" if owner.has_state:
            return state_dict(state, node, owner, name)
        case _:
            pass
    return state.unknown(node, "called", f"{owner.path}.{name}()")
