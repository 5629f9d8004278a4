"""All causes, and which of them it is: experiments in order, the first that succeeds.

Of fused attention it is the operation inside that is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ampwise import formats
from ampwise.numerics.explain import (
    backward_singularity,
    bad_buffer,
    bad_input,
    bad_parameter,
    cancellation,
    domain_error,
    dtype_error,
    empty_reduction,
    eps_underflow,
    float8,
    mask_constant,
    masked_row,
    nondeterministic,
    precision_loss,
    range_overflow,
    scale_too_high,
    stagnation,
    underflow,
)
from ampwise.numerics.explain.cause import Argument, Cause, Explanation, Fault
from ampwise.numerics.observe.ancestry import Ancestor
from ampwise.numerics.observe.attention import inside
from ampwise.numerics.observe.bits import all_bits
from ampwise.numerics.observe.draws import drawn_in_half
from ampwise.numerics.observe.exact import UnsupportedError, exact
from ampwise.numerics.observe.operations import tensors
from ampwise.numerics.observe.reference import reference
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.result import CauseName
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable

CAUSES: dict[CauseName, Cause] = {
    each.name: each
    for each in (
        empty_reduction.CAUSE,
        masked_row.CAUSE,
        bad_input.CAUSE,
        bad_parameter.CAUSE,
        bad_buffer.CAUSE,
        mask_constant.CAUSE,
        range_overflow.CAUSE,
        backward_singularity.CAUSE,
        domain_error.CAUSE,
        eps_underflow.CAUSE,
        cancellation.CAUSE,
        underflow.CAUSE,
        precision_loss.CAUSE,
        scale_too_high.CAUSE,
        dtype_error.CAUSE,
        stagnation.CAUSE,
        nondeterministic.CAUSE,
    )
}
"""By name, in the order in which their experiments are made."""


def remedies(cause: CauseName, fault: Fault) -> list[Candidate]:
    """What may mend a fault of some cause, the least first."""
    return CAUSES[cause].remedies(fault)


def explain(step: Replayable, stash: Stash, root: Root) -> Explanation:
    """Cause of a root, by experiment."""
    found = of_itself(root)
    if found is None:
        at = (root.name, root.place, root.occurrence)
        run = shadow(step, stash, errors=False, at=at)
        found = _by_a_draw(step, stash, root, run) or damaged(root, run)
        if found.cause == "DOMAIN_ERROR" and reference(step, stash).finite:
            # It would be so in float64, too; but there the code decides otherwise.
            found = precision_loss.decided(root, shadow(step, stash).errors)
    return replace(found, words=found.words + float8.as_a_scale(root))


def of_itself(root: Root) -> Explanation | None:
    """Cause of a root as far as its own inputs show it, without a replay."""
    inner = inside(root)
    if inner is not None and (found := _by_itself(inner)) is not None:
        words = f"Inside {root.name}, computed in float32: {found.words}"
        return replace(found, words=words, inside=inner.name)
    return _by_itself(root)


def damaged(root: Root, run: ShadowRun) -> Explanation:
    """The cause, given what the operation's inputs would be without rounding."""
    ideal = _made_of(root, run.inputs)
    if ideal is None or all_bits(ideal):
        return _in_any_precision(root, run.makers)
    assert run.inputs is not None
    return _by_argument(root, run.inputs, run.makers)


def _by_a_draw(step: Replayable, stash: Stash, root: Root, run: ShadowRun) -> Explanation | None:
    """The cause, if it is not finite for a number that was drawn in 16 bits, and would be else."""
    draw = drawn_in_half(run.makers)
    ideal = _made_of(root, run.inputs)
    if draw is None or (ideal is not None and not all_bits(ideal)):
        return None
    at = (root.name, root.place, root.occurrence)
    ideal = _made_of(root, shadow(step, stash, errors=False, at=at, draws=True).inputs)
    return None if ideal is None or all_bits(ideal) else precision_loss.of_a_draw(root, draw)


def _by_itself(root: Root) -> Explanation | None:
    known = (each.by_itself for each in CAUSES.values())
    return next((found for of in known if of is not None and (found := of(root))), None)


def _in_any_precision(root: Root, makers: Sequence[Ancestor | None]) -> Explanation:
    known = (each.in_any_precision for each in CAUSES.values())
    found = next(found for of in known if of is not None and (found := of(root, makers)))
    assert found is not None
    return found


def _by_argument(
    root: Root, ideal: tuple[Any, Any], makers: Sequence[Ancestor | None]
) -> Explanation:
    """The inputs are not what they should be: how?"""
    known = [each.by_argument for each in CAUSES.values() if each.by_argument is not None]
    for argument in _arguments(root, ideal, makers):
        found = next((found for of in known if (found := of(argument))), None)
        if found is not None:
            return found
    return precision_loss.somewhere(root)


def _arguments(
    root: Root, ideal: tuple[Any, Any], makers: Sequence[Ancestor | None]
) -> Iterator[Argument]:
    """Arguments that were damaged; the last, a divisor, if there is one, first."""
    triples = list(zip(tensors(root.args), tensors(ideal[0]), makers, strict=True))
    for actual, wanted, maker in reversed(triples):
        if actual.is_floating_point():
            fmt = formats.lookup(actual.dtype)
            argument = Argument.of(root, fmt, actual.double(), wanted, maker)
            if argument is not None:
                yield argument


def _made_of(root: Root, inputs: tuple[Any, Any] | None) -> list[Tensor] | None:
    """What an operation makes of other inputs, in float64; None where it has no such form."""
    if inputs is None:
        return None
    try:
        return exact(root.func, *inputs)
    except UnsupportedError:
        return None
