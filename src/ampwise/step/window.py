"""The accumulation window: what share each micro-batch has in the step.

The gradient of a window is the weighted mean of its micro-batches' gradients, the weights being
samples (or tokens). The total is known only when the window closes, and it may close early, so
micro-batch i contributes with

    share_i = weight_i / (first_weight * accumulate)

and the sum of shares becomes part of the divisor when gradients are unscaled. For full windows of
equal micro-batches that is ``loss / accumulate`` and a divisor of exactly 1, as in a loop written
by hand. Dividing by the first weight that is not 0 keeps shares near 1 / accumulate whatever the
unit is, so that scaled float16 gradients keep their range.

A weight of 0 counts nothing: no gradient, no loss, even where the loss is NaN, being a mean over
nothing. On an accelerator a weight may be a tensor that the host does not know; then all this is
computed there, and one that is negative or not finite makes the window's gradient NaN.

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


def _itself(weight: Weight) -> Weight:
    return weight


class Window:
    """Shares of the micro-batches of one accumulation window.

    Parameters
    ----------
    accumulate
        Micro-batches in a full window.
    first_weight
        Turns a weight into what weights are relative to.
    over_ranks
        Whether that stays from window to window, as several ranks need it.

    Attributes
    ----------
    position
        Micro-batches in it so far.
    counts
        Whether the last one counts; a bool on a device where only that knows.
    """

    def __init__(
        self,
        accumulate: int = 1,
        first_weight: Callable[[Weight], Weight] = _itself,
        *,
        over_ranks: bool = False,
    ) -> None:
        self.accumulate = accumulate
        self._first_weight = first_weight
        self._over_ranks = over_ranks
        self.counts: bool | Tensor = True
        self._unit: Weight | None = None
        self._used: Weight | None = None
        self._next: Tensor | None = None
        self.close()

    @property
    def weighs(self) -> bool:
        """Whether micro-batches count by their samples: more than one belong to a step."""
        return self.accumulate > 1 or self._over_ranks

    def again(self) -> Window:
        """A window for the micro-batches of the last one, with the same shares."""
        used = self._used
        if used is None:
            return Window(self.accumulate)
        return Window(self.accumulate, lambda _: used / self.accumulate, over_ranks=True)

    @property
    def fills(self) -> bool:
        """Whether the next micro-batch fills it."""
        return self.position + 1 >= self.accumulate

    def add(self, loss: Tensor, weight: Weight | None, whose: Iterable[int]) -> Weight:
        """Take in a micro-batch; what its loss must be divided by, inf where it does not count.

        Parameters
        ----------
        loss
            Its loss, detached; a float32 scalar.
        weight
            Its samples or tokens.
        whose
            The optimizers that it has gradients for.

        Raises
        ------
        UsageError
            For a weight that is negative or not finite, weights of other optimizers than those of
            the window so far, and losses with weights among others without.
        """
        weight = None if weight is None else _known(weight)
        self._begin(frozenset(whose), weighed=weight is not None)
        divided_by: Weight = self.accumulate
        self.counts = True
        if weight is not None:
            self.counts = weight > 0
            divided_by = self._relative(weight)
            self._total = self._total + weight
        self.position += 1
        share = _share_of(loss, divided_by, self.counts)
        self._loss = share if self._loss is None else self._loss + share
        return divided_by

    def _begin(self, whose: frozenset[int], *, weighed: bool) -> None:
        """Begin new shares where those so far are used up; one sum of shares is of one thing."""
        if not self._whose:
            if self._loss is not None:
                self._before = self.loss
                self._begin_shares()
        elif weighed != self._weighed:
            raise UsageError(
                "weight: losses with and without a weight in one window cannot be added up; give "
                "every backward() a weight=, or none (step(loss_fn, batch) counts the samples of "
                "its batch), or make them one loss"
            )
        elif weighed and whose != self._whose:
            raise UsageError(
                "weight: losses for different optimizers in one window would be weighed against "
                "each other; call update(optimizers, update_scale=False) between, or leave it out"
            )
        self._weighed = weighed
        self._whose |= whose

    def _relative(self, weight: Weight) -> Weight:
        """What the loss of a weight is divided by: the inverse of its share."""
        if self._unit is None and (self._over_ranks or not _is_nothing(weight)):
            first = self._first_weight(weight)
            self._unit = None if _is_nothing(first) else first * self.accumulate
        if self._unit is None or _is_nothing(weight):
            return math.inf
        if not isinstance(weight, Tensor):
            return self._unit / weight
        # Only the device knows. As long as no weight has counted, the next one is the first.
        if isinstance(self._unit, Tensor):
            self._unit = torch.where(self._unit > 0, self._unit, weight * self.accumulate)
        counts = torch.where(weight > 0, self._unit / weight, torch.nan)
        return torch.where(weight == 0, torch.inf, counts)

    def use_up(self, whose: Iterable[int]) -> None:
        """Note that some optimizers have used their gradients."""
        self._whose -= frozenset(whose)

    @property
    def whose(self) -> frozenset[int]:
        """The optimizers whose gradients are not used yet."""
        return self._whose

    def report(self, loss: Tensor) -> None:
        """Take this for the window's loss, whatever the losses were."""
        self._reported = loss

    @property
    def loss(self) -> Tensor | None:
        """Weighted mean of the losses so far, summed over updates; None before the first."""
        if self._reported is not None:
            return self._reported
        if self._loss is None:
            return self._before
        mean = divide(self._loss, self.divisor) if self._weighed else self._loss
        return mean if self._before is None else self._before + mean

    @property
    def loss_sum(self) -> Tensor:
        """Sum of the losses so far, each by its share."""
        return torch.zeros(()) if self._loss is None else self._loss

    @property
    def divisor(self) -> Weight:
        """Sum of the shares: 1 for a full window of equal micro-batches, 0 if nothing counts."""
        return self.share if self._agreed is None else self._agreed

    @property
    def is_nothing(self) -> bool:
        """Whether the host knows that nothing in it counts."""
        return bool(self._weighed) and _is_nothing(self.divisor)

    @property
    def share(self) -> Weight:
        """The same on this rank, which may have no part in the window at all."""
        if not self._weighed:
            return 1 if self._agreed is None else self._agreed
        return 0 if self._unit is None else self._total / self._unit

    @property
    def unit(self) -> float | None:
        """What shares of several ranks are relative to; None for one process (waits for it)."""
        return float(self._unit) if self._over_ranks and self._unit is not None else None

    @unit.setter
    def unit(self, value: Weight | None) -> None:
        self._unit = value

    def agree(self, shares: Tensor, losses: Tensor) -> None:
        """Take over the means over all ranks of the sums of shares and of losses."""
        if self._weighed and self._unit is not None:
            self._used = self._unit
            self._next = self._unit * torch.where(shares > 0, shares, 1.0).double()
        self._agreed, self._loss = shares, losses

    @property
    def agreed(self) -> bool:
        """Whether the sums are those of all ranks already."""
        return self._agreed is not None

    def close(self) -> None:
        """Start the next window."""
        self.position = 0
        if not self._over_ranks:
            self._unit = None
        elif self._next is not None:
            self._unit, self._next = self._next, None
        self._whose: frozenset[int] = frozenset()
        self._before: Tensor | None = None
        self._reported: Tensor | None = None
        self._begin_shares()

    def _begin_shares(self) -> None:
        """Begin sums over the losses for the same optimizers; None where there is none yet."""
        self._weighed: bool | None = None  # whether all of them have weights, or none
        self._total: Weight = 0
        self._loss: Tensor | None = None
        self._agreed: Tensor | None = None  # sum of the shares, as all ranks know it

    def moment(self) -> dict[str, Any]:
        """Its state, for `restore`."""
        return dict(vars(self))

    def restore(self, moment: Mapping[str, Any]) -> None:
        """Be as at a moment."""
        vars(self).update(moment)

    def state_dict(self) -> dict[str, Any]:
        """Position and sums, in the middle of a window."""
        return {
            "position": self.position,
            "unit": self._unit,
            "total": self._total if self._weighed else None,
            "loss": self._loss,
            "whose": sorted(self._whose),
            "before": self._before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a window."""
        self.position, self._unit = int(state["position"]), state["unit"]
        total = state["total"]
        self._weighed, self._total = total is not None, 0 if total is None else total
        self._loss, self._agreed = state["loss"], None
        self._whose, self._before = frozenset(state["whose"]), state["before"]


def divide(tensor: Tensor, by: Weight) -> Tensor:
    """``tensor / by``, or the tensor itself where that changes nothing."""
    return tensor if not isinstance(by, Tensor) and by == 1 else tensor / by


def _share_of(loss: Tensor, divided_by: Weight, counts: bool | Tensor) -> Tensor:
    """A loss by its share, 0 where it does not count."""
    if isinstance(counts, Tensor):
        return torch.where(counts, loss / divided_by, 0.0)
    return divide(loss, divided_by) if counts else torch.zeros_like(loss)


def _is_nothing(weight: Weight) -> bool:
    """Whether the host knows that it is 0."""
    if isinstance(weight, Tensor):
        return weight.device.type == "cpu" and not weight.numpy().item()
    return weight == 0


def _known(weight: Weight) -> Weight:
    """A weight as a number where the host has it; checked, if so."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise UsageError(
                f"weight: expected a number or a scalar tensor, got one of shape "
                f"{tuple(weight.shape)}; sum it up, as in mask.sum()"
            )
        weight = weight.detach().reshape(())
        if weight.device.type != "cpu":
            return weight
        # The same memory: no operator runs, so nothing looks like a host sync.
        weight = (weight.float() if weight.dtype == torch.bfloat16 else weight).numpy().item()
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise UsageError(
            f"weight: expected samples or tokens as a number or a scalar tensor, got {weight!r}"
        )
    if not 0 <= weight < math.inf:
        raise UsageError(
            f"weight: expected 0 or more samples or tokens, got {weight}; 0 is for a micro-batch "
            "that does not count"
        )
    return weight
