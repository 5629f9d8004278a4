"""Two equal arms that do not read as equal: the report says so."""

from __future__ import annotations

import pytest

from ampwise.bench.config import BASELINE, CONTROL
from ampwise.bench.race import Race
from ampwise.bench.result import PrecisionResult
from ampwise.bench.stages import note_race
from tests.report.test_report import report as made_up


@pytest.mark.parametrize(("slower", "told"), [(1.02, True), (1.0, False)])
def test_a_control_that_leaves_out_1_is_said(slower, told):
    report = made_up()
    report.notes = []
    wobble = [1.0 + 0.001 * (number % 7) for number in range(60)]
    times = {BASELINE: wobble, CONTROL: [slower * each for each in wobble], "bf16": wobble}
    results = {name: PrecisionResult(name) for name in (BASELINE, "bf16")}
    note_race(Race(times), results, report)
    assert any("fp32 against itself reads 0.98x" in each for each in report.notes) == told
