"""How a policy enters forward and backward, and what a way to compute in a precision must do.

A micro-batch enters its precision twice:

    forward    autocast around forward and loss, and all that holds in backward
    backward   the parts: the mode of float32 products, islands, 16-bit copies of weights.
               Checkpointing runs forwards again there, and kernels obey the same switches

Both may be entered again inside themselves or each other; the outermost exit puts everything back.
Between them the models are what the user made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from ampwise.policy import Policy


class Part:
    """One way in which a precision changes what runs; here, none."""

    def enter(self) -> None:
        """Forward or backward begins."""

    def leave(self) -> None:
        """It is over: put back what was found. After errors, too."""

    def begin_window(self) -> None:
        """Parameters may have been changed, by anyone, since the last forward."""

    def moved(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer has stepped on these."""

    @property
    def held_bytes(self) -> int:
        """Memory of tensors that stay between steps."""
        return 0

    def close(self) -> None:
        """Let go of the models."""


class Precision:
    """A policy in force.

    Attributes
    ----------
    forward
        Context of forward and loss. With a float32 policy autocast is off inside, also where the
        caller has it on.
    backward
        Context of a backward.
    """

    def __init__(self, policy: Policy, device_type: str, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._depth = 0
        self.backward = _Region(self)
        self.forward = _Forward(self, policy, device_type)

    def enter(self) -> None:
        """Be in all parts."""
        if not self._depth:
            entered = 0
            try:
                for part in self._parts:
                    part.enter()
                    entered += 1
            except BaseException:
                self._leave(self._parts[:entered])
                raise
        self._depth += 1

    def leave(self) -> None:
        """Be out of them, if this was the outermost region."""
        self._depth -= 1
        if not self._depth:
            self._leave(self._parts)

    def begin_window(self) -> None:
        """The next forward is the first since a step was made or skipped."""
        for part in self._parts:
            part.begin_window()

    def moved(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer has stepped on these."""
        held = list(parameters)
        for part in self._parts:
            part.moved(held)

    @property
    def held_bytes(self) -> int:
        """Memory of tensors that stay between steps, in bytes."""
        return sum(part.held_bytes for part in self._parts)

    def close(self) -> None:
        """Let go of the models."""
        for part in self._parts:
            part.close()

    def _leave(self, parts: Sequence[Part]) -> None:
        """Leave some parts, the last first; all of them, whatever one of them says."""
        if not parts:
            return
        try:
            parts[-1].leave()
        finally:
            self._leave(parts[:-1])


class _Region:
    """Context of the parts."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def __enter__(self) -> None:
        self._precision.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._precision.leave()


class _Forward(_Region):
    """The same with autocast."""

    def __init__(self, precision: Precision, policy: Policy, device_type: str) -> None:
        super().__init__(precision)
        self._device_type = device_type
        self._enabled = policy.autocast
        self._dtype = getattr(torch, policy.compute_dtype) if policy.autocast else None
        self._entered: list[torch.autocast | None] = []

    def __enter__(self) -> None:
        self._precision.enter()
        autocast = None
        if self._enabled or torch.is_autocast_enabled(self._device_type):
            autocast = torch.autocast(self._device_type, self._dtype, self._enabled)
            autocast.__enter__()
        self._entered.append(autocast)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if autocast := self._entered.pop():
            autocast.__exit__(kind, error, trace)
        self._precision.leave()
