"""How long a scaler lives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampwise_lint.analysis import Analysis
from ampwise_lint.source.places import functions_of
from ampwise_lint.values.abstract import Const, Optimizer, Scaler, Unknown, Value
from ampwise_lint.values.events import Made, ScalerStep


def first_scale(*scalers: Scaler) -> str:
    """The loss scale that scalers begin with, as a message tells it."""
    told = {_as_text(each.first_scale) for each in scalers} or {_as_text(None)}
    return told.pop() if len(told) == 1 else MADE_WITH


MADE_WITH = "the loss scale it is made with"


def _as_text(scale: Value | None) -> str:
    match scale:
        case None:
            return "loss scale 65,536"
        case Const(value=int() | float() as number):
            return f"loss scale {number:,.0f}" if number >= 1 else f"loss scale {number:g}"
        case _:
            return MADE_WITH


def recreated(code: Analysis) -> Iterator[Made]:
    """Where scalers are made that live shorter than what they step."""
    for trace in code.traces:
        made = {
            id(each.value): each
            for each in trace.of(Made)
            if isinstance(each.value, Scaler) and (each.context.loops or _is_each_epoch(each))
        }
        for step in trace.of(ScalerStep):
            event = made.get(id(step.scaler))
            if event is None:
                continue
            if isinstance(step.optimizer, Unknown) and _is_kept(step.optimizer, event):
                yield event
            if not isinstance(step.optimizer, Optimizer):
                continue
            if not step.optimizer.path and "#" in step.optimizer.key:
                continue  # made by a function nobody showed us, who knows how often
            if not event.context.loops:
                if not step.optimizer.path:  # handed in: it lives longer than the scaler
                    yield event
                continue
            inner = id(event.context.loops[-1].node)
            # A loop that makes a new optimizer too (folds, trials) starts a new training.
            if inner not in step.optimizer.loops and not _lives_long(event, step):
                yield event


def _lives_long(event: Made, step: ScalerStep) -> bool:
    """Whether a loop over epochs runs inside the one that makes it: a stage of the training."""
    inner = step.context.loops[len(event.context.loops) :]
    return any(
        isinstance(each.node, ast.For) and EPOCHS.search(ast.unparse(each.node.iter))
        for each in inner
    )


EPOCHS = re.compile(r"epochs")


EPOCH = re.compile(r"epoch(?!s)|(^|_)(train|training)_step$")
WHICH_EPOCH = re.compile(r"(cur_|current_|i_)?epoch(_id|_idx|_index|_num)?$")
"""A parameter that says which epoch it is."""


def _is_each_epoch(event: Made) -> bool:
    """Whether it is made in a function that somebody else calls for each epoch or step."""
    if len(event.context.functions) != 1:
        return False
    name = event.context.functions[0].rpartition(".")[2]
    around = functions_of(event.module, event.node)[:1]
    given = [each.arg for function in around for each in function.args.args]
    return bool(EPOCH.search(name)) or any(map(WHICH_EPOCH.match, given))


def _is_kept(optimizer: Unknown, event: Made) -> bool:
    """Whether an optimizer, of a container, lives longer than the scaler of an epoch."""
    names = [each.rpartition(".")[2] for each in event.context.functions[-1:]]
    is_given = optimizer.made == "given" and "#" not in optimizer.key
    return is_given and bool(event.context.loops) and any(map(EPOCH.search, names))
