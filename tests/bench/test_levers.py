"""Levers: found where they apply, measured apart, and never part of a precision's figures."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.levers import LeverResult, Levers, Refit, measure_levers, refit
from ampwise.bench.memory import measure
from ampwise.bench.requirements import Thresholds
from ampwise.bench.verdict import verdict
from ampwise.data.move import joined
from ampwise.policy import PRESETS
from ampwise.stats import Interval
from ampwise.tasks import Task, load_task
from tests.report.test_report import report

SETTINGS = Settings(torch.device("cpu"))


def small(optimizer=None, images: bool = False, size: int = 16, width: int = 16) -> Task:
    def data():
        generator = torch.Generator().manual_seed(0)
        shape = (size, 3, 8, 8) if images else (size, width)
        for _ in range(3):
            yield torch.randn(shape, generator=generator)

    def model():
        if images:
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8))
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))

    return Task(
        name="small",
        model=model,
        batches=data,
        loss=lambda net, x: net(x).float().square().mean(),
        optimizer=optimizer,
    )


def levers_of(task: Task, **given) -> Levers:
    found = Levers()
    measure_levers(
        task, PRESETS["fp32"], SETTINGS, list(task.batches()), found,
        **({"compiled": False, "budget_s": 2.0, "progress": lambda name: None} | given),
    )  # fmt: skip
    return found


def names(found: Levers) -> list[str]:
    return [each.name for each in found.results]


@pytest.mark.slow
def test_each_lever_is_tried_where_it_applies():
    plain = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)  # noqa: E731
    assert names(levers_of(small())) == []  # the default optimizer is fused
    (fused,) = levers_of(small(plain)).results
    assert (fused.name, fused.reason) == ("fused-optimizer", "")
    assert names(levers_of(small(images=True))) == ["channels-last"]
    tiny = load_task("charlm", {"size": "tiny", "batch": "2", "context": "16"})
    (found,) = levers_of(tiny).results
    assert found.name == "chunked-loss"
    assert found.speedup is not None
    assert found.memory_reduction is not None


def test_compiled_means_compiled_in_the_race_too(monkeypatch):
    """Measuring memory must not make the compiler give the model up before it is timed."""
    calls: list[int] = []
    plain = torch.compile

    def counting(graph, inputs):
        def run(*args):
            calls.append(1)
            return graph.forward(*args)

        return run

    monkeypatch.setattr(torch, "compile", lambda model: plain(model, backend=counting))
    (found,) = levers_of(small(), compiled=True).results
    torch._dynamo.reset()
    assert (found.name, found.reason) == ("compile", "")
    assert found.speedup is not None
    assert len(calls) > 20  # three steps for memory; the rest are the race's


def test_a_task_whose_model_is_compiled_is_raced_compiled():
    calls: list[int] = []

    def counting(graph, inputs):
        def run(*args):
            calls.append(1)
            return graph.forward(*args)

        return run

    task = dataclasses.replace(
        small(), model=lambda: torch.compile(small().model(), backend=counting)
    )
    arm = Arm(task, PRESETS["bf16"], SETTINGS)
    batches = list(task.batches())
    measure(lambda: Arm(task, PRESETS["bf16"], SETTINGS), batches, SETTINGS.device)
    arm.count_host_syncs(batches[0])
    before = len(calls)
    arm.run(batches[0])
    torch._dynamo.reset()
    assert len(calls) == before + 1


def test_widths_that_are_no_multiple_of_eight_are_padded_and_measured():
    def odd() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 65), nn.ReLU(), nn.Linear(65, 8))

    found = levers_of(dataclasses.replace(small(width=12), model=odd)).results
    assert [each.name for each in found] == [
        "0 padded from 12x65 to 16x72 (that product alone)",
        "2 padded from 65x8 to 72x8 (that product alone)",
    ]
    assert all(each.speedup is not None for each in found)


def test_a_lever_that_fails_says_why_and_the_others_go_on():
    def broken() -> Task:
        def loss(model, x):
            raise RuntimeError("no kernel for this")

        return dataclasses.replace(small(), loss=loss)

    task = dataclasses.replace(small(images=True), levers={"broken": broken})
    found = levers_of(task).results
    assert [each.name for each in found] == ["channels-last", "broken"]
    assert "no kernel for this" in found[1].reason
    assert found[1].speedup is None


def test_the_larger_batch_is_the_largest_that_fits():
    # fp32: with bf16 some CPUs' kernels take scratch memory for some sizes, so peaks do not grow evenly.
    task, batch = small(size=64), next(iter(small(size=64).batches()))

    def peak(times: int) -> int:
        from ampwise.bench.arm import Arm

        large = [joined([batch] * times)] * 2
        return measure(
            lambda: Arm(task, PRESETS["fp32"], SETTINGS), large, SETTINGS.device
        ).peak_bytes

    limit = peak(5) + 100
    found = refit(task, PRESETS["fp32"], SETTINGS, batch, limit, 0.3)
    assert isinstance(found, Refit)
    assert found.times == 5
    assert found.samples == 5 * 64
    assert found.peak_memory_bytes <= limit < peak(6)
    assert refit(task, PRESETS["fp32"], SETTINGS, batch, peak(1) + 100, 0.3) is None


def test_joined_batches_of_any_nesting():
    batch = {"x": torch.ones(2, 3), "pair": (torch.zeros(2), [torch.ones(2, 1)])}
    large = joined([batch] * 3)
    assert large["x"].shape == (6, 3)
    assert large["pair"][1][0].shape == (6, 1)
    with pytest.raises(TypeError, match="cannot be joined"):
        joined([{"x": torch.ones(2), "n": torch.tensor(1.0)}] * 2)


def test_only_levers_that_helped_are_next_steps():
    told = report()
    told.levers = Levers(
        [
            LeverResult("fused-optimizer", "bf16", Interval(1.2, 1.15, 1.25), 0.0),
            LeverResult("channels-last", "bf16", Interval(1.02, 0.98, 1.06), 0.0),
            LeverResult("head padded", "bf16", Interval(1.1, 1.08, 1.12)),
            LeverResult("chunked-loss", "bf16", Interval(0.95, 0.9, 1.0), 0.3),
        ],
        Refit("bf16", 2, 64, Interval(1.4, 1.3, 1.5), 90, 100),
    )
    said = [each for each in verdict(told, Thresholds()) if each.startswith("Next")]
    assert said == [
        "Next: fused-optimizer, 1.20x [1.15, 1.25] as fast in bf16.",
        "Next: chunked-loss saves 30% of the peak memory.",
        "Next: with bf16 a batch 2x as large fits into fp32's memory and trains 1.40x [1.30, 1.50] "
        "as many samples a second.",
    ]
