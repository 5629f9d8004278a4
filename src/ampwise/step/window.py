"""The accumulation window: what share each micro-batch has in the step.

The gradient of a window is the weighted mean of its micro-batches' gradients, the weights being
samples (or tokens). The total is known only when the window closes, and it may close early, so
micro-batch i contributes with

    share_i = weight_i / (weight_0 * accumulate)

and the sum of shares becomes part of the divisor when gradients are unscaled. For full windows of
equal micro-batches that is ``loss / accumulate`` and a divisor of exactly 1, as in a loop written
by hand. Dividing by the first weight keeps shares near 1 / accumulate whatever the unit is, so
that scaled float16 gradients keep their range.

A loss without a weight counts as ``loss / accumulate``, and several of them simply add up: that is
what loops with several losses mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Weight = int | float | Tensor


class Window:
    """Shares of the micro-batches of one accumulation window.

    Parameters
    ----------
    accumulate
        Micro-batches in a full window.
    """

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.close()

    @property
    def full(self) -> bool:
        """Whether the next micro-batch would belong to the next window."""
        return self.position >= self.accumulate

    def add(self, loss: Tensor, weight: Weight | None) -> Weight:
        """Take in a micro-batch; what its loss must be divided by.

        Parameters
        ----------
        loss
            Its loss, detached; a float32 scalar.
        weight
            Its samples or tokens, above zero.
        """
        self.position += 1
        divided_by: Weight = self.accumulate
        if weight is not None:
            if self._unit is None:
                self._unit = weight * self.accumulate
            self._total = self._total + weight
            divided_by = self._unit / weight
        share = divide(loss, divided_by)
        self._loss = share if self._loss is None else self._loss + share
        return divided_by

    @property
    def loss(self) -> Tensor | None:
        """Weighted mean of the losses so far; None before the first."""
        return None if self._loss is None else divide(self._loss, self.divisor)

    @property
    def divisor(self) -> Weight:
        """Sum of the shares: 1 for a full window of equal micro-batches."""
        return 1 if self._unit is None else self._total / self._unit

    def close(self) -> None:
        """Start the next window."""
        self.position = 0
        self._unit: Weight | None = None
        self._total: Weight = 0
        self._loss: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Position and sums, in the middle of a window."""
        return {
            "position": self.position,
            "unit": self._unit,
            "total": self._total,
            "loss": self._loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a window."""
        self.position = int(state["position"])
        self._unit, self._total, self._loss = state["unit"], state["total"], state["loss"]


def divide(tensor: Tensor, by: Weight) -> Tensor:
    """``tensor / by``, or the tensor itself where that changes nothing."""
    return tensor if not isinstance(by, Tensor) and by == 1 else tensor / by
