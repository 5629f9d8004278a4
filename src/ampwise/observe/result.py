"""What `ampwise run` saw, as plain values; schema ``ampwise.run/1``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ampwise.document import Document
from ampwise.numerics.result import Diagnosis
from ampwise.products import OddProduct
from ampwise.stats import Interval

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Asked:
    """A precision that somebody asked for, and the user's line that did."""

    dtype: str
    file: str
    line: int


@dataclass(frozen=True)
class Region:
    """An autocast region.

    Attributes
    ----------
    enabled
        Whether it was on once entered; torch switches it off where the device is not there.
    entered
        How often.
    """

    device: str
    dtype: str
    enabled: bool
    file: str
    line: int
    entered: int


@dataclass(frozen=True)
class Ran:
    """Number of matrix products by dtype, in the one step that was looked at."""

    forward: dict[str, int] = field(default_factory=dict[str, int])
    backward: dict[str, int] = field(default_factory=dict[str, int])


@dataclass
class Precision:
    """What precision was asked for, and what ran.

    Attributes
    ----------
    active
        Whether most matrix products ran in the 16-bit format that was asked for; true, too, where
        nothing but float32 was.
    parameters, gradients, optimizer_state
        Number of tensors by dtype.
    float32_products
        In what float32 products are computed: ``ieee`` or ``tf32``.
    """

    asked: list[Asked] = field(default_factory=list[Asked])
    ran: Ran = field(default_factory=Ran)
    exceptions: list[OddProduct] = field(default_factory=list[OddProduct])
    parameters: dict[str, int] = field(default_factory=dict[str, int])
    gradients: dict[str, int] = field(default_factory=dict[str, int])
    optimizer_state: dict[str, int] = field(default_factory=dict[str, int])
    active: bool = True
    regions: list[Region] = field(default_factory=list[Region])
    float32_products: str = "ieee"


@dataclass(frozen=True)
class ScaleSeen:
    """The loss scale over the run."""

    first: float
    last: float
    lowest: float
    growths: int
    backoffs: int


@dataclass(frozen=True)
class Skip:
    """A step that was skipped.

    Attributes
    ----------
    noticed_by_schedule
        Whether the schedule was held; None where there is none, or it does not step with the
        optimizer.
    """

    step: int
    noticed_by_schedule: bool | None


@dataclass(frozen=True)
class Raced:
    """How much faster than the script's own a precision was, in pairs of steps side by side.

    Attributes
    ----------
    speed
        None where the race did not last long enough.
    note
        What a reader should know: why it fell out, what it did to the training.
    """

    speed: Interval | None
    pairs: int
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """A mistake that was seen happening.

    Attributes
    ----------
    code
        Of the lint rule, or AMP501 and on.
    file, line
        The user's own.
    evidence
        What was measured.
    times
        How often it happened.
    """

    code: str
    severity: Severity
    file: str
    line: int
    message: str
    evidence: str = ""
    times: int = 1


@dataclass(frozen=True)
class NotObserved:
    """Something that could not be seen, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Overhead:
    """What observing took, in all and a step, in the hooks that run in every step.

    Measured by the host's clock around everything that looks. Not in it: the 0.1 to 0.2 ms a step
    that it takes to be called at all, the one step that is looked at op by op, and diagnoses.

    Attributes
    ----------
    share
        Of the median step.
    """

    seconds: float = 0.0
    per_step_ms: float | None = None
    share: float | None = None


@dataclass
class RunReport(Document):
    """What a script did.

    Attributes
    ----------
    steps
        Attempts, skipped ones included; several optimizers in one iteration are one step.
    optimizers
        Class names, in the order of their first step.
    waited_for_data
        Seconds in loaders; None where no loader of torch's was used.
    loss_first, loss_last
        Of the first and last step: the sum of what backward was called on in it.
    """

    schema = "ampwise.run/1"

    script: str
    exit_code: int = 0
    steps: int = 0
    micro_batches_per_step: float | None = None
    optimizers: list[str] = field(default_factory=list[str])
    precision: Precision = field(default_factory=Precision)
    loss_scale: ScaleSeen | None = None
    skips: list[Skip] = field(default_factory=list[Skip])
    waited_for_data: float | None = None
    race: dict[str, Raced] = field(default_factory=dict[str, Raced])
    findings: list[Finding] = field(default_factory=list[Finding])
    faults: list[Diagnosis] = field(default_factory=list[Diagnosis])
    not_observed: list[NotObserved] = field(default_factory=list[NotObserved])
    overhead: Overhead = field(default_factory=Overhead)
    step_ms: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    ending: str = ""
    ranks: int = 1
    environment: dict[str, Any] = field(default_factory=dict[str, Any])
