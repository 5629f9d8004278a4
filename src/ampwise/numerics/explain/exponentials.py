"""Operations that overflow for arguments above log(max of the format), times a factor."""

from __future__ import annotations

import math

from ampwise import formats
from ampwise.numerics.explain.cause import Fault
from ampwise.numerics.remedy.candidate import Candidate

_FACTORS = {"exp": 1.0, "expm1": 1.0, "sinh": 1.0, "cosh": 1.0, "exp2": math.log2(math.e)}


def smaller_argument(fault: Fault) -> list[Candidate]:
    """What keeps the argument of an exponential small; of another operation nothing."""
    op = fault.op.removesuffix("_")
    if op not in _FACTORS:
        return []
    fmt = formats.lookup(fault.dtype or "float32")
    most = math.log(fmt.max) * _FACTORS[op]
    how = (
        f"line {fault.place.line}: subtract the maximum first (x - x.amax(dim, keepdim=True)); or "
        "stay in log-space (logsumexp, log_softmax, softplus); or clamp the argument below "
        f"log(max of {fmt}): x.clamp(max={math.floor(10 * most) / 10:g})"
    )
    return [Candidate(f"keep the argument of {op} small", how, tried=False)]
