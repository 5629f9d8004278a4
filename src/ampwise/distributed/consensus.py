"""What all ranks agree on at the end of a window, in one small sum on the device.

Each rank puts in

    the squared norm of its part of the gradients (parts that n ranks hold count 1/n)
    1 if that is not finite
    its share of the window, and of the window's loss     (`window`)
    1 if it was asked to stop                             (a signal to any rank stops all)

and all of them get the same sums back, bit for bit, from which they draw the same conclusions:
found_inf, norm, divisor of the gradients, reported loss. So no rank can skip alone, in whichever
shard, rank or optimizer the inf was; and since float64 sums are of a few numbers, the cost is the
latency of one all-reduce.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Consensus:
    """The ranks that train together, and what they agree on.

    Attributes
    ----------
    group
        Their process group.
    rank, size
        This process's number, and how many there are.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.stop_wanted = False

    def mean(self, value: float | Tensor) -> Tensor:
        """The mean of what the ranks have; a float64 scalar on the device."""
        shared = self._scalar(value)
        dist.all_reduce(shared, group=self.group)
        return shared / self.size

    def sums(self, squares: Tensor, share: float | Tensor, loss: Tensor) -> Tensor:
        """Sum over ranks: squared norm, non-finite norms, shares, losses, wishes to stop.

        Parameters
        ----------
        squares
            Squared norm of what this rank counts of the gradients, a float64 scalar.
        share
            This rank's share of the window.
        loss
            The same share of its loss.

        Returns
        -------
        Tensor
            Five float64 on the device, the same on all ranks.
        """
        finite = torch.isfinite(squares)
        row = torch.stack(
            (
                torch.where(finite, squares, 0.0),
                (~finite).double(),
                self._scalar(share),
                loss.to(self._device, torch.float64),
                self._scalar(float(self.stop_wanted)),
            )
        )
        dist.all_reduce(row, group=self.group)
        return row

    def _scalar(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self._device, torch.float64).reshape(()).clone()
        return torch.full((), value, dtype=torch.float64, device=self._device)
