"""What a script did since its last update: calls of outermost modules, and losses.

Kept so that the step can be run again: arguments by reference, the random and autocast state that
a call began with, what its modules keep in plain Python, and the gradients that came into its
outputs. None of it is copied but what forward writes: which attributes and buffers those are is
learned in the first steps.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ampwise.data import leaves, tensors
from ampwise.observe.spots import Spots, callers_spots
from ampwise.step.attributes import Attributes
from ampwise.step.modules import modules_of
from ampwise.step.recorder import RandomState

_LEARNING = 3
"""Calls of a module in which it is learned what forward changes."""
_AHEAD = 2
"""Batches that are held: loaders may have fetched the next before one is used (Accelerate's)."""
_MOST_CALLS = 512
_MOST_HELD = 1 << 30
"""Calls in a pass, and bytes of the arguments of several, that are held."""
_MOST_BYTES = 64 << 20
"""Of gradients that are kept, and of buffers that are copied."""


class Autocast(NamedTuple):
    """Whether and how autocast is on, for one kind of device."""

    device: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls, device: str) -> Autocast:
        """As it is at this moment."""
        return cls(
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )

    def again(self) -> torch.autocast:
        """A region of the same kind."""
        return torch.autocast(self.device, self.dtype, self.enabled, self.cache)


@dataclass(slots=True)
class Incoming:
    """The gradient that came into an output of a call, where it was small enough to keep."""

    path: str
    gradient: Tensor | None = None


@dataclass(slots=True)
class Call:
    """A call of an outermost module.

    Attributes
    ----------
    began, ended
        Random state; that of the end only where it may matter.
    outputs
        Its tensors by their identity: a weak reference, and the path among the outputs.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    began: RandomState
    autocast: Autocast
    spots: Spots
    attributes: Attributes
    buffers: list[tuple[Tensor, Tensor]]
    versions: list[tuple[Tensor, int]]
    ended: RandomState | None = None
    outputs: dict[int, tuple[weakref.ref[Tensor], str]] = field(default_factory=dict[int, Any])
    incoming: list[Incoming] = field(default_factory=list[Incoming])

    def path_of(self, tensor: Tensor) -> str | None:
        """Where a tensor is among the outputs; None if it is not."""
        found = self.outputs.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def rewind(self, device: torch.device) -> None:
        """Have random state and module be as when the call began."""
        self.began.restore(device)
        self.attributes.restore()
        with torch.no_grad():
            for buffer, copy in self.buffers:
                buffer.copy_(copy)

    @property
    def size(self) -> int:
        """Bytes of its arguments."""
        return sum(each.numel() * each.element_size() for each, _ in self.versions)

    @property
    def changed_in_place(self) -> bool:
        """Whether an argument was written to since."""
        return any(tensor._version != version for tensor, version in self.versions)


@dataclass(slots=True)
class Pass:
    """Calls up to a backward, and what that was called on.

    Attributes
    ----------
    batches
        What loaders gave last, up to its first call.
    began
        Random state, where it may matter and a device was known by then.
    loss
        Unscaled, detached; None before backward, and where it is no single number.
    backward
        Where it was called.
    program
        How the loss is computed from the calls, as seen in this pass; None where nobody looked.
    complete, size
        Whether all calls were kept, and the bytes of their arguments.
    """

    batches: Sequence[Any] = ()
    began: RandomState | None = None
    calls: list[Call] = field(default_factory=list[Call])
    loss: Tensor | None = None
    backward: Spots = ()
    program: Any = None
    complete: bool = True
    size: int = 0

    @property
    def batch(self) -> Any:
        """The batch that its first call was given tensors of; else the last; None without one."""
        given = {id(each) for each, _ in self.calls[0].versions} if self.calls else set[int]()
        held = (e for e in reversed(self.batches) if any(id(t) in given for t in tensors(e)))
        return next(held, self.batches[-1] if self.batches else None)

    def add(self, call: Call) -> None:
        """Keep a call; the oldest go where many have gradients and no backward follows."""
        self.calls.append(call)
        self.size += call.size
        while len(self.calls) > _MOST_CALLS or (self.size > _MOST_HELD and len(self.calls) > 8):
            self.size -= self.calls.pop(0).size
            self.complete = False


class Calls:
    """The passes since the last update, and those before it in the same step.

    Attributes
    ----------
    device
        Of the first parameter that was seen.
    entered
        16-bit dtype of the last autocast region since the last update that was on.
    draws
        Whether losses may depend on random numbers drawn outside of modules.
    losses_known
        Whether how losses are computed is known: gradients that come from them are then had again.
    """

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.earlier: list[Pass] = []
        self.now = Pass()
        self.device: torch.device | None = None
        self.entered: torch.dtype | None = None
        self.draws = True
        self.losses_known = False
        self._batches: deque[Any] = deque(maxlen=_AHEAD)
        self._bytes = 0
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
        self._open: tuple[Call, Callable[[], None] | None] | None = None

    def batch(self, batch: Any) -> None:
        """A loader gave a batch."""
        self._batches.append(batch)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""
        self._open = None
        if not torch.is_grad_enabled() or _is_traced():
            return
        given = [each for value in (*args, *kwargs.values()) for each in tensors(value)]
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = _Known(module)
        if not self._takes_part(known, given):
            return
        learned = known.learn(module)
        self._open = (self._call(module, args, kwargs, given, known), learned)

    def end(self, output: Any) -> Call | None:
        """It returned; the call, if it is kept."""
        if self._open is None or output is None:
            return None
        (call, learned), self._open = self._open, None
        if learned is not None:
            learned()
        assert self.device is not None
        if self.draws:
            call.ended = RandomState.now(self.device, host=False)
        for path, tensor in leaves(output, ""):
            call.outputs[id(tensor)] = (weakref.ref(tensor), path)
            if tensor.requires_grad and tensor.grad_fn is not None and not self.losses_known:
                call.incoming.append(self._listen(path, tensor))
        if not self.now.calls:
            self.now.batches = tuple(self._batches)
        self.now.add(call)
        return call

    def backward(self, loss: Tensor | None, spots: Spots) -> Pass:
        """Backward is called: the pass that it ends."""
        ended, self.now = self.now, self._new()
        ended.loss = None if loss is None else loss.detach()
        ended.backward = spots
        self.passes.append(ended)
        if len(self.passes) > _MOST_CALLS:
            self.passes.pop(0).complete = False
            self.passes[0].complete = False
        return ended

    def updated(self) -> None:
        """An update was made or skipped."""
        self.earlier += self.passes
        self.passes, self._bytes, self.entered = [], 0, None
        if self.draws or self.now.calls:
            self.now = self._new()

    def step_ends(self) -> None:
        """All updates of an iteration are over."""
        self.earlier = []

    def _new(self) -> Pass:
        device = self.device if self.draws else None
        return Pass(began=None if device is None else RandomState.now(device, host=False))

    def _takes_part(self, known: _Known, given: Sequence[Tensor]) -> bool:
        """Whether a module trains, or is given what others have made; a transform does not."""
        if self.device is None:
            self.device = known.device
        if known.device is not None:
            return True
        return self.device is not None and any(each.requires_grad for each in given)

    def _call(
        self, module: nn.Module, args: Any, kwargs: Any, given: Sequence[Tensor], known: _Known
    ) -> Call:
        assert self.device is not None
        return Call(
            module,
            args,
            kwargs,
            RandomState.now(self.device, host=known.draws),
            Autocast.now(self.device.type),
            callers_spots(),
            Attributes(known.modules, internals=False),
            [(each, each.detach().clone()) for each in known.buffers],
            [(each, each._version) for each in given if not each.is_inference()],
        )

    def _listen(self, path: str, tensor: Tensor) -> Incoming:
        """Keep the gradient that will come into an output, if there is room."""
        kept, size = Incoming(path), tensor.numel() * tensor.element_size()
        if self._bytes + size > _MOST_BYTES:
            return kept
        self._bytes += size
        index = tensor.output_nr

        def before(gradients: Sequence[Tensor | None]) -> None:
            found = gradients[index]
            if found is not None:
                found = found.detach()
                kept.gradient = found if kept.gradient is None else kept.gradient + found

        assert tensor.grad_fn is not None
        tensor.grad_fn.register_prehook(before)
        return kept


def _is_traced() -> bool:
    """Whether what runs is no step but a trace, or a transform of functions."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return torch.jit.is_tracing() or functorch.peek_interpreter_stack() is not None


