"""Questions several rules ask of a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import is_not

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Change, Edit
from ampwise_lint.source.frequency import SETTING, is_for_few, is_for_most
from ampwise_lint.source.nodes import Node, span
from ampwise_lint.source.places import block_of, in_reach, is_inside, names, scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import EVALUATION, LOSS, dotted, leaves
from ampwise_lint.values.abstract import (
    Const,
    DictValue,
    Instance,
    ListValue,
    Model,
    Optimizer,
    Parameter,
    Parameters,
    Scaler,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    is_low,
    key_of,
)
from ampwise_lint.values.contents import flatten, modules_in, origins
from ampwise_lint.values.events import (
    Backward,
    CastDown,
    CastUp,
    Condition,
    Enter,
    Event,
    Forward,
    Loop,
    Made,
    Managed,
    Op,
    OptimizerStep,
    ScalerStep,
    Site,
    Unscale,
    Update,
    ZeroGrad,
)


def is_managed(trace: Trace) -> bool:
    """Whether a wrapper runs the step on this path: what it does is not in sight."""
    return any(isinstance(each, Managed) for each in trace.events)


def is_led(trace: Trace) -> bool:
    """Whether a wrapper does more in the step on this path than scale losses and clip."""
    return any(not each.plain for each in trace.of(Managed))


def is_given(event: Event) -> bool:
    """Whether a wrapper runs backward of a loss there."""
    return isinstance(event, Managed) and event.loss is not None


def given_in_parts(trace: Trace) -> Iterator[tuple[Managed, Tensor]]:
    """Each backward of part of a window that a wrapper runs: of a loss that was divided."""
    for event in trace.of(Managed):
        if event.loss is not None and event.loss.divided:
            yield event, event.loss


def uses_amp(code: Analysis) -> bool:
    """Whether anything in the file runs in mixed precision."""
    return _has_amp(code, lambda e: e.region.enabled and not e.context.no_grad)


def trains_in_amp(code: Analysis) -> bool:
    """The same, but not in an evaluation alone, whose gradients may be off further in."""
    by_trainer = code.any(Made, lambda e: isinstance(e.value, Wrapper))
    trains = by_trainer or any(map(code.any, (Backward, ScalerStep, OptimizerStep, Managed)))
    return trains and _has_amp(code, lambda e: e.region.enabled and not _evaluates(e))


def _has_amp(code: Analysis, counts: Callable[[Enter], bool]) -> bool:
    return (
        code.any(Enter, counts)
        or code.any(ScalerStep)
        or code.any(Backward, lambda e: _is_by_scaler(e.scaled))
        or code.any(Made, lambda e: isinstance(e.value, Wrapper) and e.value.lower)
        or code.any(Managed, lambda e: e.path.startswith("apex.amp"))
    )


def _evaluates(event: Event) -> bool:
    return event.context.no_grad or _evaluates_by_name(event)


def _evaluates_by_name(event: Event) -> bool:
    """Whether a function that is being executed is called as one that evaluates."""
    names = [each.rpartition(".")[2] for each in event.context.functions]
    return any(map(EVALUATION.search, names))


def uses_half(code: Analysis) -> bool:
    """Whether anything in the file runs in 16 bits."""
    return uses_amp(code) or code.any(CastDown)


UNSEEN = " (if the float16 training that imports this network runs it)"


def with_networks(code: Analysis) -> Iterator[tuple[Trace, str]]:
    """All paths, and those through networks that nothing in sight runs, with what is said of them.

    For mistakes that are some wherever float16 gets, as numbers that it does not hold.
    """
    yield from ((each, "") for each in code.traces)
    yield from ((each, UNSEEN) for each in code.networks)


@dataclass(slots=True)
class Steps:
    """Where the steps of a file are made."""

    nodes: set[int] = field(default_factory=set[int])
    """``id`` of the innermost loops around each backward, each step and both, and of loops over
    data around."""
    traces: set[int] = field(default_factory=set[int])
    """``id`` of the events of paths through a function that makes a step without a loop."""
    windows: set[int] = field(default_factory=set[int])
    """``id`` of the branches that hold a step, and of those before it that ``continue``: what is
    in them, or behind, happens once a step."""
    waits: set[tuple[str, bool]] = field(default_factory=set[tuple[str, bool]])
    """What those branches ask, and which way they go."""
    lower: set[tuple[int, int | None]] = field(default_factory=set[tuple[int, int | None]])
    """``id`` of the events of a path, with those of the loops that train in lower precision on it;
    with None for the path itself."""

    def is_window(self, branch: Condition) -> bool:
        """Whether what is in a branch happens once a step: it holds the step, or asks the same."""
        return id(branch.node) in self.windows or (_asked(branch), branch.taken) in self.waits

    def is_lower(self, trace: Trace, loop: Loop | None) -> bool:
        """Whether what a loop, or a path without one, trains is in lower precision there."""
        return (id(trace.events), None if loop is None else id(loop.node)) in self.lower


def step_loops(code: Analysis) -> Steps:
    """Find what runs once a step."""
    found = Steps()
    by_trainer = code.any(Made, lambda e: isinstance(e.value, Wrapper) and e.value.lower)
    rests = _loops_for_rests(code)
    runs_backward = code.any(Backward, lambda e: isinstance(e.scaled, Wrapper) and e.scaled.lower)
    for trace in code.traces:
        # Where a trainer runs backward on another path, this one does without it.
        is_plain = runs_backward and not any(each.scaled for each in trace.of(Backward))
        is_told = by_trainer and not (is_plain and trace.of(Backward))
        backward: tuple[Loop, ...] = ()
        # What only takes gradients, to look at them or to test them, trains nothing.
        steps = any(isinstance(e, ScalerStep | OptimizerStep | Managed) for e in trace.events)
        for event in trace.events:
            if is_told or _is_lower(event):
                around = (None, *(id(each.node) for each in event.context.loops))
                found.lower |= {(id(trace.events), each) for each in around}
            if not _is_of_steps(event, rests):
                continue
            loops = event.context.loops
            if loops and not steps:
                continue
            if isinstance(event, Backward):
                backward = loops
            pairs = zip(loops, backward, strict=False)
            both = takewhile(lambda pair: pair[0].node is pair[1].node, pairs)
            found.nodes |= {id(each.node) for each, _ in [*both][-1:]}
            if loops:
                found.nodes.add(id(loops[-1].node))
                # Of a loop over data sets and one over batches, the inner one makes the steps.
                found.nodes |= {id(each.node) for each in [e for e in loops if e.over_data][-1:]}
            elif trace.root and not trace.root.rpartition(".")[2].startswith("test_"):
                found.traces.add(id(trace.events))
            if not isinstance(event, Backward):
                found.windows |= {id(each.node) for each in event.context.conditions}
                found.waits |= {(_asked(e), e.taken) for e in event.context.conditions}
                inner = loops[-1].node if loops else None
                found.windows |= {id(each) for each in passed(event, inner)}
    return found


def _is_of_steps(event: Event, rests: set[tuple[int, ...]]) -> bool:
    """Whether it is a backward or a step, and none behind the batches of an epoch."""
    if isinstance(event, Backward) or is_given(event):
        return True
    return isinstance(event, ScalerStep | OptimizerStep) and _nodes(event) not in rests


def _loops_for_rests(code: Analysis) -> set[tuple[int, ...]]:
    """Loops over epochs that step on what the last window has left over, behind the batches.

    They make no backward themselves, and a loop inside of them makes the other steps.
    """
    backward = {_nodes(each) for trace in code.traces for each in trace.of(Backward)}
    backward |= {_nodes(e) for trace in code.traces for e in trace.of(Managed) if is_given(e)}
    steps = {
        _nodes(each)
        for trace in code.traces
        for each in (*trace.of(ScalerStep), *trace.of(OptimizerStep))
    }
    return {
        outer
        for outer in steps - backward
        if outer and any(len(e) > len(outer) and e[: len(outer)] == outer for e in steps)
    }


def _nodes(event: Event) -> tuple[int, ...]:
    """``id`` of the loops around something, outermost first."""
    return tuple(id(each.node) for each in event.context.loops)


def _asked(branch: Condition) -> str:
    """What a branch asks, the same in each iteration."""
    return branch.key.partition("#")[0]


def _is_lower(event: Event) -> bool:
    """Whether something tells that training is in lower precision where it happens."""
    match event:
        case ScalerStep() | Managed():
            return True
        case Backward(scaled=scaled) if _is_by_scaler(scaled):
            return True
        case Enter(region=region):
            return region.enabled and not _evaluates(event)
        case Forward() | Backward():
            return event.context.region is not None and not _evaluates(event)
        case _:
            return False


def _is_by_scaler(scaled: Value | None) -> bool:
    """Whether a loss was scaled by something that is there for 16 bits only: apex is, too."""
    if isinstance(scaled, Wrapper):
        return scaled.lower or scaled.path.startswith("apex.amp")
    return scaled is not None


def is_hot(event: Event, steps: Steps, trace: Trace) -> bool:
    """Whether something happens on every step of a training loop in lower precision."""
    if event.context.no_grad and not _is_of_step(event, steps, trace):
        return False
    conditions = list(event.context.conditions)
    if any(trace.decided.get(each.key, each.taken) != each.taken for each in conditions):
        return False  # in a branch that the path, as it went on, did not take
    if id(trace.events) in steps.traces:
        # Objects that the step is handed were made before it.
        if any(each.endswith(".__init__") for each in event.context.functions):
            return False
        inner, loop = None, None
    else:
        around = [each for each in event.context.loops if id(each.node) in steps.nodes]
        if not around:
            return False
        inner, loop = around[0], around[0].node
        conditions = event.context.branches_in(around[0])
    if not steps.is_lower(trace, inner):
        return False
    before = [each for each in passed(event, loop) if id(each) not in steps.windows]
    if any(is_for_most(each.test) for each in before):
        return False
    return not any(
        (each.periodic or SETTING.search(each.key) or _is_rare(each, loop, event.module))
        and not steps.is_window(each)
        for each in conditions
    )


def passed(event: Event, loop: Node | None) -> Iterator[ast.If]:
    """Each ``if ...: continue`` or ``if ...: return`` behind which something happens in a loop.

    There, and in the functions that are called there on the way to it.
    """
    way = [*event.context.sites, Site(event.node, event.module, event.context.functions)]
    inside = (each.node is loop or is_inside(each.module, each.node, loop) for each in way if loop)
    first = next((place for place, is_in in enumerate(inside) if is_in), 0)
    for each in way[first:]:
        yield from _left_before(each, loop)


def _left_before(site: Site, loop: Node | None) -> Iterator[ast.If]:
    """Branches in a loop's body, or a function's, that leave it before it comes to a place."""
    statement: ast.AST = site.module.statement_of(site.node)
    while isinstance(statement, ast.stmt) and statement is not loop:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        for each in takewhile(partial(is_not, statement), block_of(site.module, statement)):
            if isinstance(each, ast.If) and isinstance(each.body[-1], ast.Continue | ast.Return):
                yield each
        around = site.module.parents[id(statement)]
        is_part = isinstance(around, ast.ExceptHandler | ast.match_case)
        statement = site.module.statement_of(around) if is_part else around


def _is_of_step(event: Event, steps: Steps, trace: Trace) -> bool:
    """Whether it belongs to a step for all `no_grad`: figures of the batch, no validation."""
    loops = event.context.loops
    while len(loops) > 1 and _is_over_figures(loops[-1], steps, trace):
        loops = loops[:-1]
    inner = [each.node for each in loops[-1:]]
    if any(is_inside(event.module, event.node, each) for each in inner if id(each) in steps.nodes):
        return True
    if not inner and id(trace.events) not in steps.traces:
        return False
    # In functions that the step calls: where one of them validates, it says so.
    return all(id(each) in steps.nodes for each in inner) and not _evaluates_by_name(event)


def _is_over_figures(loop: Loop, steps: Steps, trace: Trace) -> bool:
    """Whether a loop inside a step goes over what the step has made, and runs no network."""
    if loop.over_data or id(loop.node) in steps.nodes or not isinstance(loop.node, ast.For):
        return False
    return not any(
        each.serial == loop.serial for event in trace.of(Forward) for each in event.context.loops
    )


def _is_rare(branch: Condition, loop: Node | None, module: Module) -> bool:
    """Whether a branch is taken once or so: it ends the loop, or waits for one step or a flag."""
    if not isinstance(branch.node, ast.If):
        return False
    body = branch.node.body if branch.taken else branch.node.orelse
    if _ends(body, branch.node, loop) or _is_once(branch.node):
        return True
    if not branch.taken:
        return False
    test = branch.node.test
    return is_for_few(test) or _is_fault(test) or _is_of_warnings(module, test)


def is_of_fault(event: Event) -> bool:
    """Whether it stands in the branch for a step that went wrong."""
    return any(
        each.taken and isinstance(each.node, ast.If) and _is_fault(each.node.test)
        for each in event.context.conditions
    )


OUT_OF_RANGE = re.compile(r"\b(min|max)\(.*\) [<>]")


def _is_fault(test: ast.expr) -> bool:
    """``if torch.isnan(loss)``, ``if x.max() > 1``: what is taken when training goes wrong."""
    text = ast.unparse(test).lower()
    if OUT_OF_RANGE.search(text):
        return True
    return "isnan" in text or "isinf" in text or ("not " in text and "finite" in text)


def _is_of_warnings(module: Module, test: ast.expr) -> bool:
    """``if len(caught) > 0`` of ``with warnings.catch_warnings(record=True) as caught``."""
    asked = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)} - {"len", "any"}
    if len(asked) != 1 or "warnings" not in module.imports.names.values():
        return False
    return any(
        dotted(getattr(item.context_expr, "func", item)).endswith("catch_warnings")
        and isinstance(item.optional_vars, ast.Name)
        and item.optional_vars.id in asked
        for each in ast.walk(scope_of(module, test))
        if isinstance(each, ast.With)
        for item in each.items
    )


def _ends(body: list[ast.stmt], branch: ast.If, loop: Node | None) -> bool:
    """Whether a block ends by leaving the loop: no ``continue``, no return of what it calls."""
    if not leaves(body) or isinstance(body[-1], ast.Continue):
        return False
    inside = loop is not None and loop.lineno <= branch.lineno <= (loop.end_lineno or 0)
    return inside or not isinstance(body[-1], ast.Return)


def is_always(event: Event, steps: Steps) -> bool:
    """Whether something hot happens on every step, whatever branches are taken."""
    around = [each for each in event.context.loops if id(each.node) in steps.nodes]
    branches = event.context.branches_in(around[0]) if around else event.context.conditions
    return all(each.known or steps.is_window(each) for each in branches)


def _is_once(branch: Node) -> bool:
    """``if flag: ...; flag = False``."""
    if not isinstance(branch, ast.If):
        return False
    is_not = isinstance(branch.test, ast.UnaryOp) and isinstance(branch.test.op, ast.Not)
    flag = dotted(branch.test.operand if isinstance(branch.test, ast.UnaryOp) else branch.test)
    return bool(flag) and any(
        isinstance(each, ast.Assign)
        and dotted(each.targets[0]) == flag
        and isinstance(each.value, ast.Constant)
        and each.value.value is is_not
        for each in branch.body
    )


def steps_by_scaler(trace: Trace) -> Iterator[ScalerStep | Managed]:
    """Each step that a scaler makes, or skips: by itself, or inside a wrapper that holds one."""
    for event in trace.events:
        if isinstance(event, ScalerStep) or (isinstance(event, Managed) and event.optimizer):
            yield event


def steps_behind(trace: Trace, event: Event) -> Iterator[ScalerStep | OptimizerStep]:
    """Steps that come after something, also the next time round a loop that both stand in."""
    around = {each.node for each in event.context.loops}
    index = trace.events.index(event)
    for place, step in enumerate(trace.events):
        if isinstance(step, ScalerStep | OptimizerStep):
            again = any(each.node in around for each in step.context.loops)
            if place > index or again:
                yield step


def stays_half(trace: Trace, cast: CastDown) -> bool:
    """Whether what is cast is not cast up again before the next step."""
    key = key_of(cast.value)
    for event in trace.events[trace.events.index(cast) :]:
        if isinstance(event, ScalerStep | OptimizerStep):
            return True
        if isinstance(event, CastUp):
            whole = key_of(event.value)
            if key == whole or key.startswith(f"{whole}."):
                return False
    return True


def owners(value: Value | None) -> set[str]:
    """Whose parameters something holds; empty where that is not known."""
    match value:
        case Parameters(of=Optimizer() as optimizer):
            return owners(optimizer.params)
        case Parameters(of=owner) | Parameter(of=owner):
            return owners(owner) or _named(owner)
        case Optimizer(params=params):
            return owners(params)
        case ListValue(items=items):
            found = [owners(each) for each in items]
            return set().union(*found) if all(found) and found else set()
        case DictValue(items=items):
            return owners(items.get("params"))
        case Unknown() | None:
            return set()
        case Model(wrapped=str(kind), inner=Model() as inner) if kind:
            return owners(inner)
        case _:
            return _named(value)


def _named(value: Value) -> set[str]:
    key = key_of(value)
    return set() if ELEMENT.search(key) else {key}


ELEMENT = re.compile(r"^\w+ of .*#")
"""What a loop over something unknown yields: it may be what another such loop yields."""


def networks_in(trace: Trace, backward: Backward) -> set[str]:
    """The networks a backward goes through, as `owners` names them."""
    nodes = {id(each.node) for each in origins(backward.tensor)}
    return {key_of(each.model) for each in trace.of(Forward) if id(each.node) in nodes}


def same_owner(first: Value | None, second: Value | None) -> bool | None:
    """Whether two things hold parameters of the same network; None where that is not known."""
    one, other = owners(first), owners(second)
    if not one or not other:
        return None
    return any(_shares(mine, its) for mine in one for its in other)


def _shares(one: str, other: str) -> bool:
    """Whether two names are of one network, or of one and its part."""
    return is_within(one, other) or is_within(other, one)


def is_within(part: str, whole: str) -> bool:
    """Whether one name, as `owners` gives it, is of a network or a part of it."""
    return part == whole or part.startswith(f"{whole}.")


def is_part(network: Value, of: Value | None) -> bool:
    """Whether a network is a module of another, or of one that an optimizer's parameters are of."""
    match of:
        case Optimizer(params=inner) | Parameters(of=inner):
            return is_part(network, inner)
        case ListValue(items=items):
            return any(is_part(network, each) for each in items)
        case DictValue(items=items):
            return is_part(network, items.get("params"))
        case Model() | Unknown():
            is_named = key_of(network).startswith((f"{of.key}.", f"{of.key}["))
            return is_named or any(each is network for each in modules_in(of))
        case Instance():
            return key_of(network).startswith(f"{key_of(of)}.")
        case _:
            return False


