"""What happens in a script, as verbs that a listener may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampwise.lines import Line
from ampwise.observe.steps import Attempt, Step


class Listener:
    """Wants to know some of it; each verb does nothing here.

    All are called on the script's own thread, in the order of events. None may change anything.
    """

    def batch(self, batch: Any) -> None:
        """A loader gave a batch."""

    def call_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called by code outside of modules; outside of backward."""

    def call_ends(self, module: nn.Module, output: Any) -> None:
        """It returned; None where it raised."""

    def autocast_entered(
        self, device: str, dtype: torch.dtype, line: Line, *, enabled: bool
    ) -> None:
        """An autocast region begins, on this line of the user's."""

    def compiled(self, settings: Mapping[str, Any]) -> None:
        """``torch.compile`` is called, with these settings."""

    def scaler_made(self, scaler: GradScaler) -> None:
        """A live scaler was made."""

    def backward_begins(self, loss: Tensor | None, scaler: GradScaler | None) -> None:
        """Backward of a loss (unscaled, still in its graph; None if it is no single tensor)."""

    def backward_ends(self) -> None:
        """It is done, or raised."""

    def unscaled(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """``unscale_`` is called."""

    def scaler_steps(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """``step`` of a live scaler is called."""

    def clipped(self, what: str, scale: Tensor | None) -> None:
        """Gradients are about to be clipped by a function of this name, scaled if not None."""

    def gradients_ready(self, optimizer: Optimizer) -> None:
        """An update is about to be made, with gradients as they are, and no scaler asked."""

    def stepped(self, optimizer: Optimizer, *, by_scaler: bool) -> None:
        """An optimizer's own ``step`` is called."""

    def attempted(self, attempt: Attempt) -> None:
        """An update was made or skipped."""

    def updated(self, scaler: GradScaler) -> None:
        """``update`` of a live scaler was called."""

    def loaded(self, what: Any) -> None:
        """``load_state_dict`` of an optimizer or scaler, or a file by ``torch.load``."""

    def schedule_stepped(self) -> None:
        """A scheduler of torch's stepped."""

    def step_ends(self, step: Step) -> None:
        """All updates of an iteration were made or skipped."""
