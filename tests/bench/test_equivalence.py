"""Parity statistics: right against hand-worked cases, and honest over many simulated benches."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ampwise.bench.equivalence import (
    ALPHA,
    FIRST_LOOK,
    MAX_SEEDS,
    decide,
    holm,
    least_sd_of,
    seeds_needed,
)

MARGIN = 0.01
LOOKS = MAX_SEEDS - FIRST_LOOK + 1
DRAWS = 1000


def alone(values, looks: int = 1, resolution: float = 0.0):
    return decide({"bf16": values}, MARGIN, looks, {"bf16": least_sd_of(resolution)})["bf16"]


def test_tost_against_scipy():
    values = [0.001, -0.002, 0.004, 0.0, 0.003]
    parity = alone(values)
    below = stats.ttest_1samp(values, -MARGIN, alternative="greater").pvalue
    above = stats.ttest_1samp(values, MARGIN, alternative="less").pvalue
    assert parity.p_equivalent == pytest.approx(max(below, above))
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (parity.low, parity.high) == pytest.approx(interval)
    assert parity.difference == pytest.approx(0.0012)


def test_holm_by_hand():
    # 3 x 0.01, 2 x 0.02, then 0.03 raised to what came before; at most 1.
    assert holm({"a": 0.01, "b": 0.03, "c": 0.02}) == pytest.approx(
        {"a": 0.03, "b": 0.04, "c": 0.04}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_equal_bit_for_bit_is_equivalent_and_a_constant_loss_is_different():
    assert alone([0.0] * 5).decision == "equivalent"
    assert alone([-0.02] * 5).decision == "different"


@pytest.mark.parametrize("resolution", [1 / 20, math.inf])
def test_no_difference_in_a_coarse_metric_decides_nothing(resolution):
    parity = alone([0.0] * MAX_SEEDS, LOOKS, resolution)
    assert parity.decision == "undecided"
    assert parity.low < -MARGIN
    assert parity.sd == 0
    assert alone([0.0] * FIRST_LOOK, LOOKS, 1 / 360).decision == "equivalent"


def test_the_resolution_is_the_spread_of_rounding():
    """Differences of values that are rounded, of a true difference that is not."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0.5, 0.9, (2, 100_000))
    rounded = np.round(values * 20) / 20
    assert (rounded - values)[0].std() * math.sqrt(2) == pytest.approx(
        least_sd_of(1 / 20), rel=0.02
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_arm_that_diverged_is_different(bad):
    assert alone([0.0, 0.001, bad]).decision == "different"


@pytest.mark.parametrize("values", [[], [0.0]])
def test_one_seed_decides_nothing(values):
    assert alone(values).decision == "undecided"


def test_several_precisions_and_looks_ask_for_more():
    values = [0.001, -0.004, 0.006, 0.002, -0.003]
    once = alone(values)
    often = decide(dict.fromkeys("abc", values), MARGIN, LOOKS)["a"]
    assert often.p_equivalent == pytest.approx(3 * LOOKS * once.p_equivalent)


def test_seeds_needed_decide_with_the_promised_power():
    rng = np.random.default_rng(0)
    first = rng.normal(0.0, 1.0, 5)
    first = (first - first.mean()) / first.std(ddof=1) * 0.012  # mean 0 and sd 0.012, exactly
    parity = alone(first)
    assert parity.decision == "undecided"
    needed = seeds_needed(parity, MARGIN, tests=1)
    assert needed is not None
    runs = rng.normal(0.0, 0.012, (2000, needed))
    decided = np.mean([alone(run).decision == "equivalent" for run in runs])
    assert 0.7 < decided < 0.97


# -- the whole procedure, many times -------------------------------------------------------------


def noise(kind: str, true: float, sd: float, draws: int, rng: np.random.Generator) -> np.ndarray:
    shape = (draws, MAX_SEEDS)
    if kind == "heavy tails":
        return true + sd * rng.standard_t(4, shape) / math.sqrt(2)
    values = rng.normal(true, sd, shape)
    return np.round(values * 360) / 360 if kind == "counts of 360" else values


def run_through(values: np.ndarray, looks: int = LOOKS, resolution: float = 0.0) -> tuple[str, int]:
    """Decision of one bench that adds seeds until decided, and the seeds it took."""
    for seeds in range(FIRST_LOOK, MAX_SEEDS + 1):
        decision = alone(values[:seeds], looks, resolution).decision
        if decision != "undecided":
            return decision, seeds
    return "undecided", MAX_SEEDS


def shares(kind: str, true: float, sd: float, looks: int = LOOKS, draws: int = DRAWS):
    rng = np.random.default_rng(1)
    outcomes = [run_through(each, looks) for each in noise(kind, true, sd, draws, rng)]
    rate = {
        name: np.mean([decision == name for decision, _ in outcomes])
        for name in ("equivalent", "different")
    }
    return rate, float(np.median([seeds for _, seeds in outcomes]))


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "counts of 360"])
@pytest.mark.parametrize("true", [0.01, -0.01, 0.02])
def test_false_equivalence_stays_below_its_level(kind, true):
    rate, _ = shares(kind, true, 0.004)
    slack = 2 * math.sqrt(ALPHA * (1 - ALPHA) / DRAWS)
    assert rate["equivalent"] <= ALPHA + slack
    if abs(true) == 0.02:
        assert rate["different"] > 0.99


@pytest.mark.parametrize("believed", [True, False])
def test_a_coarse_metric_hides_a_difference_and_passes_only_if_its_zeros_are_believed(believed):
    """Accuracies on 20 samples of arms that differ by the margin itself, or more."""
    rng = np.random.default_rng(1)
    accuracy = rng.normal(0.8, 0.002, (400, 2, MAX_SEEDS))
    accuracy[:, 1] -= 0.015
    differences = np.diff(np.round(accuracy * 20) / 20, axis=1)[:, 0]
    resolution = 0.0 if believed else 1 / 20
    decisions = [run_through(each, resolution=resolution)[0] for each in differences]
    assert (decisions.count("equivalent") > 0.9 * len(decisions)) == believed
    assert believed or decisions.count("equivalent") == 0


def test_without_the_correction_for_looks_the_level_does_not_hold():
    """The correction is not for show: looking eight times at 5 % each errs more often."""
    rate, _ = shares("normal", 0.01, 0.004, looks=1)
    assert rate["equivalent"] > 0.08


@pytest.mark.parametrize(
    ("true", "sd", "power", "seeds"),
    [(0.0, 0.002, 0.99, 5), (0.0, 0.004, 0.99, 5), (0.005, 0.002, 0.99, 6)],
)
def test_power_where_real_tasks_are(true, sd, power, seeds):
    rate, median = shares("normal", true, sd, draws=400)
    assert rate["equivalent"] >= power
    assert rate["different"] == 0
    assert median <= seeds
