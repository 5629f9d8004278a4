"""Which matrix products ran in which dtype, and on whose line: a step looked at op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.formats import dtype_name
from ampwise.lines import place
from ampwise.places import Place, Places

_PRODUCTS = frozenset(
    ["mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_grouped_mm", "_scaled_mm",
     "convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
     "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"]
)  # fmt: skip
LOWERED = frozenset(
    ["linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "mv", "einsum",
     "chain_matmul", "multi_dot", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
     "conv_transpose2d", "conv_transpose3d", "prelu", "scaled_dot_product_attention"]
)  # fmt: skip
"""Functions of torch's that autocast runs in 16 bits; operators and recurrent ones aside."""
_BIAS_FIRST = ("addmm", "baddbmm", "addbmm", "addmv")
_MOST = 12
"""Lines that are named."""


def is_product(name: str) -> bool:
    """Whether an operation is a matrix product, a convolution, or attention."""
    return name in _PRODUCTS or name.startswith("_scaled_dot_product")


def operand_of(name: str) -> int:
    """Position of the first operand of a product."""
    return 1 if name in _BIAS_FIRST else 0


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a step."""

    name: str
    dtype: str
    place: Place


@dataclass(frozen=True)
class OddProduct:
    """Matrix products of one line that ran in another dtype than most.

    Attributes
    ----------
    module
        FQN; "" outside of modules.
    times
        How many there were in the step that was looked at.
    """

    module: str
    file: str
    line: int
    op: str
    dtype: str
    phase: Literal["forward", "backward"]
    times: int


class CountProducts(TorchDispatchMode):
    """Counts products by dtype and place.

    Attributes
    ----------
    found
        What was counted so far.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.found: Counter[Product] = Counter()
        self._places = places

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        place = self._places.here()
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if is_product(name):
            operand = args[operand_of(name)]
            if isinstance(operand, Tensor) and operand.is_floating_point():
                dtype = dtype_name(operand.dtype)
                self.found[Product(name, dtype, place)] += 1
        return result


def odd_ones(products: Mapping[Product, int], usual: Collection[str]) -> list[OddProduct]:
    """Lines whose products ran in another dtype than is usual."""
    odd = [(each, times) for each, times in products.items() if each.dtype not in usual]
    return [
        OddProduct(each.place.module, each.place.file, each.place.line, each.name, each.dtype,
                   "backward" if each.place.phase == "backward" else "forward", times)
        for each, times in odd[:_MOST]
    ]  # fmt: skip


def in_words(odd: Sequence[OddProduct]) -> list[str]:
    """A line for each line of code; those of forward and its backward together."""
    groups: dict[tuple[str, str, str], list[OddProduct]] = {}
    for each in odd:
        key = (each.dtype, each.module, place(each.file, each.line))
        groups.setdefault(key, []).append(each)
    sums = {key: sum(each.times for each in group) for key, group in groups.items()}
    return [_in_words(key, groups[key], sums[key]) for key in sorted(sums, key=lambda k: -sums[k])]


def _in_words(key: tuple[str, str, str], group: Sequence[OddProduct], times: int) -> str:
    dtype, module, line = key
    ops = ", ".join(dict.fromkeys(_op(each.op) for each in group))
    where = "".join(f", {each}" for each in (module, line) if each)
    return f"{times:,} in {dtype}: {ops}{where}"


def _op(name: str) -> str:
    """An operation by the name that people call it by; attention has a kernel a device."""
    attention = "scaled_dot_product"
    name = name.lstrip("_")
    return f"{attention}_attention" if name.startswith(attention) else name
