"""Planted faults are found on their line, and clean networks raise no alarm."""

from __future__ import annotations

import pytest
import torch

from ampwise.numerics.diagnose import diagnose
from tests.numerics.fuzz import draw


def located(seed: int, folder) -> bool:
    torch.manual_seed(seed)
    each = draw(seed, folder, faulty=True)
    found = diagnose(each.task, "fp16", steps=8)
    right = (
        found.status == "fault"
        and found.step == each.step
        and found.origin is not None
        and found.origin.file == str(each.path)
        and found.origin.line == each.line
    )
    if not right:
        print(f"seed {seed}, {each.fault}, step {each.step}, line {each.line}: {found.status} "
              f"{found.cause} step {found.step} {found.origin} {found.explanation}")  # fmt: skip
    return right


def quiet(seed: int, folder) -> bool:
    torch.manual_seed(seed)
    found = diagnose(draw(seed, folder, faulty=False).task, ("fp16", "bf16")[seed % 2], steps=8)
    right = found.status in ("clean", "benign") and not found.findings
    if not right:
        print(f"seed {seed}: {found.cause} {found.origin} {found.explanation} {found.findings}")
    return right


def test_planted_faults_are_located(tmp_path):
    assert sum(located(seed, tmp_path) for seed in range(12)) >= 11


def test_clean_networks_raise_no_alarm(tmp_path):
    assert sum(quiet(seed, tmp_path) for seed in range(12)) == 12


@pytest.mark.parametrize("seed", [1195, 1278])
def test_sums_that_cancel_are_no_underflow(seed, tmp_path):
    """A gain or weight before a normalisation: its gradient is rounding noise, or zero by chance."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # the order of the sums in which it is zero
    try:
        assert quiet(seed, tmp_path)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_500_planted_faults_95_percent_are_located(tmp_path):
    found = sum(located(seed, tmp_path) for seed in range(1000, 1500))
    print(f"{found} of 500 located")
    assert found >= 475


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_500_clean_networks_raise_no_alarm(tmp_path):
    assert sum(quiet(seed, tmp_path) for seed in range(1000, 1500)) == 500
