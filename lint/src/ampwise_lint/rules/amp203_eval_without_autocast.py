"""# eval-without-autocast

## What it does
Reports a validation forward (no gradients, in a loop or in a method such as `val_step`) outside
autocast, of a network that is trained inside autocast in the same file, or of a copy of it. Silent
where outputs are shown or written and nothing is measured (samples, previews, predictions), or an
agent acts and rates states; in functions that other files could call and none does; for networks
whose forward opens autocast itself, or that the call tells what to run in (`mixed_precision=`); for
what is frozen beside a training step; and where the same path trains the network outside autocast.

## Why is this bad
The figures are those of another precision than the one that trains and, mostly, the one that
will serve: an overflow or a rounding that hurts in 16 bits does not show. Validation also pays
float32's time, and its outputs take twice the memory.

## Example
    with torch.no_grad():
        for x, y in val_loader:
            correct += (model(x).argmax(1) == y).sum()

## Use instead
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        for x, y in val_loader:
            correct += (model(x).argmax(1) == y).sum()

## Fix safety
Unsafe: `--unsafe-fixes` puts the forward, and forwards and losses that follow it in the block,
under the autocast that training uses. The figures change, float32 may be what the author wants to
compare with, and 16-bit outputs go on (`.numpy()` of bfloat16 raises). No fix where that autocast
cannot be written at the place of the validation (its `enabled` is a local name of the training
function), or the forward stands in the head of a statement or in a comprehension.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.places import (
    block_of,
    functions_of,
    has_own_lines,
    has_torch,
    in_reach,
    wrap,
)
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import LOSS, RUNS, dotted, leaves
from ampwise_lint.triggers import AUTOCAST, SCALER
from ampwise_lint.validation import validates
from ampwise_lint.values.abstract import (
    Function,
    Instance,
    Model,
    Region,
    Value,
    key_of,
)
from ampwise_lint.values.events import Backward, CastDown, Forward, Loss, Site

Places = dict[str, set[str]]


@rule("AMP203", "eval-without-autocast", "warning", fix="unsafe", triggers=(SCALER, AUTOCAST))
def check(code: Analysis) -> Iterator[Mistake]:
    trained = [each for trace in code.traces for each in _trained(trace)]
    found = list(_validations(code, trained))
    places = {id(place.node) for _, place, _ in found}
    for event, place, trace in found:
        if place is event and any(id(each.node) in places for each in event.context.sites):
            continue  # inside a method of the network: it is told where that is called
        yield Mistake(
            place.node,
            place.module,
            "training runs this network in autocast, validation without: figures are those of "
            "another precision than the one trained in, and evaluation takes float32's time and "
            "memory; run it under the same autocast",
            mend=partial(_edits, event, trace, trained) if place is event else None,
        )


def _validations(
    code: Analysis, all_trained: list[Forward]
) -> Iterator[tuple[Forward, Forward | Site, Trace]]:
    """Forwards of validations outside autocast, and where it is missing."""
    trained = _by_name(each for each in all_trained if not _is_of_trainer(each))
    plain = _by_name(each for trace in code.traces for each in _trained_without(trace))
    networks = {_network(each) for each in all_trained}
    makers = _by_name(all_trained, lambda each: {_maker(each)})
    covered = _covered(code)
    contexts = {name for each in all_trained for name in _contexts(each)}
    beside = _beside(code)
    halved = {each.context.functions for e in code.traces for each in _halved(e) if not _asks(each)}
    for trace in code.traces:
        models = {_network(each) for each in _trained(trace)} | _trained_inside(trace)
        parts = {id(each.model) for each in _trained(trace)}
        whole = {_network(each) for each in _trained_without(trace)} - models
        here = halved | {each.context.functions for each in _halved(trace)}
        for event in trace.of(Forward):
            if _is_teacher(event, trace) or _network(event) in whole:
                continue
            if whole and _runs_only(event, trace, whole):
                continue
            same = _network(event) in models or _holds(event.model, parts)
            same = (same and _is_reached(trace, event)) or (
                _name(event) in trained
                and not _is_another(event, trained, plain)
                and not _is_made_otherwise(event, makers)
            )
            if contexts.intersection(_contexts(event)):
                continue  # whoever calls it sets the same name
            if _is_told(event) or event.context.functions in here or _is_choice(event, beside):
                continue  # it says itself what validates, if not on every path
            place = _place(event, covered)
            if place is not event:  # a helper calls all networks by one name
                same = _network(event) in networks
            if not same or place is None or _casts(event, code.module):
                continue
            if validates(event, _name(event), place.node):
                yield event, place, trace


def _contexts(event: Forward) -> Iterator[str]:
    """The names of context managers that something stands in: ``with ctx:``."""
    node: ast.AST | None = event.node
    while node is not None:
        if isinstance(node, ast.With):
            yield from filter(None, (dotted(each.context_expr) for each in node.items))
        node = event.module.parents.get(id(node))


CASTS = re.compile(
    r"^class (\w+)\b(?:(?!^class )[\s\S])*?^[ \t]+@[\w.]*autocast(?!\([^)\n]*False)[^\n]*\n"
    r"(?:[ \t]+@[^\n]*\n)*[ \t]+def forward\b",
    re.MULTILINE,
)
"""A class whose forward is decorated with autocast."""


def _casts(event: Forward, module: Module) -> bool:
    """Whether a network runs in autocast wherever it is called, or one that is handed in may."""
    network = _original(event.model)
    if isinstance(network, Instance):
        found = network.class_.lookup("forward")
        return found is not None and isinstance(found[0], Function) and _runs_in(found[0])
    is_given = isinstance(network, Model) and not network.path and "@" not in network.key
    return is_given and module.project.made_beside(module, CASTS)


TELLS = re.compile(r"(^|_)(amp|fp16|half|mixed_precision|autocast)$")


def _is_told(event: Forward) -> bool:
    """Whether the call tells the network what precision to run in: ``mixed_precision=mixed``."""
    given = event.node.keywords if isinstance(event.node, ast.Call) else []
    return any(
        each.arg is not None
        and TELLS.search(each.arg)
        and not (isinstance(each.value, ast.Constant) and not each.value.value)
        for each in given
    )


def _runs_in(function: Function) -> bool:
    """Whether a function is decorated with autocast, or opens it where a setting says so."""
    texts = [ast.unparse(each) for each in getattr(function.node, "decorator_list", [])]
    blocks = [each for each in ast.walk(function.node) if isinstance(each, ast.With)]
    texts += [ast.unparse(item.context_expr) for each in blocks for item in each.items]
    return any("autocast" in each and "False" not in each for each in texts)


def _beside(code: Analysis) -> set[tuple[int, bool]]:
    """Branches that validate in autocast, by the ``if`` and which way it went."""
    return {
        (id(branch.node), branch.taken)
        for trace in code.traces
        for each in trace.of(Forward)
        if each.context.region is not None and (each.context.no_grad or each.training is False)
        for branch in each.context.branches
    }


def _is_choice(event: Forward, beside: set[tuple[int, bool]]) -> bool:
    """``if cuda: with autocast: model(x)``, else without: the author has thought of it."""
    if any((id(e.node), not e.taken) in beside for e in event.context.branches):
        return True
    if _opens_otherwise(event):
        return True
    return any((id(each), True) in beside for each in _left_by(event))


def _opens_otherwise(event: Forward) -> bool:
    """Whether autocast is entered on the other side of an ``if``, in a function that only runs."""
    function = next(iter(functions_of(event.module, event.node)), None)
    if function is None or any(map(_is_backward, ast.walk(function))):
        return False  # the other side may be the training
    node: ast.AST = event.node
    while (around := event.module.parents.get(id(node))) is not None:
        if isinstance(around, ast.If) and node is not around.test:
            here = around.body if any(each is node for each in around.body) else around.orelse
            there = around.orelse if here is around.body else around.body
            if any(map(_opens, there)) and not any(map(_opens, here)):
                return True
        node = around
    return False


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "backward"


def _opens(statement: ast.stmt) -> bool:
    items = [e for each in ast.walk(statement) if isinstance(each, ast.With) for e in each.items]
    return any("autocast" in ast.unparse(each.context_expr) for each in items)


def _left_by(event: Forward) -> Iterator[ast.If]:
    """Each ``if`` before it in its function that leaves, as ``if amp: with autocast: return``."""
    statement = event.module.statement_of(event.node)
    for each in block_of(event.module, statement):
        if each is statement:
            return
        if isinstance(each, ast.If) and _leaves(each.body):
            yield each


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a block ends by leaving, inside of ``with`` perhaps."""
    return leaves(body) or (
        bool(body) and isinstance(body[-1], ast.With) and _leaves(body[-1].body)
    )


