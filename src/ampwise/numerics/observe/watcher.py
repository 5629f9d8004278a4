"""The dispatch mode of a watched replay: which operations make inf or NaN of finite values.

Each floating-point result that is no view is read once (`torch.aminmax`, which carries NaN along);
what is known of it is kept by storage, so views, in-place operations and saved tensors need no
bookkeeping of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ampwise.formats import dtype_name
from ampwise.numerics.observe.bits import NAN, NEGATIVE, bad_bits, bits_and_extreme
from ampwise.numerics.observe.operations import (
    FILLS,
    Operation,
    OperationMode,
    copied,
    held_by,
    is_whole,
    memory,
    tensors,
    written,
)
from ampwise.numerics.observe.roots import BadValues, Flow, Root
from ampwise.places import NOWHERE, Phase, Place, Places

_CAPTURED = 8
"""Roots whose inputs are kept."""


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of the values of a piece of memory that are not finite.

    Attributes
    ----------
    deliberate
        Whether they are infinities that the code wrote on purpose.
    maker
        Root or carrier that made it bad.
    """

    bits: int
    deliberate: bool = False
    maker: int = -1


@dataclass(slots=True)  # one for each operation: frozen would take a while
class _Call:
    """An operation that is being looked at.

    Attributes
    ----------
    copies
        Of its arguments, where it writes them.
    inputs
        States of the bad tensors among them.
    """

    index: int
    operation: Operation
    place: Place
    args: Any
    kwargs: Any
    copies: Any
    inputs: list[_State]

    @property
    def faulty(self) -> list[_State]:
        """Of its bad inputs, those that are bad by no one's intention."""
        return [each for each in self.inputs if not each.deliberate]


