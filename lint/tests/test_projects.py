"""Mistakes that only all the files of a project show, where its files expect them, and only there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ampwise_lint.engine import lint

PROJECTS = sorted((Path(__file__).parent / "projects").iterdir())
EXPECT = re.compile(r"# expect: (AMP\d+)")


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda each: each.name)
def test_a_project_has_the_findings_expected(folder, monkeypatch):
    monkeypatch.chdir(folder)
    expected = {
        (path.name, number, code)
        for path in folder.glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for code in EXPECT.findall(line)
    }
    report = lint([Path()], jobs=1, use_cache=False)
    assert report.skipped == []
    assert {(each.path, each.line, each.code) for each in report.findings} == expected
    assert bool(expected) == folder.name.startswith("bad_")
