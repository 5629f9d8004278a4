"""A float64 shadow beside a replay: what every value would be without rounding.

Each operation runs three times: as it is, in float64 on the shadows of its inputs (the *propagated*
result, as if nothing had been rounded since the batch), and in float64 on the actual inputs (the
*local* result: what this operation alone rounds away). Shadows are kept by storage: for each piece
of memory a flat float64 twin, and a tensor's shadow is the twin under the tensor's own strides. So
views, in-place operations and saved tensors find their shadow without bookkeeping. Integers, masks
and random draws follow the actual run, so the two never take different branches. An operation that
has no float64 form is taken as exact from there on.

Memory: 8 bytes for every element that the run keeps alive, so 2 to 4 times that of the run.

    SQNR = 10 log10( sum(exact^2) / sum((actual - exact)^2) )      in dB, larger is better
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ampwise import formats
from ampwise.numerics.observe.ancestry import Ancestor, cancelled, flushed, lost_constants
from ampwise.numerics.observe.attention import by_formula, is_attention
from ampwise.numerics.observe.places import Place, Places, placing
from ampwise.numerics.observe.trace import (
    Operation,
    _key,
    _operation,
    _tensors,
    _written,
    hollow,
    sources,
)
from ampwise.numerics.result import Extent
from ampwise.policy import Policy
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable, Replayed

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PRUNE_EVERY = 256
_LOW_DB = 20.0
"""Below this an operation is looked at more closely."""
RIGHT_DB, WRONG_DB = 20.0, 15.0
"""SQNR above which inputs are right, and below which a result of such inputs is wrong."""
_FLOAT32_BYTES = 4
_SUMS = {
    "sum": "sum", "mean": "mean", "add": "add", "sub": "add", "rsub": "add", "mul": "mul",
    "div": "div", "neg": "neg", "_to_copy": "_to_copy",
}  # fmt: skip
"""Operations that sum or only scale, and what they are on magnitudes."""
_COUNTS = frozenset(["add", "add_"])
"""Operations that count, where all that they are given are integers."""
_FROM_INTEGERS = frozenset(["arange", "_to_copy", "cumsum"])
"""Operations that turn integers into floating point: positions, counters."""


class UnsupportedError(Exception):
    """The operation has no float64 form."""


def exact(func: Any, args: Any, kwargs: Any, result: Any = None) -> Any:
    """An operation in float64, on inputs that are raised to it; in-place ones on copies.

    Parameters
    ----------
    result
        What the actual run gave, for the random draws that are followed.

    Returns
    -------
    Any
        The written arguments and results, as `_written` lists them.

    Raises
    ------
    UnsupportedError
        When there is no such form.
    """
    name = func._overloadpacket.__name__
    if name in _SPECIAL:
        return _SPECIAL[name](args, kwargs, result)
    if _draws(func, name, args, kwargs) or name in _NO_FORM or "foreach" in name:
        raise UnsupportedError(name)
    if is_attention(name):
        return by_formula(func, args, kwargs, torch.float64)
    args, kwargs = tree_map(_raise, args), tree_map(_raise, kwargs)
    if name in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)
    try:
        made = func(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnsupportedError(name) from error
    return _written(_operation(func), args, kwargs, made)


def _draws(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers; attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    if not is_attention(name):
        return True
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    return float(given.get("dropout_p", 0.0)) > 0


def _raise(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(torch.float64, copy=True) if value.is_floating_point() else value
    return torch.float64 if value in _FLOATS and isinstance(value, torch.dtype) else value


def _dropout(args: Any, _kwargs: Any, result: Any) -> list[Tensor]:
    values, share = args[0].double(), float(args[1])
    if result is None:
        raise UnsupportedError("native_dropout")
    mask = result[1]
    return [values * mask / (1 - share) if share < 1 else values * 0]


def _recast(args: Any, kwargs: Any, _result: Any) -> list[Tensor]:
    dtype = kwargs.get("dtype") or args[0].dtype
    if not dtype.is_floating_point:
        raise UnsupportedError("_to_copy")
    return [args[0].to(torch.float64, copy=True)]


_SPECIAL: dict[str, Callable[[Any, Any, Any], list[Tensor]]] = {
    "native_dropout": _dropout,
    "_to_copy": _recast,
}
_NO_FORM = frozenset(
    ["_local_scalar_dense", "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_",
     "nextafter", "view", "_unsafe_view"]
)  # fmt: skip


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
        return _decibels(signal, noise)
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
        _decibels(signal, float(torch.linalg.vector_norm(noise))),
        flushed / signal if 0 < signal < math.inf else 0.0,
        float(lost.double().mean()) if lost.numel() else 0.0,
    )


def _decibels(signal: float, noise: float) -> float:
    """From norms."""
    if not math.isfinite(noise):
        return -math.inf
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal > 0 else -math.inf


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
        Largest magnitude of the shadow.
    flushed, zeros
        Of a result with a low `local_db`: as in `Error`.
    integers
        Whether integers came out rounded.
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
    miscounted: bool = False
    occurrence: int = 0
    func: Any = None
    miscounts: Extent | None = None


@dataclass(slots=True)
class ShadowRun:
    """What a shadow replay showed.

    Attributes
    ----------
    errors
        Of every operation that computes in floating point, in order.
    gradients
        Float64 gradients by parameter name, scaled like the actual ones.
    losses
        Float64 losses.
    terms
        Size of the terms that each loss is the sum of: how small an error of it can be asked for.
    inputs, actual
        Shadows of the inputs of the operation that was asked for, as arguments for it; and these
        inputs as they are.
    makers
        What made each tensor among them; None where it comes from outside.
    """

    replayed: Replayed
    errors: list[OperationError] = field(default_factory=list[OperationError])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    losses: list[Tensor] = field(default_factory=list[Tensor])
    terms: list[float] = field(default_factory=list[float])
    inputs: tuple[Any, Any] | None = None
    actual: tuple[Any, Any] | None = None
    makers: list[Ancestor | None] = field(default_factory=list["Ancestor | None"])


def shadow(
    step: Replayable,
    stash: Stash,
    *,
    errors: bool = True,
    at: tuple[str, Place, int] | None = None,
    policy: Policy | None = None,
    scale: float | None = None,
) -> ShadowRun:
    """Replay a window with a float64 shadow.

    Parameters
    ----------
    errors
        Measure every operation's errors (twice the work).
    at
        Name, place and occurrence of an operation: keep the shadows of its inputs and what they
        were made of, and stop there.
    policy, scale
        As for `Replayable.replay`.
    """
    with placing(step.models) as places:
        mode = Shadow(places, errors=errors, at=at)
        for _, tensor, _ in sources(step.models, stash):
            mode.source(tensor)
        replayed = step.replay(stash, around=lambda: mode, policy=policy, scale=scale)
    run = ShadowRun(replayed, mode.errors, inputs=mode.inputs, actual=mode.actual,
                    makers=mode.makers)  # fmt: skip
    if at is None:
        run.losses = [_or_actual(mode.of(each), each) for each in replayed.losses]
        run.terms = [mode.terms_of(each) for each in replayed.losses]
        run.gradients = {
            name: _or_actual(mode.of(each), each)
            for name, each in replayed.gradients.items()
            if not each.is_sparse
        }
    return run


def _or_actual(reference: Tensor | None, actual: Tensor) -> Tensor:
    return actual.double() if reference is None else reference.clone()


class _ReachedError(Exception):
    """The operation that was asked for."""


def shadowed(mode: Shadow, act: Callable[[], object]) -> None:
    """Do something beside a shadow, as far as the operation that is asked for."""
    with mode, suppress(_ReachedError):
        act()


class Shadow(TorchDispatchMode):
    """The dispatch mode of `shadow`."""

    def __init__(self, places: Places, *, errors: bool, at: tuple[str, Place, int] | None) -> None:
        super().__init__()
        self.errors: list[OperationError] = []
        self.inputs: tuple[Any, Any] | None = None
        self.actual: tuple[Any, Any] | None = None
        self.makers: list[Ancestor | None] = []
        self._seen: dict[tuple[str, Place], int] = {}
        self._places = places
        self._measure = errors
        self._at = at
        self._count = 0
        self._twins: dict[tuple[int, torch.dtype], tuple[Any, Tensor]] = {}
        self._quality: dict[tuple[int, torch.dtype], float] = {}
        self._terms: dict[tuple[int, torch.dtype], float] = {}
        self._made: dict[tuple[int, torch.dtype], Ancestor] = {}
        self._rounded: set[tuple[int, torch.dtype]] = set()  # made of integers that were rounded

    def source(self, tensor: Tensor) -> None:
        """A tensor from outside is exact."""
        if tensor.dtype in _FLOATS and not tensor.is_sparse:
            self._write(tensor, tensor.detach().double())

    def of(self, tensor: Tensor) -> Tensor | None:
        """The shadow of a tensor; None where there is none."""
        if tensor.dtype not in _FLOATS or tensor.is_sparse or hollow(tensor):
            return None
        found = self._twins.get(_twin(tensor))
        if found is None:
            return None
        return found[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def terms_of(self, number: Tensor) -> float:
        """Size of the terms that a number is the sum of; its own where it is no sum."""
        own = float(self._input(number).abs())
        return max(own, self._terms.get(_twin(number), 0.0))

    def _sum(self, operation: Operation, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """Keep the size of the terms of a number: the same operation on their magnitudes."""
        for tensor in written:  # an address may be used again
            self._terms.pop(_twin(tensor), None)
        if operation.name not in _SUMS or len(written) != 1 or written[0].numel() != 1:
            return
        packet = getattr(torch.ops.aten, _SUMS[operation.name])
        func = getattr(packet, operation.func._overloadname)
        args, kwargs = tree_map(self._magnitude, args), tree_map(self._magnitude, kwargs)
        self._terms[_twin(written[0])] = float(exact(func, args, kwargs)[0].abs())

    def _magnitude(self, value: Any) -> Any:
        if isinstance(value, float):
            return abs(value)
        if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
            return value
        if value.numel() == 1 and _twin(value) in self._terms:
            return torch.full_like(value, self.terms_of(value), dtype=torch.float64)
        return self._input(value).abs()

    def _write(self, tensor: Tensor, values: Tensor) -> None:
        key = _twin(tensor)
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
        place.copy_(values)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func)
        place = self._places.here()
        index, self._count = self._count, self._count + 1
        if self._count % _PRUNE_EVERY == 0:
            self._twins = {k: v for k, v in self._twins.items() if not v[0].expired()}
            self._quality = {k: v for k, v in self._quality.items() if k in self._twins}
            self._terms = {k: v for k, v in self._terms.items() if k in self._twins}
            self._made = {k: v for k, v in self._made.items() if k in self._twins}
            self._rounded &= self._twins.keys()
        occurrence = self._seen.get((operation.name, place), 0)
        self._seen[operation.name, place] = occurrence + 1
        if self._at == (operation.name, place, occurrence):
            self._stop(args, kwargs)
        floating = [each for each in _tensors((args, kwargs)) if each.dtype in _FLOATS]
        actual_inputs = tree_map(_kept, (args, kwargs)) if operation.mutates else (args, kwargs)
        raised = tree_map(self._input, args), tree_map(self._input, kwargs)
        result = func(*args, **kwargs)
        written = [] if operation.empty else [
            each for each in _written(operation, args, kwargs, result)
            if each.dtype in _FLOATS and not hollow(each)
        ]  # fmt: skip
        rounded = any(_twin(each) in self._rounded for each in floating)
        if not written:
            if rounded and operation.name == "_to_copy":
                self._index(index, place, args[0], result)
            return result
        (self._rounded.update if rounded else self._rounded.difference_update)(map(_twin, written))
        worst = min((self._quality.get(_twin(each), math.inf) for each in floating),
                    default=math.inf)  # fmt: skip
        references = self._shadowed(func, raised, result, written)
        if references is not None and place.phase == "forward":
            self._sum(operation, args, kwargs, written)
        if not self._measure and self._at is None:
            return result
        propagated = self._propagate(written, references)
        if references is not None and self._measure:
            self._note(index, occurrence, operation, place, actual_inputs, written, references,
                       result, worst, propagated)  # fmt: skip
        if self._at is not None:
            self._remember(operation, place, floating, actual_inputs[0], raised[0], written,
                           references, worst, propagated)  # fmt: skip
        return result

    def _remember(
        self, operation: Operation, place: Place, floating: list[Tensor], args: Any, ideal: Any,
        written: list[Tensor], references: list[Tensor] | None, worst: float, propagated: float,
    ) -> None:  # fmt: skip
        """Note which operation made what was written, and from what."""
        parents = tuple(self._made[_twin(each)] for each in floating if _twin(each) in self._made)
        result, name, dtype = written[0], operation.name, _dtype_of(written[0])
        wanted = references[0] if references else result.double()
        count, rounded_to = cancelled(name, args, ideal, result, wanted)
        gone = flushed(result, wanted, formats.lookup(dtype).min_subnormal)
        ends = torch.aminmax(result.detach()) if result.numel() else ()
        extreme = max(map(float, ends), key=abs, default=0.0)
        lost = lost_constants(name, args, ideal, result)
        maker = Ancestor(name, place, dtype, worst, propagated, lost, parents, count, rounded_to,
                         gone, extreme)  # fmt: skip
        self._made.update(dict.fromkeys(map(_twin, written), maker))

    def _stop(self, args: Any, kwargs: Any) -> None:
        """Keep what the operation that was asked for is given, and go no further."""
        self.inputs = (tree_map(self._input, args), tree_map(self._input, kwargs))
        self.actual = tree_map(_kept, (args, kwargs))
        self.makers = [self._made.get(_twin(each)) for each in _tensors(args)]
        raise _ReachedError

    def _shadowed(
        self, func: Any, raised: tuple[Any, Any], result: Any, written: list[Tensor]
    ) -> list[Tensor] | None:
        """Write the shadows of what an operation wrote; None where it has no float64 form."""
        try:
            references = exact(func, raised[0], raised[1], result)
        except UnsupportedError:
            for tensor in written:
                self._write(tensor, tensor.detach().double())
                self._quality.pop(_twin(tensor), None)
            return None
        for tensor, reference in zip(written, references, strict=False):
            if reference.shape == tensor.shape:
                self._write(tensor, reference)
        return references

    def _index(self, index: int, place: Place, rounded: Tensor, result: Tensor) -> None:
        """Integers that were rounded become integers again: are they others?"""
        if bool((self._input(rounded).to(result.dtype) != result).any()):
            self.errors.append(
                OperationError(index, "_to_copy", place, _dtype_of(rounded), math.inf, -math.inf,
                               math.inf, miscounted=True)
            )  # fmt: skip

    def _propagate(self, written: list[Tensor], references: list[Tensor] | None) -> float:
        """SQNR of what an operation wrote against the shadow, the least; inf where it has none."""
        propagated = math.inf
        for tensor, reference in zip(written, references or (), strict=False):
            if tensor.numel() and tensor.shape == reference.shape:
                found = self._quality[_twin(tensor)] = sqnr_db(tensor, reference)
                propagated = min(propagated, found)
        return propagated

    def _note(
        self, index: int, occurrence: int, operation: Operation, place: Place, inputs: Any,
        written: list[Tensor], references: list[Tensor], result: Any, worst: float,
        propagated: float,
    ) -> None:  # fmt: skip
        """Measure an operation's own error."""
        actual = written[0]
        floating = any(each.is_floating_point() for each in _tensors(inputs[0]))
        if not actual.numel() or not (floating or operation.name in _FROM_INTEGERS):
            return
        counts = operation.name in _COUNTS and _are_integers(inputs[0], actual)
        if operation.mutates and not counts:
            return
        error = OperationError(
            index, operation.name, place, _dtype_of(actual), math.inf, propagated, worst,
            occurrence=occurrence, func=operation.func,
        )  # fmt: skip
        self.errors.append(error)
        wrong = propagated < WRONG_DB and worst >= RIGHT_DB
        error.miscounted = wrong and actual.numel() > 1 and _twin(actual) in self._rounded
        if propagated < _LOW_DB:
            error.exact_amax = float(references[0].abs().max())
        if actual.element_size() < _FLOAT32_BYTES:
            self._own_error(error, operation, inputs, actual, result, counts or not floating)

    def _own_error(
        self, error: OperationError, operation: Operation, inputs: Any, actual: Tensor,
        result: Any, counts: bool,
    ) -> None:  # fmt: skip
        try:
            local = exact(operation.func, inputs[0], inputs[1], result)[0]
        except UnsupportedError:
            return
        if local.shape != actual.shape:
            return
        error.local_db = sqnr_db(actual, local)
        size = rms(local)
        if 0 < size < math.inf:
            error.bias = float((actual.detach().double() - local).mean()) / size
        if error.local_db < _LOW_DB:
            found = compare(actual, local)
            error.flushed, error.zeros = found.flushed, found.zeros
        if counts and error.local_db < math.inf:
            error.integers = bool((local == local.round()).all())
            if error.integers:
                self._rounded.add(_twin(actual))
                error.miscounts = Extent(int((actual.double() != local).sum()), local.numel())
            error.exact_amax = float(local.abs().max())

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _FLOATS or value.is_sparse:
            return value
        twin = self.of(value)
        return value.detach().double() if twin is None else twin.clone()


def _are_integers(args: Any, result: Tensor) -> bool:
    """Whether integers in 16 bits are counted up, to a little beyond what these hold at most."""
    if result.element_size() >= _FLOAT32_BYTES:
        return False
    most = 2 ** (formats.lookup(result.dtype).mantissa_bits + 2)
    numbers = [float(each) for each in args if isinstance(each, int | float)]
    tensors = [each for each in _tensors(args) if each.is_floating_point()]
    return all(map(float.is_integer, numbers)) and all(
        bool((each == each.round()).all()) and 0 < float(each.abs().max()) <= most
        for each in tensors
        if each.numel()
    )


def _twin(tensor: Tensor) -> tuple[int, torch.dtype]:
    """Where a tensor's shadow is kept."""
    return _key(tensor), tensor.dtype


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def rms(tensor: Tensor) -> float:
    """Root mean square; 0 of nothing."""
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
