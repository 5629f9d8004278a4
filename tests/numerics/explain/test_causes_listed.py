"""A cause is a file: what is listed, what a report may say, and what the docs explain are the same."""

from __future__ import annotations

import re
import typing
from pathlib import Path

from ampwise.numerics import explain
from ampwise.numerics.explain.causes import CAUSES
from ampwise.numerics.result import CauseName

NAMES = set(typing.get_args(CauseName))


def test_every_cause_of_a_report_is_registered():
    assert set(CAUSES) == NAMES


def test_every_registered_cause_has_a_file_that_begins_with_its_name():
    folder = Path(explain.__file__).parent
    first_lines = [each.read_text().partition("\n")[0] for each in folder.glob("*.py")]
    named = {found[1] for line in first_lines if (found := re.match(r'"""([A-Z_]+): ', line))}
    assert named == NAMES


def test_the_docs_explain_every_cause():
    text = (Path(__file__).parents[3] / "docs" / "diagnose.md").read_text()
    explained = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([A-Z_]+)`", line.split("|")[1])
    }
    assert explained >= NAMES
