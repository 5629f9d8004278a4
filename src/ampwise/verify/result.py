"""What `ampwise verify` found, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ampwise.document import Document
from ampwise.telemetry.environment import Environment

Status = Literal["pass", "fail", "not measured", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """One requirement, traced to what was seen.

    Attributes
    ----------
    id, requirement
        Which one.
    how
        How it was checked.
    status, evidence
        What came of it, with the figures.
    critical
        Whether its failure blocks.
    left_out
        Whether it was not measured because the user did not want it.
    """

    id: str
    requirement: str
    how: str
    status: Status
    evidence: str
    critical: bool
    left_out: bool = False

    @property
    def open(self) -> bool:
        """Whether it is critical and nobody knows: asked for, applicable, and not measured."""
        return self.critical and self.status == "not measured" and not self.left_out


@dataclass
class Verification(Document):
    """All requirements of one task.

    Attributes
    ----------
    precision
        The policy that was verified.
    scaled
        The policy under which loss scaling was exercised.
    """

    schema = "ampwise.verify/1"
    non_finite_words = True

    task: str
    device: str
    precision: str
    scaled: str
    environment: Environment
    findings: list[Finding] = field(default_factory=list[Finding])
    interrupted: bool = False

    @property
    def applicable(self) -> list[Finding]:
        """Requirements that this machine and these settings can be held to."""
        return [each for each in self.findings if each.status != "not applicable"]

    @property
    def passed(self) -> int:
        """Requirements measured and met."""
        return sum(each.status == "pass" for each in self.findings)

    @property
    def score(self) -> float:
        """Passed over applicable; what is not measured counts as not passed."""
        return self.passed / len(self.applicable) if self.applicable else 0.0

    @property
    def decision(self) -> Literal["PASS", "BLOCK", "UNDECIDED"]:
        """BLOCK if a critical requirement fails, UNDECIDED if one could not be measured.

        What the user left out leaves nothing undecided; without any check there is no PASS.
        """
        failed = any(each.critical and each.status == "fail" for each in self.findings)
        if failed or not self.findings:
            return "BLOCK"
        undecided = self.interrupted or any(each.open for each in self.findings)
        return "UNDECIDED" if undecided else "PASS"

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, with what follows from them."""
        return {
            **super().to_json(),
            "score": self.score,
            "passed": self.passed,
            "applicable": len(self.applicable),
            "decision": self.decision,
        }
