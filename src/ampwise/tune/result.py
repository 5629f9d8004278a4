"""What a search for islands found, as plain values; schema ``ampwise.tune/1``."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampwise.bench.result import BenchReport
from ampwise.document import Document


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
class Tuned(Document):
    """What `tune` found.

    Attributes
    ----------
    choice
        The fastest policy that holds, as text; ``fp32`` when none is faster.
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
