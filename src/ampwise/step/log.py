"""The log of a step: how many there were, what each was like, and which were skipped.

The device writes a row of each (`telemetry.ring`). The host learns whether it was skipped when that
costs no wait (`host`), and keeps what still matters of it (`skips`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampwise.policy import Policy
from ampwise.step.host import HostFlag, Outcomes
from ampwise.step.skips import Skips, explain
from ampwise.step.warn import warn_user
from ampwise.telemetry.ring import Ring, Totals


class StepLog:
    """What became of each step, and what is known of it on the host.

    Parameters
    ----------
    device
        Where steps are decided.
    max_skips
        Skipped steps in a row after which training aborts.

    Attributes
    ----------
    steps
        Completed steps; skipped ones count.
    ring
        Their records.
    outcomes
        Whether each was skipped, on its way to the host.
    skips
        The same, as far as it is known and still matters.
    """

    def __init__(self, device: torch.device, max_skips: int) -> None:
        self.steps = 0
        self.ring = Ring(device)
        self.outcomes = Outcomes(device)
        self.skips = Skips(max_skips)
        self._device = device
        self._missed: dict[int, list[str]] = {}  # buffers that a skip would not put back, by step

    def close(self, lr: float | Tensor, found_inf: HostFlag, missed: list[str]) -> list[bool]:
        """A step is over, its row written; what became known of steps, the oldest first.

        `missed` are the buffers that were not put back if it was skipped.
        """
        self.ring.written(lr)
        self.steps += 1
        if missed:
            self._missed[self.steps] = missed
        return self.outcomes.settle(found_inf)  # and so the device is done with the step before

    def learn(self, known: Sequence[bool]) -> None:
        """Take in what became known."""
        first = self.skips.known + 1
        self.skips.learn(known)
        for step, skipped in enumerate(known, first) if self._missed else ():
            missed = self._missed.pop(step, [])
            if skipped and missed:
                warn_user(
                    f"buffers {', '.join(missed[:6])} were written for the first time, made or "
                    "reshaped in a step that was skipped; they could not be put back"
                )

    def enforce_limit(self, policy: Policy) -> None:
        """Abort after too many skipped steps in a row.

        Raises
        ------
        SkippedStepsError
            Then, with what was seen in them.
        """
        if self.skips.exhausted:
            raise explain(self.ring.history, self.skips.in_a_row, policy)

    def complete_totals(self) -> Totals:
        """What was counted in all steps; waits for the device."""
        self.learn(self.outcomes.drain())
        return self.ring.complete_totals

    def start_from(self, totals: Totals, in_a_row: int = 0, held: int = 0) -> None:
        """Count on from somewhere, with no record of what came before.

        `in_a_row` steps were skipped last, and `held` are still to be left out of the schedule.
        """
        self.steps = totals.steps
        self.outcomes.drain()
        self._missed.clear()
        self.skips = Skips(self.skips.limit, known=totals.steps, skipped=totals.skipped)
        self.skips.in_a_row, self.skips.to_hold = in_a_row, held
        self.ring = Ring(self._device, totals)
