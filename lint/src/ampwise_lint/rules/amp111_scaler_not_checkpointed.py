"""# scaler-not-checkpointed

## What it does
Reports `torch.save` of a checkpoint with the optimizer's state and without the scaler's, functions
not in sight that save and are given network and optimizer but no scaler, and
`optimizer.load_state_dict` where the scaler's state is never loaded; checkpoints of that kind where
an Accelerator scales the losses, unless it saves itself. Where a function saves the optimizer that
it is given, the call of it is reported. Silent for weights alone, and where each epoch has a scaler
of its own, which AMP110 reports, for a function that trains without the scaler of another one, and
where a checkpoint that was loaded is written again.

## Why is this bad
`scaler.state_dict()` holds the scale and the growth tracker. Without it a resumed run starts
again at 65536 and skips steps until the scale fits, so it does not go on where it stopped; if
the scale had grown, small gradients are lost until it has grown again, one doubling per 2000
steps.

## Example
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, path)

## Use instead
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
    }
    torch.save(state, path)

## Fix safety
Unsafe: `--unsafe-fixes` adds the entry where the checkpoint is a dict in sight and the scaler's
name is in reach, and loads it behind the optimizer's, if the checkpoint has such an entry: old ones
have none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from types import NoneType
from typing import TypeGuard

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit, file_of, receiver
from ampwise_lint.queries.precision import in_float16, is_real
from ampwise_lint.queries.scalers import first_scale, recreated
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import (
    alone,
    assignments,
    bound_in,
    class_of,
    functions_of,
    scope_of,
)
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import AUTOCAST, SCALER
from ampwise_lint.values.abstract import (
    DictValue,
    Instance,
    ListValue,
    Model,
    Optimizer,
    Parameters,
    Scaler,
    Scheduler,
    Unknown,
    Value,
    Wrapper,
)
from ampwise_lint.values.classes import is_network
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import Backward, Event, Made, Save, ScalerStep, Site, StateDict


@rule(
    "AMP111",
    "scaler-not-checkpointed",
    "warning",
    fix="unsafe",
    triggers=(SCALER, AUTOCAST),
    echo_of="AMP110",
)
def check(code: Analysis) -> Iterator[Mistake]:
    # A scaler of one epoch has no state to save; that it is made anew is the mistake (AMP110).
    short = {id(each.value) for each in recreated(code)}
    scales = code.any(Backward, lambda e: is_real(e.scaled) and id(e.scaled) not in short)
    if not scales and not code.any(Made, _is_wrapper):
        yield from _past_accelerator(code)
        return
    every = [each for trace in code.traces for each in trace.of(StateDict)]
    states = [each for each in every if isinstance(each.of, Scaler | Wrapper)]
    saved = any(not each.loads for each in states)
    lacking = _saves_without(code, saved)
    for save in lacking:
        yield _save_mistake(code, save)
    if lacking or any(each.loads for each in states):
        return
    if not saved and code.any(Save):
        return
    for event in code.of(StateDict):
        if _is_tested(event):
            continue
        if event.loads and isinstance(event.of, Optimizer) and not _loads_scaler(event.module):
            yield Mistake(
                event.node,
                event.module,
                "the optimizer's state is loaded but not the scaler's: the run goes on at "
                f"{_first_scale(code)} and skips steps until it fits; load the scaler's state too",
                mend=partial(_load_edits, code, event),
            )


def _first_scale(code: Analysis) -> str:
    """What the scalers that scale losses here begin with."""
    scaled = [each.scaled for trace in code.traces for each in trace.of(Backward)]
    return first_scale(*(each for each in scaled if isinstance(each, Scaler) and each.path))


def _is_tested(event: Event) -> bool:
    """Whether a unit test saves or loads it, from which nobody goes on."""
    return any(each.startswith("test_") for each in event.context.functions)


def _past_accelerator(code: Analysis) -> Iterator[Mistake]:
    """Checkpoints of a training whose scaler an Accelerator holds."""
    scaled = [each.scaled for trace in code.traces for each in trace.of(Backward)]
    made = [e.value for e in code.of(Made) if isinstance(e.value, Wrapper) and e.value.scales]
    trainers = [e for e in scaled if isinstance(e, Wrapper)]
    # One that is handed in is the one that the file makes.
    if any(each.path.rpartition(".")[2].lower() == "accelerator" for each in trainers):
        trainers += made
    trainers = [each for each in trainers if each.scales and each.path.startswith("accelerate.")]
    if not trainers or any("save_state" in used for used in code.module.roles.methods.values()):
        return
    when = in_float16(*trainers)
    for save in _saves_without(code, saved=False):
        if save.mapping is not None:
            yield Mistake(
                save.node,
                save.module,
                f"the checkpoint holds the optimizer's state, and {when}the Accelerator has a "
                "scaler, whose state is not in it: a resumed run starts again at loss scale 65,536 "
                "and skips steps until it fits; save accelerator.scaler.state_dict() too, or by "
                "accelerator.save_state()",
            )


def _loads_scaler(module: Module) -> bool:
    """Whether a file loads a scaler's state on some path, which need not have been walked."""
    return any(
        "load_state_dict" in used and module.roles.of(name) == "scaler"
        for name, used in list(module.roles.methods.items())
    )


