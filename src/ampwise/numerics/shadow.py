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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ampwise.numerics.places import Place, Places, placing
from ampwise.numerics.trace import _key, _operation, _tensors, _written, hollow, sources
from ampwise.step.recorder import Replayed, Stash, replay
from ampwise.step.train_step import TrainStep

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PRUNE_EVERY = 256
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
    if "scaled_dot_product" not in name:
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
    bias
        Mean signed error, relative to the mean magnitude.
    flushed
        Share of the signal (by norm) that became exactly zero, 0 to 1.
    zeros
        Share of elements that are zero and should not be.
    """

    sqnr_db: float
    bias: float
    flushed: float
    zeros: float


def compare(actual: Tensor, reference: Tensor) -> Error:
    """Errors of a tensor against its float64 reference of the same shape."""
    actual = actual.detach().double()
    # Infinities that are meant (masks) are no noise, and no signal.
    noise = torch.where(actual == reference, 0.0, actual - reference)
    meant = torch.isinf(reference) & (actual == reference)
    signal = float(torch.where(meant, 0.0, reference).square().sum())
    power = float(noise.square().sum())
    magnitude = float(torch.where(meant, 0.0, reference).abs().mean()) if reference.numel() else 0.0
    lost = (actual == 0) & (reference != 0)
    flushed = float(torch.where(lost, reference, 0.0).square().sum())
    if not math.isfinite(power):
        sqnr = -math.inf
    elif power == 0:
        sqnr = math.inf
    else:
        sqnr = 10 * math.log10(signal / power) if signal > 0 else -math.inf
    return Error(
        sqnr,
        float(noise.mean()) / magnitude if magnitude > 0 and noise.numel() else 0.0,
        math.sqrt(flushed / signal) if signal > 0 and math.isfinite(signal) else 0.0,
        float(lost.double().mean()) if lost.numel() else 0.0,
    )


@dataclass(slots=True)
class OperationError:
    """Errors of one operation's results.

    Attributes
    ----------
    local
        Against float64 on the actual inputs.
    propagated
        Against the shadow.
    inputs_db
        Worst propagated SQNR among its inputs.
    """

    index: int
    name: str
    place: Place
    dtype: str
    local: Error
    propagated: Error
    inputs_db: float
    amax: float
    exact_amax: float
    integers: bool = False
    """Whether integers came out rounded."""


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
    inputs
        Shadows of the inputs of the operation that was asked for, as arguments for it.
    scalars
        Constants that operations were called with so far.
    """

    replayed: Replayed
    errors: list[OperationError] = field(default_factory=list[OperationError])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    losses: list[Tensor] = field(default_factory=list[Tensor])
    inputs: tuple[Any, Any] | None = None
    scalars: set[float] = field(default_factory=set[float])


def shadow(
    step: TrainStep,
    stash: Stash,
    *,
    errors: bool = True,
    at: tuple[str, Place, int] | None = None,
) -> ShadowRun:
    """Replay a window with a float64 shadow.

    Parameters
    ----------
    errors
        Measure every operation's errors (twice the work).
    at
        Name, place and occurrence of an operation: keep the shadows of its inputs, and stop there.
    """
    with placing(step._models) as places:
        mode = Shadow(places, errors=errors, at=at)
        for _, tensor, _ in sources(step._models, stash):
            mode.source(tensor)
        replayed = replay(step, stash, around=lambda: mode)
    run = ShadowRun(replayed, mode.errors, inputs=mode.inputs, scalars=mode.scalars)
    if at is None:
        run.losses = [_or_actual(mode.of(each), each) for each in replayed.losses]
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


