"""What is wrong with a tensor: NaN, +inf and -inf as bits, in one pass over its values."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ampwise.numerics.observe.operations import held_by, is_hollow

NAN, POSITIVE, NEGATIVE = 1, 2, 4
"""It holds NaN, +inf, -inf."""


def bad_bits(tensor: Tensor) -> int:
    """`NAN`, `POSITIVE`, `NEGATIVE` of a floating-point tensor; 0 if every value is finite."""
    return bits_and_extreme(tensor)[0]


def all_bits(tensors: Iterable[Tensor]) -> int:
    """The same of several."""
    found = 0
    for each in tensors:
        found |= bad_bits(each)
    return found


def bits_and_extreme(tensor: Tensor) -> tuple[int, float]:
    """What is wrong with a tensor; and its value of the largest magnitude."""
    tensor = held_by(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel() or is_hollow(tensor):
        return 0, 0.0
    if tensor.element_size() == 1:
        tensor = tensor.float()
    low, high = (each.item() for each in torch.aminmax(tensor))
    if math.isnan(low) or math.isnan(high):
        return NAN, math.nan
    bits = (POSITIVE if high == math.inf else 0) | (NEGATIVE if low == -math.inf else 0)
    return bits, high if high >= -low else low


def extreme_of(tensors: Iterable[Tensor]) -> float:
    """The finite value of the largest magnitude, with its sign; 0 without any."""
    wide = (each.detach().double() for each in tensors if each.is_floating_point())
    held = (each[torch.isfinite(each)] for each in wide)
    ends = [float(end) for each in held if each.numel() for end in torch.aminmax(each)]
    return max(ends, key=abs, default=0.0)
