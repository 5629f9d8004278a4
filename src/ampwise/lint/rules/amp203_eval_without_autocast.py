"""# eval-without-autocast

## What it does
Reports a validation forward (no gradients, in a loop) outside autocast, of a network that is
trained inside autocast in the same file.

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
No automatic fix: the figures change, and float32 may be what the author wants to compare with.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from ampwise.lint.model.analysis import Analysis, Trace
from ampwise.lint.model.events import Backward, Forward
from ampwise.lint.model.roles import EVALUATION, dotted
from ampwise.lint.model.values import key_of
from ampwise.lint.rule import Mistake, rule

Places = dict[str, set[str]]
OFF = re.compile(r"amp|scaler|fp16|half|mixed|precision")


@rule("AMP203", "eval-without-autocast", "warning", fix="unsafe")
def check(code: Analysis) -> Iterator[Mistake]:
    trained = _by_name(each for trace in code.traces for each in _trained(trace))
    plain = _by_name(each for trace in code.traces for each in _trained_without(trace))
    covered = {
        id(each.node) for trace in code.traces for each in trace.of(Forward) if each.context.regions
    }
    for trace in code.traces:
        models = {key_of(each.model) for each in _trained(trace)}
        for event in trace.of(Forward):
            same = (key_of(event.model) in models and _is_reached(trace, event)) or (
                _name(event.node) in trained and not _is_another(event, trained, plain)
            )
            if same and id(event.node) not in covered and _validates(event):
                yield Mistake(
                    event.node,
                    event.module,
                    "training runs this network in autocast, validation without: figures are those "
                    "of another precision than the one trained in, and evaluation takes float32's "
                    "time and memory; run it under the same autocast",
                )


def _trained(trace: Trace) -> list[Forward]:
    """Forward passes in autocast that a backward follows."""
    return [
        each
        for each in trace.of(Forward)
        if each.is_root and each.context.region is not None and not each.context.no_grad
    ]


def _trained_without(trace: Trace) -> list[Forward]:
    """Forward passes of training outside autocast."""
    if not any(isinstance(each, Backward) for each in trace.events):
        return []
    return [
        each
        for each in trace.of(Forward)
        if each.is_root
        and each.context.region is None
        and not each.context.no_grad
        and each.training is not False
    ]


def _is_reached(trace: Trace, event: Forward) -> bool:
    """Whether the branches it stands in go with those this path has taken elsewhere."""
    return all(trace.decided.get(e.key, e.taken) is e.taken for e in event.context.conditions)


def _is_another(event: Forward, trained: Places, plain: Places) -> bool:
    """Whether only a name is shared with what is trained in autocast.

    In its function, its class or its branch, the network of that name is trained without only.
    """
    name = _name(event.node)
    return name in plain and bool(_places(event) & plain[name] - trained[name])


def _by_name(events: Iterable[Forward]) -> Places:
    """The places in which networks are trained, by their names."""
    found: Places = {}
    for each in events:
        found.setdefault(_name(each.node), set()).update(_places(each))
    return found


def _places(event: Forward) -> set[str]:
    """The function, the class and the branches something stands in."""
    function = event.context.functions[-1] if event.context.functions else ""
    class_ = function.rpartition(".")[0]
    branches = {f"{e.key} is {e.taken}" for e in event.context.conditions if not e.known}
    return branches | {f"def {function}"} | ({f"class {class_}"} if class_ else set())


def _name(node: ast.AST) -> str:
    return dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _validates(event: Forward) -> bool:
    """Whether it belongs to a validation: by the mode, or by a function's name."""
    if not event.is_root or not event.context.loops or _is_fallback(event):
        return False
    if not event.context.no_grad and event.training is not False:
        return False
    names = [each.rpartition(".")[2] for each in event.context.functions[-2:]]
    return event.training is False or any(EVALUATION.search(each) for each in names)


def _is_fallback(event: Forward) -> bool:
    """Whether it stands where lower precision is switched off."""
    return any(
        not each.taken
        and isinstance(each.node, ast.If)
        and OFF.search(event.module.unparsed(each.node.test))
        for each in event.context.conditions
    )
