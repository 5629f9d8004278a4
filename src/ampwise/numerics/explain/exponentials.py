"""Operations that overflow for arguments above log(max of the format), times a factor."""

from __future__ import annotations

import math

from ampwise import formats
from ampwise.numerics.explain.cause import Fault
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.interventions import Scope, on

_FACTORS = {"exp": 1.0, "expm1": 1.0, "sinh": 1.0, "cosh": 1.0, "exp2": math.log2(math.e)}


def smaller_argument(fault: Fault) -> list[Candidate]:
    """A clamp that keeps the argument of an exponential small; of another operation nothing."""
    op, place = fault.op.removesuffix("_"), fault.place
    if op not in _FACTORS or place.phase != "forward" or not place.file:
        return []
    fmt = formats.lookup(fault.dtype or "float32")
    most = math.floor(10 * math.log(fmt.max) * _FACTORS[op]) / 10
    least = -most if op in ("sinh", "cosh") else None
    bounds = f"max={most:g}" if least is None else f"min={least:g}, max={most:g}"
    how = (
        f"line {place.line}: clamp the argument below log(max of {fmt}): x.clamp({bounds}). "
        "What is beyond is no longer the same, and gets no gradient"
    )
    limited = on(Scope(place.file, place.line), change.clamped(_FACTORS, least, most))
    return [Candidate(f"keep the argument of {op} small", how, limited)]
