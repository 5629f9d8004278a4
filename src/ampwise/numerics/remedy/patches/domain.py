"""Arguments at which a function, or its derivative, has no finite value."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampwise import formats
from ampwise.formats import HALF
from ampwise.numerics.remedy.patches.edit import Edit
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.template import Guard, Rewrite

_SINGULAR = {
    "log": "1.0", "log2": "1.0", "log10": "1.0", "sqrt": "1.0", "rsqrt": "1.0",
    "reciprocal": "1.0", "acos": "0.0", "asin": "0.0", "atanh": "0.0", "exp": "0.0",
    "expm1": "0.0", "exp2": "0.0", "cosh": "0.0",
}  # fmt: skip
"""Functions, and an argument at which all is well."""

_TWICE = (
    "`where` differentiates both branches: the one that is not taken gives 0 times inf, which is "
    "NaN. A safe argument keeps it finite."
)
_WHAT = "where around the argument, too"


def _untouched(*holes: str) -> Guard:
    """Whether no hole is safe already."""
    return lambda taken: all(taken[each].op not in _SAFE for each in holes)


_SAFE = ("where", "clamp", "clamp_min", "clamp_max")


def _double_where() -> Iterator[Rewrite]:
    for op, safe in _SINGULAR.items():
        for pattern, instead in (
            (f"where(M, {op}(X), Y)", f"where(M, torch.{op}(torch.where(M, X, {safe})), Y)"),
            (f"where(M, Y, {op}(X))", f"where(M, Y, torch.{op}(torch.where(M, {safe}, X)))"),
        ):
            yield Rewrite(_WHAT, _TWICE, (pattern,), f"torch.{instead}", _untouched("X"))
    for hole, pattern, instead in (
        ("Z", "where(M, X / Z, Y)", "torch.where(M, X / torch.where(M, Z, 1.0), Y)"),
        ("Z", "where(M, Y, X / Z)", "torch.where(M, Y, X / torch.where(M, 1.0, Z))"),
        ("X", "where(M, pow(X, N), Y)", "torch.where(M, torch.where(M, X, 1.0) ** N, Y)"),
    ):
        yield Rewrite(_WHAT, _TWICE, (pattern,), instead, _untouched(hole))


DOUBLE_WHERE = tuple(_double_where())

_AWAY = "The argument is kept where the function and its derivative are finite."
_NEAR_ZERO = ("DOMAIN_ERROR", "BACKWARD_SINGULARITY", "UNDERFLOW", "EPS_UNDERFLOW")
_TOO_LARGE = ("DOMAIN_ERROR", "RANGE_OVERFLOW")
_OF_PRECISION = ("UNDERFLOW", "EPS_UNDERFLOW", "RANGE_OVERFLOW")
"""Causes of which float64 is free: there the formula is right as it is written."""


def _clamped(site: Site) -> Iterator[Rewrite]:
    """A clamp into the domain of the function; in float32, where 16 bits are too few.

    The smallest first, which changes the least; of what is nearer to 0 the derivative is larger,
    and may not be beyond float16.
    """
    wide = ".float()" if site.dtype in HALF else ""
    half = site.compute_dtype == "float16" and site.cause not in _OF_PRECISION
    for least, squared in (("1e-12", "1e-12"), *([("1e-4", "1e-8")] if half else ())):
        yield from _above_0(wide, least, squared)
    yield from _inside()


def _inside() -> Iterator[Rewrite]:
    """A clamp between the ends of the domain, where there is no derivative."""
    for op in ("acos", "asin", "atanh"):
        yield _kept(f"the argument of {op} kept inside -1 to 1", f"{op}(X)",
                    f"torch.{op}(X.float().clamp(-1 + 1e-6, 1 - 1e-6))")  # fmt: skip


def _above_0(wide: str, least: str, squared: str) -> Iterator[Rewrite]:
    """A clamp above 0; `squared` is that of what a root is taken of."""
    for op in ("sqrt", "log", "log2", "log10", "rsqrt"):
        limit = squared if op.endswith("sqrt") else least
        yield _kept(f"the argument of {op} kept above 0", f"{op}(X)",
                    f"torch.{op}(X{wide}.clamp_min({limit}))")  # fmt: skip
    for what, pattern, instead in (
        ("base of a power", "pow(X, N)", "X{} ** N"),
        ("divisor", "Y / X", "Y / X{}"),
        ("divisor", "reciprocal(X)", "1 / X{}"),
    ):
        above = instead.format(f"{wide}.clamp_min({least})")
        yield _kept(f"the {what} kept above 0", pattern, above)


def _limited(site: Site) -> Iterator[Rewrite]:
    """A clamp below the logarithm of the largest number that the format has."""
    most = math.floor(10 * math.log(formats.lookup(site.dtype or "float32").max)) / 10
    for op in ("exp", "expm1", "sinh", "cosh"):
        yield _kept(f"the argument of {op} kept below {most:g}", f"{op}(X)",
                    f"torch.{op}(X.clamp(max={most:g}))")  # fmt: skip


def _kept(what: str, pattern: str, instead: str) -> Rewrite:
    return Rewrite(what, _AWAY, (pattern,), instead, _untouched("X"))


_EMPTY = Rewrite(
    "a mean over what is there, which may be nothing",
    "The mean of no elements is 0 divided by 0; the sum is 0.",
    ("mean(X)",),
    "X.sum() / max(X.numel(), 1)",
)


def edits(site: Site) -> Iterator[Edit]:
    """A safe argument: by `where`; by a clamp, where no format would do."""
    rows: list[Rewrite] = []
    if site.cause == "EMPTY_REDUCTION":
        rows.append(_EMPTY)
    if site.cause in (*_NEAR_ZERO, *_TOO_LARGE):
        rows += DOUBLE_WHERE
    if site.cause not in _OF_PRECISION:
        rows += _clamps(site)
    for row in rows:
        yield from row.edits(site)


def clamps(site: Site) -> Iterator[Edit]:
    """A clamp where a wider format might have done: it changes what is computed."""
    if site.cause in ("PRECISION_LOSS", "CANCELLATION"):
        for row in _inside():
            yield from row.edits(site)
    if site.cause in _OF_PRECISION:
        for row in _clamps(site):
            yield from row.edits(site)


def _clamps(site: Site) -> list[Rewrite]:
    rows = list(_clamped(site)) if site.cause in _NEAR_ZERO else []
    return [*rows, *_limited(site)] if site.cause in _TOO_LARGE else rows
