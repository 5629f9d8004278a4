"""What a loader is read for: to train, or aside: to validate, to look, to compute figures."""

from __future__ import annotations

import ast
import re

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.queries.steps import Steps, step_loops
from ampwise_lint.source.library import NO_GRAD
from ampwise_lint.source.places import (
    block_of,
    bound_to,
    class_of,
    loads,
    names_bound_by,
    outward,
    scope_of,
)
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import EVALUATION, dotted
from ampwise_lint.values.events import (
    PREPARED,
    Backward,
    Forward,
    Loop,
    Made,
    Managed,
    Moved,
    OptimizerStep,
    Read,
)


def reads_by_purpose(code: Analysis) -> tuple[set[int], set[int]]:
    """``id`` of the nodes of loaders read in sight: those by no training, and the others."""
    loops = step_loops(code)
    aside: set[int] = set()
    trained: set[int] = set()
    for trace in code.traces:
        for read in trace.of(Read):
            if read.by == PREPARED:
                continue
            found = aside if _only_looks(read, loops, trace) else trained
            found.add(id(read.loader.node))
    return aside - trained, trained


def _only_looks(read: Read, loops: Steps, trace: Trace) -> bool:
    """Whether what takes batches surely validates, shows them, or trains in float32."""
    if read.by:
        return is_aside(read.by)
    around = read.context.loops[-1:]
    if id(trace.events) in loops.traces:
        return not loops.is_lower(trace, None)
    if any(id(each.node) in loops.nodes for each in around):
        return not loops.is_lower(trace, around[0])
    if isinstance(read.node, ast.Call):  # of ``next``
        return read.context.no_grad
    if any(isinstance(each, ast.Yield) for each in ast.walk(read.node)):
        return False
    runs = [e for e in trace.of(Forward) if around[0].serial in (s.serial for s in e.context.loops)]
    is_named = any(map(is_aside, read.context.functions))
    if read.context.no_grad or is_named or _computes_figures(read, around[0], trace):
        return True
    return bool(runs) and all(e.context.no_grad for e in runs)


def _computes_figures(read: Read, loop: Loop, trace: Trace) -> bool:
    """Whether a loop makes nothing but figures of its batches, as the means to normalize by."""
    if not isinstance(loop.node, ast.For):
        return False
    inside = [e for e in trace.events if loop.serial in (each.serial for each in e.context.loops)]
    if any(
        isinstance(each, Forward | Backward | OptimizerStep | Managed | Moved) for each in inside
    ):
        return False
    calls = [e for part in loop.node.body for e in ast.walk(part) if isinstance(e, ast.Call)]
    own = names_bound_by(loop.node)
    return all(_is_arithmetic(read.module, each, own) for each in calls)


def _is_arithmetic(module: Module, call: ast.Call, own: set[str]) -> bool:
    """Whether a call computes with numbers and tensors: ``x.mean()``, ``torch.sum(x)``, ``len``."""
    name = dotted(call.func)
    if not name:  # a method of an expression
        return isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Name)
    root = (module.imports.full(call.func) or name).partition(".")[0]
    is_own = "." in name and name.partition(".")[0] in own
    return is_own or root in PLAIN or name.rpartition(".")[2] in NOTES


PLAIN = {
    "torch", "numpy", "np", "math", "print", "len", "float", "int", "sum", "min", "max", "range",
    "enumerate", "zip", "list", "tuple", "isinstance", "str", "time",
}  # fmt: skip
"""Functions and packages that train nothing."""

NOTES = {"append", "extend", "set_description", "set_postfix"}
"""Methods that write down what was computed."""


