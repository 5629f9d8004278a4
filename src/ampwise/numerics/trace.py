"""A watched replay: which operation first turned clean values into inf or NaN.

Every operation of forward and backward passes a dispatch mode. Each floating-point result that is
no view is read once (`torch.aminmax`, which carries NaN along); what is known of it is kept by
storage, so views, in-place operations and saved tensors need no bookkeeping of their own. An
operation whose inputs are clean and whose output is not is a **root**. From a non-finite loss or
gradient the bad values are followed back through their producers to the roots they come from; the
earliest is the origin.

Not every infinity is a fault. One that the code writes on purpose (a fill or mask with inf) is
deliberate, and stays so while operations carry it along without making NaN of it; softmax turns it
into zeros and all is well. Uninitialised memory says nothing. Roots whose infinity some later
operation swallowed (``1 / inf``) are kept too: values may be silently wrong there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ampwise.data import leaves
from ampwise.numerics.places import NOWHERE, Phase, Place, Places, placing
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable, Replayed

NAN, POSITIVE, NEGATIVE = 1, 2, 4
"""What is wrong with a tensor, as bits: it holds NaN, +inf, -inf."""

_CAPTURED = 8
"""Roots whose inputs are kept."""

HISTORY = 6
"""Operations before a root that are told."""

_EMPTY = frozenset(["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"])
FILLS = frozenset(
    ["full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where",
     "scalar_tensor", "lift_fresh", "lift_fresh_copy", "index_fill", "index_fill_", "index_put",
     "index_put_", "constant_pad_nd"]
)  # fmt: skip


@dataclass(slots=True)
class Root:
    """An operation with clean inputs and a non-finite output.

    Attributes
    ----------
    index
        Its number among the operations of the replay.
    occurrence
        How many operations of the same name at the same place came before it.
    func, args, kwargs
        The call, with copies of its inputs; `func` is None for a tensor that was bad from the
        start.
    outputs
        Copies of its floating-point results.
    source
        What the bad tensor was, if it came from outside: ``batch[0]``, ``parameter w``, ...
    swallowed_by
        Name, place and occurrence of the operation that made finite values of it; None if none did.
    fed_by
        The tensor from outside whose infinities, taken for a mask, are among its inputs.
    before
        What made the largest of its inputs, with what came before that.
    """

    index: int
    name: str
    place: Place
    bits: int
    occurrence: int = 0
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    outputs: list[Tensor] = field(default_factory=list[Tensor])
    source: str = ""
    swallowed_by: tuple[str, Place, int] | None = None
    fed_by: Root | None = None
    before: Flow | None = None

    @property
    def history(self) -> list[Flow]:
        """The last operations before it, the latest last."""
        found: list[Flow] = []
        flow = self.before
        while flow is not None and len(found) < HISTORY:
            found.append(flow)
            flow = flow.before
        return found[::-1]


@dataclass(slots=True)
class _State:
    """What is known of a storage's values."""

    keep: Any  # keeps the address from being used again
    bits: int
    deliberate: bool = False
    maker: int = -1  # root or carrier that made it bad


@dataclass(frozen=True, slots=True)
class Flow:
    """An operation that a value came through.

    Attributes
    ----------
    extreme
        The finite value of the largest magnitude, with its sign.
    before
        The one that made the largest of what it was given.
    """

    name: str
    place: Place
    dtype: str
    extreme: float
    before: Flow | None


@dataclass(slots=True)
class _Carrier:
    """An operation that passed bad values on."""

    name: str
    place: Place
    parents: tuple[int, ...]


@dataclass(slots=True)
class Trace:
    """What a watched replay showed.

    Attributes
    ----------
    replayed
        Losses and gradients.
    operations
        Number of operations.
    roots
        By index, in order.
    origin
        The earliest root that the non-finite loss or gradient comes from; None without one.
    path
        Modules (or lines) that the first bad value went through.
    target
        What is not finite in the end: ``loss`` or a parameter's name; empty when all is.
    failed
        The operation that raised, with its place.
    before_error
        Of a replay that raised: the root that it seems to be about, if there is one.
    spans
        Where the operations of forward were, in order; each run of the same place once.
    """

    replayed: Replayed
    operations: int = 0
    roots: dict[int, Root] = field(default_factory=dict[int, Root])
    origin: Root | None = None
    path: list[str] = field(default_factory=list[str])
    target: str = ""
    failed: Root | None = None
    before_error: Root | None = None
    spans: list[Place] = field(default_factory=list[Place])


