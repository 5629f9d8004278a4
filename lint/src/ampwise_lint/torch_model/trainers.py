"""Trainers that open autocast and scale losses themselves: what they are told, and what that means.

Accelerate, Fabric, Lightning's Trainer and that of transformers. A network that Accelerate or
Fabric has prepared runs in autocast wherever it is called, and returns float32; a module that
Lightning fits has its steps called there.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.values.abstract import (
    NONE,
    Const,
    Function,
    Instance,
    ListValue,
    Loader,
    Manager,
    Model,
    Optimizer,
    Region,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.events import PREPARED, Backward, Managed, Read

MIXED = {
    "fp16": "float16", "16": "float16", "16-mixed": "float16",
    "bf16": "bfloat16", "bf16-mixed": "bfloat16",
}  # fmt: skip
"""What is autocast's dtype under a precision's name."""

TRUE = {"bf16-true": "bfloat16", "16-true": "float16"}
"""What dtype parameters themselves are cast to under a precision's name."""

SETTINGS = ("precision", "mixed_precision", "fp16", "bf16")
"""Parameters that tell the precision."""

PREPARES = {
    "prepare", "prepare_model", "prepare_optimizer", "setup", "setup_module", "setup_optimizers",
}  # fmt: skip
UNSCALES = {"clip_grad_norm_", "clip_grad_value_", "clip_gradients", "unscale_gradients"}
"""Methods that divide gradients by the loss scale."""


def make(path: str, a: Arguments) -> Wrapper:
    """What is constructed under a trainer's name."""
    told = _told(a)
    given = next((e for e in a.named.values() if isinstance(e, Wrapper)), None)
    if told is None and given is not None:  # Trainer(args=TrainingArguments(...))
        mixed, weights, lower = given.mixed, given.weights, given.lower
    else:
        mixed, weights = MIXED.get(told or "", ""), TRUE.get(told or "", "")
        lower = told is not None and told.lower() not in library.FULL_PRECISION
        if told is None and _last(path) == "Accelerator":
            # `accelerate launch` may tell it: nothing is known of what, only of how fast it is.
            return Wrapper(path, lower=True, divides=_divides(a))
    return Wrapper(
        path,
        lower,
        has_state=path.endswith(".NativeScaler"),
        mixed=mixed or ("any" if lower and not weights else ""),
        weights=weights,
        divides=_divides(a),
        network=a.named.get("model") if _last(path).endswith("Trainer") else None,
        skips=path.endswith(".NativeScaler"),
    )


def _divides(a: Arguments) -> bool:
    return a.open or any(each in a.named for each in library.ACCUMULATES)


def _told(a: Arguments) -> str | None:
    """The precision a trainer is told; ``?`` for one that is not in sight."""
    for name in SETTINGS:
        match a.named.get(name):
            case None:
                pass
            case Const(value=bool(is_on)) if name in ("fp16", "bf16"):
                if is_on:
                    return name
            case Const(value=value):
                return str(value)
            case _:
                return "?"
    return None


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def region_of(state: State, node: ast.Call, trainer: Wrapper) -> Region:
    """The autocast region that a trainer opens."""
    dtype = trainer.mixed if trainer.mixed != "any" else None
    return Region(node, state.here, bool(trainer.mixed), None, dtype)


def prepared(state: State, node: ast.Call, trainer: Wrapper, name: str, a: Arguments) -> Value:
    """``accelerator.prepare(model, optimizer)``: networks and optimizers come back."""
    if a.open or not a.positional:
        return state.unknown(node, "called", f"{trainer.path}.{name}()")
    found: list[Value] = []
    for number, each in enumerate(a.positional):
        if isinstance(each, Model | Instance) and trainer.mixed:  # else its forward stays as it is
            region = region_of(state, node, trainer)
            state.prepared[key_of(each)] = replace(region, of_trainer=True)
        if isinstance(each, Loader):
            state.emit(Read, node, each, PREPARED)
        kept = isinstance(each, Model | Instance | Optimizer)
        found.append(each if kept else Unknown(f"{trainer.path}.{name}()[{number}]", "called"))
    return ListValue(found) if len(found) > 1 else found[0]


def fit(state: State, node: ast.Call, trainer: Wrapper, a: Arguments) -> None:
    """``Trainer(...).fit(module)``: its steps, as Lightning calls them."""
    module = a.first("model")
    if not isinstance(module, Instance) or not library.LIGHTNING.match(trainer.path):
        return
    cast = Manager("autocast", node, region_of(state, node, trainer))
    no_grad = Manager("no_grad", node)
    before, state.trainer = state.trainer, trainer
    with state.in_iteration(node, 0, over_data=True):
        for name, managers in (
            ("training_step", [cast]),
            ("validation_step", [cast, no_grad]),
            ("test_step", [cast, no_grad]),
        ):
            found = module.class_.lookup(name)
            if found is None or not isinstance(function := found[0], Function):
                continue
            bound = Function(function.node, function.module, function.scope, module, found[1])
            batch = Tensor(key=f"batch of {name}", data=True, moved=True)
            index = Unknown("batch_idx", "given")
            with state.inside(managers):
                loss = state.call(bound, Arguments([batch, index]), node)
            if name == "training_step" and isinstance(loss, Tensor):
                state.emit(Backward, node, loss, trainer)
                state.emit(Managed, node, trainer.path)
    state.trainer = before


def manual_backward(state: State, node: ast.Call, a: Arguments) -> None:
    """``self.manual_backward(loss)`` of a module of Lightning's: scaled as its trainer scales.

    That it runs in the autocast of the step is Lightning's doing.
    """
    trainer = state.trainer or _of_project(state)
    with state.in_region(Region(node, state.here, False, None, None)):
        state.emit(Backward, node, a.first("loss") or NONE, trainer)
        state.emit(Managed, node, trainer.path, plain=True)


def _of_project(state: State) -> Wrapper:
    """The trainer that fits a module in a file that leads to it: one that may scale, if any."""
    for module in state.here.project.leading_to(state.module, "Trainer("):
        for call in module.index.of(ast.Call):
            path = module.imports.full(call.func)
            if library.LIGHTNING.match(path) and _last(path) == "Trainer":
                named = {each.arg: _as_written(each.value) for each in call.keywords if each.arg}
                trainer = make(path, Arguments(named=named))
                if trainer.scales:
                    return trainer
    return Wrapper("lightning.Trainer")


def _as_written(node: ast.expr) -> Value:
    """A literal; of anything else nothing is known."""
    return Const(node.value) if isinstance(node, ast.Constant) else Unknown(ast.unparse(node))
