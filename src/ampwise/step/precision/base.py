"""How a policy enters forward and backward, and what a way to compute in a precision must do.

A micro-batch enters its precision twice:

    forward    autocast around forward and loss, and all that holds in backward
    backward   the parts: the mode of float32 products, islands, 16-bit copies of weights.
               Checkpointing runs forwards again there, and kernels obey the same switches

Both may be entered again inside themselves or each other; the outermost exit puts everything back.
Between them the models are what the user made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampwise.policy import Policy


class Part:
    """One way in which a precision changes what runs; here, none."""

    def enter(self) -> None:
        """Forward or backward begins."""

    def leave(self) -> None:
        """It is over: put back what was found. After errors, too."""

    def begin_window(self, *, anew: bool) -> None:
        """Parameters may have been changed, by anyone, since the last forward.

        With `anew` a graph may still hold what that forward computed with.
        """

    def moved(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer has stepped on these."""

    def stepping(
        self,
        optimizer: Optimizer,  # noqa: ARG002 - for those that step otherwise
        make: Callable[[], object],
    ) -> Callable[[], object]:
        """What makes an optimizer's step; `make` is its own."""
        return make

    @property
    def held_bytes(self) -> int:
        """Memory of tensors that stay between steps."""
        return 0

    @property
    def left_out(self) -> dict[str, str]:
        """Modules that stay out of it against the policy's name, with the reason."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, as plain values, by names of its own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; from the beginning, if it is empty."""

    def close(self) -> None:
        """Let go of the models."""


class Precision:
    """A policy in force; itself the context of a backward.

    Attributes
    ----------
    held_bytes
        Memory of tensors that stay between steps.
    """

    def __init__(self, policy: Policy, device_type: str, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._depth = 0
        # To make autocast anew takes longer than to enter it.
        self._idle: dict[bool, list[torch.autocast]] = {True: [], False: []}
        self._device_type = device_type
        self._enabled = policy.autocast
        self._dtype = getattr(torch, policy.compute_dtype) if policy.autocast else None

    def forward(self) -> AbstractContextManager[None]:
        """Context of forward and loss.

        With a float32 policy autocast is off inside, also where the caller has it on.
        """
        if self._enabled or torch.is_autocast_enabled(self._device_type):
            caches = torch.is_autocast_cache_enabled()
            idle = self._idle[caches]
            autocast = (
                idle.pop()
                if idle
                else torch.autocast(self._device_type, self._dtype, self._enabled, caches)
            )
            return _Forward(self, autocast, idle)
        return self

    def __enter__(self) -> None:
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

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._leave(self._parts)

    def begin_window(self, *, anew: bool = False) -> None:
        """The next forward is the first since a step was made or skipped.

        With `anew` a graph may still hold what an earlier one computed with.
        """
        if self._depth:
            return
        self._forget_casts()
        for part in self._parts:
            part.begin_window(anew=anew)

    def moved(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer has stepped on these."""
        self._forget_casts()
        held = list(parameters)
        for part in self._parts:
            part.moved(held)

    def step(self, optimizer: Optimizer, make: Callable[[], object]) -> None:
        """Make an optimizer's step, its own being `make`."""
        for part in self._parts:
            make = part.stepping(optimizer, make)
        make()

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, as plain values."""
        return {name: each for part in self._parts for name, each in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; from the beginning, if it is empty."""
        for part in self._parts:
            part.load_state_dict(state)

    def _forget_casts(self) -> None:
        """Have autocast cast anew: inside a region of the caller's it would keep its casts."""
        if self._enabled:
            torch.clear_autocast_cache()

    @property
    def held_bytes(self) -> int:
        """Memory of tensors that stay between steps, in bytes."""
        return sum(part.held_bytes for part in self._parts)

    @property
    def left_out(self) -> dict[str, str]:
        """Modules that stay out of it against the policy's name, with the reason."""
        return {name: why for part in self._parts for name, why in part.left_out.items()}

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


class _Forward:
    """Context of a precision with autocast, which goes to those that are `idle` afterwards."""

    def __init__(
        self, precision: Precision, autocast: torch.autocast, idle: list[torch.autocast]
    ) -> None:
        self._precision = precision
        self._autocast = autocast
        self._idle = idle

    def __enter__(self) -> None:
        self._precision.__enter__()
        self._autocast.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._autocast.__exit__(kind, error, trace)
        self._idle.append(self._autocast)
        self._precision.__exit__()