def watch(
    step: Replayable,
    stash: Stash,
    *,
    scale: float | None = None,
    capture: int | None = None,
    backward: bool = True,
    once: bool = False,
) -> Trace:
    """Replay a window under watch.

    Parameters
    ----------
    capture
        Index of a root whose inputs must be kept, beside the first ones.
    scale, backward
        As for `Replayable.replay`.
    once
        Do not replay again for the inputs of an origin that were not kept.
    """
    with placing(step.models) as places:
        watcher = Watcher(places, capture)
        for name, tensor, kind in sources(step.models, stash):
            watcher.source(name, tensor, kind)
        replayed = step.replay(stash, around=lambda: watcher, scale=scale, backward=backward)
    trace = Trace(replayed, watcher.count, watcher.roots, failed=watcher.failed,
                  spans=watcher.spans)  # fmt: skip
    if replayed.error is not None:
        trace.before_error = watcher.before_error()
    watcher.conclude(trace)
    if once or trace.origin is None or trace.origin.func is not None or trace.origin.source:
        return trace
    return watch(step, stash, scale=scale, capture=trace.origin.index, backward=backward)


def watch_update(step: Replayable, update: Callable[[], object]) -> tuple[Root | None, str]:
    """Make the update of a window whose backward is done, under watch.

    Returns
    -------
    tuple
        The operation that first made a parameter non-finite (None if none did), and which one.
    """
    with placing(step.models) as places:
        watcher = Watcher(places, phase="optimizer")
        with watcher:
            update()
    for name, parameter in step.named_tensors().items():
        roots = watcher.roots_of(parameter)
        if roots:
            return min(roots, key=lambda root: root.index), name
    return None, ""


def sources(models: Sequence[nn.Module], stash: Stash) -> Iterator[tuple[str, Tensor, str]]:
    """Tensors that come from outside, with their names and kinds."""
    for each in stash.micro_batches:
        for path, tensor in leaves(each.batch):
            yield path, tensor, "batch"
    for values in (stash.before, *stash.updates):
        for name, tensor in values.items():
            yield name, tensor, "parameter"
    for model in models:
        for name, tensor in model.named_parameters():
            yield name, tensor.detach(), "parameter"
        for name, tensor in model.named_buffers():
            yield name, tensor, "buffer"


def hollow(tensor: Tensor) -> bool:
    """Whether a tensor has no values to look at: autograd's zeros, and shapes without memory."""
    return tensor._is_zerotensor() or tensor.is_meta


def has_finite_inputs(root: Root) -> bool:
    """Whether what an operation was given, as far as it was kept, is finite."""
    return not any(map(bad_bits, _tensors((root.args, root.kwargs))))


def held_by(tensor: Tensor) -> Tensor:
    """A tensor's values: of a sparse one, those that it has."""
    return tensor._values() if tensor.is_sparse else tensor


def bad_bits(tensor: Tensor) -> int:
    """`NAN`, `POSITIVE`, `NEGATIVE` of a floating-point tensor; 0 if every value is finite."""
    return _bits_and_extreme(tensor)[0]


