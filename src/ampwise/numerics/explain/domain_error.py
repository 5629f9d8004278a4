"""DOMAIN_ERROR: arguments that an operation has no finite value for, in float64 either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampwise.numerics.explain import exponentials
from ampwise.numerics.explain.cause import Cause, Explanation, Fault
from ampwise.numerics.observe import domain
from ampwise.numerics.observe.ancestry import Ancestor
from ampwise.numerics.observe.bits import NAN, bad_bits
from ampwise.numerics.observe.operations import tensors
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.interventions import Scope, on
from ampwise_lint.base.words import counted

_SPREADS = ("std", "var", "std_mean", "var_mean")


def _in_any_precision(root: Root, makers: Sequence[Ancestor | None]) -> Explanation:
    outside = domain.in_words(root.name, root.args[0]) if root.args else ""
    outside = outside or _by_zero(root, makers)
    if not outside:
        outside = f"{root.name} has no finite value for these inputs {_range_of(root)}"
    return Explanation(
        "DOMAIN_ERROR",
        f"{outside}. float64 gives none either: the fault is in the model or loss, not in the "
        "precision.",
    )


def _by_zero(root: Root, makers: Sequence[Ancestor | None]) -> str:
    """How many divisors are 0, what that gives, and what made them; empty where none is."""
    divisor = root.args[1] if root.name in ("div", "div_") and len(root.args) > 1 else None
    if not isinstance(divisor, Tensor) or not (zeros := int((divisor == 0).sum())):
        return ""
    are = "is" if zeros == 1 else "are"
    gives = "0 / 0 is NaN" if bad_bits(root.outputs[0]) & NAN else "a number over 0 is inf"
    maker = makers[-1] if makers else None
    made = "" if maker is None else f", made by {maker.where(root.place)}"
    flat = maker is not None and maker.name in _SPREADS
    why = ", the spread of values that are all the same" if flat else ""
    return f"{zeros:,} of {counted(divisor.numel(), 'divisor')} {are} 0{made}{why}: {gives}"


def _range_of(root: Root) -> str:
    floats = [each for each in tensors(root.args) if each.is_floating_point() and each.numel()]
    if not floats:
        return ""
    offending = next((each for each in floats if bad_bits(each)), floats[-1])
    low, high = torch.aminmax(offending.double())
    return f"(from {float(low):.4g} to {float(high):.4g})"


def _remedies(fault: Fault) -> list[Candidate]:
    """No precision helps."""
    return exponentials.smaller_argument(fault) or _inside(fault)


def _inside(fault: Fault) -> list[Candidate]:
    place, bounded = fault.place, domain.domain_of(fault.op)
    if bounded is None:
        how = (
            f"line {place.line}: clamp the argument into the function's domain; no precision helps"
        )
        return [Candidate("mend the model or loss", how, tried=False)]
    low, high = bounded.bounds(torch.float32)
    ends = [f"{end}={value:.9g}" for end, value in (("min", low), ("max", high))
            if value is not None]  # fmt: skip
    how = (
        f"line {place.line}: clamp the argument into the function's domain: "
        f"x.clamp({', '.join(ends)}), for float32; or mend what makes it. No precision helps"
    )
    change_of = on(Scope(place.file, place.line), change.inside_domain)
    return [Candidate(f"keep the argument of {fault.op} inside", how, change_of)]


CAUSE = Cause("DOMAIN_ERROR", _remedies, in_any_precision=_in_any_precision)
