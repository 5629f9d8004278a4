"""Schedules: whether the learning rate moved on after a step that was skipped.

PyTorch's schedulers are seen stepping. Where there is none, a rate that the script sets by hand is
compared from step to step.
"""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler

from ampwise.observe.patches import Patches
from ampwise.observe.session import Session


class Schedules:
    """``LRScheduler``s, those with a ``step`` of their own included.

    Attributes
    ----------
    stepped
        How often any did.
    """

    what = "schedulers"

    def __init__(self, session: Session) -> None:
        self.stepped = 0
        self._session = session
        self._inside = False

    def install(self, patches: Patches) -> None:
        """Put it in place."""
        base = lr_scheduler.LRScheduler
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and issubclass(kind, base) and "step" in vars(kind):
                patches.wrap(kind, "step", self._step)

    def _step(self, real: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not self._session.active:
            return real(scheduler, *args, **kwargs)
        self._inside = True
        try:
            return real(scheduler, *args, **kwargs)
        finally:
            self._inside = False
            self.stepped += 1
            self._session.tell("schedule_stepped")
