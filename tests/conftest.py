"""Nothing of a test run touches the user's cache, trackers or working folder."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

import pytest
import setuptools  # noqa: F401 - first: imported late, by inductor, it met Python's own distutils once
import torch
import torch._dynamo  # which every optimizer loads

_CACHE = os.environ["AMPWISE_CACHE"] = tempfile.mkdtemp(prefix="ampwise-cache-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
# PyTorch stays: no full collection of garbage, as before memory is measured, has to walk through it.
gc.collect()
gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Runs and reports that a test writes land in its own temporary folder."""
    monkeypatch.chdir(tmp_path)
