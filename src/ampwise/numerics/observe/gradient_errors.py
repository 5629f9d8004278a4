"""Which gradients are wrong: missing, or noise, against those of a float64 shadow."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from ampwise.sqnr import Error, compare, decibels

NEGLIGIBLE = 1e-6
"""Gradients this small beside the largest (root mean square) are zero in exact arithmetic."""

MISSING = 0.5
"""Share of a gradient's norm that has to be there."""

FEW = 8
"""Elements of a gradient below which rounding may by chance take most of its norm."""

LEAST_SHARE = 1e-3
"""Share of the norm of all gradients below which one is too small to be looked at by itself."""

GRADIENT_DB = 3.0
"""SQNR of the whole gradient below which a step is wrong: an error of 70 % of its norm. Small and
ill-conditioned networks (batch norm over a few samples) fall to 8 dB in bfloat16, and train."""

NOISE_DB = 10.0
"""SQNR below which one is a fault where float32 on a line mends it; and up to which a patch has to
gain, however the step was without it."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """A gradient beside its reference: sums, over the elements, of squares and of products."""

    actual: float
    ideal: float
    noise: float
    product: float
    count: int

    @property
    def rms(self) -> float:
        """Root mean square of the reference; 0 of nothing."""
        return math.sqrt(self.ideal / self.count) if self.count else 0.0


class GradientErrors:
    """Gradients beside their float64 reference, each read once; sparse ones are left out.

    Parameters
    ----------
    actual, reference
        Gradients by parameter name.
    scale
        What `actual` has to be divided by.
    """

    def __init__(
        self, actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], scale: float = 1.0
    ) -> None:
        self._actual, self._reference, self._scale = actual, reference, scale
        self._sums = {
            name: _sums(actual[name], ideal, scale)
            for name, ideal in reference.items()
            if name in actual and not actual[name].is_sparse
        }
        sums = self._sums.values()
        self.noise = math.sqrt(sum(each.noise for each in sums))
        self.norm = math.sqrt(sum(each.ideal for each in sums))

    @property
    def sqnr_db(self) -> float:
        """SQNR of all gradients as one vector, in dB; inf when exact."""
        return decibels(self.norm, self.noise)

    @property
    def cosine(self) -> float:
        """Between all gradients as one vector, and the reference's; 1 where both are zero."""
        own = math.sqrt(sum(each.actual for each in self._sums.values()))
        if self.norm == 0 or own == 0:
            return 1.0 if own == self.norm else 0.0
        return sum(each.product for each in self._sums.values()) / (own * self.norm)

    def missing(self) -> dict[str, Error]:
        """Parameters most of whose gradient is missing, with its errors.

        A gradient that is only inexact is none of them: that of a bias before a normalisation, say,
        is a sum that cancels, and mostly rounding noise in any precision.
        """
        largest = max((each.rms for each in self._sums.values()), default=0.0)
        found: dict[str, Error] = {}
        for name, sums in self._sums.items():
            # What is missing is noise, too: with less of that there is nothing to look for.
            if sums.rms <= NEGLIGIBLE * largest or sums.noise <= MISSING**2 * sums.ideal:
                continue
            error = compare(self._actual[name].double() / self._scale, self._reference[name])
            few = self._reference[name].numel() < FEW
            if error.flushed > MISSING or (not few and sums.actual < MISSING**2 * sums.ideal):
                found[name] = error
        return found

    def noisy(self, below_db: float = 0.0) -> dict[str, float]:
        """Weight matrices that train on noise: SQNR of their gradients, in dB, where it is low.

        Beside large gradients the noise of a small one does not show in that of the whole. Vectors
        are left out: see `missing` for the bias before a normalisation.
        """
        least = (LEAST_SHARE * self.norm) ** 2
        matrices = {
            name: decibels(math.sqrt(sums.ideal), math.sqrt(sums.noise))
            for name, sums in self._sums.items()
            if self._reference[name].dim() >= 2 and sums.ideal > least
        }
        return {name: kept for name, kept in matrices.items() if kept < below_db}

    def hidden(self) -> list[str]:
        """Weight matrices that train on noise, which the whole gradient does not show."""
        if self.sqnr_db < GRADIENT_DB:
            return []
        return list(self.noisy(max(0.0, min(NOISE_DB, self.sqnr_db - NOISE_DB))))

    def least(self, names: Collection[str]) -> tuple[float, str]:
        """The least SQNR, in dB, of the whole gradient ("") and of some matrices, and of which.

        One that is too small to be looked at here is left out, as by `noisy`.
        """
        alone = self.noisy(math.inf)
        return min([(self.sqnr_db, ""), *((alone[each], each) for each in names if each in alone)])

    @property
    def worst_db(self) -> float:
        """The least SQNR of a weight matrix, in dB; inf where none is large enough to look at."""
        return min(self.noisy(math.inf).values(), default=math.inf)

    def relative(self, names: Collection[str]) -> float:
        """Error of some gradients beside their norm; of all as one vector, of others each alone."""
        if set(names) >= self._sums.keys():
            return self.noise / self.norm if self.norm else 0.0
        sums = [self._sums[each] for each in names]
        return math.sqrt(sum(each.noise / each.ideal for each in sums if each.ideal))


def _sums(actual: Tensor, ideal: Tensor, scale: float) -> _Sums:
    own, ideal = actual.detach().double().flatten() / scale, ideal.flatten()
    product, size = float(own @ ideal), float(own @ own)
    noise = own.sub_(ideal)
    return _Sums(size, float(ideal @ ideal), float(noise @ noise), product, own.numel())


def in_words(noisy: Mapping[str, float]) -> str:
    """Which matrices train on noise, the worst first."""
    worst = sorted(noisy, key=lambda name: noisy[name])
    more = f" and {len(worst) - 2} more" if len(worst) > 2 else ""
    return (
        f"the gradient of {', '.join(worst[:2])}{more} is noise, with an SQNR of "
        f"{noisy[worst[0]]:z.0f} dB against float64"
    )
