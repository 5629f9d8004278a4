"""Drawing figures, whatever the environment says about matplotlib."""

from __future__ import annotations

import os
import subprocess
import sys

DRAW = """
import os
from ampwise.report.canvas import svg
assert "<svg" in svg("a", lambda axes: axes.plot([1, 2]), height=1)
print(os.environ["MPLBACKEND"])
"""


def test_a_backend_of_a_notebook_that_is_not_installed_here_is_left_alone():
    backend = "not-a-backend-here"
    done = subprocess.run(
        [sys.executable, "-c", DRAW],
        env={**os.environ, "MPLBACKEND": backend}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == backend, done.stderr
