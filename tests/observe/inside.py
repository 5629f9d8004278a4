"""Scripts observed inside of the test's own process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampwise.observe.result import RunReport
from ampwise.observe.run import Observation, RunConfig
from ampwise.observe.script import Target


@dataclass
class Seen:
    """A report, and the lines of ``steps.jsonl``."""

    report: RunReport
    lines: list[dict[str, Any]]
    session: Any

    @property
    def codes(self) -> dict[str, int]:
        """Lines of the findings by code."""
        return {each.code: each.line for each in self.report.findings}


def line_of(script: Path, text: str) -> int:
    """Number of the only line that has this text in it."""
    found = [n for n, line in enumerate(script.read_text().splitlines(), 1) if text in line]
    assert len(found) == 1, (text, found)
    return found[0]


def forget_compiled() -> None:
    """What other tests compiled is not the script's."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
        dynamo.utils.counters.clear()


def observe(script: Path, *args: str, **options: Any) -> Seen:
    """Run a script, as ``ampwise run`` does; nothing that was seen may have failed."""
    forget_compiled()
    lines: list[dict[str, Any]] = []
    config = RunConfig(Target(str(script), args), debug=True, **options)
    observed = Observation(config, lambda step, metrics: lines.append({"step": step, **metrics}))
    ending = observed.run(lambda _: None)
    report = observed.report(ending)
    assert not observed.session.failed
    return Seen(report, lines, observed.session)
