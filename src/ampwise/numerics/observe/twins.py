"""Float64 twins of memory: where the shadow of a tensor is kept.

For each piece of memory a flat float64 twin; a tensor's shadow is the twin under the tensor's own
strides. So views, in-place operations and saved tensors find their shadow without bookkeeping.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from ampwise.numerics.observe.exact import FLOATS
from ampwise.numerics.observe.operations import is_discrete, is_hollow, memory

Key = tuple[int, torch.dtype]


def key_of(tensor: Tensor) -> Key:
    """Where a tensor's shadow is kept, and all else that is known of its values."""
    return memory(tensor), tensor.dtype


class Twins:
    """The shadows of a run.

    Parameters
    ----------
    discrete
        Also of integers and masks, which otherwise are those of the run.
    """

    def __init__(self, *, discrete: bool = False) -> None:
        self._discrete = discrete
        self._twins: dict[Key, tuple[Any, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """The shadow of a tensor; None where there is none."""
        if not self._has(tensor) or is_hollow(tensor):
            return None
        found = self._twins.get(key_of(tensor))
        if found is None:
            return None
        return found[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Let a tensor have these values as its shadow."""
        key = key_of(tensor)
        if key not in self._twins:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            twin = torch.zeros(size, dtype=torch.float64, device=tensor.device)
            whole: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            storage: Any = tensor.untyped_storage()
            whole.set_(storage, 0, (size,))
            twin.copy_(whole)  # what is not written now is as it actually is
            weak = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
            self._twins[key] = (weak, twin)
        place = self._twins[key][1].as_strided(
            tensor.size(), tensor.stride(), tensor.storage_offset()
        )
        for dim, (size, stride) in enumerate(zip(place.size(), place.stride(), strict=True)):
            if size > 1 and stride == 0:  # expanded: one element stands for all
                place, values = place.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        place.copy_(values)

    def raised(self, value: Any) -> Any:
        """An argument as it would be without rounding; what is no such tensor stays as it is."""
        if not isinstance(value, Tensor) or not self._has(value):
            return value
        twin = self.of(value)
        to = torch.float64 if value.dtype in FLOATS else value.dtype
        return (value.detach() if twin is None else twin).to(to, copy=True)

    def _has(self, tensor: Tensor) -> bool:
        """Whether tensors of this kind have shadows."""
        known = tensor.dtype in FLOATS or (self._discrete and is_discrete(tensor))
        return known and not tensor.is_sparse

    def prune(self) -> Container[Key]:
        """Let go of the twins of memory that is gone; the keys of those that are left."""
        self._twins = {key: each for key, each in self._twins.items() if not each[0].expired()}
        return self._twins.keys()
