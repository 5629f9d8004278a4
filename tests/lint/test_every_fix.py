"""Every ``--fix`` of every file leaves it sound: the fixtures, and public code where it is at hand.

Public files are not kept in the repository. ``make lint-proof`` runs over a folder of them
(``AMPWISE_LINT_FILES``), which ``python tests/lint/public_files.py FOLDER`` fills from
``public_files.txt``: repository, commit and path of each, read from GitHub.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from ampwise_lint.fix import fix_file
from ampwise_lint.settings import Settings
from ampwise_lint.source.text import UnreadableError, read
from tests.lint.soundness import spoilt

FIXTURES = sorted((Path(__file__).parents[2] / "lint" / "tests" / "fixtures").rglob("*.py"))
FOLDER = os.environ.get("AMPWISE_LINT_FILES", "")
PUBLIC = sorted(Path(FOLDER).rglob("*.py")) if FOLDER else []


def mended(path: Path, work: Path, *, unsafe: bool) -> list[str]:
    """What fixes spoil in a copy of a file; also a second run that changes something again."""
    before = read(path).text
    work.write_text(before, encoding="utf-8")
    fix_file(work, frozenset({work}), Settings(), unsafe)
    after = read(work).text
    if after == before:
        return []
    found = spoilt(before, after)
    fix_file(work, frozenset({work}), Settings(), unsafe)
    if read(work).text != after:
        found.append("a second run changes it again")
    return found


def raised(text: str) -> str:
    """What a file raises when it is run, here without CUDA; empty where it runs to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(text, "fixture", "exec"), {"__name__": "__main__"})
        except Exception as error:
            return type(error).__name__
    return ""


@pytest.mark.parametrize("path", FIXTURES, ids=lambda e: f"{e.parent.name}/{e.stem}")
def test_fixes_leave_a_fixture_sound_and_running(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work, before = tmp_path / "mended.py", path.read_text()
    assert mended(path, work, unsafe=True) == []
    after = work.read_text()
    if after != before:
        assert raised(before) or raised(after) == ""
        assert mended(path, work, unsafe=False) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not PUBLIC, reason="AMPWISE_LINT_FILES names no folder with files")
def test_fixes_leave_public_files_sound(tmp_path):
    bad: list[str] = []
    tried = 0
    for path in PUBLIC:
        try:
            read(path)
        except UnreadableError:  # Python 2
            continue
        tried += 1
        for unsafe in (False, True):
            found = mended(path, tmp_path / "mended.py", unsafe=unsafe)
            bad += [f"{path}: {each}" for each in found]
    assert bad == []
    assert tried >= 200


VALUE = """\
from contextlib import nullcontext
import torch
context = torch.{cuda}amp.autocast if amp else nullcontext
with context():
    pass
"""
BRANCH = """\
try:
    from torch.{cuda}amp import autocast
except ImportError:
    autocast = None
"""
PLAIN = "import torch\nfrom torch.cuda.amp import GradScaler\n"


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (VALUE.format(cuda="cuda."), VALUE.format(cuda=""), "does not bind"),
        (VALUE.format(cuda="cuda."), VALUE.format(cuda=""), "another signature"),
        (BRANCH.format(cuda="cuda."), BRANCH.format(cuda=""), "other versions"),
        (PLAIN, PLAIN + "scaler.update()\n", "unbound name: scaler"),
        (PLAIN, "import torch\ntorch.autocast(0, device_type=0)\n", "does not bind"),
        (PLAIN, "import torch\ntorch.amp.nothing()\n", "does not bind"),
        ("optimizer.step(closure)\n", "scaler.step(optimizer)\n", "lost an argument: closure"),
        ("x = 1\n", "x = (1\n", "does not compile"),
    ],
)
def test_what_is_spoilt_is_seen(before, after, problem):
    assert any(problem in each for each in spoilt(before, after))
