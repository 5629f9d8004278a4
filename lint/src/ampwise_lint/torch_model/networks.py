"""What methods of networks do, what running one does, and what is known to run one."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import LOSS
from ampwise_lint.torch_model import casts, steps, tensors, trainers
from ampwise_lint.values.abstract import (
    FALSE,
    NONE,
    Function,
    Instance,
    ListValue,
    Manager,
    Model,
    Parameters,
    Tensor,
    Value,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.classes import is_network
from ampwise_lint.values.contents import flatten, origins
from ampwise_lint.values.events import (
    CastUp,
    Clip,
    Forward,
    Managed,
    ZeroGrad,
)


def run(state: State, node: Node, network: Value, a: Arguments) -> None:
    """Note that a network runs."""
    is_root, is_training = not state.in_forward, not state.is_evaluating(network)
    on_cpu = isinstance(network, Model) and network.cpu
    state.emit(Forward, node, network, tuple(a.values), is_root, is_training, on_cpu)


def run_given(state: State, node: Node, a: Arguments) -> None:
    """Note the networks that ``compute_loss(model, batch)`` is given, and runs."""
    networks = [each for each in a.values if _is_run_by_losses(each)]
    if len(networks) < a.count and not is_run(a):
        for each in networks:
            run(state, node, each, a)


def is_run(a: Arguments) -> bool:
    """Whether a call is given what a network has returned already."""
    return any(each.forward for each in origins(*flatten(a.values)))


GIVES_BACK = re.compile(
    r"^(compile|wrap|unwrap|prepare|parallelize|distribute|shard|convert|freeze|load|resume|restore"
    r"|de_parallel|get_peft|to_(ddp|fsdp|device|distributed))(_|$)",
    re.IGNORECASE,
)
"""Functions that give back the network they are given, in a wrapper or changed, by their names."""


def given_back(name: str, a: Arguments) -> Value | None:
    """The network that a function nobody showed us is given, and gives back."""
    first = a.positional[0] if a.positional else a.named.get("model")
    return first if is_net(first) and GIVES_BACK.match(name) else None


def is_net(value: Value | None) -> bool:
    """Whether something is a network."""
    return isinstance(value, Model) or (isinstance(value, Instance) and is_network(value.class_))


def _is_run_by_losses(value: Value) -> bool:
    if isinstance(value, Model):
        return not library.LOSS_LAYERS.match(value.path) and not LOSS.search(value.key)
    return isinstance(value, Instance) and is_network(value.class_)


# ---------------------------------------------------------------------- methods


def network(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    """Call a method of a network."""
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
    if state.unsure:
        return owner  # in a branch that may not be taken
    is_on = name == "train" and not (a.positional and a.positional[0] is FALSE)
    state.modes[key_of(owner)] = is_on
    return owner


def _network_moved(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    dtype = casts.dtype_given(a)
    if dtype in ("float16", "bfloat16"):
        return casts.halved(state, node, owner, dtype)
    if isinstance(owner, Model):
        owner.cpu = casts.device_given(a) == "cpu" and not _is_choice(state)
    return owner


def _is_choice(state: State) -> bool:
    """Whether the path stands in a branch that may not be taken, or is there for want of a GPU."""
    return state.unsure > 0 or any("available" in each.key for each in state.context.conditions)


def _network_as_it_is(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    if isinstance(owner, Model):
        owner.cpu = name == "cpu" and not _is_choice(state)
    return owner


def _network_cast_up(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    state.emit(CastUp, node, owner)
    return owner


def _applied(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    """``model.apply(function)``, where that makes modules half."""
    function = a.first("fn")
    if isinstance(function, Function) and id(function.node) in function.module.roles.core:
        state.call(function, Arguments([Model(f"{key_of(owner)}.modules")]), node)
    return owner


def _network_zeroed(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> None:
    state.emit(ZeroGrad, node, owner)


def _network_clipped(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    """FSDP's own, which returns the norm."""
    state.emit(Clip, node, owner)
    key = state.unknown(node, label="norm").key
    return Tensor(key=key, op="grad_norm", dtype="float32")


def _network_steps(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> None:
    """``engine.step()``, ``engine.backward(loss)``: of a network that runs its own step."""
    if name == "step" or a.count:
        state.emit(Managed, node, key_of(owner))


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


def _manual_backward(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    trainers.manual_backward(state, node, a)
    return NONE


def _clip_gradients(
    state: State, node: ast.Call, owner: Model | Instance, name: str, a: Arguments
) -> Value:
    """Lightning's, which unscales first."""
    state.emit(Managed, node, key_of(owner), unscales=True, plain=True)
    return NONE


def _no_sync(state: State, node: ast.Call, owner: Value, name: str, a: Arguments) -> Value:
    return Manager("other", node)


def _state_of(state: State, node: ast.Call, owner: Value, name: str, a: Arguments) -> Value:
    return steps.state_dict(state, node, owner, name)


OF_NETWORKS: dict[
    str, Callable[[State, ast.Call, Model | Instance, str, Arguments], Value | None]
] = {
    **dict.fromkeys(("parameters", "named_parameters"), _parameters_of),
    **dict.fromkeys(("train", "eval"), _mode),
    **dict.fromkeys(library.HALVES, casts.halved_by_name),
    **dict.fromkeys(("float", "double"), _network_cast_up),
    **dict.fromkeys(("to", "type"), _network_moved),
    **dict.fromkeys(
        ("cuda", "cpu", "requires_grad_", "compile", "xpu", "share_memory"),
        _network_as_it_is,
    ),
    **dict.fromkeys(("state_dict", "load_state_dict"), _state_of),
    **dict.fromkeys(("backward", "step"), _network_steps),
    "apply": _applied,
    "zero_grad": _network_zeroed,
    "clip_grad_norm_": _network_clipped,
    "manual_backward": _manual_backward,
    "clip_gradients": _clip_gradients,
    "no_sync": _no_sync,
    "append": _appended,
    "parse_args": casts.same,  # of options that are a class of the project: they are its own
}
"""What methods of networks do; where it is None, they return what others of that name do."""