def _is_wrapper(event: Made) -> bool:
    """Whether a wrapper is made that has a scaler's state to save."""
    return isinstance(event.value, Wrapper) and event.value.has_state


def _saves_without(code: Analysis, saved: bool) -> list[Save]:
    """Saves of an optimizer's state without a scaler's, on any path, each mistake once."""
    saves = [each for trace in code.traces for each in trace.of(Save)]
    complete = [each for each in saves if _holds(each.mapping, Scaler)]
    whole = {id(each.node) for each in complete}
    called = {_calls(each) for each in complete}
    scaled = {id(e) for t in code.traces if _is_scaled(t) for e in t.of(Save)}
    plain = _without_scaler(code)
    found: dict[object, Save] = {}
    for save in saves:
        place = _place(save)
        if place in found or _is_tested(save) or _calls(save) in plain:
            continue
        if save.mapping is None:
            lacks = not saved and _is_optimizer_state(code, save)
        else:
            # A function nobody showed us may be given an optimizer to log its state.
            writes = _is_torch_save(save) or _has_weights(save.mapping)
            # One function may write both: each call of it counts where the training is scaled.
            other = id(save) in scaled and _calls(save) not in called
            lacks = writes and (id(save.node) not in whole or other)
            lacks &= _holds(save.mapping, Optimizer)
        if lacks:
            found[place] = save
    return list(found.values())


def _calls(save: Save) -> tuple[int, ...]:
    """The save, and the calls that lead to it."""
    return (id(save.node), *(id(each.node) for each in save.context.sites))


def _without_scaler(code: Analysis) -> set[tuple[int, ...]]:
    """Saves of a training that is in sight, and scales nothing on any path."""
    plain: set[tuple[int, ...]] = set()
    others: set[tuple[int, ...]] = set()
    for trace in code.traces:
        trained = {type(each.scaled) for each in trace.of(Backward)}
        (plain if trained == {NoneType} else others).update(map(_calls, trace.of(Save)))
    return plain - others


def _is_scaled(trace: Trace) -> bool:
    return any(is_real(each.scaled) for each in trace.of(Backward))


def _place(save: Save) -> object:
    """What makes saves one mistake: the dict, or the function that is given what to save."""
    if save.mapping is None:
        return id(save.node)
    made = save.mapping.node
    if isinstance(made, ast.Call) and made is save.node:
        return id(save.module), save.module.imports.full(made.func)
    return id(made)


def _is_torch_save(save: Save) -> bool:
    call = save.node
    return isinstance(call, ast.Call) and save.module.imports.full(call.func) == "torch.save"


