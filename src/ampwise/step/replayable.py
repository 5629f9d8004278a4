"""What whoever examines a step asks of it: that it can be run again, and what it is made of.

Two things can: a `TrainStep` (`replay.Replay`), and a step of a script that is observed. Nothing
that looks into a step needs to know which of them it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ampwise.policy import Policy
from ampwise.step.recorder import Stash, finite


@dataclass(slots=True)
class Replayed:
    """What a replay gave.

    Attributes
    ----------
    losses
        Unscaled loss of each micro-batch, detached.
    gradients
        Gradients by parameter name, still scaled.
    norms
        Of the gradients, as a guard reads them; empty without backward, or where it raised.
    poisoned
        Buffers that forward left with inf or NaN in them, and that had none before, by name. What
        was written in place holds its old values again; what was bound anew is the new tensor.
    error
        What forward or backward raised, if it did; the rest is then what came before.
    forward_s
        Time of the forwards, in seconds.
    """

    losses: list[Tensor] = field(default_factory=list[Tensor])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    norms: list[Tensor] = field(default_factory=list[Tensor])
    poisoned: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    error: Exception | None = None
    forward_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether it ran to its end and every loss and gradient is finite."""
        return self.error is None and all(map(finite, (*self.losses, *self.gradients.values())))


class Replayable(Protocol):
    """A step that can be run again, exactly."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models, out of DDP."""
        ...

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """What updates them."""
        ...

    @property
    def policy(self) -> Policy:
        """The precision it runs in."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scale is in force."""
        ...

    @property
    def least_scale(self) -> float:
        """The lowest that a loss scale comes to by itself."""
        ...

    @property
    def steps(self) -> int:
        """Completed steps; skipped ones count."""
        ...

    @property
    def open(self) -> Stash | None:
        """The window that is not over yet, as it was recorded."""
        ...

    @property
    def closed(self) -> Stash | None:
        """The window before it."""
        ...

    @property
    def ranks(self) -> int:
        """Processes that train these models together."""
        ...

    @property
    def group(self) -> ProcessGroup | None:
        """These ranks; None for one process."""
        ...

    @property
    def can_replay(self) -> bool:
        """Whether this process can run a step by itself: not where it has only a part of it."""
        ...

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The models' parameters by FQN."""
        ...

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The same, and those that only an optimizer knows."""
        ...

    def rewind_buffers(self) -> None:
        """Put buffers back to where an open window began, and leave it open."""
        ...

    def replay(
        self,
        stash: Stash,
        *,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        policy: Policy | None = None,
        scale: float | None = None,
        change: Callable[[Any], Any] | None = None,
        backward: bool = True,
        until_bad: bool = False,
    ) -> Replayed:
        """Run a window again, forward and backward; nothing about the step or the model changes.

        Parameters
        ----------
        around
            Makes a context to run forward and backward in.
        policy
            Another policy.
        scale
            Another loss scale.
        change
            Applied to each batch first.
        backward
            False for the forwards alone.
        until_bad
            End at the first loss that is not finite, for who asks no more than whether all is:
            where float16 is emulated, backward is most of a step.
        """
        ...

    def how(self, policy: Policy) -> str:
        """What to write for another policy."""
        ...

    def how_in_float32(self, *modules: str) -> str:
        """What to write to keep modules in float32."""
        ...

    def how_scaled(self, scale: float) -> str:
        """What to write for a loss scale that begins with this."""
        ...


def lower_scales(step: Replayable, stash: Stash, by: float = 16.0) -> Iterator[float]:
    """Loss scales below a window's own, each lower by a factor, to the lowest it comes to."""
    scale = float(stash.scale)
    while scale > step.least_scale:
        scale = max(step.least_scale, scale / by)
        yield scale
