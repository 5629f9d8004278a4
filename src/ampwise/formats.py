"""Floating-point formats: limits, the gap between neighbouring values, and spelling.

A binary format with ``e`` exponent and ``m`` mantissa bits holds, in every binade
``[2^k, 2^(k+1))`` from ``k = emin`` upwards, ``2^m`` evenly spaced values ``2^(k-m)`` apart.
Below ``2^emin`` the spacing stays that of the lowest binade (subnormals) down to zero::

    bias = 2^(e-1) - 1        emin = 1 - bias        eps = 2^-m
    min normal = 2^emin       min subnormal = 2^(emin-m)
    max = (2 - 2^-m) 2^bias             the IEEE layout: top exponent code is inf and NaN
    max = (2 - 2^(1-m)) 2^(bias+1)      "fn": only the all-ones code is NaN, there is no inf

======================  ====  ====  =========  ============  ==============  ======
format                   e     m    max        min normal    min subnormal   eps
======================  ====  ====  =========  ============  ==============  ======
float64                  11    52   1.80e308   2^-1022       2^-1074         2^-52
float32                   8    23   3.40e38    2^-126        2^-149          2^-23
tf32 (in matmuls only)    8    10   3.40e38    2^-126        2^-136          2^-10
bfloat16                  8     7   3.39e38    2^-126        2^-133          2^-7
float16                   5    10   65504      2^-14         2^-24           2^-10
float8_e4m3fn             4     3   448        2^-6          2^-9            2^-3
float8_e5m2               5     2   57344      2^-14         2^-16           2^-2
======================  ====  ====  =========  ============  ==============  ======

All arithmetic here is on Python floats (float64) and exact. Nothing imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampwise.errors import PolicyError, nearest

HALF = ("float16", "bfloat16")
"""The names of the two formats of 16 bits."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """One binary floating-point format.

    Attributes
    ----------
    name
        PyTorch's name of the dtype (``tf32``, which is no dtype, under its own).
    bits
        Bits a value occupies in memory.
    exponent_bits, mantissa_bits
        Stored bits of exponent and mantissa, the hidden leading one not counted.
    has_inf
        Whether overflow has an infinity to go to; if not, it becomes NaN.
    aliases
        Other accepted spellings, the shortest first.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    has_inf: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """The short spelling used in policy names and reports, such as ``bf16``."""
        return self.aliases[0] if self.aliases else self.name

    @property
    def max(self) -> float:
        """Largest finite value."""
        if self.has_inf:
            return math.ldexp(2.0 - self.eps, self._bias)
        return math.ldexp(2.0 - 2.0 * self.eps, self._bias + 1)

    @property
    def min_normal(self) -> float:
        """Smallest positive value with full precision."""
        return math.ldexp(1.0, self._emin)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value; half of it and less rounds to zero."""
        return math.ldexp(1.0, self._emin - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """Gap between 1.0 and the next larger value."""
        return math.ldexp(1.0, -self.mantissa_bits)

    def ulp(self, x: float) -> float:
        """Spacing of the format's values in the binade of `x`, as `math.ulp` defines it.

        Equals the gap from ``|x|`` to the next larger value, and at `max` the gap below. Zero and
        subnormals give `min_subnormal`. Infinities and anything beyond `max` give inf (no finite
        neighbour), NaN gives NaN. `x` need not itself be a value of the format.
        """
        if math.isnan(x):
            return math.nan
        if abs(x) > self.max:
            return math.inf
        exponent = math.frexp(x)[1] - 1 if x else self._emin
        return math.ldexp(1.0, max(exponent, self._emin) - self.mantissa_bits)

    def __str__(self) -> str:
        return self.name

    @property
    def _bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def _emin(self) -> int:
        return 1 - self._bias


FLOAT64 = FloatFormat("float64", 64, 11, 52, aliases=("fp64", "f64", "double"))
FLOAT32 = FloatFormat("float32", 32, 8, 23, aliases=("fp32", "f32", "float", "single"))
TF32 = FloatFormat("tf32", 32, 8, 10, aliases=("tf32", "tensorfloat32"))
BFLOAT16 = FloatFormat("bfloat16", 16, 8, 7, aliases=("bf16",))
FLOAT16 = FloatFormat("float16", 16, 5, 10, aliases=("fp16", "f16", "half"))
FLOAT8_E4M3FN = FloatFormat("float8_e4m3fn", 8, 4, 3, has_inf=False, aliases=("e4m3fn", "e4m3"))
FLOAT8_E5M2 = FloatFormat("float8_e5m2", 8, 5, 2, aliases=("e5m2",))

FORMATS: tuple[FloatFormat, ...] = (
    FLOAT64,
    FLOAT32,
    TF32,
    BFLOAT16,
    FLOAT16,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
)

_BY_SPELLING = {word: fmt for fmt in FORMATS for word in (fmt.name, *fmt.aliases)}


def dtype_name(dtype: object) -> str:
    """What a dtype is called in reports: ``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def lookup(spelling: object) -> FloatFormat:
    """The format of a spelling: ``fp16``, ``float16``, ``half``, ``torch.float16`` or the dtype.

    Raises
    ------
    PolicyError
        For anything else; the message lists the formats and the nearest spelling.
    """
    word = dtype_name(str(spelling).strip().lower())
    if word not in _BY_SPELLING:
        legal = ", ".join(fmt.name for fmt in FORMATS)
        raise PolicyError(
            f"unknown floating-point format {str(spelling)!r}: expected one of {legal}"
            f"{nearest(word, _BY_SPELLING)}"
        )
    return _BY_SPELLING[word]
