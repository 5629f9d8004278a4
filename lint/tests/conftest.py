"""Nothing of a test run touches the user's cache or working folder."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import pytest

collect_ignore = ["fixtures", "projects"]
"""What the linter reads, and nobody runs."""

_CACHE = os.environ["AMPWISE_CACHE"] = tempfile.mkdtemp(prefix="ampwise-cache-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """What a test writes lands in its own temporary folder."""
    monkeypatch.chdir(tmp_path)