ADAM = ("Adam", "AdamW", "NAdam", "RAdam")
EPS_LOST = 3e-8
"""Half the smallest float16: what is smaller becomes zero."""


def loses_eps(optimizer: Optimizer) -> bool:
    """Whether it is an Adam whose eps is 0 in float16."""
    eps = optimizer.arguments.get("eps")
    if optimizer.path.rpartition(".")[2] not in ADAM or "fused" in optimizer.arguments:
        return False  # the fused kernel computes in float32
    if eps is None:
        return "**" not in optimizer.arguments
    return isinstance(eps, Const) and isinstance(eps.value, float) and eps.value < EPS_LOST


def is_scaled(value: Value | None) -> bool:
    """Whether a backward was scaled: by a scaler in sight, or by a trainer that is told to."""
    return is_real(value) or (isinstance(value, Wrapper) and value.scales)


def in_float16(*trainers: Wrapper) -> str:
    """How a message begins where trainers scale in float16 only, and their precision is open."""
    return "in float16 " if all(each.mixed == "any" for each in trainers) else ""


def is_real(value: Value | None) -> bool:
    """Whether a backward was scaled by a scaler in sight."""
    return isinstance(value, Scaler) and not value.opaque


def is_unscaled(event: Backward) -> bool:
    """Whether a backward was surely not scaled."""
    return event.scaled is None and not is_handed_in(event.tensor)


