"""Options of ``ampwise bench``, in one process or under torchrun, and its budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ampwise.cli.options import Common, Gate


class Budgets(NamedTuple):
    """Rounds of the race; seconds of the race, of parity, of each lever, and of all together."""

    rounds: int
    race_s: float
    parity_s: float
    lever_s: float
    total_s: float


_FULL = Budgets(200, 300.0, 1200.0, 30.0, math.inf)
_QUICK = Budgets(60, 45.0, 120.0, 8.0, 240.0)


@dataclass
class Options(Common):
    """Measure every precision side by side: speed, memory, held-out loss, and what to use."""

    precisions: str | None = None
    """Comma-separated precisions beside fp32; default: those that gain here, and fp16."""

    steps: int | None = None
    """Rounds at most (each precision makes one step a round); default 200, with --quick 60."""

    quick: bool = False
    """A first answer within --budget 240: fewer rounds, shorter training."""

    budget: float | None = None
    """Seconds for all of it, on a busy machine, too; what does not fit is not measured."""

    seeds: int = 12
    """Paired seeds for accuracy parity, at most; 5 or more decide, 0 leaves it out."""

    parity_steps: int | None = None
    """Steps of each training run for parity; default: what five seeds have time for."""

    metric: str | None = None
    """What parity compares; default: the first metric that the task's evaluate() gives."""

    accumulate: int = 1
    """Micro-batches in an accumulation window."""

    max_grad_norm: float | None = None
    """Clip the gradient norm to this."""

    min_speedup: float = 1.5
    """Requirement: at least this many times faster than fp32."""

    min_memory_reduction: float = 0.40
    """Requirement: at least this share of fp32's peak memory saved."""

    max_accuracy_difference: float = 0.01
    """Requirement: held-out metric within this of fp32's; relative to it, but for scores from 0
    to 1, such as an accuracy."""

    levers: bool = True
    """Leave out what else helps, beside precision."""

    compile: bool = False
    """Try torch.compile as one of the levers; it takes a while and needs a compiler."""

    parallel: str | None = None
    """Under torchrun, which measures how training scales: ddp, fsdp (FSDP2) or ddp,fsdp."""

    rank_timeout: float = 600.0
    """Seconds that processes wait for one that does not come along."""

    gate: Gate = "off"
    """Exit with 1 when a requirement fails; "strict": also when one is not measured."""

    def budgets(self) -> Budgets:
        """Those of --quick or of a full run, with what was asked for."""
        given = _QUICK if self.quick else _FULL
        return given._replace(
            rounds=self.steps or given.rounds, total_s=self.budget or given.total_s
        )