class Watcher(OperationMode):
    """Watches what runs inside of it.

    Parameters
    ----------
    capture
        Index of a root whose inputs must be kept, beside the first ones.
    phase
        What all of it is taken for, where it is neither forward nor backward.

    Attributes
    ----------
    count
        Operations so far.
    values
        Where bad values come from.
    failed
        The operation that raised.
    spans
        Where the operations of forward were, in order; each run of the same place once.
    """

    def __init__(
        self, places: Places, capture: int | None = None, phase: Phase | None = None
    ) -> None:
        super().__init__()
        self.count = 0
        self.values = BadValues()
        self.failed: Root | None = None
        self.spans: list[Place] = []
        self._phase = phase
        self._failed_on: list[Root] = []
        self._places = places
        self._capture = capture
        self._states: dict[int, tuple[_State, Any]] = {}  # with what keeps the address in use
        self._flows: dict[int, Flow] = {}
        self._seen: dict[tuple[str, Place], int] = {}

    # -- what it is asked for ----------------------------------------------------------------------

    def source(self, name: str, tensor: Tensor, kind: str) -> None:
        """Look at a tensor from outside."""
        bits = bad_bits(tensor)
        if not bits:
            return
        index = -2 - len(self.values.roots)
        deliberate = bits == NEGATIVE and kind != "parameter"  # an additive mask
        held = [tensor.detach()] if tensor.is_floating_point() and not tensor.is_sparse else []
        self.values.roots[index] = Root(
            index, kind, NOWHERE, bits, outputs=held, source=f"{kind} {name}"
        )
        self._set(tensor, _State(bits, deliberate, index))

    def before_error(self) -> Root | None:
        """The root that an error is about: what a failed operation was given, or a check saw."""
        if self.failed is None:
            seen = [each for each in self.values.roots.values() if each.swallowed_by is None]
        else:
            seen = self._failed_on
        captured = [each for each in seen if each.func is not None]
        return max(captured, key=lambda root: root.index, default=None)

    def roots_of(self, tensor: Tensor) -> list[Root]:
        """Roots that a tensor's bad values come from; empty if it is finite."""
        return self.values.behind(self.maker_of(tensor)) if bad_bits(tensor.detach()) else []

    def maker_of(self, tensor: Tensor) -> int:
        """Index of what made a tensor bad; that of nothing, where it is not known."""
        known = self._states.get(memory(tensor))
        return -1 if known is None else known[0].maker

    # -- while it runs -----------------------------------------------------------------------------

    def operate(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        func = op.func
        place = self._places.here()
        if self._phase is not None:
            place = replace(place, phase=self._phase)
        index, self.count = self.count, self.count + 1
        if place.phase == "forward" and (not self.spans or self.spans[-1] != place):
            self.spans.append(place)
        copies = copied((args, kwargs)) if op.mutates else None
        call = _Call(index, op, place, args, kwargs, copies, self._inputs(args, kwargs))
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.failed = Root(index, op.name, place, 0, 0, func, *copied((args, kwargs)))
            self._failed_on = self._behind(call.faulty)
            raise
        results = [] if op.empty else written(op, args, kwargs, result)
        if results:
            self._look(call, results)
        return result

    def _look(self, call: _Call, results: list[Tensor]) -> None:
        """Judge the results of one operation."""
        key = (call.operation.name, call.place)
        occurrence = self._seen.get(key, 0)
        self._seen[key] = occurrence + 1
        before = self._largest(call)
        bad, bits = self._read(call, results, before)
        faulty = call.faulty
        if not bits:
            for root in self._behind(faulty):
                root.swallowed_by = root.swallowed_by or (*key, occurrence)
            return
        if not faulty and _deliberate(call, bits):
            maker = next((each.maker for each in call.inputs), -1)
            state = _State(bits, deliberate=True, maker=maker)
        elif faulty:
            self.values.carried(call.index, *key, (each.maker for each in faulty))
            state = _State(bits, maker=call.index)
            self._note_scales(bad, faulty)
        else:
            root = self._root(call, bits, occurrence, bad)
            root.before = before
            roots = self.values.roots
            root.fed_by = next((roots[e.maker] for e in call.inputs if e.maker in roots), None)
            roots[call.index] = root
            state = _State(bits, maker=call.index)
        for tensor in bad:
            self._set(tensor, state)

    def _read(
        self, call: _Call, results: list[Tensor], before: Flow | None
    ) -> tuple[list[Tensor], int]:
        """Note how large results are; those that are bad, and in what way."""
        own = {memory(each) for each in tensors((call.args, call.kwargs))}
        bad: list[Tensor] = []
        bits = 0
        for tensor in results:
            found, extreme = bits_and_extreme(tensor)
            bits |= found
            key = memory(tensor)
            self._flows[key] = Flow(
                call.operation.name, call.place, dtype_name(tensor.dtype), extreme, before
            )
            if found:
                bad.append(tensor)
            elif key in self._states and (key not in own or is_whole(tensor)):
                del self._states[key]
        return bad, bits

    def _root(self, call: _Call, bits: int, occurrence: int, bad: list[Tensor]) -> Root:
        root = Root(call.index, call.operation.name, call.place, bits, occurrence)
        captured = sum(each.func is not None for each in self.values.roots.values())
        if captured < _CAPTURED or call.index == self._capture:
            root.func = call.operation.func
            root.args, root.kwargs = call.copies or copied((call.args, call.kwargs))
            root.outputs = [each.detach().clone() for each in bad]
        return root

    def _note_scales(self, bad: list[Tensor], faulty: list[_State]) -> None:
        """Note of the roots of a bad tensor of float8 those that were a scale of it."""
        for tensor in bad:
            if tensor.element_size() == 1:
                for root in self._behind(faulty):
                    if root.outputs and root.outputs[0].numel() < tensor.numel():
                        root.scales = dtype_name(tensor.dtype)

    def _behind(self, states: Iterable[_State]) -> list[Root]:
        return [root for each in states for root in self.values.behind(each.maker)]

    def _largest(self, call: _Call) -> Flow | None:
        """What made the largest of its arguments; None where all come from outside."""
        known = [self._flows.get(memory(each)) for each in tensors((call.args, call.kwargs))]
        flows = [each for each in known if each is not None and math.isfinite(each.extreme)]
        return max(flows, key=lambda flow: abs(flow.extreme), default=None)

    def _inputs(self, args: Any, kwargs: Any) -> list[_State]:
        """States of the bad tensors among the inputs."""
        if not self._states:
            return []
        found: list[_State] = []
        for tensor in tensors((args, kwargs)):
            known = self._states.get(memory(tensor))
            if known is not None and bad_bits(tensor):
                found.append(known[0])
        return found

    def _set(self, tensor: Tensor, state: _State) -> None:
        self._states[memory(tensor)] = (state, held_by(tensor).untyped_storage())


def _deliberate(call: _Call, bits: int) -> bool:
    """Whether infinities were written on purpose, or only carried along."""
    if bits & NAN:
        return False
    carried = 0
    for each in call.inputs:
        carried |= each.bits
    if call.inputs and not bits & ~carried:
        return True
    if call.operation.name not in FILLS:
        return False
    scalars = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, float)]
    return any(math.isinf(each) for each in scalars)
