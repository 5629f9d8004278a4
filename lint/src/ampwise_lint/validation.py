"""Which forward passes belong to a validation: by mode, names, and what is done with outputs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import dropwhile

from ampwise_lint.source.nodes import Node
from ampwise_lint.source.pictures import FIGURE, bound, is_pictured, names_read
from ampwise_lint.source.places import functions_of, loads, names, scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import EVALUATION, LOSS, dotted
from ampwise_lint.values.abstract import Const, Tensor
from ampwise_lint.values.contents import flatten
from ampwise_lint.values.events import Condition, Forward, Site

Definition = ast.FunctionDef | ast.AsyncFunctionDef
TRAINING = re.compile(r"^(is_|do_|self\.)?(train|training|is_train)$")
OFF = re.compile(r"amp|scaler|fp16|half|mixed|precision")
MEASURES = re.compile(
    r"lpips|ssim|percep|vgg|dice|iou|metric|fid|distance|similarity", re.IGNORECASE
)
"""Networks that are no more than a loss or a figure."""


def validates(event: Forward, network: str, place: Node) -> bool:
    """Whether a forward of a network of that name belongs to a validation.

    `place`: the forward, or a call of a helper that leads to it, from which on to look around.
    """
    is_repeated = bool(event.context.loops) or _is_step(event)
    if MEASURES.search(network) or not event.is_root or not is_repeated:
        return False
    if any(is_meant(event) for is_meant in OTHER_USES):
        return False
    if not event.context.no_grad and event.training is not False:
        return False
    # What a helper is called, which training calls, too, does not tell.
    around = next(each.functions for each in event.way if each.node is place)
    functions = [each.rpartition(".")[2] for each in around[-2:]]
    if functions and "train" in functions[-1] and not event.context.no_grad:
        return False
    data = _loops_over(event)
    is_shown = any(_only_shows(event, each) for each in (event.node, place))
    if not any(map(EVALUATION.search, data)) and is_shown:
        return False
    asked = [each for branch in event.context.conditions for each in _asked(branch)]
    named = any(map(EVALUATION.search, [*functions, *data, *asked]))
    if any(map(ACTS.search, functions if not named else functions[-1:])):
        return False  # what an agent does, and learns from, is not measured
    return (event.training is False or named) and not _is_dead(event)


def _is_picture(event: Forward) -> bool:
    return any(is_pictured(each.module, each.node) for each in _calls(event))


ACTS = re.compile(r"(^|_)(act|actions?|rollouts?|play|explore|get(_\w+)?_values?)(_|$)")
"""Functions in which an agent acts, or rates what it has come to."""


def _is_of_loss(event: Forward) -> bool:
    """Whether it is a part of a loss, as what matches outputs with targets is."""
    classes = (
        e.removesuffix(".forward") for e in event.context.functions if e.endswith(".forward")
    )
    return any(map(LOSS.search, classes))


def _calls(event: Forward) -> Iterator[Site]:
    """Where a network is called, and where the method of its own is that calls it there."""
    yield event.site
    functions = event.context.functions
    if (
        functions
        and event.context.sites
        and dotted(getattr(event.node, "func", event.node)).startswith("self.")
    ):
        yield event.context.sites[-1]


def _is_sampling(event: Forward) -> bool:
    """Whether a script draws a sample step by step: a loop gives a network what it made before.

    Inside of functions, what a generated output is for tells more.
    """
    loop = event.context.loops[-1] if event.context.loops else None
    if loop is None or loop.over_data or event.context.functions:
        return False
    given = {name for each in getattr(event.node, "args", []) for name in names(each)}
    made = bound(event.module.statement_of(event.node))
    inside = [each for each in ast.walk(loop.node) if isinstance(each, ast.Assign)]
    assigned = [(names_read(each), bound(each)) for each in inside]
    for _ in assigned:
        made |= {name for read, written in assigned if made & read for name in written}
    return bool(made & given)


def _is_of_unit_test(event: Forward) -> bool:
    """Whether it is run to see that it runs: by a function of a file of tests."""
    name = event.module.path.name
    is_of_tests = name.startswith("test_") or name.endswith("_test.py")
    tests = [each.rpartition(".")[2] for each in event.context.functions[:1]]
    return is_of_tests and any(each.startswith("test_") for each in tests)


def _loops_over(event: Forward) -> list[str]:
    """Names in what the loop around it runs over."""
    loop = event.context.loops[-1].node if event.context.loops else None
    if not isinstance(loop, ast.For | ast.AsyncFor):
        return []
    return [each.id for each in ast.walk(loop.iter) if isinstance(each, ast.Name)]


SHOWS = re.compile(
    r"(^|_)(sampl\w*|generat\w*|gen|preview\w*|visuali\w*|plot\w*|draw\w*|demo|videos?)(_|$)",
    re.IGNORECASE,
)
PREDICTS = re.compile(
    r"(^|_)(infer\w*|predict\w*|extract\w*|embed\w*|export\w*)(_|$)", re.IGNORECASE
)


OF_TOKENS = re.compile(r"\bscores\b")
"""What a function that samples draws tokens by: no figure."""


def _only_shows(event: Forward, place: Node) -> bool:
    """Whether outputs are shown or written and nothing is measured: no figure goes wrong.

    What a function that predicts gives back may be measured by whom it is given to.
    """
    around = _up_to_purpose(list(_functions(event, place)))
    if any(EVALUATION.search(each.name) and not _is_shown(each) for _, each in around):
        return False
    texts = [OF_TOKENS.sub("", module.unparsed(e)) for module, e in around if _is_shown(e)]
    return not all(map(FIGURE.search, texts))


def _up_to_purpose(ways: list[tuple[Module, Definition]]) -> list[tuple[Module, Definition]]:
    """The two innermost functions, or those up to the first that says what it is for.

    What shows something may have been told to by what is called so, too.
    """
    ends = (n for n, (_, e) in enumerate(ways) if EVALUATION.search(e.name) or _is_shown(e))
    last = next(ends, 0) + 1
    while last < len(ways) and _is_shown(ways[last][1]):
        last += 1
    return ways[: max(2, last)]


def _is_shown(function: Definition) -> bool:
    if SHOWS.search(function.name):
        return True
    returns = any(isinstance(e, ast.Return) and e.value is not None for e in ast.walk(function))
    return bool(PREDICTS.search(function.name)) and not returns


def _functions(event: Forward, place: Node) -> Iterator[tuple[Module, Definition]]:
    """The function a place on the way to a forward stands in, and those that lead there."""
    for each in dropwhile(lambda site: site.node is not place, reversed(event.way)):
        functions = functions_of(each.module, each.node)
        yield from ((each.module, e) for e in functions if isinstance(e, Definition))


def _is_dead(event: Forward) -> bool:
    """Whether it stands in a function that other files could call, and nothing does."""
    if len(event.context.functions) != 1:
        return False  # another one leads there
    module = event.module
    around = [each for each in functions_of(module, event.node) if isinstance(each, Definition)]
    is_plain = len(around) == 1 and isinstance(module.parents[id(around[0])], ast.Module)
    return is_plain and module.project.leaves_unused(module, around[0].name)


STEP = re.compile(r"^_?(val|valid|validation|eval|evaluation|test)_(step|batch|iter|iteration)$")


def _is_step(event: Forward) -> bool:
    """Whether a method is one that a framework calls for each batch of a validation.

    Or a function that is handed one batch, and called so.
    """
    first = event.context.functions[:1]
    if any(STEP.search(each.rpartition(".")[2]) and "." in each for each in first):
        return True
    return any(
        EVALUATION.search(each.name) and any(arg.arg == "batch" for arg in each.args.args)
        for each in functions_of(event.module, event.node)
        if isinstance(each, Definition)
    )


def _is_given_nothing(event: Forward) -> bool:
    """``model(None, device)``, which asks a network for something else than an output."""
    first = event.inputs[0] if event.inputs else None
    is_none = isinstance(first, Const) and first.value is None
    return is_none and not any(isinstance(each, Tensor) for each in flatten(event.inputs))


def _asked(branch: Condition) -> list[str]:
    """Names of what a branch waits for: ``if args.validate``, ``if train: ... else``."""
    if not isinstance(branch.node, ast.If):
        return []
    parts = list(ast.walk(branch.node.test))
    is_not = any(isinstance(each, ast.Not | ast.NotEq) for each in parts)
    if is_not and any(isinstance(each, ast.BoolOp) for each in parts):
        return []
    asked = [each.attr for each in parts if isinstance(each, ast.Attribute)]
    asked += [each.id for each in parts if isinstance(each, ast.Name)]
    asked += [str(each.value) for each in parts if isinstance(each, ast.Constant)]
    if branch.taken is not is_not:
        return asked
    return ["eval"] if any(TRAINING.search(each) for each in asked) else []


def _is_discarded(event: Forward) -> bool:
    """Whether nobody looks at the output: a warm-up, a measurement of speed."""
    around = event.module.parents.get(id(event.node))
    while isinstance(around, ast.IfExp):
        around = event.module.parents.get(id(around))
    match around:
        case ast.Expr():
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == "_" or not loads(scope_of(event.module, event.node), name)
        case _:
            return False


def _is_fallback(event: Forward) -> bool:
    """Whether it stands where lower precision is switched off."""
    return any(
        isinstance(each.node, ast.If)
        and _is_without(event.module.unparsed(each.node.test), taken=each.taken)
        for each in event.context.conditions
    )


FULL = re.compile(r"fp32|float32|full_precision")


def _is_without(test: str, *, taken: bool) -> bool:
    """Whether a branch is the one without lower precision: ``if amp: ... else``, ``if fp32``."""
    if FULL.search(test):
        return taken is not ("not " in test or "!=" in test)
    return not taken and bool(OFF.search(test))


OTHER_USES = (
    _is_of_loss,
    _is_fallback,
    _is_given_nothing,
    _is_discarded,
    _is_picture,
    _is_of_unit_test,
    _is_sampling,
)
"""What else a network may be run for."""