def is_handed_in(loss: Value) -> bool:
    """Whether a loss is a caller's, or made of one: what it ran in is not in sight."""
    match loss:
        case Tensor(of=Value() as source):
            return is_handed_in(source)
        case Unknown(made="given"):
            return True
        case Unknown(op="add" | "sub" | "mul" | "div", operands=[first, *_]):
            return is_handed_in(first)
        case _:
            return False


FAULT = re.compile(r"is_?nan|is_?inf(?!erence)|found_inf|has_nan|(?<!no_)overflow", re.IGNORECASE)
"""Conditions that hold when a step went wrong."""
SOUND = re.compile(r"is_?finite|all_?finite|no_overflow", re.IGNORECASE)
"""Conditions that hold when it did not."""


def accumulates(trace: Trace) -> Iterator[tuple[Backward, ScalerStep | OptimizerStep]]:
    """Each backward that runs more often than the step behind it, with that step."""
    if any((FAULT if taken else SOUND).search(key) for key, taken in trace.decided.items()):
        return  # a step that went wrong is left out, which makes no window
    for index, event in enumerate(trace.events):
        if not isinstance(event, Backward) or not (event.context.loops or trace.root):
            continue  # a function that is walked by itself may be called once a micro-batch
        step = next(
            (e for e in trace.events[index:] if isinstance(e, ScalerStep | OptimizerStep)), None
        )
        if step is not None and (_is_deeper(event, step) or _is_rarer(event, step)):
            yield event, step


