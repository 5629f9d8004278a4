"""What a diagnosis says, as plain values; schema ``ampwise.diagnosis/1``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ampwise.document import Document

Status = Literal["fault", "clean", "benign", "not_reproduced"]
Phase = Literal["data", "forward", "backward", "optimizer"]
CauseName = Literal[
    "BAD_INPUT", "BAD_PARAMETER", "BAD_BUFFER", "RANGE_OVERFLOW", "MASK_CONSTANT",
    "FULLY_MASKED_ROW", "EPS_UNDERFLOW", "UNDERFLOW", "CANCELLATION", "DOMAIN_ERROR",
    "BACKWARD_SINGULARITY", "EMPTY_REDUCTION", "SCALE_TOO_HIGH", "STAGNATION", "PRECISION_LOSS",
    "DTYPE_ERROR", "NONDETERMINISTIC",
]  # fmt: skip
"""What a fault may come from; `explain.causes` says of each how it is told, and what mends it."""


def percent(share: float, digits: int = 0) -> str:
    """A share of 0 to 1; one that rounds to nothing, or to everything, says that it is not."""
    least = 0.1**digits
    if 0 < share < least / 200:
        return f"<{least:.{digits}f}%"
    if 1 - least / 200 < share < 1:
        return f">{100 - least:.{digits}f}%"
    return f"{share:.{digits}%}"


@dataclass(frozen=True)
class Values:
    """What a tensor holds.

    Attributes
    ----------
    amax
        Largest finite magnitude.
    min_nonzero
        Smallest magnitude that is not zero.
    zero, subnormal, non_finite
        Shares of the elements, 0 to 1.
    low, high
        Smallest and largest finite value, with their signs.
    """

    name: str
    dtype: str
    shape: list[int]
    amax: float | None
    min_nonzero: float | None
    zero: float
    subnormal: float
    non_finite: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Span:
    """How far something reaches along one dimension of a tensor.

    Attributes
    ----------
    name
        What the dimension counts: ``sample``, ``position``, ``channel``, ``index`` of a vector, or
        ``axis 1`` where that is not known.
    size, count
        How many there are, and how many of them are hit.
    first
        The first few that are.
    """

    name: str
    size: int
    count: int
    first: list[int]


@dataclass(frozen=True)
class Extent:
    """Which part of a tensor broke.

    Attributes
    ----------
    elements, of
        How many of its elements, of how many.
    spans
        Along each of its dimensions.
    """

    elements: int
    of: int
    spans: list[Span] = field(default_factory=list[Span])


@dataclass(frozen=True)
class Passed:
    """An operation that a value came through, and how large it then was.

    Attributes
    ----------
    extreme
        The finite value of the largest magnitude, with its sign.
    """

    op: str
    module: str
    file: str
    line: int
    phase: Phase
    dtype: str
    extreme: float


@dataclass(frozen=True)
class Origin:
    """The operation where it began, on the user's own line.

    Attributes
    ----------
    op
        Its aten name.
    module
        FQN of the module it ran in; "" for the root and the loss.
    call
        Which call of that module in the step, from 0.
    library
        ``file:line`` inside a library, where the innermost code is one's.
    inside
        Of a fused operation, the one inside that broke.
    """

    op: str
    module: str
    file: str
    line: int
    source: str
    dtype: str
    call: int = 0
    library: str = ""
    inside: str = ""
    inputs: list[Values] = field(default_factory=list[Values])
    outputs: list[Values] = field(default_factory=list[Values])


INNER_SCALE = 4096
"""What a value is multiplied by whose gradient forward asks for, where no loss scale reaches it."""
HOLDS_TOO = "holds, too"
"""What came of a patch that was shown to hold as the one that is taken was."""


@dataclass(frozen=True)
class Fix:
    """Something to try.

    Attributes
    ----------
    what, how
        In a few words, and what to write.
    verified
        Whether the failing step, replayed with it, was clean and close to the reference.
    cost
        What it costs, measured; or why it was not verified: ``tried: ...``, or ``could not be
        tried: ...``.
    step_time_ratio, step_time_low, step_time_high
        Time of the replayed step with it over that without it (of the forward, where the step takes
        long), and its 95 % interval; None where not measured.
    activation_bytes
        What forward saves for backward with it, less what it does without; None where not measured.
    patch
        Unified diff of the user's source, for ``git apply`` in the working directory; None where
        the fix is none of code. `verified` then means that the patched source was run.
    patch_status
        ``verified: ...`` with how that was shown; ``holds, too: ...`` where another was taken; or
        ``suggestion: ...`` with why it is no more.
    """

    what: str
    how: str
    verified: bool
    cost: str
    step_time_ratio: float | None = None
    activation_bytes: int | None = None
    step_time_low: float | None = None
    step_time_high: float | None = None
    patch: str | None = None
    patch_status: str = ""

    @property
    def outcome(self) -> str:
        """What came of it, in words; only a patch that was trained on is called verified."""
        if self.patch_status.startswith(HOLDS_TOO):
            return HOLDS_TOO
        if not self.verified:
            return "not verified"
        return "holds on this step" if self.patch is None else "verified"


@dataclass(frozen=True)
class Finding:
    """A further problem, silent or smaller."""

    cause: CauseName
    explanation: str
    phase: Phase = "forward"
    origin: Origin | None = None
    fixes: list[Fix] = field(default_factory=list[Fix])


@dataclass(frozen=True)
class OpError:
    """Errors of one operation against float64, in dB of SQNR (None: exact)."""

    op: str
    module: str
    file: str
    line: int
    phase: Phase
    dtype: str
    local_db: float | None
    propagated_db: float | None
    bias: float


@dataclass
class Diagnosis(Document):
    """Where a step went wrong, why, and what mends it.

    Attributes
    ----------
    step
        Number of the optimizer step, from 1; of a clean run the last one looked at.
    path
        Modules, or lines, that the first bad value went through, as far as a loss or gradient.
    worst_ops
        Operations with the largest errors of their own; no faults, only a ranking.
    histograms
        Of each module's result: share of the non-zero values by binary exponent.
    notes
        What a reader should know of how it was found.
    rank
        With several processes: the first one whose own part of the step was at fault.
    extent
        How many elements broke, and which samples, channels, positions or other indices; None where
        not known.
    history
        The operations before the origin, and how large what they gave was; the latest last. Where
        the origin's own result is finite in float64, that comes last.
    measured_scale
        The loss scale under which figures of backward were taken; None where none was in force.
    """

    schema = "ampwise.diagnosis/1"

    status: Status
    task: str
    precision: str
    device: str
    step: int
    phase: Phase | None = None
    origin: Origin | None = None
    cause: CauseName | None = None
    explanation: str = ""
    fixes: list[Fix] = field(default_factory=list[Fix])
    findings: list[Finding] = field(default_factory=list[Finding])
    path: list[str] = field(default_factory=list[str])
    target: str = ""
    loss: float | None = None
    loss_scale: float | None = None
    worst_ops: list[OpError] = field(default_factory=list[OpError])
    histograms: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    notes: list[str] = field(default_factory=list[str])
    environment: dict[str, Any] = field(default_factory=dict[str, Any])
    rank: int | None = None
    extent: Extent | None = None
    history: list[Passed] = field(default_factory=list[Passed])
    measured_scale: float | None = None
