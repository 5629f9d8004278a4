"""What a bench is asked for, and the precisions it takes when none are named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol

import torch

from ampwise.bench.arm import Settings
from ampwise.bench.equivalence import MAX_SEEDS
from ampwise.bench.race import Race
from ampwise.bench.requirements import Thresholds
from ampwise.capability import DeviceCapability
from ampwise.installation import extra_command
from ampwise.policy import PRESETS, Policy

MEMORY_STEPS = 3
BASELINE = "fp32"
CONTROL = "fp32 again"
"""A second float32 arm: how far two equal arms seem to lie apart is the noise of the machine."""


@dataclass(frozen=True)
class BenchConfig:
    """What to measure.

    Attributes
    ----------
    precisions
        Policies beside fp32; None for what the device is good for, and fp16.
    max_rounds
        Rounds after which the race ends undecided.
    budget_s
        Seconds the race may take.
    max_seeds
        Paired seeds for parity, at most; 0 leaves it out.
    parity_steps
        Steps of each of its training runs; None for what fits into `parity_budget_s` at five seeds.
    parity_budget_s
        Seconds after which no further seed starts.
    metric
        What parity compares; None for the task's own.
    levers_s
        Seconds for the race of each lever beside precision; 0 leaves them out.
    compiled
        Whether `torch.compile` is one of them.
    total_s
        Seconds for all of it. What does not fit is not measured, and the report says so. The first
        steps and the peak memory are always measured, and a step that runs is waited for.
    """

    device: torch.device
    precisions: Sequence[Policy] | None = None
    seed: int = 0
    accumulate: int = 1
    max_grad_norm: float | None = None
    max_rounds: int = 200
    budget_s: float = 300.0
    max_seeds: int = MAX_SEEDS
    parity_steps: int | None = None
    parity_budget_s: float = 900.0
    metric: str | None = None
    levers_s: float = 0.0
    compiled: bool = False
    total_s: float = math.inf
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def settings(self) -> Settings:
        """What every arm shares."""
        return Settings(self.device, self.seed, self.accumulate, self.max_grad_norm)


class Progress(Protocol):
    """Who wants to know how far a bench is."""

    def stage(self, what: str) -> None:
        """Something begins."""

    def round(self, race: Race) -> None:
        """A round of the race ended."""

    def seed(self, name: str, seed: int, planned: int) -> None:
        """A precision starts to train under a seed."""


def choose(
    asked: Sequence[Policy] | None, capability: DeviceCapability
) -> tuple[list[Policy], dict[str, str]]:
    """The policies to measure, fp32 first, and the presets left out with the reason.

    Default: every preset whose format gains on the device and that leaves the model as it is, and
    fp16. Where none gains, bf16 is
    measured too, so that the report shows what it costs rather than asserts it.
    """
    baseline = PRESETS[BASELINE]
    if asked is not None:
        return [baseline, *(each for each in asked if each != baseline)], {}
    chosen, left_out = [baseline], dict[str, str]()
    nothing_gains = not any(each.gains for each in capability.formats.values())
    for name, policy in PRESETS.items():
        support = capability.formats.get(policy.compute_format)
        if support is None:
            continue
        if policy.pure:
            left_out[name] = "it changes what the model holds; name it to measure it"
        elif policy.float8 and support.gains and not find_spec("torchao"):
            left_out[name] = f"torchao is not installed: {extra_command('fp8')}"
        elif support.gains or name == "fp16" or (name == "bf16" and nothing_gains):
            chosen.append(policy)
        else:
            left_out[name] = support.reason
    return chosen, left_out