def zeroed_with(trace: Trace, backward: Backward) -> Iterator[ZeroGrad]:
    """What zeroes gradients each time a backward runs, in the loop around it."""
    around = [each.serial for each in backward.context.loops[-1:]]
    for event in trace.of(ZeroGrad):
        inner = event.context.loops[-1:]
        if [each.serial for each in inner] != around or event.context.is_periodic:
            continue
        loop = inner[0].node if inner else None
        rare = (_is_rare(each, loop, event.module) for each in event.context.branches)
        if not any(rare) and not _gives_up(event, backward):
            yield event


def _gives_up(zero: ZeroGrad, backward: Backward) -> bool:
    """Whether it stands in a branch behind the backward that leaves the iteration."""
    around = {id(each.node) for each in backward.context.conditions}
    return any(
        isinstance(each.node, ast.If)
        and id(each.node) not in around
        and leaves(each.node.body if each.taken else each.node.orelse)
        for each in zero.context.branches
    )


def _is_deeper(event: Event, step: Event) -> bool:
    """A loop around the one, inside the loops around the other."""
    nodes = [each.node for each in step.context.loops]
    inner = [each.node for each in event.context.loops]
    return len(inner) > len(nodes) and inner[: len(nodes)] == nodes and bool(nodes)


def _is_rarer(event: Event, step: Event) -> bool:
    """The step waits for the end of a window that the backward does not wait for."""
    inner = [each.node for each in event.context.loops[-1:]]
    if [each.node for each in step.context.loops[-1:]] != inner:
        return False
    held = {each.key.partition("#")[0] for each in event.context.conditions}
    return any(
        each.periodic and each.key.partition("#")[0] not in held for each in step.context.branches
    ) or _skipped_to(event, step)


