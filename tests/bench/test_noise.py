"""A noisy machine is told from a slow precision, and wrong verdicts on speed are rare."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from ampwise.bench.contamination import Contamination, Watch
from ampwise.bench.requirements import Thresholds, judge
from ampwise.bench.result import PrecisionResult
from ampwise.stats import Interval, paired_speedup

CPU = torch.device("cpu")


def judged(speedup: Interval, noise: Interval | None, disturbed: bool = False):
    precision = PrecisionResult("bf16", speedup=speedup)
    return judge(precision, Thresholds(), None, noise, disturbed=disturbed)["speedup"]


def test_the_noise_floor_widens_the_interval():
    speedup = Interval(1.60, 1.55, 1.65)
    assert judged(speedup, None).status == "pass"
    assert judged(speedup, Interval(1.01, 0.99, 1.03)).status == "pass"
    for control in (Interval(1.08, 1.05, 1.11), Interval(1 / 1.08, 0.90, 0.95)):
        said = judged(speedup, control)
        assert said.status == "not measured"
        assert said.reason.startswith("too noisy: fp32 against itself reads ")
    assert judged(Interval(1.2, 1.1, 1.3), Interval(1.05, 1.0, 1.1)).status == "fail"


def test_what_is_undecided_says_what_to_do():
    undecided = Interval(1.5, 1.4, 1.6)
    assert judged(undecided, None).reason.endswith("run longer (--steps), or on a quieter machine")
    said = judged(undecided, None, disturbed=True)
    assert said.status == "not measured"
    assert said.reason.endswith("the notes say what disturbed the race, and what to do")
    decided = Interval(1.8, 1.7, 1.9)
    assert judged(decided, None, disturbed=True).status == "pass"  # doubtful is not undecided


def race(truth: float, kind: str, draw: np.random.Generator, rounds: int = 60):
    """Times of float32, its control and an arm `truth` times faster, on a machine in trouble."""
    machine = np.ones(rounds)
    if kind == "drift":
        machine = np.linspace(1, draw.uniform(0.6, 1.6), rounds)
    times = [machine * np.exp(draw.normal(0, 0.04, rounds)) for _ in range(3)]
    if kind == "bursts":
        for each in times:  # a neighbour hits single steps, each arm on its own
            hit = draw.random(rounds) < 0.15
            each[hit] *= draw.uniform(1.5, 4.0, hit.sum())
    return times[0], times[1], times[2] / truth


@pytest.mark.parametrize("kind", ["quiet", "drift", "bursts"])
@pytest.mark.parametrize(("truth", "wrong"), [(1.42, "pass"), (1.58, "fail")])
def test_wrong_verdicts_are_rarer_than_one_in_a_hundred(truth, wrong, kind):
    draw, count, decided = np.random.default_rng(2), 0, 0
    for _ in range(150):
        baseline, again, arm = race(truth, kind, draw)
        said = judged(paired_speedup(baseline, arm), paired_speedup(baseline, again)).status
        count += said == wrong
        decided += said != "not measured"
    assert count <= 1
    if kind != "bursts":
        assert decided > 100


def test_other_programs_are_noticed():
    busy = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(busy) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.5)
        watch = Watch(CPU)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
        seen = watch.read()
    finally:
        for each in others:
            each.kill()
            each.wait()
    assert seen.others is None or seen.others > 0.25
    assert seen.complaints() or seen.others is None


def test_complaints_name_the_figure_and_a_quiet_machine_has_none():
    assert Contamination(0.006, 0.0, 0.05).complaints() == []
    assert Contamination().complaints() == []
    said = Contamination(0.4, 0.1, 1.2).complaints()
    assert said == [
        "tasks waited for a processor 40% of the time: close other programs",
        "the hypervisor took 10% of the processors' time: use a machine that is not shared",
        "other processes kept 1.2 processors busy: close other programs",
    ]
