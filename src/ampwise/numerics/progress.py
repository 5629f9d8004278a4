"""Who wants to know how far a diagnosis is."""

from __future__ import annotations

from typing import Protocol

from ampwise.numerics.result import Diagnosis


class Progress(Protocol):
    """Who wants to know how far a diagnosis is."""

    def step(self, number: int, planned: int, loss: float) -> None:
        """A step was made."""

    def stage(self, what: str) -> None:
        """What is being done now."""

    def found(self, diagnosis: Diagnosis) -> None:
        """Cause and evidence are known; fixes are still to be tried."""


class Silent:
    """Nobody wants to know."""

    def step(self, number: int, planned: int, loss: float) -> None:
        """Nothing."""

    def stage(self, what: str) -> None:
        """Nothing."""

    def found(self, diagnosis: Diagnosis) -> None:
        """Nothing."""