def _bits_and_extreme(tensor: Tensor) -> tuple[int, float]:
    """What is wrong with a tensor; and its value of the largest magnitude."""
    tensor = held_by(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel() or hollow(tensor):
        return 0, 0.0
    if tensor.element_size() == 1:
        tensor = tensor.float()
    low, high = (each.item() for each in torch.aminmax(tensor))
    if math.isnan(low) or math.isnan(high):
        return NAN, math.nan
    bits = (POSITIVE if high == math.inf else 0) | (NEGATIVE if low == -math.inf else 0)
    return bits, high if high >= -low else low


class Watcher(TorchDispatchMode):
    """The dispatch mode of `watch`."""

    def __init__(
        self, places: Places, capture: int | None = None, phase: Phase | None = None
    ) -> None:
        super().__init__()
        self._phase = phase
        self.count = 0
        self.roots: dict[int, Root] = {}
        self.failed: Root | None = None
        self.spans: list[Place] = []
        self._failed_on: list[Root] = []
        self._places = places
        self._capture = capture
        self._states: dict[int, _State] = {}
        self._carriers: dict[int, _Carrier] = {}
        self._flows: dict[int, Flow] = {}
        self._seen: dict[tuple[str, Place], int] = {}

    def source(self, name: str, tensor: Tensor, kind: str) -> None:
        """Look at a tensor from outside."""
        bits = bad_bits(tensor)
        if not bits:
            return
        index = -2 - len(self.roots)
        deliberate = bits == NEGATIVE and kind != "parameter"  # an additive mask
        held = [tensor.detach()] if tensor.is_floating_point() and not tensor.is_sparse else []
        self.roots[index] = Root(index, kind, NOWHERE, bits, outputs=held, source=f"{kind} {name}")
        self._set(tensor, _State(None, bits, deliberate, index))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func)
        place = self._places.here()
        if self._phase is not None:
            place = replace(place, phase=self._phase)
        index, self.count = self.count, self.count + 1
        if place.phase == "forward" and (not self.spans or self.spans[-1] != place):
            self.spans.append(place)
        copies = None
        if operation.mutates:
            copies = tree_map(_copy, (args, kwargs))
        inputs = self._inputs(args, kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.failed = Root(index, operation.name, place, 0, 0, func, *_copies(args, kwargs))
            makers = [each.maker for each in inputs if not each.deliberate]
            self._failed_on = [root for maker in makers for root in self._roots_behind(maker)]
            raise
        if not operation.empty:
            written = _written(operation, args, kwargs, result)
            if written:
                self._look(index, operation, place, args, kwargs, copies, inputs, written)
        return result

    def _look(
        self, index: int, operation: Operation, place: Place, args: Any, kwargs: Any,
        copies: Any, inputs: list[_State], written: list[Tensor],
    ) -> None:  # fmt: skip
        """Judge the results of one operation."""
        key = (operation.name, place)
        occurrence = self._seen.get(key, 0)
        self._seen[key] = occurrence + 1
        own = {_key(each) for each in _tensors((args, kwargs))}
        bits = 0
        bad: list[Tensor] = []
        before = self._largest(args, kwargs)
        for tensor in written:
            found, extreme = _bits_and_extreme(tensor)
            bits |= found
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._flows[_key(tensor)] = Flow(operation.name, place, dtype, extreme, before)
            if found:
                bad.append(tensor)
            elif _key(tensor) in self._states and (_key(tensor) not in own or _whole(tensor)):
                del self._states[_key(tensor)]
        faulty = [each for each in inputs if not each.deliberate]
        if not bits:
            for root in (root for each in faulty for root in self._roots_behind(each.maker)):
                root.swallowed_by = root.swallowed_by or (operation.name, place, occurrence)
            return
        if not faulty and _deliberate(operation, args, kwargs, inputs, bits):
            maker = next((each.maker for each in inputs), -1)
            state = _State(None, bits, deliberate=True, maker=maker)
        elif faulty:
            parents = tuple(dict.fromkeys(each.maker for each in faulty))
            self._carriers[index] = _Carrier(operation.name, place, parents)
            state = _State(None, bits, maker=index)
        else:
            self.roots[index] = self._root(
                index, operation, place, bits, occurrence, args, kwargs, copies, bad
            )
            self.roots[index].before = before
            outside = (self.roots[each.maker] for each in inputs if each.maker in self.roots)
            self.roots[index].fed_by = next(outside, None)
            state = _State(None, bits, maker=index)
        for tensor in bad:
            self._set(tensor, state)

    def _root(
        self, index: int, operation: Operation, place: Place, bits: int, occurrence: int,
        args: Any, kwargs: Any, copies: Any, bad: list[Tensor],
    ) -> Root:  # fmt: skip
        root = Root(index, operation.name, place, bits, occurrence)
        if sum(each.func is not None for each in self.roots.values()) < _CAPTURED or (
            index == self._capture
        ):
            root.func = operation.func
            root.args, root.kwargs = copies or _copies(args, kwargs)
            root.outputs = [each.detach().clone() for each in bad]
        return root

    def before_error(self) -> Root | None:
        """The root that an error is about: what a failed operation was given, or a check saw."""
        if self.failed is None:
            seen = [each for each in self.roots.values() if each.swallowed_by is None]
        else:
            seen = self._failed_on
        captured = [each for each in seen if each.func is not None]
        return max(captured, key=lambda root: root.index, default=None)

    def roots_of(self, tensor: Tensor) -> list[Root]:
        """Roots that a tensor's bad values come from; empty if it is finite."""
        state = self._states.get(_key(tensor)) if bad_bits(tensor.detach()) else None
        return [] if state is None else self._roots_behind(state.maker)

    def _roots_behind(self, maker: int) -> list[Root]:
        """Roots that a bad value comes from."""
        found: dict[int, Root] = {}
        queue, met = [maker], {maker}
        while queue:
            index = queue.pop()
            if index in self.roots:
                found[index] = self.roots[index]
            for parent in self._carriers[index].parents if index in self._carriers else ():
                if parent not in met:
                    met.add(parent)
                    queue.append(parent)
        return list(found.values())

    def _largest(self, args: Any, kwargs: Any) -> Flow | None:
        """What made the largest of some arguments; None where all come from outside."""
        known = [self._flows.get(_key(each)) for each in _tensors((args, kwargs))]
        flows = [each for each in known if each is not None and math.isfinite(each.extreme)]
        return max(flows, key=lambda flow: abs(flow.extreme), default=None)

    def _inputs(self, args: Any, kwargs: Any) -> list[_State]:
        """States of the bad tensors among the inputs."""
        if not self._states:
            return []
        found: list[_State] = []
        for tensor in _tensors((args, kwargs)):
            state = self._states.get(_key(tensor))
            if state is not None and bad_bits(tensor):
                found.append(state)
        return found

    def _set(self, tensor: Tensor, state: _State) -> None:
        kept = _State(held_by(tensor).untyped_storage(), state.bits, state.deliberate, state.maker)
        self._states[_key(tensor)] = kept

    def conclude(self, trace: Trace) -> None:
        """From what is not finite in the end, back to the earliest root."""
        ends = [("loss", each) for each in trace.replayed.losses]
        ends += list(trace.replayed.gradients.items())
        starts: list[tuple[str, int]] = []
        for name, tensor in ends:
            if bad_bits(tensor):
                state = self._states.get(_key(tensor))
                starts.append((name, -1 if state is None else state.maker))
        if not starts:
            return
        trace.target = starts[0][0]
        makers = [maker for name, maker in starts if name == "loss" or trace.target != "loss"]
        links: dict[int, int] = {}
        queue, roots = list(makers), list[int]()
        while queue:
            maker = queue.pop()
            if maker in self.roots:
                roots.append(maker)
            for parent in self._carriers[maker].parents if maker in self._carriers else ():
                if parent not in links and parent != maker:
                    links[parent] = maker
                    queue.append(parent)
        if roots:
            # What was bad from the start comes before every operation.
            first = min(roots)
            trace.origin = self.roots[first]
            trace.path = self._path(first, links)

    def _path(self, root: int, links: dict[int, int]) -> list[str]:
        path: list[str] = []
        index: int | None = root
        while index is not None and len(path) < 200:
            step = self.roots.get(index) or self._carriers[index]
            place = step.place
            word = place.module or (f"line {place.line}" if place.line else step.name)
            word = f"{word} (backward)" if place.phase == "backward" else word
            if not path or path[-1] != word:
                path.append(word)
            index = links.get(index)
        return path


@dataclass(frozen=True, slots=True)
class Operation:
    """What an overload's schema says."""

    name: str
    func: Any
    mutates: bool
    empty: bool


@cache
def _operation(func: Any) -> Operation:
    name = func._overloadpacket.__name__ if hasattr(func, "_overloadpacket") else str(func)
    schema = func._schema
    mutates = any(each.alias_info is not None and each.alias_info.is_write
                  for each in schema.arguments)  # fmt: skip
    return Operation(name, func, mutates, name in _EMPTY)


def _written(operation: Operation, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """Results that are no views of the inputs, and inputs that were written."""
    found: list[Tensor] = []
    own: set[int] = set()
    if operation.mutates:
        for place, argument in enumerate(operation.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                found += _tensors(value)
    own = {_key(each) for each in _tensors((args, kwargs))}
    found += [each for each in _tensors(result) if _key(each) not in own]
    return [each for each in found if each.is_floating_point() or each.is_complex()]


def _deliberate(
    operation: Operation, args: Any, kwargs: Any, inputs: list[_State], bits: int
) -> bool:
    """Whether infinities were written on purpose, or only carried along."""
    if bits & NAN:
        return False
    carried = 0
    for each in inputs:
        carried |= each.bits
    if inputs and not bits & ~carried:
        return True
    if operation.name not in FILLS:
        return False
    scalars = [each for each in (*args, *kwargs.values()) if isinstance(each, float)]
    return any(math.isinf(each) for each in scalars)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in _tensors(each)]
    return []


def _key(tensor: Tensor) -> int:
    """Identity of the memory."""
    try:
        return held_by(tensor).untyped_storage()._cdata
    except NotImplementedError:
        return id(tensor)


def _whole(tensor: Tensor) -> bool:
    """Whether a tensor covers all of its memory."""
    tensor = held_by(tensor)
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _copies(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tree_map(_copy, args), tree_map(_copy, kwargs)
