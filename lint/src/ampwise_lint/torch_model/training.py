"""What a loop is made of: optimizers, schedulers, loaders, wrapped networks, clipping, saving."""

from __future__ import annotations

import ast
from collections.abc import Callable

from ampwise_lint.path.state import State
from ampwise_lint.torch_model import tensors, trainers
from ampwise_lint.torch_model.precision import note_policy
from ampwise_lint.values.abstract import (
    NONE,
    Const,
    DictValue,
    Function,
    Instance,
    Loader,
    Model,
    Optimizer,
    Scaler,
    Scheduler,
    Tensor,
    Unknown,
    Value,
    key_of,
    truth,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import (
    Clip,
    Clock,
    Grad,
    Made,
    Save,
    Synchronize,
)


def make_optimizer(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """An optimizer of the class `path`."""
    arguments = dict(a.named)
    if a.open:
        arguments["**"] = NONE
    params = a.first("params")
    key = state.made_here(node, "optimizer")
    loops = tuple(id(each.node) for each in state.context.loops)
    optimizer = Optimizer(node, state.here, key, path, params, arguments, loops)
    state.emit(Made, node, optimizer)
    return optimizer


def make_scheduler(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A learning-rate scheduler."""
    return Scheduler(state.made_here(node, "scheduler"), path, a.first("optimizer"))


def auto_optimizer(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """An optimizer that a function gives back."""
    return a.first("optimizer") or state.unknown(node, "called")


def loader(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A loader of torch's, or of its kind."""
    arguments = dict(a.named)
    for index, name in ((0, "dataset"), (5, "num_workers"), (7, "pin_memory")):
        if index < len(a.positional):
            arguments[name] = a.positional[index]
    loader = Loader(node, state.here, arguments, opaque=a.open)
    state.emit(Made, node, loader)
    return loader


def wrap(kind: str) -> Callable[[State, ast.Call, str, Arguments], Value]:
    """What makes a network that is spread over devices, by `kind`."""

    def make(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
        note_policy(state, node, a)
        inner = a.first("module", "model")
        if isinstance(inner, Instance):
            inner.wrapped = kind
            inner.attributes["module"] = inner
            return inner
        return Model(state.made_here(node, "model"), path, node, kind, inner=inner)

    return make


def clip(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Clip gradients; it gives their norm."""
    state.emit(Clip, node, a.first("parameters", "params"))
    return Tensor(key=state.made_here(node, "norm"), op="grad_norm", dtype="float32")


def grad(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``torch.autograd.grad``."""
    outputs = a.first("outputs") or NONE
    scaled = isinstance(outputs, Tensor) and isinstance(outputs.scaled, Scaler)
    of = flatten([a.get(1, "inputs") or NONE])
    result = Tensor(
        key=state.made_here(node, "gradient"), op="autograd.grad", grad_scaled=scaled,
        inputs=(outputs,), node=node, dtype=tensors.widest(of) if of else None,
    )  # fmt: skip
    state.emit(Grad, node, result, _is_true(a.get(4, "create_graph")))
    return result


def _is_true(value: Value | None) -> bool:
    return isinstance(value, Const) and value.value is True


def save(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``torch.save``."""
    what = a.first("obj") or NONE
    state.emit(Save, node, what, what if isinstance(what, DictValue) else None)
    return NONE


def checkpoint(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A handler of ignite's that saves what it is told whenever it is called."""
    what = a.first("to_save")
    if isinstance(what, DictValue):
        state.emit(Save, node, what, what)
    return wrapper(state, node, path, a)


def synchronize(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Wait for the device."""
    state.emit(Synchronize, node, path)
    return NONE


def clock(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """Read the clock."""
    state.emit(Clock, node)
    return Unknown(state.made_here(node, "time"), clock=len(state.trace))


def wrapper(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A trainer, or what else runs steps."""
    made = trainers.make(path, a)
    state.emit(Made, node, made)
    if path.startswith("ignite.engine.") and a.positional:
        _walk_each_batch(state, node, a.positional[0])
    return made


def deepspeed(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """``deepspeed.initialize(config={"bf16": {"enabled": True}})``: an engine that runs steps."""
    wrapper = trainers.make(path, a)
    config = a.named.get("config") or a.named.get("config_params")
    wrapper.lower = any(_is_on(state, config, each) for each in ("fp16", "bf16"))
    state.emit(Made, node, wrapper)
    return wrapper


def _is_on(state: State, config: Value | None, name: str) -> bool:
    """Whether a configuration has a section for a precision that is not switched off."""
    if isinstance(config, DictValue):
        section = config.items.get(name)
        enabled = section.items.get("enabled") if isinstance(section, DictValue) else None
    else:  # one that was read from a file, and set anew
        enabled = state.converted.get(f"item {key_of(config)}[{name!r}]['enabled']")
    return enabled is not None and truth(enabled) is not False


def _walk_each_batch(state: State, node: ast.Call, function: Value) -> None:
    """``Engine(update)``: a function that is called with each batch."""
    if isinstance(function, Function):
        with state.in_iteration(node, 0, over_data=True):
            batch = Tensor(key=f"batch@{node.lineno}", data=True)
            state.call(function, Arguments([Unknown("engine", "given"), batch]), node)
