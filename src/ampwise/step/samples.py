"""How many samples a batch holds, when nobody says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def samples_in(batch: Any) -> int:
    """Length of the first dimension of the first tensor in any nesting; 1 if there is none."""
    return _leading(batch) or 1


def _leading(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.size(0) if value.dim() else 0
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        return 0
    return next((length for each in value if (length := _leading(each))), 0)
