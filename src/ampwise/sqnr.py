"""How far values are from a float64 reference.

SQNR = 10 log10( sum(exact^2) / sum((actual - exact)^2) )      in dB, larger is better
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Error:
    """How far values are from what they should be.

    Attributes
    ----------
    sqnr_db
        Signal over noise; inf when exact.
    flushed
        Share of the signal (by norm) that became exactly zero, 0 to 1.
    zeros
        Share of elements that are zero and should not be.
    """

    sqnr_db: float
    flushed: float
    zeros: float


def sqnr_db(actual: Tensor, reference: Tensor) -> float:
    """SQNR of a tensor against its float64 reference of the same shape; inf when exact."""
    noise = float(torch.linalg.vector_norm(actual.detach().double() - reference))
    signal = float(torch.linalg.vector_norm(reference))
    if math.isfinite(noise) and math.isfinite(signal):
        return decibels(signal, noise)
    return compare(actual, reference).sqnr_db


def compare(actual: Tensor, reference: Tensor) -> Error:
    """Errors of a tensor against its float64 reference of the same shape."""
    actual = actual.detach().double()
    # Infinities that are meant (masks) are no noise, and no signal.
    noise = torch.where(actual == reference, 0.0, actual - reference)
    reference = torch.where(torch.isinf(reference) & (actual == reference), 0.0, reference)
    signal = float(torch.linalg.vector_norm(reference))
    lost = (actual == 0) & (reference != 0)
    flushed = float(torch.linalg.vector_norm(torch.where(lost, reference, 0.0)))
    return Error(
        decibels(signal, float(torch.linalg.vector_norm(noise))),
        flushed / signal if 0 < signal < math.inf else 0.0,
        float(lost.double().mean()) if lost.numel() else 0.0,
    )


def decibels(signal: float, noise: float) -> float:
    """Of a signal over noise, from their norms; inf without noise, -inf where one is not finite."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return -math.inf
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal > 0 else -math.inf


def rms(tensor: Tensor) -> float:
    """Root mean square; 0 of nothing."""
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