def _halved(trace: Trace) -> list[CastDown]:
    """Where networks are made half."""
    return [each for each in trace.of(CastDown) if isinstance(each.value, Model | Instance)]


def _asks(event: CastDown) -> bool:
    """``if args.half: model.half()``: without the option nothing is made half."""
    last = event.context.conditions[-1].node if event.context.conditions else None
    return isinstance(last, ast.If) and isinstance(last.test, ast.Attribute)


Calls = dict[int, set[int]]
"""The calls that lead to a forward, by ``id`` of its node."""


def _covered(code: Analysis) -> Calls:
    """What runs in autocast, or beside it on purpose, on some path."""
    found: Calls = {}
    for trace in code.traces:
        for each in trace.of(Forward):
            if each.context.regions:
                calls = {id(site.node) for site in each.context.sites}
                found.setdefault(id(each.node), set()).update(calls)
    return found


def _runs_only(event: Forward, trace: Trace, plain: set[str]) -> bool:
    """Whether a method of a network runs nothing but parts that train outside autocast, too."""
    inside = [
        each
        for each in trace.of(Forward)
        if each.is_root and any(site.node is event.node for site in each.context.sites)
    ]
    return bool(inside) and all(_network(each) in plain for each in inside)


def _place(event: Forward, covered: Calls) -> Forward | Site | None:
    """Where autocast is missing: at a forward, or where a helper is called that runs it.

    A helper that training calls in autocast is called without by validation.
    """
    if event.context.regions:
        return None
    if id(event.node) not in covered:
        return event
    calls = covered[id(event.node)]
    return next((e for e in reversed(event.context.sites) if id(e.node) not in calls), None)