class Shadow(TorchDispatchMode):
    """The dispatch mode of `shadow`."""

    def __init__(self, places: Places, *, errors: bool, at: tuple[str, Place, int] | None) -> None:
        super().__init__()
        self.errors: list[OperationError] = []
        self.inputs: tuple[Any, Any] | None = None
        self.scalars: set[float] = set()
        self._places = places
        self._measure = errors
        self._at = at
        self._met = 0
        self._count = 0
        self._twins: dict[tuple[int, torch.dtype], tuple[Any, Tensor]] = {}

    def source(self, tensor: Tensor) -> None:
        """A tensor from outside is exact."""
        if tensor.dtype in _FLOATS and not tensor.is_sparse:
            self._write(tensor, tensor.detach().double())

    def of(self, tensor: Tensor) -> Tensor | None:
        """The shadow of a tensor; None where there is none."""
        if tensor.dtype not in _FLOATS or tensor.is_sparse or hollow(tensor):
            return None
        found = self._twins.get((_key(tensor), tensor.dtype))
        if found is None:
            return None
        return found[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _write(self, tensor: Tensor, values: Tensor) -> None:
        key = (_key(tensor), tensor.dtype)
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
        self.scalars.update(e for e in (*args, *kwargs.values()) if isinstance(e, float))
        if self._count % _PRUNE_EVERY == 0:
            self._twins = {k: v for k, v in self._twins.items() if not v[0].expired()}
        self._stop_if_asked(operation.name, place, args, kwargs)
        floating = [each for each in _tensors((args, kwargs)) if each.dtype in _FLOATS]
        actual_inputs = tree_map(_kept, (args, kwargs)) if operation.mutates else (args, kwargs)
        raised = tree_map(self._input, args), tree_map(self._input, kwargs)
        worst = self._worst(floating) if self._measure else math.inf
        result = func(*args, **kwargs)
        written = [] if operation.empty else [
            each for each in _written(operation, args, kwargs, result)
            if each.dtype in _FLOATS and not hollow(each)
        ]  # fmt: skip
        if not written:
            return result
        references = self._shadowed(func, raised, result, written)
        rounds = floating or operation.name in _FROM_INTEGERS
        if references is not None and self._measure and rounds and not operation.mutates:
            self._note(index, operation.name, place, func, actual_inputs, written, references,
                       result, worst)  # fmt: skip
        return result

    def _stop_if_asked(self, name: str, place: Place, args: Any, kwargs: Any) -> None:
        if self._at is None or (name, place) != self._at[:2]:
            return
        if self._met == self._at[2]:
            self.inputs = (tree_map(self._input, args), tree_map(self._input, kwargs))
            raise _ReachedError
        self._met += 1

    def _shadowed(
        self, func: Any, raised: tuple[Any, Any], result: Any, written: list[Tensor]
    ) -> list[Tensor] | None:
        """Write the shadows of what an operation wrote; None where it has no float64 form."""
        try:
            references = exact(func, raised[0], raised[1], result)
        except UnsupportedError:
            for tensor in written:
                self._write(tensor, tensor.detach().double())
            return None
        for tensor, reference in zip(written, references, strict=False):
            if reference.shape == tensor.shape:
                self._write(tensor, reference)
        return references

    def _note(
        self, index: int, name: str, place: Place, func: Any, inputs: Any, written: list[Tensor],
        references: list[Tensor], result: Any, worst: float,
    ) -> None:  # fmt: skip
        try:
            local = exact(func, inputs[0], inputs[1], result)
        except UnsupportedError:
            return
        actual = written[0]
        if not actual.numel() or actual.shape != local[0].shape:
            return
        own = compare(actual, local[0])
        self.errors.append(
            OperationError(
                index,
                name,
                place,
                str(actual.dtype).removeprefix("torch."),
                own,
                compare(actual, references[0]),
                worst,
                float(actual.detach().abs().max()),
                float(references[0].abs().max()),
                integers=own.sqnr_db < math.inf
                and not any(each.is_floating_point() for each in _tensors(inputs[0]))
                and bool((local[0] == local[0].round()).all()),
            )
        )

    def _worst(self, tensors: list[Tensor]) -> float:
        """Lowest propagated SQNR among some inputs."""
        found = math.inf
        for tensor in tensors:
            twin = self.of(tensor)
            if twin is not None and tensor.numel():
                found = min(found, compare(tensor, twin).sqnr_db)
        return found

    def _input(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _FLOATS or value.is_sparse:
            return value
        twin = self.of(value)
        return value.detach().double() if twin is None else twin.clone()


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


NEGLIGIBLE = 1e-6
"""Gradients this small beside the largest (root mean square) are zero in exact arithmetic."""

MISSING = 0.5
"""Share of a gradient's norm that has to be there."""


def missing_gradients(
    actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], scale: float = 1.0
) -> dict[str, Error]:
    """Parameters most of whose gradient is missing, with its errors.

    A gradient that is only inexact is none of them: that of a bias before a normalisation, say, is
    a sum that cancels, and mostly rounding noise in any precision.

    Parameters
    ----------
    actual, reference
        Gradients by parameter name.
    scale
        What `actual` has to be divided by.
    """
    sizes = {name: rms(each) for name, each in reference.items()}
    largest = max(sizes.values(), default=0.0)
    missing: dict[str, Error] = {}
    for name, ideal in reference.items():
        gradient = actual.get(name)
        if gradient is None or gradient.is_sparse or sizes[name] <= NEGLIGIBLE * largest:
            continue
        error = compare(gradient.double() / scale, ideal)
        if error.flushed > MISSING or rms(gradient.double() / scale) < MISSING * sizes[name]:
            missing[name] = error
    return missing


def rms(tensor: Tensor) -> float:
    """Root mean square; 0 of nothing."""
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
