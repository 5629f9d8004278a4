"""EPS_UNDERFLOW: a small constant, or a bound near 1, that had no effect in the format."""

from __future__ import annotations

import math

from ampwise import formats
from ampwise.numerics.explain.cause import Argument, Cause, Explanation, Fault
from ampwise.numerics.observe.ancestry import Ancestor, back_from
from ampwise.numerics.observe.draws import count, is_in_half
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.interventions import Scope, on
from ampwise_lint.base.words import counted, figure


def _by_argument(argument: Argument) -> Explanation | None:
    if argument.what == "zero":
        return _zeros(argument)
    return _edge(argument) if argument.what == "edge" else None


def _zeros(argument: Argument) -> Explanation | None:
    """Zeros that a constant should have kept away from 0."""
    least, are, fmt = float(argument.wanted.abs().min()), zeros(argument), argument.fmt
    eps = next((pair for pair in _lost_in(argument.maker) if _guards(pair[0], least)), None)
    if eps is None:
        return None
    if eps[0] > 0.5:
        return _lost_bound(are, *eps, formats.lookup(eps[1].dtype))
    return Explanation(
        "EPS_UNDERFLOW",
        f"{are}: the constant {figure(eps[0])}, which should keep them away from 0, is lost. The "
        f"smallest number of {fmt} is {fmt.min_subnormal:.2g}, and it keeps "
        f"{fmt.mantissa_bits + 1} bits.{_drawn(eps[1])}",
        _if_elsewhere(eps[1], argument.root),
    )


def _drawn(by: Ancestor) -> str:
    """What to say of a constant that is added to a draw in 16 bits; empty of any other."""
    draw = next((each for each in by.parents if is_in_half(each)), None)
    if draw is None:
        return ""
    often = count(formats.lookup(draw.dtype))
    return f" {draw.where(by.place)} draws in {draw.dtype}: the lowest comes once in {often:,}."


def _edge(argument: Argument) -> Explanation | None:
    """Arguments at the end of a domain that a bound should have kept away from it."""
    to, fmt = float(argument.actual[0]), argument.fmt
    bound = next(
        (pair for pair in _lost_in(argument.maker)
         if pair[0] != to and _rounded(pair[0], fmt) == to), None
    )  # fmt: skip
    if bound is None:
        return None
    count = counted(len(argument.actual), "argument")
    return _lost_bound(f"{count} of {argument.root.name} reach {figure(to)}", *bound, fmt)


def zeros(argument: Argument) -> str:
    """How many values are 0."""
    count = len(argument.wanted)
    are = "are" if count > 1 else "is"
    return f"{counted(count, 'value')} that {argument.root.name} needs {are} 0"


def _rounded(value: float, fmt: formats.FloatFormat) -> float:
    return round(value / fmt.ulp(value)) * fmt.ulp(value)


def _lost_bound(what: str, bound: float, by: Ancestor, fmt: formats.FloatFormat) -> Explanation:
    """A bound just inside 1 that rounds to 1."""
    nearest = math.copysign(1.0 - fmt.eps / 2, bound)
    return Explanation(
        "EPS_UNDERFLOW",
        f"{what}: the bound {bound!r} of {by.name} on line {by.place.line} rounds to "
        f"{math.copysign(1, bound):g} in {fmt}, and keeps nothing away. Its number next to it is "
        f"{nearest:.6g}.",
        by,
    )


def _if_elsewhere(made_by: Ancestor, root: Root) -> Ancestor | None:
    """Where it began, if that is another line: of its own the root shows more."""
    place = made_by.place
    return None if place.file_line == root.place.file_line else made_by


def _lost_in(maker: Ancestor | None) -> list[tuple[float, Ancestor]]:
    """Constants that had no effect, and the operations they were lost in, the nearest first."""
    return [(constant, each) for each in back_from(maker) for constant in each.lost]


def _guards(eps: float, least: float) -> bool:
    """Whether a constant would have kept a value away from 0.

    By itself, its root, twice that, by which the derivative of a root divides, or its distance
    from 1.
    """
    root = math.sqrt(abs(eps))
    parts = (eps, root, 2 * root, 1 - eps if eps > 0.5 else 0.0)
    return any(0.5 * least <= part <= 1.001 * least for part in parts)


def _remedies(fault: Fault) -> list[Candidate]:
    fmt = formats.lookup(fault.step.policy.compute_dtype)
    least = 2 * fmt.min_normal if fmt.name == "float16" else 1e-6
    clamps = fault.op.removesuffix("_") in ("clamp", "clamp_max")
    first = [_bounds(fault, fmt, least)] if clamps else _larger_eps(fault, fmt, least)
    return [*first, *fault.in_another_precision()]


def _bounds(fault: Fault, fmt: formats.FloatFormat, least: float) -> Candidate:
    """Both bounds as numbers that the format has, next to 0 and to 1."""
    place = fault.place
    return Candidate(
        f"bounds that {fmt} holds",
        f"line {place.line}: clamp to {least:.2g} from 0 and to {fmt.eps:.2g} from 1",
        on(Scope(place.file, place.line), change.constants(least, math.inf, 1 - fmt.eps)),
    )


def _larger_eps(fault: Fault, fmt: formats.FloatFormat, first: float) -> list[Candidate]:
    """An eps that the format holds; and where that does not do, one whose square it holds."""
    second = 1e-2 if fmt.name == "float16" else 1e-3
    with_default = ("normalize", "cosine_similarity", "layer_norm", "rms_norm")
    scope = Scope(fault.place.file, fault.place.line)
    return [
        Candidate(
            f"an eps that {fmt} holds{again}",
            f"line {fault.place.line}: use eps={eps:.2g}",
            on(scope, change.small_constants(eps, with_default)),
            otherwise=bool(again),
        )
        for eps, again in ((first, ""), (second, ", larger"))
    ]


CAUSE = Cause("EPS_UNDERFLOW", _remedies, by_argument=_by_argument, of_precision=True)
