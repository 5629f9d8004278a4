"""The accepted list: every planted fault gets the patch that a reviewer has read."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.numerics.cases import CASES, VARIANTS
from tests.numerics.patches.corpus import ALL, NO_CODE, accepted, diagnosed

UNMENDED = {
    "perplexity": "its loss is 4e40 in float64: a clamp is far from that, and float32 ends before",
    "case_variance_becomes_zero_in_float32": "float32 is too coarse, and no patch writes float64",
}
"""Faults that no patch mends yet, and why."""

LEAST_SHARE = 0.8
"""Of the faults that a change of the code can mend, how many are to be mended."""


def changes(diff: str) -> str:
    """A diff without line numbers, which move when a file grows."""
    return re.sub(r"^@@ .*$", "@@", diff, flags=re.MULTILINE)


def test_every_fault_is_on_the_list_or_known_to_be_left():
    listed = {name for name in ALL if accepted(name).exists()}
    assert set(ALL) - listed == set(UNMENDED)
    assert len(listed) >= LEAST_SHARE * len(ALL)
    assert set(NO_CODE) < set(CASES | VARIANTS)


@pytest.mark.parametrize("name", sorted(set(ALL) - set(UNMENDED)))
def test_git_takes_an_accepted_patch(name, tmp_path):
    fault = ALL[name]
    patch = accepted(name)
    files = re.findall(r"^--- a/(\S+)$", patch.read_text(), re.MULTILINE)
    for file in files:
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((fault.folder / file).read_bytes())
    done = subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, capture_output=True)
    assert not done.returncode, done.stderr
    for file in files:
        compile((tmp_path / file).read_bytes(), file, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_fault_gets_the_accepted_patch_verified_in_a_fresh_process(name):
    found = diagnosed(name)
    verified = [each for each in found.fixes if each.verified]
    tried = [(each.what, each.patch_status) for each in found.fixes]
    if name in UNMENDED:
        assert not verified, tried
        return
    assert found.status == "fault"
    assert verified, tried
    assert changes(verified[0].patch) == changes(accepted(name).read_text())
    assert verified[0].patch_status.startswith("verified: the patched source, in a fresh process")
