"""Every rule: documented, found where a fixture expects it, silent on near misses, mended right."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ampwise_lint.engine import check_file
from ampwise_lint.fix import fix_file
from ampwise_lint.rules import all_rules
from ampwise_lint.settings import Settings
from ampwise_lint.source.project import Project

FIXTURES = Path(__file__).parent / "fixtures"
FILES = sorted(FIXTURES.rglob("*.py"))
READ = [each for each in FILES if each.name.startswith(("bad_", "good_"))]
FIXED = [each for each in FILES if each.name.startswith("fixed_")]
EXPECT = re.compile(r"# expect: (AMP\d+)")

CATALOGUE = {
    "AMP101": ("clip-before-unscale", "error", "safe"),
    "AMP102": ("gradient-read-before-unscale", "warning", "unsafe"),
    "AMP103": ("double-unscale", "error", ""),
    "AMP104": ("backward-without-scale", "error", "safe"),
    "AMP105": ("step-bypasses-scaler", "error", "safe"),
    "AMP106": ("missing-scaler-update", "error", "safe"),
    "AMP107": ("update-per-micro-batch", "error", "unsafe"),
    "AMP108": ("update-per-optimizer", "error", "unsafe"),
    "AMP109": ("accumulation-not-averaged", "warning", "unsafe"),
    "AMP110": ("scaler-recreated", "warning", "unsafe"),
    "AMP111": ("scaler-not-checkpointed", "warning", "unsafe"),
    "AMP112": ("scheduler-ignores-skip", "info", "unsafe"),
    "AMP113": ("zero-grad-misplaced", "error", ""),
    "AMP114": ("scaler-with-retain-or-closure", "error", ""),
    "AMP115": ("scaled-loss-reported", "warning", "unsafe"),
    "AMP116": ("gradient-penalty-on-scaled-grads", "error", ""),
    "AMP117": ("scaler-shared-or-plain-under-fsdp", "error", "unsafe"),
    "AMP118": ("scaler-without-half", "warning", ""),
    "AMP119": ("clip-beyond-unscaled", "error", ""),
    "AMP201": ("backward-under-autocast", "warning", "safe"),
    "AMP202": ("loss-outside-autocast", "warning", "unsafe"),
    "AMP203": ("eval-without-autocast", "warning", "unsafe"),
    "AMP204": ("scaler-with-bfloat16", "info", "unsafe"),
    "AMP205": ("fp16-without-scaler", "error", ""),
    "AMP206": ("half-parameters", "error", ""),
    "AMP207": ("manual-cast-in-autocast", "warning", "unsafe"),
    "AMP208": ("mixed-autocast-dtypes", "warning", ""),
    "AMP209": ("unsafe-bce", "error", "unsafe"),
    "AMP210": ("log-of-softmax", "warning", "safe"),
    "AMP211": ("eps-below-format", "warning", "unsafe"),
    "AMP212": ("mask-constant-overflow", "error", "unsafe"),
    "AMP213": ("unprotected-exp", "warning", ""),
    "AMP214": ("custom-function-without-custom-fwd", "warning", "unsafe"),
    "AMP215": ("autocast-outside-dataparallel-forward", "warning", ""),
    "AMP216": ("manual-loss-scale", "warning", ""),
    "AMP217": ("metrics-in-half", "warning", "unsafe"),
    "AMP218": ("autocast-device-mismatch", "warning", "unsafe"),
    "AMP219": ("autocast-and-other", "error", "unsafe"),
    "AMP220": ("low-precision-weights", "warning", ""),
    "AMP221": ("weights-through-half", "warning", ""),
    "AMP222": ("forward-outside-autocast", "warning", ""),
    "AMP223": ("precision-that-does-not-happen", "warning", ""),
    "AMP301": ("sync-in-hot-loop", "info", "unsafe"),
    "AMP302": ("synchronize-in-hot-loop", "warning", "unsafe"),
    "AMP303": ("loader-not-overlapped", "info", "unsafe"),
    "AMP304": ("timing-without-sync", "warning", ""),
    "AMP305": ("unfused-optimizer", "info", "unsafe"),
    "AMP306": ("misaligned-dimension", "info", ""),
    "AMP307": ("no-sync-missing", "info", ""),
    "AMP401": ("deprecated-cuda-amp", "warning", "safe"),
    "AMP402": ("apex-amp", "warning", ""),
    "AMP403": ("deprecated-precision-flag", "info", "unsafe"),
    "AMP404": ("device-for-old-autocast", "error", ""),
}


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def findings(path: Path) -> set[tuple[int, str]]:
    checked = check_file(path, Project(frozenset({path})))
    assert not checked.skipped
    return {(each.line, each.code) for each in checked.findings}


def test_the_rules_are_those_of_the_catalogue():
    found = {code: (e.name, e.severity, e.fix) for code, e in all_rules().items()}
    assert found == CATALOGUE


@pytest.mark.parametrize("code", CATALOGUE)
def test_a_rule_is_documented(code):
    doc = all_rules()[code].doc
    assert doc.startswith(f"# {CATALOGUE[code][0]}")
    headings = re.findall(r"^## (.+)$", doc, re.MULTILINE)
    assert headings == [
        "What it does", "Why is this bad", "Example", "Use instead", "Fix safety"
    ]  # fmt: skip


@pytest.mark.parametrize("code", CATALOGUE)
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


def test_every_rule_that_mends_has_a_fixed_fixture():
    mending = {
        path.parent.name
        for path in READ
        if path.name.startswith("bad_")
        for each in check_file(path, Project(frozenset({path}))).findings
        if each.edits and each.code == path.parent.name
    }
    assert mending == {path.parent.name for path in FIXED}
