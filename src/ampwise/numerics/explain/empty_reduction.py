"""EMPTY_REDUCTION: a reduction over nothing is 0 divided by 0; so is the spread of one value."""

from __future__ import annotations

from ampwise.numerics.explain.cause import Cause, Explanation, Fault
from ampwise.numerics.observe.bits import NAN, bad_bits
from ampwise.numerics.observe.operations import tensors
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.interventions import Scope, on
from ampwise_lint.base.words import counted

_REDUCTIONS = ("mean", "var", "std", "sum", "amax", "amin", "max", "min", "div", "logsumexp",
               "nll_loss_forward", "cross_entropy")  # fmt: skip
_VARIANCES = ("std", "var", "std_mean", "var_mean")


def _by_itself(root: Root) -> Explanation | None:
    return _of_nothing(root) or _of_one(root)


def _of_nothing(root: Root) -> Explanation | None:
    floats = [each for each in tensors((root.args, root.kwargs)) if each.is_floating_point()]
    nothing = any(each.numel() == 0 for each in floats)
    ignored = root.name == "nll_loss_forward" and len(root.outputs) > 0 and _all_ignored(root)
    if not ignored and not (nothing and root.name in _REDUCTIONS):
        return None
    return Explanation(
        "EMPTY_REDUCTION",
        f"{root.name} reduces over no elements: 0 divided by 0. Nothing was selected, or every "
        "target is ignored.",
    )


def _all_ignored(root: Root) -> bool:
    target, ignored = root.args[1], root.args[4]
    return bool((target == ignored).all())


def _of_one(root: Root) -> Explanation | None:
    """A variance with as many degrees of freedom as it has none."""
    if root.name not in _VARIANCES or bad_bits(root.args[0]):
        return None
    values, result = root.args[0], root.outputs[0]
    size = values.numel() // max(1, result.numel())
    if not size or not root.bits & NAN:
        return None
    return Explanation(
        "EMPTY_REDUCTION",
        f"{root.name} of {counted(size, 'value')} divides by one less than their number, which is "
        f"{size - 1}. A spread needs two; with correction=0 that of one is 0.",
    )


def _remedies(fault: Fault) -> list[Candidate]:
    place = fault.place
    scope = Scope(place.file, place.line)
    if fault.op in _VARIANCES:
        found = Candidate(
            "the spread of one sample is 0",
            f"line {place.line}: {fault.op}(..., correction=0)",
            on(scope, change.uncorrected),
        )
    else:
        found = Candidate(
            "nothing to reduce gives 0",
            f"line {place.line}: torch.nan_to_num(...) of the result, or divide by "
            "count.clamp(min=1), which gives the same 0",
            on(scope, change.zero_for_nothing()),
        )
    return [found, *fault.in_bfloat16()]


CAUSE = Cause("EMPTY_REDUCTION", _remedies, by_itself=_by_itself)
