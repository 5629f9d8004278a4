"""docs/scale.md: its estimates against the simulation, its figures, and its scripts."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs" / "scale.md").read_text()

sys.path.insert(0, str(ROOT / "benchmarks"))
import _collectives as simulated  # noqa: E402
import _growth as growth  # noqa: E402
import reduce  # noqa: E402
import scale  # noqa: E402
from _collectives import Disturbance, Fabric, Link  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))

ALIKE = Fabric(Link(3e-6, 1e9), Link(3e-6, 1e9))
NODES = Fabric(Link(3e-6, 4e9), Link(9e-6, 1e9), start_s=1e-5)


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "scale-cpu.json").read_text())


# -- the simulation against closed forms ------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8, 13, 64])
def test_a_ring_of_like_links_takes_what_the_formula_says(ranks):
    n_bytes = 1e6
    steps = 2 * (ranks - 1)
    expected = steps * 3e-6 + steps / ranks * n_bytes / 1e9
    assert simulated.simulate_ring(ALIKE, ranks, n_bytes) == pytest.approx(expected, rel=1e-12)
    assert simulated.ring_s(ALIKE, ranks, n_bytes) == pytest.approx(expected, rel=1e-12)
    half = simulated.simulate_ring(ALIKE, ranks, n_bytes, rounds=1)
    assert half == pytest.approx(expected / 2, rel=1e-12)


@pytest.mark.parametrize("ranks", [16, 64, 256])
@pytest.mark.parametrize("n_bytes", [40, 1e9], ids=["latency", "bandwidth"])
def test_a_ring_over_nodes_takes_what_the_formula_says(ranks, n_bytes):
    found = simulated.simulate_ring(NODES, ranks, n_bytes)
    assert found == pytest.approx(simulated.ring_s(NODES, ranks, n_bytes), rel=1e-3)


@pytest.mark.parametrize("fabric", [ALIKE, NODES], ids=["alike", "nodes"])
@pytest.mark.parametrize("sizes", ["doubling_sizes", "halving_sizes", "gather_sizes"])
def test_exchanges_take_what_the_formula_says(fabric, sizes):
    listed = getattr(simulated, sizes)(64, 4096.0)
    found = simulated.simulate_exchanges(fabric, 64, listed)
    assert found == pytest.approx(simulated.exchanges_s(fabric, 64, listed), rel=1e-12)


def test_exchanges_are_for_powers_of_two():
    with pytest.raises(ValueError, match=r"ranks: expected a power of 2, got 12"):
        simulated.doubling_sizes(12, 1)


def test_a_gather_takes_what_the_formula_says():
    found = simulated.simulate_gather(NODES, 64, 1e5)
    assert found == pytest.approx(simulated.gather_s(NODES, 64, 1e5), rel=1e-3)


def test_one_late_rank_makes_all_late_and_a_slow_one_all_slow():
    still = simulated.simulate_ring(ALIKE, 16, 1e9)
    late = simulated.simulate_ring(ALIKE, 16, 1e9, disturbance=Disturbance(late_s=0.5))
    slow = simulated.simulate_ring(ALIKE, 16, 1e9, disturbance=Disturbance(slow=2))
    assert late == pytest.approx(still + 0.5, rel=1e-3)
    assert slow == pytest.approx(2 * still, rel=1e-3)


def test_jitter_costs_more_in_a_ring_than_its_mean():
    by = Disturbance(jitter_s=1e-6)
    still = simulated.simulate_ring(ALIKE, 64, 40)
    assert simulated.simulate_ring(ALIKE, 64, 40, disturbance=by) > still + 2 * 63 * 1e-6


# -- all else --------------------------------------------------------------------------------------


def test_rounding_to_bfloat16_is_that_of_torch():
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(growth.to_bfloat16(values), expected)


def test_the_loss_scale_settles_where_skips_balance():
    interval, ranks = 50, 512
    expected = math.log2(growth.balanced_scale(2.0**14, 2.0, ranks, interval))
    found = growth.simulate_loss_scale(
        lambda scale: min((scale / 2.0**14) ** 2, 0.999),
        ranks,
        6000,
        warm_up=1000,
        growth_interval=interval,
    )
    assert abs(found["log2_scale"] - expected) <= 1
    assert found["skipped"] <= 1 / (interval + 1) + 2 / 5000


def test_the_interval_between_checkpoints_loses_least():
    best = growth.young_daly_s(30, 40_000)
    lost = [growth.simulate_failures(best * by, 30, 300, 40_000) for by in (0.5, 1, 2)]
    assert lost[1] < min(lost[0], lost[2])
    assert lost[1] == pytest.approx(growth.lost_share(best, 30, 300, 40_000), rel=0.05)


# -- the page --------------------------------------------------------------------------------------


def test_the_page_has_the_figures_of_the_results(results):
    flat = " ".join(DOCS.split())
    for name, text in scale.tables(results).items():
        assert " ".join(text.split()) in flat, name


def test_the_page_has_the_figures_of_training_with_sums_in_bfloat16():
    stored = json.loads((ROOT / "benchmarks" / "results" / "reduce-cpu.json").read_text())
    assert reduce.table(stored) in DOCS
    for metrics in stored["tasks"].values():
        for found in metrics["loss"].values():
            exact, summed = np.array(found["reduce_fp32"]), np.array(found["reduce_bf16"])
            relative, judged = summed / exact - 1, found["difference"]
            assert judged["difference"] == pytest.approx(relative.mean())
            expected = stats.ttest_1samp(relative, 0).confidence_interval(0.95)
            assert (judged["low"], judged["high"]) == pytest.approx(expected)


def test_the_page_has_the_figures_of_two_processes():
    stored = json.loads((ROOT / "benchmarks" / "results" / "scaling-charlm-cpu.json").read_text())
    for each in stored["results"]:
        if each["processes"] == 1:
            continue
        rate, apart = (
            f"{2 * found['median']:.2f}x [{2 * found['low']:.2f}, {2 * found['high']:.2f}]"
            for found in (each["efficiency"], each["apart"])
        )
        name = f"{each['precision']}, {'DDP' if each['parallel'] == 'ddp' else 'FSDP2'}"
        share, peak = each["communication"]["median"], max(each["peak_memory_bytes"])
        assert f"| {name} | {rate} | {apart} | {share:.0%} | {peak / 1e6:.1f} MB |" in DOCS.replace(
            " %", "%"
        )


def test_stored_estimates_are_those_of_the_formulas_and_of_the_simulation(results):
    sent = 3 * len(scale.MODEL.shapes) * results["checkpoint_entry"]["sent_bytes"]
    stored = {(row["name"], row["ranks"]): row for row in results["collectives"]}
    for row in scale.simulate_collectives(sent, ranks=(8, 64)):
        for key, value in row.items():
            assert stored[row["name"], row["ranks"]][key] == pytest.approx(value), (row, key)


def _scripts() -> dict[str, str]:
    """The page's script, as it stands and with FSDP2 in place of DDP."""
    ddp, fsdp, mesh, _ = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    wrap = "model = DistributedDataParallel(model, gradient_as_bucket_view=True)\n"
    assert wrap in ddp
    return {
        "ddp": ddp,
        "fsdp": ddp.replace(wrap, fsdp),
        "mesh": ddp.replace(wrap, mesh + fsdp.replace("mp_policy=", "mesh=mesh, mp_policy=")),
    }


@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fsdp", "mesh"))]
)
def test_the_scripts_of_the_page_run(kind, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_scripts()[kind])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^32 steps, loss \d", done.stdout, re.MULTILINE), done.stdout


def test_files_the_page_names_are_there():
    for path in re.findall(r"\]\(\.\./([\w./-]+)\)", DOCS):
        assert (ROOT / path).exists(), path
