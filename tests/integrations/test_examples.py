"""Each example in a trainer is run as a user runs it, and learns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import Python

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("needs", ["lightning", "transformers", "accelerate", "timm"])
def test_it_learns(needs, tmp_path):
    pytest.importorskip("sklearn")
    if needs != "timm":  # whose manner of loop needs nothing of it
        pytest.importorskip(needs)
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    code, out, err = Python([str(EXAMPLES / f"{needs}_digits.py")], tmp_path, quiet).ended()
    assert code == 0, err
    said = re.search(r"^accuracy (0\.\d+)", out, re.MULTILINE)
    assert said, out
    assert float(said[1]) > 0.85