def _skipped_to(event: Event, step: Event) -> bool:
    """The step is reached in a later iteration than the backward: a ``continue`` went before."""
    return [each.serial for each in event.context.loops[-1:]] != [
        each.serial for each in step.context.loops[-1:]
    ]


BY_HAND = {
    "exp", "expm1", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp", "pow", "softmax",
    "softplus", "square",
}  # fmt: skip
"""Operations that losses are written with, and that autocast runs in float32."""


def losses_by_hand(trace: Trace) -> Iterator[Op]:
    """Each operation outside autocast of a loss that is no function, on a half output."""
    found = [
        each
        for each in trace.of(Op)
        if each.path in BY_HAND
        and each.context.region is None
        and not each.context.no_grad
        and is_half_output(next(iter(each.inputs), None))
        and not _is_root(each)
        and not _is_in_network(each)
    ]
    if not found:
        return
    losses = [each.tensor for each in trace.of(Backward)]
    parts = {id(each) for each in origins(*losses)}
    yield from (each for each in found if id(each.result) in parts)


def _is_in_network(event: Op) -> bool:
    """Whether a network computes it on the way to its output: the softmax of an attention."""
    networks = [e for e in event.context.functions if e.endswith(".forward")]
    return any(not LOSS.search(each.removesuffix(".forward")) for each in networks)