class _Known:
    """What forward of a module is known to change: attributes and buffers of which modules.

    Attributes
    ----------
    device
        Of its first parameter, when it was first called; None where it has none.
    draws
        Whether it may draw from Python's or NumPy's generators.
    """

    def __init__(self, module: nn.Module) -> None:
        first = next(module.parameters(), None)
        self.device = None if first is None else first.device
        self._drew = False
        self.modules: list[nn.Module] = []
        self.buffers: list[Tensor] = []
        self._looks = _LEARNING

    @property
    def draws(self) -> bool:
        return self._drew or self._looks > 0

    def learn(self, module: nn.Module) -> Callable[[], None] | None:
        """Look at one more call: what to do at its end; None once enough is known."""
        if not self._looks:
            return None
        self._looks -= 1
        known = set(map(id, self.modules))
        drawn = _drawn()
        before = [(each, Attributes([each], internals=False)) for each in modules_of([module])
                  if id(each) not in known]  # fmt: skip
        versions = [(each, each._version) for each in _small_buffers(module)]

        def learned() -> None:
            self._drew |= _drawn() != drawn
            self.modules += [each for each, attributes in before if attributes.changed]
            mine = set(map(id, self.buffers))
            self.buffers += [each for each, version in versions
                             if each._version != version and id(each) not in mine]  # fmt: skip

        return learned


def _drawn() -> tuple[Any, ...]:
    """Something that changes when numbers are drawn from Python's or NumPy's generator."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return random.getstate(), name, bytes(keys), *rest


def _small_buffers(module: nn.Module) -> list[Tensor]:
    """Buffers that may be copied at each call; not what training of a norm does not depend on."""
    found = [
        buffer
        for each in modules_of([module])
        if not (isinstance(each, _NormBase) and each.training and each.track_running_stats)
        for buffer in each._buffers.values()
        if buffer is not None and not buffer.is_inference()
    ]
    total = sum(each.numel() * each.element_size() for each in found)
    return found if total <= _MOST_BYTES else []
