"""# manual-cast-in-autocast

## What it does
Reports `.half()`, `.bfloat16()` or `.to(...)` one of these dtypes, of a tensor inside autocast
or of an input just before the network's call in it. Casts up (`.float()`) are right and not
reported; nor is what a function of another library or of autograd takes, which autocast leaves
alone (`flash_attn_func(q.half(), k.half(), v.half())`), nor anything where the network itself was
made half, in a branch for that dtype (`if dtype == torch.bfloat16`), or where an option names the
dtype and autocast's own is not in sight.

## Why is this bad
Autocast casts where an operation is faster in 16 bits and leaves alone what needs float32.
After a cast by hand, norms, softmax and losses get values with 11 bits (float16) or 8
(bfloat16); inputs above 65504 are inf in float16. With autocast off, float32 weights meet
16-bit inputs and the product raises.

## Example
    x = x.cuda().half()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)

## Use instead
    x = x.cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(x), y)

## Fix safety
Unsafe: `--unsafe-fixes` removes `.half()`, `.bfloat16()` and the dtype in `.to(...)`. The cast may
be there to save memory, or for a custom kernel. A dtype that is given by a name is left.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit
from ampwise_lint.queries.edits import edit
from ampwise_lint.queries.owners import owners
from ampwise_lint.rule import Mistake, rule
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import bound_to, has_comment, loads, scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted
from ampwise_lint.triggers import AUTOCAST
from ampwise_lint.values.abstract import Cast, Instance, Model, Region, Tensor, Value, key_of
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import Backward, CastDown, Forward, Managed

_MESSAGE = (
    "a tensor is cast to {dtype} by hand {where} autocast: operations that autocast keeps in "
    "float32 (losses, softmax, norms) get values that are rounded already, and without autocast "
    "the code no longer runs; leave the cast to autocast"
)


@rule("AMP207", "manual-cast-in-autocast", "warning", fix="unsafe", triggers=(AUTOCAST,))
def check(code: Analysis) -> Iterator[Mistake]:
    trains = code.any(Backward) or code.any(Managed)
    for trace in code.traces:
        halved = {key_of(e.value) for e in trace.of(CastDown) if _is_network(e)}
        for event in trace.events:
            if event.context.no_grad:
                continue  # what is cast for inference only is meant to be
            if halved and not (isinstance(event, Forward) and halved.isdisjoint(_of(event.model))):
                continue  # a network of 16 bits takes no other inputs
            if isinstance(event, CastDown) and event.context.region is not None:
                if (
                    not _is_network(event)
                    and not _is_asked_for(event)
                    and not _is_for_kernel(event)
                ):
                    message = _MESSAGE.format(dtype=event.cast, where="inside")
                    yield Mistake(
                        event.node, event.module, message, _edits(event.node, event.module)
                    )
            elif not trains:
                continue  # a test of a network that is given half on purpose
            elif isinstance(event, Forward) and event.context.region is not None and event.is_root:
                for cast in _casts(event):
                    message = _MESSAGE.format(dtype=cast.dtype, where="just before")
                    yield Mistake(cast.node, cast.module, message, _edits(cast.node, cast.module))


def _of(network: Value) -> set[str]:
    """The networks that one is, or holds: DistributedDataParallel's."""
    return {key_of(network), *owners(network)}


def _is_network(cast: CastDown) -> bool:
    return isinstance(cast.value, Model | Instance)


def _is_asked_for(cast: CastDown) -> bool:
    """Whether somebody else chooses the dtype, who may choose the one that autocast has.

    An option does, in a region whose dtype is not in sight, or whoever a branch for it waits for:
    ``if dtype == torch.bfloat16: return x.bfloat16()``.
    """
    if _is_open(cast.context.region, cast.node, cast.module):
        return True
    tests = [
        each.node.test
        for each in cast.context.conditions
        if each.taken and isinstance(each.node, ast.If) and cast.module.holds(each.node)
    ]
    return any(_asks_for(cast.module, each, cast.cast) for each in tests)


def _is_for_kernel(cast: CastDown) -> bool:
    """Whether it is for what autocast does not know: ``flash_attn_func(q.half(), k.half())``."""
    module, node = cast.module, cast.node
    around = scope_of(module, node)
    uses = [use for name in bound_to(module, node) for use in loads(around, name)]
    return any(_is_for_another(module, each) for each in (node, *uses))


def _is_for_another(module: Module, given: ast.AST) -> bool:
    """Whether it is an argument of a function of another library, or of one of autograd."""
    call = module.parents.get(id(given))
    if isinstance(call, ast.keyword):
        call = module.parents.get(id(call))
    if not isinstance(call, ast.Call) or call.func is given:
        return False
    if isinstance(call.func, ast.Attribute) and call.func.attr == "apply":
        return True
    first = module.imports.full(call.func).partition(".")[0]
    ours = not first or first == "torch" or module.project.locate(module.path, first) is not None
    return not ours


def _is_open(region: Region | None, cast: Node, module: Module) -> bool:
    """Whether an option names the dtype that is cast to, and autocast's own is not in sight."""
    return region is not None and region.dtype is None and not _is_written(cast, module)


def _is_written(node: Node, module: Module) -> bool:
    """Whether the dtype stands where something is cast: ``x.half()``, ``x.to(torch.half)``."""
    if not isinstance(node, ast.Call):
        return False
    by_name = isinstance(node.func, ast.Attribute) and node.func.attr in library.HALVES
    return by_name or any(_is_dtype(module, each) for each in (*node.args, *node.keywords))


def _asks_for(module: Module, test: ast.expr, dtype: str) -> bool:
    """``dtype == torch.bfloat16``."""
    match test:
        case ast.Compare(ops=[ast.Eq() | ast.Is()], comparators=[right]):
            return library.DTYPES.get(module.imports.full(right)) == dtype
        case _:
            return False


MOVES = library.MOVES | {"index"}


def _casts(event: Forward) -> Iterator[Cast]:
    """Where what a network is given was made half: itself, or what it was put together of."""
    waiting = flatten(event.inputs)
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor) and (cast := each.cast) is not None:
            if not _is_open(event.context.region, cast.node, cast.module):
                yield cast
        elif isinstance(each, Tensor) and each.op in MOVES:
            waiting += flatten(each.inputs)


def _edits(node: Node, module: Module) -> tuple[Edit, ...]:
    """``x.half()`` and ``x.to(torch.half)`` become ``x``; a cast that moves too goes on moving."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ()
    owner = module.text_of(node.func.value)
    arguments = [*node.args, *node.keywords]
    kept = [each for each in arguments if not _is_dtype(module, each)]
    dtypes = 0 if node.func.attr in library.HALVES else 1
    if len(arguments) != len(kept) + dtypes or (kept and not dtypes):
        return ()
    if kept:
        given = ", ".join(map(module.text_of, kept))
        return (edit("replace", node, f"{owner}.{node.func.attr}({given})"),)
    if (rebinding := _rebinding(module, node, owner)) is not None:
        return (edit("remove", rebinding),)
    return (edit("replace", node, owner),)


def _rebinding(module: Module, node: ast.Call, owner: str) -> ast.Assign | None:
    """``x = x.half()``, of which nothing is left without the cast."""
    statement = module.statement_of(node)
    if not isinstance(statement, ast.Assign) or statement.value is not node:
        return None
    same = [dotted(each) for each in statement.targets] == [owner]
    return statement if same and not has_comment(module, statement) else None


def _is_dtype(module: Module, argument: ast.expr | ast.keyword) -> bool:
    node = argument.value if isinstance(argument, ast.keyword) else argument
    return module.imports.full(node) in library.DTYPES
