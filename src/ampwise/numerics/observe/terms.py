"""How large the terms of a sum are: how small an error of the sum can be asked for."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ampwise.numerics.observe.exact import FLOATS, exact
from ampwise.numerics.observe.operations import Operation
from ampwise.numerics.observe.twins import Key, Twins, key_of

_SUMS = {
    "sum": "sum", "mean": "mean", "add": "add", "sub": "add", "rsub": "add", "mul": "mul",
    "div": "div", "neg": "neg", "_to_copy": "_to_copy",
}  # fmt: skip
"""Operations that sum or only scale, and what they are on magnitudes."""


class Terms:
    """Of the numbers of a run that are sums: the same operations on magnitudes."""

    def __init__(self, twins: Twins) -> None:
        self._twins = twins
        self._terms: dict[Key, float] = {}

    def of(self, number: Tensor) -> float:
        """Size of the terms that a number is the sum of; its own where it is no sum."""
        own = float(self._twins.raised(number).abs())
        return max(own, self._terms.get(key_of(number), 0.0))

    def note(self, operation: Operation, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """Keep the size of the terms of what an operation wrote, if that is one number."""
        for tensor in results:  # an address may be used again
            self._terms.pop(key_of(tensor), None)
        if operation.name not in _SUMS or len(results) != 1 or results[0].numel() != 1:
            return
        packet = getattr(torch.ops.aten, _SUMS[operation.name])
        func = getattr(packet, operation.func._overloadname)
        args, kwargs = tree_map(self._magnitude, args), tree_map(self._magnitude, kwargs)
        self._terms[key_of(results[0])] = float(exact(func, args, kwargs)[0].abs())

    def keep(self, alive: Container[Key]) -> None:
        """Forget all others."""
        self._terms = {key: each for key, each in self._terms.items() if key in alive}

    def _magnitude(self, value: Any) -> Any:
        if isinstance(value, float):
            return abs(value)
        if not isinstance(value, Tensor) or value.dtype not in FLOATS:
            return value
        if value.numel() == 1 and key_of(value) in self._terms:
            return torch.full_like(value, self.of(value), dtype=torch.float64)
        return self._twins.raised(value).abs()