def is_half_output(value: object) -> bool:
    """Whether something is what a network in autocast returned, or made of it, in 16 bits."""
    if not isinstance(value, Tensor) or not value.forward or not is_low(value.dtype):
        return False
    if value.region is not None:
        return value.region.enabled
    return any(map(is_half_output, flatten(value.inputs)))  # made of it behind the region


def _is_root(event: Op) -> bool:
    """``x ** 0.5``, which makes what overflows smaller."""
    power = event.inputs[1] if len(event.inputs) > 1 else None
    number = power.value if event.path == "pow" and isinstance(power, Const) else None
    return isinstance(number, int | float) and abs(number) <= 1


def is_of_each(event: Event) -> bool:
    """``for optimizer in optimizers: scaler.step(optimizer)``, or ``optimizers[i]``."""
    loop = event.context.loops[-1].node if event.context.loops else None
    if not isinstance(loop, ast.For):
        return False
    return bool((names(loop.target) - {"self"}) & names(event.node))


def is_simple(trace: Trace) -> bool:
    """Whether an edit of steps is sure to be right: one scaler, steps of optimizers only.

    With several scalers the one that belongs to a backward may be another; a closure, or whatever
    else a step is given, would be lost.
    """
    scalers = {id(e.scaler) for e in trace.events if isinstance(e, ScalerStep | Update | Unscale)}
    scalers |= {id(e.scaled) for e in trace.of(Backward) if is_real(e.scaled)}
    steps = [*trace.of(ScalerStep), *trace.of(OptimizerStep)]
    return len(scalers) <= 1 and all(map(_is_plain, steps))