def only_infers(event: Made) -> bool:
    """Whether the class that keeps it reads it under ``no_grad`` alone, as ``next(self.data)``."""
    module, class_ = event.module, class_of(event.module, event.node)
    if class_ is None:
        return False
    called = set(bound_to(module, event.node))
    for each in ast.walk(scope_of(module, event.node)):
        if isinstance(each, ast.Assign) and any(dotted(e) in called for e in ast.walk(each.value)):
            called |= {dotted(target) for target in each.targets}
    kept = {each for each in called if each.startswith("self.")}
    uses = [e for e in ast.walk(class_) if isinstance(e, ast.Attribute) and dotted(e) in kept]
    reads = [_read_by(module, each) for each in uses if isinstance(each.ctx, ast.Load)]
    return bool(reads) and all(e is not None and _is_without_gradients(module, e) for e in reads)


def _read_by(module: Module, loader: ast.expr) -> ast.AST | None:
    """What takes batches of a loader: ``for batch in self.loader``, ``next(self.batches)``."""
    for each in outward(module, loader):
        match each:
            case ast.For(iter=over) if any(part is loader for part in ast.walk(over)):
                return each
            case ast.Call(func=ast.Name(id="next")):
                return each
            case ast.stmt():
                return None
            case _:
                pass
    return None


def _is_without_gradients(module: Module, node: ast.AST) -> bool:
    """Whether it stands below ``no_grad``: a context, or what decorates its function."""
    around: list[ast.expr] = []
    for each in outward(module, node):
        if isinstance(each, ast.With):
            around += [item.context_expr for item in each.items]
        elif isinstance(each, ast.FunctionDef):
            around += each.decorator_list
    calls = [each.func if isinstance(each, ast.Call) else each for each in around]
    return any(module.imports.full(each) in NO_GRAD for each in calls)


def is_for_a_look(event: Made) -> bool:
    """``len(loader)``, ``next(iter(loader))``, loops that end in ``break`` or drop each batch."""
    module = event.module
    statement = module.statement_of(event.node)
    name = dotted(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    uses = loads(module.tree, name) if name else []
    uses = [each for each in uses if not _is_of_another(module, each, name, statement.lineno)]
    return bool(uses) and all(_takes_one(module, each) for each in uses)


def _is_of_another(module: Module, use: ast.expr, name: str, line: int) -> bool:
    """Whether a name is always bound anew between a line and its use."""
    around = [use, *outward(module, use)]
    for statement in (each for each in around if isinstance(each, ast.stmt)):
        block = block_of(module, statement)
        before = [each for each in block[: block.index(statement)] if each.lineno > line]
        if any(_binds(each, name) for each in before):
            return True
    return False


def _binds(statement: ast.stmt, name: str) -> bool:
    """Whether a statement binds a name, on each branch."""
    match statement:
        case ast.Assign(targets=targets):
            return any(dotted(each) == name for each in targets)
        case ast.If(body=body, orelse=other):
            return all(any(_binds(each, name) for each in block) for block in (body, other))
        case _:
            return False


def _takes_one(module: Module, use: ast.expr) -> bool:
    around = module.parents[id(use)]
    match around:
        case ast.Call(func=ast.Name(id="len")):
            return True
        case ast.Call(func=ast.Name(id="iter" | "enumerate")):
            return _takes_one(module, around)
        case ast.Call(func=ast.Name(id="next")):
            return True
        case ast.For(iter=over, body=[*_, ast.Break()]):
            return over is use
        case ast.For(iter=over, target=ast.Name(id="_")):
            return over is use
        case ast.For(
            iter=ast.Call(func=ast.Name(id="enumerate")) as over, target=ast.Tuple() as to
        ):
            return over is use and ast.unparse(to.elts[-1]) == "_"
        case _:
            return False


def is_aside(name: str) -> bool:
    """Whether a name is of validation, of pictures or of a benchmark."""
    return bool(EVALUATION.search(name) or PICTURES.search(name))


PICTURES = re.compile(
    r"(^|_)(vis|viz|visual\w*|plot\w*|render\w*|demo|dummy|bench(mark)?)(_|$)", re.IGNORECASE
)
