"""The accumulation window: what share each micro-batch has in the step.

The gradient of a window is the weighted mean of its micro-batches' gradients, the weights being
samples (or tokens). The total is known only when the window closes, and it may close early, so
micro-batch i contributes with

    share_i = weight_i / (weight_0 * accumulate)

and the sum of shares becomes part of the divisor when gradients are unscaled. For full windows of
equal micro-batches that is ``loss / accumulate`` and a divisor of exactly 1, as in a loop written
by hand. Dividing by the first weight keeps shares near 1 / accumulate whatever the unit is, so
that scaled float16 gradients keep their range.

Over several ranks the weighted mean is over all their micro-batches. Shares must mean the same
everywhere, so the ranks agree on what the first ones are divided by, and then on the sums of shares
and losses of each window (`agree`): the sum over ranks, which DDP and FSDP2 divide by their number,
is divided by the mean of the shares, and the next window's are relative to this one's.

A loss without a weight counts as ``loss / accumulate``, and several of them simply add up: that is
what loops with several losses mean.

Shares belong to the optimizers whose gradients they are of. Once these have stepped, in an
iteration of several updates, the next loss begins new shares; the window's loss is the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ampwise.errors import UsageError

Weight = int | float | Tensor


class Window:
    """Shares of the micro-batches of one accumulation window.

    Parameters
    ----------
    accumulate
        Micro-batches in a full window.
    first_weight
        With several ranks: turns a weight of this rank into one that is the same on all.
    """

    def __init__(
        self, accumulate: int, first_weight: Callable[[Weight], Weight] | None = None
    ) -> None:
        self.accumulate = accumulate
        self._first_weight = first_weight
        self._unit: Weight | None = None
        self._used: Weight | None = None
        self._next: Tensor | None = None
        self.close()

    @property
    def weighs(self) -> bool:
        """Whether micro-batches count by their samples: more than one belong to a step."""
        return self.accumulate > 1 or self._first_weight is not None

    def again(self) -> Window:
        """A window for the micro-batches of the last one, with the same shares."""
        used = self._used
        if used is None:
            return Window(self.accumulate)
        return Window(self.accumulate, lambda _: used / self.accumulate)

    @property
    def fills(self) -> bool:
        """Whether the next micro-batch fills it."""
        return self.position + 1 >= self.accumulate

    def add(self, loss: Tensor, weight: Weight | None, whose: Iterable[int]) -> Weight:
        """Take in a micro-batch; what its loss must be divided by.

        Parameters
        ----------
        loss
            Its loss, detached; a float32 scalar.
        weight
            Its samples or tokens; 0 for one that does not count.
        whose
            The optimizers that it has gradients for.

        Raises
        ------
        UsageError
            For weights of other optimizers than those of the window so far.
        """
        self._begin(frozenset(whose), weighs=weight is not None and self._total is not None)
        self.position += 1
        divided_by: Weight = self.accumulate
        if weight is not None:
            if self._unit is None:
                first = weight if self._first_weight is None else self._first_weight(weight)
                self._unit = first * self.accumulate
            self._total = weight if self._total is None else self._total + weight
            is_zero = not isinstance(weight, Tensor) and weight == 0
            divided_by = math.inf if is_zero else self._unit / weight
        share = divide(loss, divided_by)
        self._loss = share if self._loss is None else self._loss + share
        return divided_by

    def _begin(self, whose: frozenset[int], *, weighs: bool) -> None:
        """Begin new shares where those so far are used up; one sum of shares is of one thing."""
        if not self._whose:
            self._before, self._total, self._loss, self._agreed = self.loss, None, None, None
        elif weighs and whose != self._whose:
            raise UsageError(
                "weight: losses for different optimizers in one window would be weighed against "
                "each other; call update(optimizers, update_scale=False) between, or leave it out"
            )
        self._whose |= whose

    def use_up(self, whose: Iterable[int]) -> None:
        """Note that some optimizers have used their gradients."""
        self._whose -= frozenset(whose)

    @property
    def loss(self) -> Tensor | None:
        """Weighted mean of the losses so far, summed over updates; None before the first."""
        if self._loss is None:
            return self._before
        mean = divide(self._loss, self.divisor)
        return mean if self._before is None else self._before + mean

    @property
    def loss_sum(self) -> Tensor | None:
        """Sum of the losses so far, each by its share."""
        return self._loss

    @property
    def divisor(self) -> Weight:
        """Sum of the shares: 1 for a full window of equal micro-batches."""
        if self._agreed is not None:
            return self._agreed
        if self._total is None or self._unit is None:
            return 1
        if not isinstance(self._total, Tensor) and self._total == 0:
            raise UsageError("weight: all micro-batches of this window weigh 0; one must count")
        return self._total / self._unit

    @property
    def share(self) -> Weight:
        """The same on this rank, which may have no part in the window at all."""
        if self._total is None or self._unit is None:
            return 1 if self._agreed is None else self._agreed
        return self._total / self._unit

    @property
    def unit(self) -> float | None:
        """What shares of several ranks are relative to; None for one process (waits for it)."""
        return None if self._first_weight is None or self._unit is None else float(self._unit)

    @unit.setter
    def unit(self, value: Tensor) -> None:
        self._unit = value

    def agree(self, shares: Tensor, losses: Tensor) -> None:
        """Take over the means over all ranks of the sums of shares and of losses."""
        if self._total is not None and self._unit is not None:
            self._used = self._unit
            self._next = torch.where(shares > 0, self._unit * shares, self._unit)
        self._agreed, self._loss = shares, losses

    @property
    def agreed(self) -> bool:
        """Whether the sums are those of all ranks already."""
        return self._agreed is not None

    def close(self) -> None:
        """Start the next window."""
        self.position = 0
        if self._first_weight is None:
            self._unit = None
        elif self._next is not None:
            self._unit, self._next = self._next, None
        self._total: Weight | None = None
        self._loss: Tensor | None = None
        self._agreed: Tensor | None = None
        self._whose: frozenset[int] = frozenset()
        self._before: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Position and sums, in the middle of a window."""
        return {
            "position": self.position,
            "unit": self._unit,
            "total": self._total,
            "loss": self._loss,
            "whose": sorted(self._whose),
            "before": self._before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a window."""
        self.position = int(state["position"])
        self._unit, self._total, self._loss = state["unit"], state["total"], state["loss"]
        self._whose, self._before = frozenset(state["whose"]), state["before"]


def divide(tensor: Tensor, by: Weight) -> Tensor:
    """``tensor / by``, or the tensor itself where that changes nothing."""
    return tensor if not isinstance(by, Tensor) and by == 1 else tensor / by