def _has_weights(mapping: DictValue) -> bool:
    """Whether there is a network in it, or state that is no optimizer's or scheduler's."""
    states = [v for each in _mappings(mapping) for v in flatten([*each.items.values()])]
    return any(
        isinstance(each, Model | Instance)
        or (isinstance(each, Parameters) and not isinstance(each.of, Optimizer | Scheduler))
        for each in states
    )


def _is_optimizer_state(code: Analysis, save: Save) -> bool:
    """Whether something that is no dict holds an optimizer's state: the state itself, an object."""
    if isinstance(save.what, Parameters | ListValue):
        states = [each.of for each in flatten([save.what]) if isinstance(each, Parameters)]
        kinds = {type(each) for each in states}
        return Optimizer in kinds and Scaler not in kinds
    if isinstance(save.what, Instance):
        values = save.what.attributes.values()
        return any(isinstance(v, Parameters) and isinstance(v.of, Optimizer) for v in values)
    if not isinstance(save.what, Unknown) or not _is_named(save.node):
        return False
    if save.what.key.startswith("torch.load"):
        return False  # it holds what was written before
    return any(
        not each.loads
        and isinstance(each.of, Optimizer)
        and each.module is save.module
        and each.context.functions == save.context.functions
        for each in code.of(StateDict)
    )


def _is_named(call: Node) -> bool:
    """Whether what is saved is a variable."""
    return isinstance(call, ast.Call) and isinstance(next(iter(call.args), None), ast.Name)


def _edits(code: Analysis, save: Save, module: Module) -> tuple[Edit, ...]:
    """Put the scaler's state into the dict, where its name is in reach there."""
    mapping = save.mapping
    if mapping is None or not isinstance(mapping.node, ast.Dict) or not module.holds(mapping.node):
        return ()
    step = next((e for t in code.traces if save in t.events for e in t.of(ScalerStep)), None)
    if step is None or step.module is not module:
        return ()
    name = receiver(step.node)
    same = scope_of(module, step.node) is scope_of(module, mapping.node)
    if not same and not name.startswith("self."):
        return ()
    return (edit("argument", mapping.node, f'"scaler": {name}.state_dict()'),)


def _load_edits(code: Analysis, event: StateDict) -> tuple[Edit, ...]:
    """Load the scaler's state behind the optimizer's, from the checkpoint that has both."""
    module, node = event.module, event.node
    statement = alone(module, node)
    match node:
        case ast.Call(args=[ast.Subscript(value=checkpoint, slice=ast.Constant())]):
            source = dotted(checkpoint)
        case _:
            return ()
    steps = [each for t in code.traces for each in t.of(ScalerStep) if each.module is module]
    name = receiver(steps[0].node) if steps else ""
    if statement is None or not source or not name:
        return ()
    if not _is_same_scaler(module, name, steps[0].node, node):
        return ()
    text = f'if "scaler" in {source}:\n    {name}.load_state_dict({source}["scaler"])\n'
    return (edit("after", statement, text),)


def _is_same_scaler(module: Module, name: str, step: ast.AST, load: ast.AST) -> bool:
    """Whether the scaler's name at its step means the same where a checkpoint is loaded."""
    if name.startswith("self."):
        return class_of(module, step) is class_of(module, load)
    scope = scope_of(module, load)
    if scope is not scope_of(module, step):
        return False
    made = assignments(scope, name)
    before = getattr(load, "lineno", 0)
    return all(each.lineno < before for each in made) if made else name in bound_in(scope)


def _save_mistake(code: Analysis, save: Save) -> Mistake:
    site = _told(code, save)
    node, module = site.node, site.module
    made = save.made if node is save.node else None
    home = file_of(made, save, code) if made is not None else None
    if made is not node and home is not None and _is_dict(made):
        within = functions_of(home, made)[:1]
        if home is not module or within != functions_of(module, node)[:1]:
            node, module = made, home  # another function only writes what it is given
    return Mistake(
        node,
        module,
        "the checkpoint holds the optimizer's state but not the scaler's: a resumed run starts "
        f"again at {_first_scale(code)} and skips steps until it fits; save scaler.state_dict() "
        "too",
        _edits(code, save, module),
    )


