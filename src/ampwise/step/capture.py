"""A whole training step as one CUDA graph: one launch instead of hundreds.

A captured step reads nothing back, so it needs fused optimizers (``capturable=True`` where they
have it), batches of one shape, and whole windows: one micro-batch a step. What the host does after
a step (scheduler, patience, telemetry) runs after each replay as it does after each ordinary step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampwise.data.move import clone, leaves
from ampwise.errors import UsageError
from ampwise.step.host import HostFlag

WARM_UP = 3
"""Ordinary steps before the capture, for what libraries set up on first use."""


class CapturedStep:
    """Makes the first steps as usual, then captures one, then replays it.

    Parameters
    ----------
    ordinary
        Makes an ordinary step on a batch; what that returns.
    on_device
        The device's part of a step on a batch, its telemetry into a row; what the step returns,
        and found_inf.
    on_host
        The host's part, after each replay, from the row and found_inf.
    row
        Where the captured step writes its telemetry.
    """

    def __init__(
        self,
        ordinary: Callable[[Any], Any],
        on_device: Callable[[Any, Tensor], tuple[Any, HostFlag]],
        on_host: Callable[[Tensor, HostFlag], None],
        row: Tensor,
    ) -> None:
        self._ordinary = ordinary
        self._on_device = on_device
        self._on_host = on_host
        self._row = row
        self._warm_up = WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None
        if row.device.type != "cuda":
            warnings.warn(
                f"CUDA graphs need a CUDA device: steps on {row.device} run as usual", stacklevel=3
            )

    def __call__(self, batch: Any) -> Any:
        """One step on a batch of the shapes of the first; what it returns, on the device.

        Raises
        ------
        UsageError
            When the batch has other shapes.
        """
        if self._row.device.type != "cuda":
            return self._ordinary(batch)
        if self._warm_up:
            self._warm_up -= 1
            return self._aside(batch)
        if self._graph is None:
            self._capture(batch)
        else:
            self._load(batch)
        assert self._graph is not None
        self._graph.replay()
        self._on_host(self._row, self._found_inf)
        return clone(self._returned)

    def _aside(self, batch: Any) -> Any:
        """An ordinary step on a side stream, as a capture needs it before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            returned = self._ordinary(batch)
        torch.cuda.current_stream().wait_stream(stream)
        return returned

    def _capture(self, batch: Any) -> None:
        self._batch = clone(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._returned, self._found_inf = self._on_device(self._batch, self._row)
        self._graph = graph

    def _load(self, batch: Any) -> None:
        """Copy a batch to where the graph reads it."""
        fixed, new = list(leaves(self._batch)), list(leaves(batch))
        if [(path, each.shape) for path, each in fixed] != [(path, t.shape) for path, t in new]:
            shapes = ", ".join(f"{path} {tuple(each.shape)}" for path, each in fixed)
            raise UsageError(
                f"captured step: expected a batch as the one captured, {shapes}; make steps on "
                "other shapes with the TrainStep itself"
            )
        for (_, target), (_, source) in zip(fixed, new, strict=True):
            target.copy_(source, non_blocking=True)