def _network(event: Forward) -> str:
    """Tells networks apart: a wrapper of torch and a copy are the one they hold or come from."""
    return key_of(_original(event.model))


def _trained_inside(trace: Trace) -> set[str]:
    """The networks that a loss in one class runs: ``self.student(x)`` in ``self.forward(x, y)``."""
    outer = {key_of(value) for each in _trained(trace) for value in _parts(each.model)}
    return {
        _network(each)
        for each in trace.of(Forward)
        if not each.is_root
        and each.context.region is not None
        and not each.context.no_grad
        and each.training is not False
        and _network(each) in outer
    }


def _parts(network: Value) -> list[Value]:
    """The networks that a network in sight, whose method makes the steps, was handed."""
    made = network.attributes.values() if isinstance(network, Instance) else ()
    return [_original(each) for each in made if isinstance(each, Model | Instance)]


def _holds(network: Value, parts: set[int]) -> bool:
    """Whether some of what was trained is a network's: ``model.features(x)`` runs its layers."""
    return isinstance(network, Instance) and any(
        id(each) in parts for each in network.attributes.values()
    )


def _original(network: Value) -> Value:
    for _ in range(COPIES):
        match network:
            case Model(wrapped=wrapped, inner=Value() as inner) if wrapped:
                network = inner
            case Model(copy_of=Value() as original):
                network = original
            case _:
                break
    return network


COPIES = 4
"""Copies of copies that are followed."""


def _trained(trace: Trace) -> list[Forward]:
    """Forward passes in autocast that a backward follows."""
    return [
        each
        for each in trace.of(Forward)
        if each.is_root
        and each.context.region is not None
        and not each.context.no_grad
        and each.training is not False
    ]


def _is_of_trainer(event: Forward) -> bool:
    """Whether autocast goes with the network, which another function may be given, too."""
    return event.context.region is not None and event.context.region.of_trainer


def _trained_without(trace: Trace) -> list[Forward]:
    """Forward passes of training outside autocast."""
    steps = bool(trace.of(Backward))
    return [
        each
        for each in trace.of(Forward)
        if each.is_root
        and (steps or _is_of_framework(each))
        and each.context.region is None
        and not each.context.no_grad
        and each.training is not False
    ]


def _is_of_framework(event: Forward) -> bool:
    """Whether a framework runs backward of what the function returns."""
    return any(each.endswith(".training_step") for each in event.context.functions)


def _is_teacher(event: Forward, trace: Trace) -> bool:
    """Whether a copy, or a frozen part, runs in the training step, or a copy for gradients."""
    if not event.context.loops:
        return False
    is_copy = isinstance(event.model, Model) and event.model.copy_of is not None
    if is_copy and not event.context.no_grad:
        return True  # of the input, as in an attack
    loop = event.context.loops[-1].serial
    beside = (e.context.loops and e.context.loops[-1].serial == loop for e in trace.of(Backward))
    # What is frozen and in no `no_grad` hands gradients on, whatever it is a copy of.
    return (is_copy or not event.context.no_grad) and any(beside)


def _is_reached(trace: Trace, event: Forward) -> bool:
    """Whether the branches it stands in go with those this path has taken elsewhere."""
    return all(trace.decided.get(e.key, e.taken) is e.taken for e in event.context.conditions)


def _is_another(event: Forward, trained: Places, plain: Places) -> bool:
    """Whether only a name is shared with what is trained in autocast.

    In its function, its class or its branch, the network of that name is trained without only.
    """
    name = _name(event)
    return name in plain and bool(_places(event) & plain[name] - trained[name])