def _is_plain(step: ScalerStep | OptimizerStep) -> bool:
    """``scaler.step(optimizer)``, ``optimizer.step()``: no closure, receivers that are names."""
    node = step.node
    if not isinstance(node, ast.Call) or node.keywords or not receiver(node):
        return False
    wanted = 1 if isinstance(step, ScalerStep) else 0
    return len(node.args) == wanted and not any(isinstance(e, ast.Starred) for e in node.args)


def site_in(event: Event, module: Module) -> Site:
    """Where something happens as seen from a file: the call that leads there from it, if one does.

    A helper in a file of its own that does what it is told to is called wrongly, not wrong; what
    the file that is judged defines, for a base class to call, is what it can change.
    """
    context = event.context
    judged = context.sites[0].module if context.sites else module
    if event.module is not module and event.module is not judged:
        for each in reversed(context.sites):
            if each.module is module:
                return each
    return Site(event.node, event.module, context.functions)


def file_of(node: ast.AST, event: Event, code: Analysis) -> Module | None:
    """The file a node stands in: that of an event, or one on the way to it."""
    ways = [event.module, *(each.module for each in event.context.sites), code.module]
    return next((each for each in ways if each.holds(node)), None)


def edit(what: Change, node: Node, text: str = "") -> Edit:
    """A change at a node."""
    return Edit(what, *span(node), text, node)


def statement_edit(what: Change, module: Module, node: Node, text: str = "") -> Edit:
    """A change at the statement a node stands in."""
    return edit(what, module.statement_of(node), text)


def receiver(node: ast.AST) -> str:
    """``scaler`` of ``scaler.step(optimizer)``, as text; empty for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return dotted(node.func.value)
    return ""


def is_known_at(module: Module, call: ast.AST, at: ast.AST) -> bool:
    """Whether the receiver of a method's call means the same at another place of the file."""
    return isinstance(call, ast.Call) and in_reach(module, call.func, at)


def first_argument(node: ast.AST) -> str:
    """The first argument of a call, as text."""
    if isinstance(node, ast.Call) and node.args:
        return ast.unparse(node.args[0])
    return ""
