"""Student's t distribution, for the few values that a bench asks it for.

With a whole number v of degrees of freedom, and ``a = atan(t / sqrt(v))``, the probability of lying
within t of 0 is a finite sum of powers of ``cos(a)`` (Abramowitz and Stegun, 26.7.3 and 26.7.4):

    v odd    2/pi (a + sin(a) (c + 2/3 c^3 + (2 4)/(3 5) c^5 + ... up to c^(v-2)))
    v even   sin(a) (1 + 1/2 c^2 + (1 3)/(2 4) c^4 + ... up to c^(v-2))          c = cos(a)

Right to some 1e-14 up to 1,000 degrees of freedom. SciPy has it, too, and would be 143 MB for this.
"""

from __future__ import annotations

import math
from functools import cache


def cdf(freedom: int, t: float) -> float:
    """Probability that a t of so many degrees of freedom is at most `t`."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    within = math.sin(angle) * total
    if odd:
        within = 2 / math.pi * (angle + within)
    return min(max((1 + within) / 2, 0.0), 1.0)


@cache
def quantile(freedom: int, p: float) -> float:
    """The t that lies above the fraction `p` of the distribution, by halving; 0.5 <= p < 1."""
    low, high = 0.0, 1.0
    while cdf(freedom, high) < p:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if cdf(freedom, middle) < p else (low, middle)
    return high
