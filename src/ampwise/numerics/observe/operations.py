"""An operation as a dispatch mode sees it: its schema, and the tensors that it takes and writes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_EMPTY = frozenset(["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"])
FILLS = frozenset(
    ["full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where",
     "scalar_tensor", "lift_fresh", "lift_fresh_copy", "index_fill", "index_fill_", "index_put",
     "index_put_", "constant_pad_nd"]
)  # fmt: skip
"""Operations that write constants of the code."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What an overload's schema says.

    Attributes
    ----------
    mutates
        Whether it writes some of its arguments.
    empty
        Whether it gives memory that nobody has written.
    composite
        Whether it is made of others, which are seen instead; a subclass of tensors calls such.
    """

    name: str
    func: Any
    mutates: bool
    empty: bool
    composite: bool


@cache
def operation(func: Any) -> Operation:
    """The operation of an overload."""
    name = func._overloadpacket.__name__ if hasattr(func, "_overloadpacket") else str(func)
    schema = func._schema
    mutates = any(each.alias_info is not None and each.alias_info.is_write
                  for each in schema.arguments)  # fmt: skip
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return Operation(name, func, mutates, name in _EMPTY, composite)


class OperationMode(TorchDispatchMode):
    """Runs each operation by `operate`: those that others are made of, on plain tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_for_subclass(types):
            return NotImplemented
        op = operation(func)
        if op.composite:
            with self:
                return func.decompose(*args, **kwargs)
        return self.operate(op, args, kwargs)

    def operate(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; classes of this one see here what it is given and gives."""
        raise NotImplementedError


def written(
    operation: Operation, args: Any, kwargs: Any, result: Any, *, discrete: bool = False
) -> list[Tensor]:
    """Results that are no views of the inputs, and inputs that were written.

    Parameters
    ----------
    discrete
        Integers and masks instead of numbers with a point.
    """
    found: list[Tensor] = []
    if operation.mutates:
        for place, argument in enumerate(operation.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                found += tensors(value)
    own = {memory(each) for each in tensors((args, kwargs))}
    found += [each for each in tensors(result) if memory(each) not in own]
    return [each for each in found if is_discrete(each) is discrete]


def is_discrete(tensor: Tensor) -> bool:
    """Whether a tensor holds integers, indices or a mask."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def arguments_by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What an overload was called with, by the names of its schema."""
    names = [each.name for each in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an argument, or in all of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors(each)]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors(each)]
    return []


def is_for_subclass(types: Any) -> bool:
    """Whether a subclass of tensors is to take an operation apart first: float8 of torchao's, say.

    What it makes of it are operations on plain tensors, which are seen in turn.
    """
    plain: Any = Tensor
    return any(each.__torch_dispatch__ is not plain.__torch_dispatch__ for each in types)


def copied(value: Any) -> Any:
    """Arguments with copies of their tensors."""
    return tree_map(lambda each: each.detach().clone() if isinstance(each, Tensor) else each, value)


def memory(tensor: Tensor) -> int:
    """Identity of a tensor's memory: the same for its views, as long as it is alive."""
    try:
        return held_by(tensor).untyped_storage()._cdata
    except NotImplementedError:
        return id(tensor)


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor covers all of its memory."""
    tensor = held_by(tensor)
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def held_by(tensor: Tensor) -> Tensor:
    """A tensor's values: of a sparse one, those that it has."""
    return tensor._values() if tensor.is_sparse else tensor


def is_hollow(tensor: Tensor) -> bool:
    """Whether a tensor has no values to look at: autograd's zeros, and shapes without memory."""
    return tensor._is_zerotensor() or tensor.is_meta
