"""CANCELLATION: a difference of nearly equal numbers, of whose digits none were left."""

from __future__ import annotations

import torch

from ampwise import formats
from ampwise.numerics.explain.cause import Argument, Cause, Explanation, Fault
from ampwise.numerics.explain.underflow import are_tiny, zeros_and_wanted
from ampwise.numerics.observe.ancestry import LOGARITHMS, back_from
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.interventions import Scope, on
from ampwise_lint.base.words import counted


def _by_argument(argument: Argument) -> Explanation | None:
    if argument.what == "outside":
        actual, wanted = argument.actual, argument.wanted
        return _cancelled(
            f"An argument of {argument.root.name} is {float(actual.min()):.4g} and should be "
            f"{float(wanted[actual.argmin()]):.4g}",
            argument,
        )
    if argument.what != "zero" or are_tiny(argument):
        return None
    lost = next((each for each in back_from(argument.maker) if each.cancels or each.flushed), None)
    if lost is None or lost.flushed:
        return None
    return _cancelled(zeros_and_wanted(argument), argument)


def _cancelled(is_and_should: str, argument: Argument) -> Explanation:
    """A difference of nearly equal numbers, where it was taken."""
    made_by = next((each for each in back_from(argument.maker) if each.cancels), None)
    if made_by is None:
        fmt = argument.fmt
        return Explanation(
            "CANCELLATION",
            f"{is_and_should}: a difference of nearly equal numbers lost its digits before. {fmt} "
            f"keeps {fmt.mantissa_bits + 1} bits.",
        )
    fmt = formats.lookup(made_by.dtype)
    where = made_by.where(made_by.place)
    if made_by.rounded_to is not None:
        end = made_by.rounded_to
        if made_by.name in LOGARITHMS:
            near = f"{end - fmt.ulp(end) / 2:.6g} and {end + fmt.ulp(end):.6g}"
            return Explanation(
                "CANCELLATION",
                f"{is_and_should}: {where} is of numbers that rounded to {end:g}, and "
                f"keeps nothing of how far they are from it. Next to it {fmt} has {near}.",
                made_by,
            )
        return Explanation(
            "CANCELLATION",
            f"{is_and_should}: {where} takes the difference to "
            f"{end:g} of numbers that rounded to {end:g}. Next below it {fmt} has "
            f"{end - fmt.ulp(end) / 2:.6g}; what is nearer has to come there in float32, or as the "
            "difference that it is.",
            made_by,
        )
    left = f"{made_by.propagated_db:.0f} dB are left of {made_by.inputs_db:.0f} dB"
    if made_by.cancelled:
        are = "is" if made_by.cancelled == 1 else "are"
        left = f"{counted(made_by.cancelled, 'element')} of its result {are} lost"
    return Explanation(
        "CANCELLATION",
        f"{is_and_should}: {where} subtracts nearly equal "
        f"numbers, and their digits cancel. {fmt} keeps {fmt.mantissa_bits + 1} bits; {left}.",
        made_by,
    )


def _remedies(fault: Fault) -> list[Candidate]:
    place = fault.place
    scope = Scope(place.file, place.line, function=True)
    wide = change.Raised(fault.step.device.type, torch.float64)
    doubled = Candidate(
        f"the function around line {place.line} in float64",
        ".double() on its inputs, and .float() on what it returns",
        on(scope, wide, change.lowered),
    )
    others = fault.in_another_precision()
    # Float32 is cheaper, where it does; several functions in it are not.
    first = [each for each in others if not each.otherwise and each.policy is None]
    return [*first, doubled, *(each for each in others if each not in first)]


CAUSE = Cause("CANCELLATION", _remedies, by_argument=_by_argument, of_precision=True)
