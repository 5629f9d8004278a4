"""Which gradients are wrong: missing, or noise, against those of a float64 shadow."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ampwise.numerics.shadow import Error, compare, rms, sqnr_db

NEGLIGIBLE = 1e-6
"""Gradients this small beside the largest (root mean square) are zero in exact arithmetic."""

MISSING = 0.5
"""Share of a gradient's norm that has to be there."""


def missing_gradients(
    actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], scale: float = 1.0
) -> dict[str, Error]:
    """Parameters most of whose gradient is missing, with its errors.

    A gradient that is only inexact is none of them: that of a bias before a normalisation, say, is
    a sum that cancels, and mostly rounding noise in any precision.

    Parameters
    ----------
    actual, reference
        Gradients by parameter name.
    scale
        What `actual` has to be divided by.
    """
    sizes = {name: rms(each) for name, each in reference.items()}
    largest = max(sizes.values(), default=0.0)
    missing: dict[str, Error] = {}
    for name, ideal in reference.items():
        gradient = actual.get(name)
        if gradient is None or gradient.is_sparse or sizes[name] <= NEGLIGIBLE * largest:
            continue
        error = compare(gradient.double() / scale, ideal)
        if error.flushed > MISSING or rms(gradient.double() / scale) < MISSING * sizes[name]:
            missing[name] = error
    return missing


LEAST_SHARE = 1e-3
"""Share of the norm of all gradients below which one is too small to be looked at by itself."""


def noisy_matrices(
    actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], scale: float = 1.0
) -> dict[str, float]:
    """Weight matrices that train on noise: SQNR of their gradients, in dB, where it is below 0.

    Beside large gradients the noise of a small one does not show in that of the whole. Vectors are
    left out: see `missing_gradients` for the bias before a normalisation.

    Parameters
    ----------
    actual, reference, scale
        As for `missing_gradients`.
    """
    norms = {name: float(torch.linalg.vector_norm(each)) for name, each in reference.items()}
    least = LEAST_SHARE * math.hypot(*norms.values())
    found: dict[str, float] = {}
    for name, ideal in reference.items():
        gradient = actual.get(name)
        if gradient is None or gradient.is_sparse or ideal.dim() < 2 or norms[name] <= least:
            continue
        kept = sqnr_db(gradient.double() / scale, ideal)
        if kept < 0:
            found[name] = kept
    return found


def in_words(noisy: Mapping[str, float]) -> str:
    """Which matrices train on noise, the worst first."""
    worst = sorted(noisy, key=lambda name: noisy[name])
    more = f" and {len(worst) - 2} more" if len(worst) > 2 else ""
    return (
        f"the gradient of {', '.join(worst[:2])}{more} is noise, with an SQNR of "
        f"{noisy[worst[0]]:.0f} dB against float64"
    )
