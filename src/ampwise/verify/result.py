"""What `ampwise verify` found, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ampwise.errors import UsageError

SCHEMA = "ampwise.verify/1"

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
class Verification:
    """All requirements of one task.

    Attributes
    ----------
    precision
        The policy that was verified.
    scaled
        The policy under which loss scaling was exercised.
    """

    task: str
    device: str
    precision: str
    scaled: str
    environment: dict[str, Any]
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
        """Plain values, schema ``ampwise.verify/1``."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "score": self.score,
            "passed": self.passed,
            "applicable": len(self.applicable),
            "decision": self.decision,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verification:
        """What `to_json` wrote.

        Raises
        ------
        UsageError
            When `data` is something else, or of another version.
        """
        if data.get("schema") != SCHEMA:
            raise UsageError(
                f"expected a verification of schema {SCHEMA}, got {data.get('schema')!r}"
            )
        names = ("task", "device", "precision", "scaled", "environment", "interrupted")
        try:
            findings = [Finding(**each) for each in data["findings"]]
            return cls(**{name: data[name] for name in names}, findings=findings)
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"the verification is damaged: {type(error).__name__}: {error}"
            ) from None
