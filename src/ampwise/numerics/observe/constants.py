"""Tensors made of Python numbers: what they were before they were rounded.

``x.new_tensor(0.999)`` in bfloat16 is 1, and what dispatch sees of it is that 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ampwise.numerics.observe.ancestry import Ancestor
from ampwise.numerics.observe.exact import FLOATS, HALF
from ampwise.step.precision.functions import CallMode

_MAKE = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, Tensor.new_tensor: 1}
"""Which argument of a function is what a tensor is made of."""


@dataclass(frozen=True, slots=True)
class Original:
    """What a tensor was before it was rounded, and what made it.

    Attributes
    ----------
    rounded
        What it was then.
    """

    rounded: Tensor
    exact: Tensor
    maker: Ancestor


ORIGINALS: MutableMapping[Tensor, Original] = WeakIdKeyDictionary()
"""Of tensors that models hold (`made`)."""


def originals(models: Iterable[nn.Module]) -> Iterator[tuple[Tensor, Original]]:
    """Those of models that nobody has written to since."""
    for tensor in (each for model in models for _, each in in_16_bits(model)):
        original = ORIGINALS.get(tensor)
        if original is not None and torch.equal(original.rounded, tensor):
            yield tensor, original


def in_16_bits(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in 16 bits that modules hold beside their parameters."""
    yield from ((name, each) for name, each in model.named_buffers() if each.dtype in HALF)
    for path, module in model.named_modules():
        for name, each in vars(module).items():
            if isinstance(each, Tensor) and each.dtype in HALF:
                yield f"{path}.{name}", each


class Constants(CallMode):
    """Tells of each tensor in a floating-point format that is made of numbers which it is.

    Parameters
    ----------
    tell
        Called with the tensor, and the same in float64.
    """

    def __init__(self, tell: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call."""
        made = func(*args, **kwargs)
        at = _MAKE.get(func)
        if at is not None and made.dtype in FLOATS:
            data = args[at] if len(args) > at else kwargs.get("data", kwargs.get("obj"))
            with _disable_current_modes():
                if _are_numbers(data):
                    self._tell(made, torch.tensor(data, dtype=torch.float64, device=made.device))
        return made


def _are_numbers(data: Any) -> bool:
    """Whether these are numbers, in lists or not; other tensors and arrays are read as they are."""
    if isinstance(data, list | tuple):
        return all(map(_are_numbers, data))
    return isinstance(data, int | float)
