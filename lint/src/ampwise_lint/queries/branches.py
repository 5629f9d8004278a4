"""Branches a step seldom takes, and those behind which it goes on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from operator import is_not

from ampwise_lint.source.frequency import is_for_few
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.places import block_of, is_inside, scope_of
from ampwise_lint.source.project import Module
from ampwise_lint.source.roles import dotted, leaves
from ampwise_lint.values.events import Condition, Event, Site


def passed(event: Event, loop: Node | None) -> Iterator[ast.If]:
    """Each ``if ...: continue`` or ``if ...: return`` behind which something happens in a loop.

    There, and in the functions that are called there on the way to it.
    """
    way = event.way
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


def is_rare(branch: Condition, loop: Node | None, module: Module) -> bool:
    """Whether a branch is taken once or so: it ends the loop, or waits for one step or a flag."""
    if not isinstance(branch.node, ast.If):
        return False
    body = branch.node.body if branch.taken else branch.node.orelse
    if _ends(body, branch.node, loop) or _is_once(branch.node):
        return True
    if not branch.taken:
        return False
    test = branch.node.test
    if loop is not None and _is_set_back(test, loop):
        return True
    return is_for_few(test) or _is_fault(test) or _is_of_warnings(module, test)


def is_of_evaluation(branch: Condition) -> bool:
    """Whether a branch is for a network that does not train: ``if not self.training``."""
    return _asks(branch, TRAINS, False)


TRAINS = re.compile(r"\.training$")


def _asks(branch: Condition, flag: re.Pattern[str], value: bool) -> bool:
    """Whether a branch is for a flag that has a value."""
    node = branch.node
    return isinstance(node, ast.If | ast.IfExp) and _tells(node.test, branch.taken, flag, value)


def _tells(test: ast.expr, holds: bool, flag: re.Pattern[str], value: bool) -> bool:
    """Whether a test that holds, or does not, tells that a flag has a value."""
    match test:
        case ast.Attribute() | ast.Name():
            return holds is value and bool(flag.search(dotted(test)))
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _tells(inner, not holds, flag, value)
        case ast.BoolOp(op=op, values=values) if isinstance(op, ast.And) is holds:
            return any(_tells(each, holds, flag, value) for each in values)
        case _:
            return False


TRIAL = re.compile(r"(^|[._])(smoke|dry_?run|sanity|debug|fast_dev_run)(_(test|check|run|mode))?$")
TRIES = re.compile(r"(^|[._])(smoke|dry_?run|sanity|debug)(_|$)")
"""Functions that try out a training."""


def is_trial(event: Event) -> bool:
    """Whether it only tries out that a training runs, as a smoke test or a dry run does."""
    if any(map(TRIES.search, event.context.functions)):
        return True
    return any(_asks(each, TRIAL, True) for each in event.context.conditions)


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
    if OUT_OF_RANGE.search(text) or ("step_was_skipped" in text and "not " not in text):
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


def _is_set_back(test: ast.expr, loop: Node) -> bool:
    """``if flag: ...``, and further on in the loop ``if flag: flag = False``."""
    asked = dotted(test)
    return bool(asked) and any(
        isinstance(each, ast.If) and dotted(each.test) == asked and _is_once(each)
        for each in ast.walk(loop)
    )


def raises(event: Event) -> bool:
    """Whether an exception is raised behind something, whatever it finds."""
    statement = event.module.statement_of(event.node)
    block = block_of(event.module, statement)
    rest = block[block.index(statement) :]
    leaving = (ast.Return, ast.Continue, ast.Break)
    return isinstance(rest[-1], ast.Raise) and not any(
        isinstance(each, leaving) for one in rest for each in ast.walk(one)
    )


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
