"""Clipping by value that leaves inf and NaN for the guard to find."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_values_(gradients: Iterable[Tensor], limit: float) -> None:
    """Clamp true gradients to ``[-limit, limit]``, in place; what is not finite stays.

    `torch.nn.utils.clip_grad_value_` makes a finite number of an inf, and the step would be made.
    """
    for each in gradients:
        each.copy_(torch.where(each.isfinite(), each.clamp(-limit, limit), each))
