"""# sync-in-hot-loop

## What it does
Reports what copies a value to the host on every step of a mixed-precision training loop: `.item()`,
`.cpu()`, `float(loss)`, `print(loss)`, `get_scale()`, `if torch.isnan(loss)`,
`math.isfinite(loss)`; one finding for each loop and kind, with all lines. Silent under a condition
such as `step % 100 == 0`, `step == 0` or `step in shown`, in branches that leave the loop, and in
those for a step that went wrong or gave a warning, for a dry run or a smoke test, or for evaluation
(`if not self.training`); in functions that such a condition leaves early; and on paths that train
in float32, as where another class of a family of trainers is the one in lower precision. An
`Accelerator` that is told no precision counts: its launch tells it one. A DeepSpeed engine counts
where code in sight switches 16 bits on. Two readings of the scale that are compared tell whether
the step was skipped, as AMP112 advises: they are not reported.

## Why is this bad
The host waits until the device has done all that is queued, and the device then waits until the
host has queued more. The faster the step, the larger that share. Even on a CPU `.item()` has a
price, 3 us, and a finite check with `.item()` 87 us.

## Example
    for x, y in loader:
        loss = train_step(x, y)
        total += loss.item()

## Use instead
    total = torch.zeros((), device="cuda")
    for x, y in loader:
        loss = train_step(x, y)
        total += loss.detach()
    print(total.item() / len(loader))

## Fix safety
Unsafe: `--unsafe-fixes` keeps a sum on the device: `total += loss.item()` adds `loss.detach()`,
and behind the loop `total = float(total)` reads it once. Sums are then rounded to float32. Only
where the loop does nothing else with the sum, and the sum begins as a number. What is printed,
logged, appended to a list or compared on every step is left: code that goes on with the number
expects one, and how often to report, only the author knows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.findings import Edit
from ampwise_lint.queries.branches import passed
from ampwise_lint.queries.edits import edit
from ampwise_lint.queries.precision import trains_in_amp
from ampwise_lint.queries.steps import Steps, is_always, is_hot, step_loops
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source.places import block_of, functions_of, loads, names, scope_of, stores
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import MIXED
from ampwise_lint.values.abstract import Scaler, Tensor, Unknown, Wrapper
from ampwise_lint.values.events import HostSync, SchedulerStep


@rule("AMP301", "sync-in-hot-loop", "info", fix="unsafe", triggers=MIXED)
def check(code: Analysis) -> Iterator[Mistake]:
    if not trains_in_amp(code):
        return
    loops = step_loops(code)
    schedules = [each for trace in code.traces for each in trace.of(SchedulerStep)]
    chains = [each.context.functions for each in schedules if _asks_scale(each)]
    waits = {each[:count] for each in chains for count in range(len(each) + 1)}
    found: dict[tuple[object, ...], dict[int, _Place]] = {}
    edits: dict[int, tuple[Edit, ...]] = {}
    for trace in code.traces:
        for event in trace.of(HostSync):
            if event.how == "get_scale" and (
                event.context.functions in waits or _is_compared(event)
            ):
                continue  # the price of what waits for skipped steps, such as a schedule: AMP112
            # Of what another file is given more has to be known.
            sure = event.module is code.module or isinstance(event.tensor, KNOWN)
            if not sure or _is_on_host(event) or _is_no_tensor(event):
                continue
            if is_hot(event, loops, trace):
                if id(event.node) not in edits:  # a search, once for each place
                    edits[id(event.node)] = _edits(event)
                place = _Place(event, is_always(event, loops), edits[id(event.node)])
                if not event.module.source.ignores(event.node.lineno, "AMP301"):
                    kind = "a text" if event.shows else event.how
                    key = (_loop(event, loops, trace), kind, bool(place.edits))
                    found.setdefault(key, {}).setdefault(id(event.node), place)
    for places in found.values():
        yield _mistake(sorted(places.values(), key=lambda each: each.line))


KNOWN = Tensor | Scaler | Wrapper
"""What is read from the device, and surely so."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the host waits."""

    event: HostSync
    always: bool
    edits: tuple[Edit, ...]

    @property
    def line(self) -> int:
        return self.event.node.lineno


def _loop(event: HostSync, loops: Steps, trace: Trace) -> object:
    """What makes places one finding: the loop over the steps, or the function that makes one."""
    around = [each.node for each in event.context.loops if id(each.node) in loops.nodes]
    return id(event.module), id(around[0]) if around else trace.root


HOST = re.compile(
    r"\b(np|numpy|random|math|time|cfg|config|args|batch_sizes)\b|[mM]eter"
    # A mapping inside a batch, which a loop that copies the entries of the batch leaves out.
    r"|\b(data|batch|samples?)\['\w+'\]\['\w+'\]"
)


def _is_on_host(event: HostSync) -> bool:
    """Whether something of which nothing else is known lies on the host, by where it comes from."""
    return isinstance(event.tensor, Unknown) and bool(HOST.search(event.tensor.key))


def _is_no_tensor(event: HostSync) -> bool:
    """Whether it is read behind a check that it is none: ``isinstance(x, torch.Tensor)``."""
    read = {ast.unparse(each) for each in getattr(event.node, "args", [])}
    if read & _numbers_given(event):
        return True
    taken = [each.node for each in event.context.conditions if each.taken]
    if any(_asked_to_be_number(e.test) in read for e in taken if isinstance(e, ast.If | ast.IfExp)):
        return True
    others = [e.node for e in event.context.conditions if not e.taken]
    tests = [each.test for each in others if isinstance(each, ast.If | ast.IfExp)]
    tests += [each.test for each in passed(event, None)]
    return any(_asked_to_be_tensor(each) in read for each in tests)


