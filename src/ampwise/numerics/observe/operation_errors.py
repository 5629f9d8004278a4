"""Errors of single operations: what each rounds away by itself, and how wrong what it gives is.

    local       SQNR against float64 on the actual inputs
    propagated  SQNR against the shadow, as if nothing had been rounded since the batch

Integers are exact until they are larger than the format counts to; then neighbours become one, and
what is computed of them (positions, indices) may be wrong where no error shows.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampwise import formats
from ampwise.formats import dtype_name
from ampwise.numerics.observe.ancestry import DIFFERENCES
from ampwise.numerics.observe.exact import UnsupportedError, exact
from ampwise.numerics.observe.operations import Operation, tensors
from ampwise.numerics.observe.twins import Key, Twins, key_of
from ampwise.numerics.result import Extent
from ampwise.places import Place
from ampwise.sqnr import compare, rms, sqnr_db

RIGHT_DB, WRONG_DB = 20.0, 15.0
"""SQNR above which inputs are right, and below which a result of such inputs is wrong."""
_LOW_DB = 20.0
"""Below this an operation is looked at more closely."""
_FLOAT32_BYTES = 4
_SUMS = ("add", "cumsum", "index_add", "scatter_add")
_COUNTS = frozenset([*_SUMS, *(f"{each}_" for each in _SUMS)])
"""Operations that count, where all that they are given are integers."""
_FROM_INTEGERS = frozenset(["arange", "_to_copy", "cumsum"])
"""Operations that turn integers into floating point: positions, counters."""
FROM_NUMBERS = frozenset(
    ["full", "full_like", "new_full", "fill", "fill_", "scalar_tensor", "linspace"]
)
"""Operations that make a tensor of Python numbers."""


@dataclass(slots=True)
class OperationError:
    """Errors of one operation's result.

    Attributes
    ----------
    local_db
        SQNR against float64 on the actual inputs; inf for results in float32, which are not looked
        at.
    propagated_db
        SQNR against the shadow.
    inputs_db
        Least propagated SQNR among its inputs.
    bias
        Mean signed local error, relative to the root mean square of the values.
    exact_amax
        Largest magnitude of the shadow, of a difference, and of a result that is wrong.
    flushed, zeros
        Of a result with a low `local_db`: as in `sqnr.Error`.
    integers
        Whether integers came out rounded.
    beyond
        Of a result in float8: share of values beyond its largest.
    miscounted
        Whether the result is wrong and integers that were rounded before took part in it.
    occurrence
        How many operations of the same name at the same place came before it.
    func
        The operation itself.
    miscounts
        How many integers came out rounded.
    """

    index: int
    name: str
    place: Place
    dtype: str
    local_db: float
    propagated_db: float
    inputs_db: float
    bias: float = 0.0
    exact_amax: float = 0.0
    flushed: float = 0.0
    zeros: float = 0.0
    integers: bool = False
    beyond: float = 0.0
    miscounted: bool = False
    occurrence: int = 0
    func: Any = None
    miscounts: Extent | None = None

    @property
    def enlarges(self) -> bool:
        """Whether what a forward operation gives is wrong, and what it was given is right."""
        known = self.inputs_db >= RIGHT_DB and self.propagated_db < WRONG_DB
        return known and self.place.phase == "forward"


@dataclass(slots=True)
class Made:
    """An operation that was made, and made in float64 beside it.

    Attributes
    ----------
    args, kwargs
        What it was given; copies where it writes them.
    raised
        The same as it would be without rounding.
    floating
        The floating-point tensors among them, themselves.
    result, written
        What it returned, and the floating-point tensors that it wrote.
    references
        What these would be without rounding; None where it has no float64 form.
    inputs_db
        Least SQNR among its inputs.
    """

    index: int
    occurrence: int
    operation: Operation
    place: Place
    args: Any
    kwargs: Any
    raised: tuple[Any, Any]
    floating: list[Tensor]
    result: Any
    written: list[Tensor]
    references: list[Tensor] | None
    inputs_db: float


class Qualities:
    """SQNR of the tensors of a run against their shadows."""

    def __init__(self) -> None:
        self._known: dict[Key, float] = {}

    def worst(self, inputs: list[Tensor]) -> float:
        """The least of some tensors; inf where none is known."""
        return min((self._known.get(key_of(each), math.inf) for each in inputs), default=math.inf)

    def measure(self, written: list[Tensor], references: list[Tensor] | None) -> float:
        """SQNR of what an operation wrote, the least; inf where it has no float64 form."""
        least = math.inf
        for tensor, reference in zip(written, references or (), strict=False):
            if tensor.numel() and tensor.shape == reference.shape:
                found = self._known[key_of(tensor)] = sqnr_db(tensor, reference)
                least = min(least, found)
        return least

    def forget(self, written: list[Tensor]) -> None:
        """What these are is not known any more."""
        for each in written:
            self._known.pop(key_of(each), None)

    def keep(self, alive: Container[Key]) -> None:
        """Forget all others."""
        self._known = {key: each for key, each in self._known.items() if key in alive}


class OperationErrors:
    """Measures operations, one after the other.

    Attributes
    ----------
    found
        Of every operation that computes in floating point, in order.
    """

    def __init__(self, twins: Twins) -> None:
        self.found: list[OperationError] = []
        self._twins = twins
        self._rounded: set[Key] = set()  # made of integers that were rounded

    def follow(self, inputs: list[Tensor], written: list[Tensor]) -> bool:
        """Whether integers that were rounded are among the inputs; what is written holds them."""
        rounded = any(key_of(each) in self._rounded for each in inputs)
        change = self._rounded.update if rounded else self._rounded.difference_update
        change(map(key_of, written))
        return rounded

    def index(self, number: int, place: Place, rounded: Tensor, result: Tensor) -> None:
        """Integers that were rounded become integers again: are they others?"""
        if bool((self._twins.raised(rounded).to(result.dtype) != result).any()):
            self.found.append(
                OperationError(
                    number, "_to_copy", place, dtype_name(rounded.dtype), math.inf, -math.inf,
                    math.inf, miscounted=True,
                )
            )  # fmt: skip

    def constant(self, number: int, place: Place, made: Tensor, numbers: Tensor) -> None:
        """A tensor was made of these numbers, which is an operation of one input that is right."""
        if made.element_size() < _FLOAT32_BYTES:
            error = compare(made, numbers)
            self.found.append(
                OperationError(
                    number, "tensor", place, dtype_name(made.dtype), error.sqnr_db, error.sqnr_db,
                    math.inf, exact_amax=float(numbers.abs().max()), flushed=error.flushed,
                    zeros=error.zeros,
                )
            )  # fmt: skip

    def keep(self, alive: Container[Key]) -> None:
        """Forget all others."""
        self._rounded = {key for key in self._rounded if key in alive}

    def note(self, made: Made, propagated_db: float) -> None:
        """Measure an operation's own error."""
        actual, name, references = made.written[0], made.operation.name, made.references
        floating = any(each.is_floating_point() for each in tensors(made.args))
        made_of = floating or name in _FROM_INTEGERS or name in FROM_NUMBERS
        if references is None or not actual.numel() or not made_of:
            return
        counts = name in _COUNTS and _are_integers(made.args, actual)
        if made.operation.mutates and not counts and name not in FROM_NUMBERS:
            return
        error = OperationError(
            made.index, name, made.place, dtype_name(actual.dtype), math.inf, propagated_db,
            made.inputs_db, occurrence=made.occurrence, func=made.operation.func,
        )  # fmt: skip
        self.found.append(error)
        wrong = propagated_db < WRONG_DB and made.inputs_db >= RIGHT_DB
        error.miscounted = wrong and actual.numel() > 1 and key_of(actual) in self._rounded
        if propagated_db < _LOW_DB or name in DIFFERENCES:
            error.exact_amax = float(references[0].abs().max())
        if actual.element_size() < _FLOAT32_BYTES:
            self._own_error(error, made, counts=counts or not floating)

    def _own_error(self, error: OperationError, made: Made, *, counts: bool) -> None:
        actual = made.written[0]
        try:
            local = exact(made.operation.func, made.args, made.kwargs, made.result)[0]
        except UnsupportedError:
            return
        if local.shape != actual.shape:
            return
        error.local_db = sqnr_db(actual, local)
        size = rms(local)
        if 0 < size < math.inf:
            error.bias = float((actual.detach().double() - local).mean()) / size
        narrow = actual.element_size() == 1
        if error.local_db < _LOW_DB or narrow:
            found = compare(actual, local)
            error.flushed, error.zeros = found.flushed, found.zeros
        if narrow:
            sizes = local.abs()
            most = formats.lookup(actual.dtype).max
            error.beyond = float((sizes > most).double().mean())
            error.exact_amax = float(sizes.max())
        if counts and error.local_db < math.inf:
            error.integers = bool((local == local.round()).all())
            if error.integers:
                self._rounded.add(key_of(actual))
                error.miscounts = Extent(int((actual.double() != local).sum()), local.numel())
            error.exact_amax = float(local.abs().max())


def _are_integers(args: Any, result: Tensor) -> bool:
    """Whether integers in 16 bits are counted up, to a little beyond what these hold at most."""
    if result.element_size() >= _FLOAT32_BYTES:
        return False
    most = 2 ** (formats.lookup(result.dtype).mantissa_bits + 2)
    numbers = [float(each) for each in args if isinstance(each, int | float)]
    floats = [each for each in tensors(args) if each.is_floating_point()]
    return all(map(float.is_integer, numbers)) and all(
        bool((each == each.round()).all()) and float(each.abs().max()) <= most
        for each in floats
        if each.numel()
    )
