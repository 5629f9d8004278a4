"""Parity by paired training: equal is found equal, broken is caught, and no learning is no pass."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch
from torch import nn

from ampwise.bench import arm as arm_module
from ampwise.bench import parity as parity_module
from ampwise.bench.arm import Arm, Settings, Variant
from ampwise.bench.config import BenchConfig
from ampwise.bench.parity import ParityPlan, ParityReport, run_parity
from ampwise.bench.requirements import Thresholds, judge
from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.bench.run import run_bench
from ampwise.bench.verdict import verdict
from ampwise.errors import TaskError, UsageError
from ampwise.policy import PRESETS
from ampwise.step import TrainStep
from ampwise.tasks import Task

SETTINGS = Settings(torch.device("cpu"))


def blobs(noise: float = 1.0, lr: float = 1e-2, shuffled: bool = False, **given) -> Task:
    """Four clouds of points; with `shuffled` labels there is nothing to learn."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(4, 8, generator=generator)

    def draw(count: int, seed: int):
        own = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 4, (count,), generator=own)
        points = centres[labels] + noise * torch.randn(count, 8, generator=own)
        return points, torch.randint(0, 4, (count,), generator=own) if shuffled else labels

    held_out = draw(2000, 99)

    def evaluate(model):
        logits = model(held_out[0]).float()
        return {
            "accuracy": (logits.argmax(-1) == held_out[1]).float().mean().item(),
            "loss": nn.functional.cross_entropy(logits, held_out[1]).item(),
        }

    return Task(
        name="blobs",
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        batches=lambda: (draw(32, torch.randint(1 << 30, ()).item()) for _ in range(20)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        evaluate=evaluate,
        chance={"accuracy": 0.25, "loss": math.log(4)},
        **given,
    )


def compared(task: Task, *precisions: str, steps: int = 60, seeds: int = 5, **plan) -> ParityReport:
    report = ParityReport()
    variants = [Variant.plain(task, PRESETS[each]) for each in ("fp32", *precisions)]
    run_parity(task, variants, SETTINGS, ParityPlan(steps, seeds, 0.01, **plan), report)
    return report


def requirement(report: ParityReport, name: str = "bf16"):
    return judge(PrecisionResult(name), Thresholds(), report)["accuracy_difference"]


def test_bf16_is_found_as_good_on_data_it_can_learn():
    report = compared(blobs(), "bf16", "bf16-master")
    assert report.metric == "accuracy"
    assert report.learning
    for name in ("bf16", "bf16-master"):
        assert report.arms[name].decision == "equivalent", report.arms[name]
        assert requirement(report, name).status == "pass"
    assert len(report.curves["fp32"]["mean"]) == 60
    assert report.curves["fp32"]["mean"][-1] < report.curves["fp32"]["mean"][0]


def test_a_seed_that_the_deadline_ends_is_dropped():
    task = blobs()

    def slow(model, batch):
        time.sleep(0.002)
        return task.loss(model, batch)

    variants = [Variant.plain(dataclasses.replace(task, loss=slow), PRESETS[each])
                for each in ("fp32", "tf32")]  # fmt: skip
    report, started = ParityReport(), time.monotonic()
    plan = ParityPlan(60, 5, 0.01, deadline=started + 1.0)
    run_parity(task, variants, SETTINGS, plan, report)
    assert time.monotonic() - started < 1.5
    assert report.out_of_time
    assert 0 < report.seeds < 5
    assert {name: len(each) for name, each in report.finals.items()} == dict.fromkeys(
        ("fp32", "tf32"), report.seeds
    )
    judged = judge(PrecisionResult("tf32"), Thresholds(), report)["accuracy_difference"]
    assert judged.status == "not measured"
    assert judged.reason.endswith("the time was up (--budget)")


def test_the_same_seed_is_the_same_run_in_float32():
    plain, settings = Variant.plain(blobs(), PRESETS["fp32"]), SETTINGS
    plan = ParityPlan(10, 5, 0.01)
    first, again = (
        parity_module._train(plain, settings, 3, plan, [{}] * 4, may_fail=False) for _ in range(2)
    )
    other = parity_module._train(plain, settings, 4, plan, [{}] * 5, may_fail=False)
    assert first == again
    assert first != other


def test_weights_in_bf16_without_masters_are_caught(monkeypatch):
    """At a small learning rate their updates are below half an ULP: most of them are lost."""

    class WithoutMasters(Arm):
        def __init__(self, task, policy, settings):
            super().__init__(task, policy, settings)
            if policy.text == "bf16-master":
                self.model.to(torch.bfloat16)
                kept = torch.optim.AdamW(self.model.parameters(), lr=2e-4)
                self.step = TrainStep(self.model, kept, policy="bf16")

    monkeypatch.setattr(arm_module, "Arm", WithoutMasters)
    report = compared(blobs(lr=2e-4, noise=2.0), "bf16", "bf16-master", steps=200, seeds=8)
    assert report.learning
    assert report.arms["bf16-master"].decision == "different"
    assert requirement(report, "bf16-master").status == "fail"
    assert requirement(report, "bf16").status != "fail"


def test_a_task_that_learns_nothing_decides_nothing():
    report = compared(blobs(shuffled=True), "bf16", steps=20)
    assert not report.learning
    said = requirement(report)
    assert said.status == "not measured"
    assert "the task is not learning: fp32's accuracy after 20 steps" in said.reason


def test_a_diverged_arm_fails(monkeypatch):
    class Broken(Arm):
        def run(self, batch):
            if self.name == "bf16":
                raise RuntimeError("no kernel for this")
            super().run(batch)

    monkeypatch.setattr(arm_module, "Arm", Broken)
    report = compared(blobs(), "bf16", steps=30)
    assert requirement(report).status == "fail"
    assert "no kernel for this" in requirement(report).reason


def test_two_seeds_of_noise_stay_undecided_and_say_how_many_would_do():
    report = compared(blobs(noise=3.0), "bf16", steps=8, seeds=2)
    parity = report.arms["bf16"]
    assert parity.seeds == 2
    if parity.decision == "undecided":  # two seeds may happen to agree
        assert requirement(report).status == "not measured"


def test_an_unknown_metric_names_those_there_are():
    with pytest.raises(
        UsageError, match=r"metric 'f1': the task's evaluate\(\) gives accuracy, loss"
    ):
        compared(blobs(), "bf16", steps=1, seeds=2, metric="f1")


def test_what_parity_cannot_compare_is_said_before_anything_is_measured():
    broken = dataclasses.replace(blobs(), evaluate=lambda model: {"accuracy": math.nan})
    config = BenchConfig(torch.device("cpu"), [PRESETS["bf16"]])
    with pytest.raises(TaskError, match=r"evaluate\(\) gives nan as accuracy of a model in fp32"):
        run_bench(broken, config, Refusing())
    unknown = dataclasses.replace(config, metric="f1")
    with pytest.raises(UsageError, match="metric 'f1'"):
        run_bench(blobs(), unknown, Refusing())


class Refusing:
    """Progress of a bench that must not get to measuring."""

    def stage(self, what):
        raise AssertionError(what)


def test_a_loss_is_compared_relative_to_float32s():
    report = compared(blobs(), "bf16", metric="loss", steps=40)
    assert report.relative
    assert not report.higher_is_better
    finals = report.finals
    ratios = [(b - a) / a for a, b in zip(finals["fp32"], finals["bf16"], strict=True)]
    assert report.arms["bf16"].difference == pytest.approx(sum(ratios) / len(ratios))


# -- made-up runs --------------------------------------------------------------------------------


def made_up(monkeypatch, begun, fp32, bf16, losses=((2.0, 1.0), (2.0, 1.0)), **stated):
    """Parity of runs that end with these metrics (per seed: a mapping), without any training."""

    def train(variant, settings, seed, steps, untrained, *, may_fail):
        if len(untrained) == seed:
            untrained.append(begun(seed))
        other = variant.name == "bf16"
        assert may_fail == other
        metrics = (bf16 if other else fp32)(seed)
        return parity_module.Run(losses=[*losses[other]], metrics=metrics)

    monkeypatch.setattr(parity_module, "_train", train)
    return compared(dataclasses.replace(blobs(), chance={}, **stated), "bf16", seeds=8)


@pytest.mark.parametrize("metric", ["mse", "val_mae", "RMSE", "wer"])
def test_a_small_error_that_is_many_times_larger_is_different(monkeypatch, metric):
    """Seen: mse 3.4e-4 in bf16, 1e-14 in fp32, and "as accurate as fp32 (within 0.01)"."""
    report = made_up(
        monkeypatch,
        begun=lambda seed: {metric: 0.04},
        fp32=lambda seed: {metric: 1e-14 * (1 + seed)},
        bf16=lambda seed: {metric: 3.4e-4 * (1 + 0.01 * seed)},
    )
    assert report.relative
    assert report.learning
    assert report.arms["bf16"].decision == "different"
    assert requirement(report).status == "fail"


def test_what_training_left_nothing_of_is_compared_with_where_it_began(monkeypatch):
    """A held-out loss of exactly 0 divides nothing, and 1e-9 beside it is no difference."""
    report = made_up(
        monkeypatch,
        begun=lambda seed: {"loss": 0.7},
        fp32=lambda seed: {"loss": 0.0},
        bf16=lambda seed: {"loss": 1e-9 * (seed % 2)},
        losses=((1.0, 0.0), (1.0, 1e-9)),
    )
    assert report.arms["bf16"].decision == "equivalent"
    assert report.learning


def test_a_metric_that_is_always_0_is_no_division_by_it(monkeypatch):
    def zero(seed):
        return {"loss": 0.0}

    report = made_up(monkeypatch, zero, zero, zero)
    assert not report.learning
    assert requirement(report).status == "not measured"


def test_scores_without_bounds_are_compared_relative(monkeypatch):
    report = made_up(
        monkeypatch,
        begun=lambda seed: {"bleu": 0.1},
        fp32=lambda seed: {"bleu": 30 + 0.1 * seed},
        bf16=lambda seed: {"bleu": 30.02 + 0.1 * seed + 0.01 * (seed % 2)},
    )
    assert report.relative
    assert report.higher_is_better
    assert report.arms["bf16"].decision == "equivalent"


def test_an_equal_accuracy_does_not_hide_a_loss_that_is_worse(monkeypatch):
    report = made_up(
        monkeypatch,
        begun=lambda seed: {"accuracy": 0.25, "loss": 1.4},
        fp32=lambda seed: {"accuracy": 0.9 + 0.001 * seed, "loss": 0.3 + 0.001 * seed},
        bf16=lambda seed: {"accuracy": 0.901 + 0.001 * (seed % 3), "loss": 0.36 + 0.001 * seed},
    )
    assert report.arms["bf16"].decision == "equivalent"
    assert "its held-out loss ends 19" in requirement(report).reason
    found = BenchReport("t", "cpu", {}, precisions=[PrecisionResult("fp32")], parity=report)
    said = verdict(found, Thresholds())
    assert any(each.startswith("But bf16: its held-out loss ends 19") for each in said)


@pytest.mark.parametrize("identical", [False, True])
def test_a_metric_that_never_moves_passes_only_what_trained_bit_for_bit(monkeypatch, identical):
    report = made_up(
        monkeypatch,
        begun=lambda seed: {"accuracy": 0.5},
        fp32=lambda seed: {"accuracy": 1.0},
        bf16=lambda seed: {"accuracy": 1.0},
        losses=((2.0, 1.0), (2.0, 1.0 if identical else 1.1)),
    )
    said = requirement(report)
    if identical:
        assert said.status == "pass"
    else:
        assert said.status == "not measured"
        assert "accuracy is too coarse to tell: all 8 differences are exactly 0" in said.reason
        assert "in steps of 0.5" in said.reason


def test_not_learning_names_the_direction_that_was_guessed(monkeypatch):
    def falls(seed):
        return {"score_of_mine": 0.1 + 0.01 * seed}

    report = made_up(monkeypatch, lambda seed: {"score_of_mine": 0.5}, falls, falls)
    assert 'Task(higher_is_better={"score_of_mine": False}) says otherwise' in report.why_not
    assert "higher is taken to be better" in report.why_not
    stated = {"higher_is_better": {"score_of_mine": True}}
    report = made_up(monkeypatch, lambda seed: {"score_of_mine": 0.5}, falls, falls, **stated)
    assert "taken to be" not in report.why_not


def test_a_task_without_evaluate_is_judged_by_its_training_loss():
    task = dataclasses.replace(blobs(), evaluate=None, chance={})
    report = compared(task, "bf16", steps=60)
    assert report.metric == "training loss"
    assert report.relative
    assert report.learning


def test_what_an_iteration_reports_is_not_called_a_training_loss():
    def iteration(step, batch):
        with step.autocast():
            loss = task.loss(step.model, batch)
        step.backward(loss)
        step.update()
        return loss.detach()

    task = dataclasses.replace(blobs(), evaluate=None, chance={})
    report = compared(dataclasses.replace(task, loss=None, iteration=iteration), "bf16", steps=2)
    assert (report.metric, report.loss) == ("reported loss", "reported loss")


def test_no_further_seed_starts_when_the_time_is_up():
    report = compared(blobs(), "bf16", steps=5, budget_s=0.0)
    assert report.seeds == 1
    assert report.arms["bf16"].decision == "undecided"