def _told(code: Analysis, save: Save) -> Site:
    """Where a function that saves the state of what it is given is given the optimizer."""
    own = Site(save.node, save.module, save.context.functions)
    made = save.node if isinstance(save.what, Parameters) else save.made
    home = file_of(made, save, code) if made is not None else None
    if made is None or home is None:
        return own
    around = functions_of(home, made)[:1]
    helpers = [each for each in around if isinstance(each, ast.FunctionDef)]
    # One that makes steps itself has the scaler, too, and needs not be given it.
    helpers = [each for each in helpers if id(each) not in home.roles.core]
    # The innermost functions are as many as the calls that lead into them.
    for site, name in zip(save.context.sites[::-1], save.context.functions[::-1], strict=False):
        for each in helpers:
            if each.name == name.rpartition(".")[2] and isinstance(site.node, ast.Call):
                return site if _is_handed_in(code, save, each) else own
    return own


def _is_handed_in(code: Analysis, save: Save, function: ast.FunctionDef) -> bool:
    """Whether a parameter of a function is the optimizer that is saved, or its state."""
    spec = function.args
    given = {each.arg for each in (*spec.args, *spec.kwonlyargs)} - {"self"}
    inside = {id(each) for each in ast.walk(function)}
    named = {
        receiver(each.node)
        for trace in code.traces  # one place may be of several things
        for each in trace.of(StateDict)
        if isinstance(each.of, Optimizer) and id(each.node) in inside
    }
    if not named and isinstance(save.made, ast.Dict):  # what is a name there is given as a state
        named = {each.id for each in save.made.values if isinstance(each, ast.Name)}
    return bool(named & given)


def _is_dict(node: ast.AST | None) -> TypeGuard[ast.expr]:
    """Whether a dict is written there, as a display or by its name."""
    by_name = isinstance(node, ast.Call) and dotted(node.func) == "dict"
    return by_name or isinstance(node, ast.Dict)


def _holds(value: Value | None, kind: type[Value]) -> bool:
    """Whether a checkpoint holds the state of something of a kind (or may, unseen)."""
    if not isinstance(value, DictValue):
        return False
    if kind is Scaler and value.open:
        return True
    return any(_names(each, kind) for each in _mappings(value))


def _may_scale(value: Value) -> bool:
    """Whether it is a trainer whose state may be a scaler's; ignite's engines have none."""
    return isinstance(value, Wrapper) and not value.path.startswith("ignite.")


def _mappings(outer: DictValue) -> Iterator[DictValue]:
    """A mapping and those inside, each once however often it is there."""
    seen: set[int] = set()
    waiting = [outer]
    while waiting:
        mapping = waiting.pop()
        if id(mapping) not in seen:
            seen.add(id(mapping))
            yield mapping
            waiting += [each for each in mapping.items.values() if isinstance(each, DictValue)]


def _names(mapping: DictValue, kind: type[Value]) -> bool:
    """Whether one mapping has the state, or a scaler's by its key."""
    held = flatten([*mapping.items.values()])
    states = [each.of if isinstance(each, Parameters) else each for each in held]
    if kind is Scaler:
        # A network's state is that of its parameters, whatever else it holds.
        objects = [e for e in states if isinstance(e, Instance) and not is_network(e.class_)]
        states += [value for each in objects for value in each.attributes.values()]
        if any(isinstance(each, Unknown) and each.scale for each in states):
            return True  # the scale itself, which another scaler may begin with
    if any(isinstance(each, kind) or (kind is Scaler and _may_scale(each)) for each in states):
        return True
    keys = [key.lower() for key in mapping.items if isinstance(key, str)]
    return kind is Scaler and any("scaler" in key or key == "amp" for key in keys)
