"""Each example in a trainer is run as a user runs it, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("needs", ["lightning", "transformers", "accelerate", "timm"])
def test_it_learns(needs, tmp_path):
    pytest.importorskip("sklearn")
    if needs != "timm":  # whose manner of loop needs nothing of it
        pytest.importorskip(needs)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{needs}_digits.py")],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = re.search(r"^accuracy (0\.\d+)", done.stdout, re.MULTILINE)
    assert said, done.stdout
    assert float(said[1]) > 0.85
