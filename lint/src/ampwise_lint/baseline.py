"""Findings of an old code base that are known: a file of them, so that only new ones are reported.

A finding is known by file, code and the text of its line, not its number: edits elsewhere in the
file do not bring it back.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampwise_lint.base.errors import UsageError
from ampwise_lint.findings import Finding, LintReport
from ampwise_lint.settings import Settings

SCHEMA = "ampwise.lint-baseline/1"


@dataclass(frozen=True, slots=True)
class _Key:
    path: str
    code: str
    text: str


def _key(finding: Finding, settings: Settings) -> _Key:
    return _Key(settings.relative(finding.path), finding.code, finding.source.strip())


def write(report: LintReport, settings: Settings, file: Path) -> None:
    """Write all findings of a report as known."""
    counts = Counter(_key(each, settings) for each in report.findings)
    known = [
        {"path": key.path, "code": key.code, "text": key.text, "count": count}
        for key, count in sorted(counts.items(), key=lambda item: (item[0].path, item[0].code))
    ]
    text = json.dumps({"schema": SCHEMA, "known": known}, indent=1)
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the baseline {file}: {error.strerror}") from None


def drop_known(report: LintReport, settings: Settings, file: Path) -> None:
    """Take the findings a baseline holds out of a report, and count them.

    Raises
    ------
    UsageError
        When the file is not there, or is no baseline.
    """
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        known = Counter(
            {_Key(e["path"], e["code"], e["text"]): int(e["count"]) for e in content["known"]}
        )
    except OSError as error:
        raise UsageError(f"baseline {file}: {error.strerror}; --write-baseline makes one") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{file}: not a baseline; --write-baseline makes one") from None
    new: list[Finding] = []
    for each in report.findings:
        key = _key(each, settings)
        if known[key] > 0:
            known[key] -= 1
            report.baselined += 1
        else:
            new.append(each)
    report.findings = new
