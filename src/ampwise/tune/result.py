"""What a search found, as plain values; schema ``ampwise.tune/1``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ampwise.bench.parity import ParityReport
from ampwise.bench.result import BenchReport
from ampwise.document import Document
from ampwise.stats import Interval

Objective = Literal["islands", "speed", "memory"]
"""What is looked for: the fewest islands that hold, or the fastest or smallest way to train."""


@dataclass
class Tried:
    """One precision, and what it took to make it hold.

    Attributes
    ----------
    precision, policy
        As asked, and with the islands it needs; None when no islands make it hold.
    islands
        Modules to keep in float32.
    reason
        Why it holds or not.
    replays
        Steps replayed in the search.
    gradient_db
        SQNR of its gradients against float64, the least over the validated batches.
    speedup
        Measured against fp32 in turns; None where it was not raced.
    """

    precision: str
    policy: str | None = None
    islands: list[str] = field(default_factory=list[str])
    reason: str = ""
    replays: int = 0
    gradient_db: float | None = None
    speedup: float | None = None


@dataclass
class Measured:
    """A setting against fp32 as it is.

    Attributes
    ----------
    setting
        On one line: ``bf16 + checkpointing``.
    speedup
        Samples a second over fp32's.
    memory_reduction
        Share of fp32's peak that is saved; negative when it takes more.
    reason
        Why something was not measured.
    """

    setting: str
    speedup: Interval | None = None
    peak_memory_bytes: int | None = None
    memory_reduction: float | None = None
    reason: str = ""


@dataclass
class Credit:
    """What a lever, or an island for speed, does by itself and with those chosen before it.

    Attributes
    ----------
    beside
        The setting that it was tried on alone.
    alone, together
        Samples a second with it over those without; `together` on top of the levers above it.
    memory_alone, memory_together
        Share of the peak memory that it saves, likewise.
    chosen
        Whether it is part of the result.
    reason
        Why it is not, where figures do not say it.
    """

    lever: str
    beside: str
    alone: Interval | None = None
    together: Interval | None = None
    memory_alone: float | None = None
    memory_together: float | None = None
    chosen: bool = False
    reason: str = ""


@dataclass
class Island:
    """Modules, or a function of torch's, faster in float32 than in the policy's format.

    Attributes
    ----------
    pattern
        As a policy's text has it: several with ``+`` between them.
    times
        How many such modules there are, or calls of the function in a step.
    low_ms, float32_ms
        Milliseconds of forward and backward of one of them.
    alone
        Speed of one in float32 over that in the policy's format.
    together
        Samples a second of the whole step with all of them as islands over those without; None
        where it was not tried.
    """

    pattern: str
    times: int
    low_ms: float
    float32_ms: float
    alone: Interval
    together: Interval | None = None
    chosen: bool = False


@dataclass
class Settings:
    """What a search for speed or memory found.

    Attributes
    ----------
    unit
        What rates count.
    precisions
        Each by itself.
    credits
        Each lever.
    islands
        What is faster in float32; `islands_searched` says whether it was looked for.
    chosen
        The result.
    refused
        What would have been, had it trained as fp32 does.
    train
        Options of ``train`` that give it.
    parity
        Its training beside fp32's; `parity_reason` where there is none.
    interrupted
        Whether the search was stopped before its end.
    """

    unit: str = "samples"
    precisions: list[Measured] = field(default_factory=list[Measured])
    credits: list[Credit] = field(default_factory=list[Credit])
    islands: list[Island] = field(default_factory=list[Island])
    islands_searched: bool = False
    chosen: Measured | None = None
    refused: Measured | None = None
    train: dict[str, str] = field(default_factory=dict[str, str])
    parity: ParityReport | None = None
    parity_reason: str = ""
    interrupted: bool = False


@dataclass
class Tuned(Document):
    """What `tune` found.

    Attributes
    ----------
    objective
        What was looked for. `tried` and `bench` are of ``islands``, `settings` of the others.
    choice
        The policy to use, as text; ``fp32`` when none is better.
    verdict
        What to do, in sentences.
    bench
        Speed, memory and parity of the policies that hold, against fp32.
    finished
        Whether everything asked for was tried; what an interruption leaves behind was not.
    """

    schema = "ampwise.tune/1"
    non_finite_words = True

    task: str
    device: str
    least_db: float
    tried: list[Tried] = field(default_factory=list[Tried])
    choice: str = "fp32"
    verdict: list[str] = field(default_factory=list[str])
    bench: BenchReport | None = None
    finished: bool = False
    objective: Objective = "islands"
    settings: Settings | None = None

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it, with what there was."""
        part = self.bench if self.settings is None else self.settings
        return part is not None and part.interrupted