def _is_made_otherwise(event: Forward, makers: Places) -> bool:
    """Whether what is trained by that name was made by other classes or functions."""
    maker, others = _maker(event), makers[_name(event)]
    return bool(maker) and "" not in others and maker not in others


def _maker(event: Forward) -> str:
    """The class or function that made a network; empty where that is not in sight."""
    network = _original(event.model)
    if isinstance(network, Instance):
        return network.class_.node.name
    made, _, place = key_of(network).partition("@")
    return made if place else ""


def _by_name(
    events: Iterable[Forward], what: Callable[[Forward], set[str]] | None = None
) -> Places:
    """The places in which networks are trained, or `what` else is told of them, by their names."""
    found: Places = {}
    for each in events:
        found.setdefault(_name(each), set()).update((what or _places)(each))
    return found


def _places(event: Forward) -> set[str]:
    """The function, the class and the branches something stands in."""
    function = event.context.functions[-1] if event.context.functions else ""
    class_ = function.rpartition(".")[0]
    branches = {f"{e.key} is {e.taken}" for e in event.context.conditions if not e.known}
    return branches | {f"def {function}"} | ({f"class {class_}"} if class_ else set())


def _name(event: Forward) -> str:
    """``model`` of ``self.model(x)`` and of ``self.model.forward(x)``."""
    text = dotted(getattr(event.node, "func", event.node)).replace(".module", "")
    owner, _, name = text.rpartition(".")
    runs = RUNS.search(name) or LOSS.search(name)
    is_method = bool(runs) and owner not in ("", "self")
    return owner.rpartition(".")[2] if is_method else name


# ---------------------------------------------------------------------- fixes

SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)


def _edits(event: Forward, trace: Trace, trained: list[Forward]) -> tuple[Edit, ...]:
    """Put the forward and the losses that follow it under the training's autocast."""
    first = event.module.statement_of(event.node)
    same = [each.context.region for each in trained if _is_same(each, event)]
    regions = {id(each.node): each for each in same if each is not None}  # many paths, one place
    texts = {_autocast(each, event.module, event.node) for each in regions.values()}
    header = texts.pop() if len(texts) == 1 else ""
    if not header or not isinstance(first, SIMPLE) or not has_own_lines(event.module, first):
        return ()
    return (wrap(first, _last(event.module, first, trace), f"with {header}:"),)


def _is_same(trained: Forward, event: Forward) -> bool:
    same = _network(trained) == _network(event)
    return same or _name(trained) == _name(event)


def _last(module: Module, first: ast.stmt, trace: Trace) -> ast.stmt:
    """The last of the plain statements from the forward on that runs a network or a loss."""
    events = [*trace.of(Loss), *(each for each in trace.of(Forward) if each.is_root)]
    wanted = {id(module.statement_of(e.node)) for e in events if e.module is module}
    block = block_of(module, first)
    last = first
    for each in block[block.index(first) + 1 :]:
        if not isinstance(each, SIMPLE) or not has_own_lines(module, each):
            break
        if id(each) in wanted:
            last = each
    return last


def _autocast(region: Region, module: Module, at: ast.AST) -> str:
    """A region's call, as it may be written at another place; empty if it may not be."""
    node = region.node
    if not isinstance(node, ast.Call):
        return ""
    text = region.module.text_of(node)
    if region.module is module and (device := _old_device(module, node)):
        return _modern(module, node, device) if in_reach(module, node, at) else ""
    if region.module is module and text.endswith(")") and in_reach(module, node, at):
        return text
    says_when = len(node.args) > 2 or any(e.arg in ("enabled", None) for e in node.keywords)
    if says_when or region.device is None or region.dtype is None or not has_torch(module):
        return ""
    return f'torch.autocast("{region.device}", dtype=torch.{region.dtype})'


OLD = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
ORDER = ("enabled", "dtype", "cache_enabled")
"""Parameters of the old autocast by position."""


def _old_device(module: Module, call: ast.Call) -> str:
    """The device of a call through an import that AMP401 rewrites, which a copy would not know."""
    first = module.imports.names.get(dotted(call.func).partition(".")[0], "")
    return next((OLD[each] for each in OLD if f"{first}.".startswith(f"{each}.")), "")


def _modern(module: Module, call: ast.Call, device: str) -> str:
    """The call as one of ``torch.autocast``; empty where that cannot be written."""
    if not has_torch(module) or any(isinstance(each, ast.Starred) for each in call.args):
        return ""
    given = [f"{name}={module.text_of(e)}" for name, e in zip(ORDER, call.args, strict=False)]
    given += [module.text_of(each) for each in call.keywords]
    named = ", ".join([f'"{device}"', *given])
    return f"torch.autocast({named})"
