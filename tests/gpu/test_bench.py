"""The main job on a GPU: every precision measured, and the figures add up."""

from __future__ import annotations

import pytest
import torch

from ampwise import load_task
from ampwise.bench.config import BenchConfig
from ampwise.bench.race import Race
from ampwise.bench.run import run_bench

pytestmark = pytest.mark.gpu


class Quiet:
    def stage(self, what: str) -> None: ...

    def round(self, race: Race) -> None: ...

    def seed(self, name: str, seed: int, planned: int) -> None: ...


def test_every_precision_is_measured_without_a_host_sync():
    config = BenchConfig(torch.device("cuda"), max_rounds=60, budget_s=60.0, max_seeds=0)
    report = run_bench(load_task("charlm", {"size": "small"}), config, Quiet())
    measured = [each for each in report.precisions if each.status == "measured"]
    assert len(measured) >= 3
    for each in measured:
        assert each.step_ms is not None
        assert each.peak_memory_bytes == sum(each.memory.values())
        assert each.host_syncs_per_step == 0
