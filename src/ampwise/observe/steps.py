"""What a step is made of: updates, and what happened up to each.

A *segment* lasts from one update to the next. A step is the segments up to where an optimizer would
update a second time, so that a GAN's two updates are one step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from ampwise.lines import NOWHERE, Line


def is_bad(number: Tensor | None) -> bool:
    """Whether a number is inf or NaN, where that costs no wait for a device."""
    return number is not None and number.is_cpu and not math.isfinite(float(number))


@dataclass(slots=True)
class Attempt:
    """An update that was made or skipped.

    Attributes
    ----------
    skipped
        Whether it was skipped, where the host knows; else what a fused optimizer found, on the
        device: more than 0 where it skipped.
    scale
        Loss scale it was made under; None without a live scaler.
    norm
        Global L2 norm of its true gradients, before clipping; None where it is not known.
    """

    optimizer: Optimizer
    skipped: bool | Tensor
    scale: Tensor | None = None
    norm: Tensor | None = None
    line: Line = NOWHERE


@dataclass(slots=True)
class Segment:
    """What happened up to an update.

    Attributes
    ----------
    losses
        What backward was called on, unscaled, detached.
    backwards
        How often at each line.
    scaled, plain
        Backward calls on losses that a live scaler had multiplied, and on others.
    by_hand
        Whether a loss may have been scaled by other means: multiplied, or given a gradient.
    norm
        What clipping said the norm was.
    seconds, spent_s
        Time it took, and of that what observing took.
    """

    losses: list[Tensor] = field(default_factory=list[Tensor])
    backwards: dict[Line, int] = field(default_factory=dict[Line, int])
    samples: int = 0
    waited_s: float = 0.0
    scaled: int = 0
    plain: int = 0
    by_hand: bool = False
    norm: Tensor | None = None
    seconds: float = 0.0
    spent_s: float = 0.0


@dataclass(slots=True)
class Step:
    """An iteration: all updates up to the one that would be an optimizer's second.

    Attributes
    ----------
    number
        From 1; skipped ones count.
    watched
        Whether it was slowed down by being looked at.
    """

    number: int
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    segments: list[Segment] = field(default_factory=list[Segment])
    watched: bool = False

    @property
    def seconds(self) -> float:
        """Time from the update before, without what looking at it took."""
        return sum(each.seconds for each in self.segments)

    @property
    def spent_s(self) -> float:
        """What observing took of that."""
        return sum(each.spent_s for each in self.segments)

    @property
    def samples(self) -> int:
        """Rows of the batches that it took from loaders."""
        return sum(each.samples for each in self.segments)

    @property
    def waited_s(self) -> float:
        """Time it waited for them."""
        return sum(each.waited_s for each in self.segments)

    @property
    def scaled(self) -> bool:
        """Whether a live scaler took part."""
        return any(each.scale is not None for each in self.attempts)

    @property
    def micro_batches(self) -> int:
        """The most often that backward was called at one line."""
        return max((max(each.backwards.values(), default=0) for each in self.segments), default=0)
