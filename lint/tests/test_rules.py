"""Every rule: documented, found where a fixture expects it, silent on near misses, mended right."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from ampwise_lint import rules
from ampwise_lint.engine import check_file
from ampwise_lint.findings import Safety, Severity
from ampwise_lint.fix import fix_file
from ampwise_lint.rule import rule
from ampwise_lint.rules import all_rules
from ampwise_lint.settings import Settings
from ampwise_lint.source.project import Project

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted(FIXTURES.rglob("*.py"))
READ = [each for each in FILES if each.name.startswith(("bad_", "good_"))]
FIXED = [each for each in FILES if each.name.startswith("fixed_")]
EXPECT = re.compile(r"# expect: (AMP\d+)")

CODES = tuple(all_rules())


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def findings(path: Path) -> set[tuple[int, str]]:
    checked = check_file(path, Project(frozenset({path})))
    assert not checked.skipped
    return {(each.line, each.code) for each in checked.findings}


@pytest.mark.parametrize("code", CODES)
def test_a_rule_is_documented(code):
    found = all_rules()[code]
    assert found.doc.startswith(f"# {found.name}\n")
    assert found.severity in get_args(Severity)
    assert found.fix in get_args(Safety)
    headings = re.findall(r"^## (.+)$", found.doc, re.MULTILINE)
    assert headings == [
        "What it does", "Why is this bad", "Example", "Use instead", "Fix safety"
    ]  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_a_rule_has_bad_and_good_fixtures(code):
    names = [each.name for each in (FIXTURES / code).glob("*.py")]
    assert sum(each.startswith("bad_") for each in names) >= 2
    assert sum(each.startswith("good_") for each in names) >= 3


@pytest.mark.parametrize("path", READ, ids=name)
def test_findings_are_those_expected(path):
    expected = {
        (number, code)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for code in EXPECT.findall(line)
    }
    assert bool(expected) == path.name.startswith("bad_")
    assert findings(path) == expected


@pytest.mark.parametrize("path", FIXED, ids=name)
def test_a_file_is_mended_as_expected_and_stays_so(path, tmp_path):
    bad = path.with_name(path.name.replace("fixed_", "bad_", 1))
    work = tmp_path / bad.name
    work.write_text(bad.read_text())
    code = path.parent.name
    settings = Settings(select=(code,))
    known = frozenset({work})
    assert fix_file(work, known, settings, unsafe=True) > 0
    mended = work.read_text()
    assert mended == path.read_text()
    assert fix_file(work, known, settings, unsafe=True) == 0
    assert work.read_text() == mended
    ast.parse(mended)
    assert code not in {each for _, each in findings(work)}
    assert comments(mended) == comments(bad.read_text())


@pytest.mark.parametrize("path", sorted(FIXTURES.rglob("bad_kept_*.py")), ids=name)
def test_what_has_to_stay_is_reported_and_not_edited(path):
    checked = check_file(path, Project(frozenset({path})))
    code = path.parent.name
    assert [each.edits for each in checked.findings if each.code == code and each.edits] == []


def comments(text: str) -> list[str]:
    """All but the marks of what is expected, which go with the statements they stand behind."""
    return re.findall(r"#.*", EXPECT.sub("", text))


def test_a_rule_is_found_by_its_file_alone():
    files = Path(rules.__file__).parent.glob("amp*.py")
    assert sorted(each.stem.partition("_")[0].upper() for each in files) == list(CODES)


@pytest.mark.parametrize("triggers", [{}, {"triggers": ()}])
def test_a_rule_without_triggers_does_not_register(triggers):
    with pytest.raises((TypeError, ValueError), match="triggers"):
        rule("AMP999", "never-looked-for", "error", **triggers)


@pytest.mark.parametrize("path", [e for e in READ if e.name.startswith("bad_")], ids=name)
def test_what_a_rule_finds_something_in_has_its_triggers(path):
    text = path.read_text()
    for code in set(EXPECT.findall(text)):
        assert any(each.is_in(text) for each in all_rules()[code].triggers)


def test_every_rule_that_mends_has_a_fixed_fixture():
    mending = {
        path.parent.name
        for path in READ
        if path.name.startswith("bad_")
        for each in check_file(path, Project(frozenset({path}))).findings
        if each.edits and each.code == path.parent.name
    }
    assert mending == {path.parent.name for path in FIXED}