def _numbers_given(event: HostSync) -> set[str]:
    """Parameters of the function around that are annotated as numbers: ``count: int``."""
    around = next(iter(functions_of(event.module, event.node)), None)
    spec = getattr(around, "args", None)
    given = [] if spec is None else [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    return {e.arg for e in given if e.annotation and ast.unparse(e.annotation) in NUMBERS}


METHODS = ("'item'", "'detach'", "'cpu'")
"""What tensors have, and numbers do not."""


def _asked_to_be_tensor(test: ast.expr) -> str:
    """``x`` of ``isinstance(x, torch.Tensor)``, ``torch.is_tensor(x)``, ``hasattr(x, "item")``."""
    match test:
        case ast.Call(func=ast.Name(id="isinstance"), args=[asked, kind]):
            return ast.unparse(asked) if ast.unparse(kind).endswith("Tensor") else ""
        case ast.Call(func=ast.Name(id="hasattr"), args=[asked, name]):
            return ast.unparse(asked) if ast.unparse(name) in METHODS else ""
        case ast.Call(func=ast.Attribute(attr="is_tensor"), args=[asked]):
            return ast.unparse(asked)
        case _:
            return ""


NUMBERS = {"int", "float", "bool", "str", "np", "numpy", "numbers"}


def _asked_to_be_number(test: ast.expr) -> str:
    """``x`` of ``isinstance(x, (int, float))``."""
    match test:
        case ast.Call(func=ast.Name(id="isinstance"), args=[asked, kinds]):
            return ast.unparse(asked) if names(kinds) <= NUMBERS else ""
        case _:
            return ""


def _mistake(places: list[_Place]) -> Mistake:
    first, *others = places
    lines = sorted({each.line for each in others} - {first.line})
    also = f" (also in line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))})" if lines else ""
    often = "on every step" if first.always else "on each step that comes here"
    calls = [*dict.fromkeys(each.event.how for each in places)]
    waits = "waits" if len(calls) == 1 else "wait"
    return Mistake(
        first.event.node,
        first.event.module,
        f"{' and '.join(calls)} {waits} for the device {often}{also}: the queue of kernels runs "
        "dry and the speed of lower precision is lost; keep the tensor (.detach()), and read it "
        "every so many steps",
        tuple(edit for each in places for edit in each.edits),
    )


def _asks_scale(event: SchedulerStep) -> bool:
    return any("get_scale" in each.key for each in event.context.conditions)


def _is_compared(event: HostSync) -> bool:
    """Whether it is one of two readings of the scale that are compared: was the step skipped?"""
    scope = scope_of(event.module, event.node)
    kept = {
        dotted(target): each.value
        for each in ast.walk(scope)
        if isinstance(each, ast.Assign) and _reads_scale(each.value)
        for target in each.targets
        if dotted(target)
    }
    for each in ast.walk(scope):
        if isinstance(each, ast.Compare):
            sides = [kept.get(dotted(side), side) for side in (each.left, *each.comparators)]
            if all(map(_reads_scale, sides)) and any(event.node is side for side in sides):
                return True
    return False


def _reads_scale(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func).endswith(".get_scale")


# ---------------------------------------------------------------------- fixes

READS = ("item", "cpu", "detach", "numpy", "tolist")


def _edits(event: HostSync) -> tuple[Edit, ...]:
    """``total += loss.item()``: add the tensor, and read the sum behind the loop."""
    if not event.context.loops:
        return ()  # a function that makes one step
    module, node = event.module, event.node
    statement, loop = module.statement_of(node), event.context.loops[-1].node
    if not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Add | ast.Sub):
        return ()
    total = dotted(statement.target)
    if not isinstance(loop, ast.For | ast.While) or loop.orelse:
        return ()
    if not total or not isinstance(event.tensor, Tensor):
        return ()
    if functions_of(module, loop) != functions_of(module, node) or stores(loop, total) != 1:
        return ()
    begin = _begins_as(block_of(module, loop), loop, total)
    # A count that begins as an int is to stay one.
    if loads(loop, total) or begin is None or (begin is int and not event.tensor.loss):
        return ()
    outer = _outermost(statement.value, node)
    tensor = _tensor_of(outer)
    if tensor is None:
        return ()
    # In half, a sum would stand still; where the dtype is not known it may be that.
    cast = "" if event.tensor.dtype == "float32" else ".float()"
    text = f"{module.text_of(tensor)}.detach(){cast}"
    return (edit("replace", outer, text), edit("after", loop, f"{total} = float({total})"))


def _begins_as(block: list[ast.stmt], loop: ast.stmt, total: str) -> type | None:
    """The type of the number the sum is set to before the loop, in the same block."""
    for each in reversed(block[: block.index(loop)]):
        if isinstance(each, ast.Assign) and any(dotted(e) == total for e in each.targets):
            value = each.value.value if isinstance(each.value, ast.Constant) else None
            return type(value) if isinstance(value, int | float) else None
    return None


def _outermost(expression: ast.expr, read: ast.AST) -> ast.expr:
    """The longest chain of reads around one: ``loss.cpu().item()`` around ``loss.cpu()``."""
    chains = [e for e in ast.walk(expression) if isinstance(e, ast.Call) and read in ast.walk(e)]
    return next((each for each in chains if _tensor_of(each) is not None), expression)


def _tensor_of(node: ast.expr) -> ast.expr | None:
    """``loss`` of ``loss.detach().cpu().item()`` and of ``float(loss)``."""
    match node:
        case ast.Call(func=ast.Name(id="float"), args=[inner], keywords=[]):
            return _tensor_of(inner) or inner
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=[], keywords=[]):
            return (_tensor_of(inner) or inner) if name in READS else None
        case ast.Attribute(value=inner, attr="data"):
            return inner
        case _:
            return None
