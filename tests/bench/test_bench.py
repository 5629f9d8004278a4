"""The bench: statistics on simulated machines, exact memory, arms that fall out, the record."""

from __future__ import annotations

import dataclasses
import inspect
import json
import time

import numpy as np
import pytest
import torch
from torch import nn

from ampwise import Task
from ampwise.bench import race as racing
from ampwise.bench.arm import Arm, Settings
from ampwise.bench.config import CONTROL, BenchConfig, choose
from ampwise.bench.equivalence import Parity
from ampwise.bench.memory import PARTS, measure
from ampwise.bench.parity import ParityReport
from ampwise.bench.race import Race, run_race, speedups
from ampwise.bench.requirements import Thresholds, judge
from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.bench.run import run_bench
from ampwise.bench.stages import Stages, to_train
from ampwise.bench.trial import Trial, try_first_step
from ampwise.bench.verdict import verdict
from ampwise.errors import UsageError
from ampwise.lines import place
from ampwise.policy import PRESETS, Policy
from ampwise.stats import Interval, paired_speedup

CPU = torch.device("cpu")


class Silent:
    def stage(self, what) -> None:
        pass

    def seed(self, name, seed, planned) -> None:
        pass

    def round(self, race) -> None:
        pass


def small_task(width: int = 32, loss=None, batches: int = 4, size: int = 16) -> Task:
    def data():
        generator = torch.Generator().manual_seed(0)
        for _ in range(batches):
            yield torch.randn(size, width, generator=generator)

    def default(model, x):
        return model(x).float().square().mean()

    return Task(
        name="small",
        model=lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)),
        batches=data,
        loss=loss or default,
        evaluate=lambda m: {"loss": m(torch.ones(4, width)).float().square().mean().item()},
    )


def arm(policy="fp32", **task) -> Arm:
    return Arm(small_task(**task), PRESETS[policy], Settings(CPU))


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("truth", [0.7, 1.0, 1.8])
def test_the_interval_covers_the_truth_under_drift_and_bursts(truth):
    """A machine that slows down by half over the run, with 10 % of the rounds hit by a burst."""
    draw, inside = np.random.default_rng(0), 0
    for _ in range(200):
        rounds = 40
        drift = np.linspace(1, 1.5, rounds)
        times = [drift * np.exp(draw.normal(0, 0.03, rounds)) for _ in range(2)]
        for each in times:
            each *= np.where(draw.random(rounds) < 0.1, 3.0, 1.0)
        found = paired_speedup(times[0] * truth, times[1])
        inside += found.low <= truth <= found.high
        assert found.median == pytest.approx(truth, rel=0.06)
    assert inside >= 185  # 92.5 %; the interval says 95 %


def test_a_hand_derived_median():
    found = paired_speedup([2.0, 4.0, 8.0], [1.0, 1.0, 1.0])
    assert found.median == pytest.approx(4.0)
    assert found.low >= 2.0
    assert found.high <= 8.000001


# -- memory ----------------------------------------------------------------------------------------


def test_peak_memory_is_deterministic_and_its_parts_add_up():
    batches = list(small_task().batches())[:3]
    first, second = (measure(arm, batches, CPU) for _ in range(2))
    assert first == second
    assert set(first.parts) == set(PARTS)
    assert sum(first.parts.values()) == first.peak_bytes


def test_parts_against_values_by_hand():
    parameters = 4 * (32 * 32 + 32 + 32 * 8 + 8)
    use = measure(arm, list(small_task().batches())[:3], CPU)
    assert use.parts["parameters"] == parameters
    steps = 4 * 4  # one float32 counter for each of four tensors
    assert use.parts["optimizer state"] == 2 * parameters + steps
    assert use.parts["autocast cache"] == 0
    assert use.peak_bytes >= 3 * parameters + 16 * 32 * 4  # and at least one activation


def test_bf16_master_keeps_copies_of_two_bytes_a_weight_beside_float32_parameters():
    weights = 32 * 32 + 32 + 32 * 8 + 8
    use = measure(lambda: arm("bf16-master"), list(small_task().batches())[:3], CPU)
    assert use.parts["parameters"] == 4 * weights
    assert use.parts["autocast cache"] == 2 * weights
    assert all(size >= 0 for size in use.parts.values())


def test_the_autocast_cache_is_two_bytes_a_weight():
    # Large batches, so that the peak is at the end of forward, where the cache is.
    use = measure(lambda: arm("bf16"), list(small_task(size=2000).batches())[:3], CPU)
    assert use.parts["autocast cache"] == 2 * (32 * 32 + 32 + 32 * 8 + 8)


# -- arms that fall out ----------------------------------------------------------------------------


class Sleeper:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def run(self, batch) -> None:
        time.sleep(self.seconds)


def test_a_first_step_that_takes_too_long_is_killed(monkeypatch):
    monkeypatch.setattr("ampwise.bench.trial._SET_UP_S", 0.2)
    started = time.monotonic()
    trial = try_first_step(lambda: Sleeper(60), None, limit_s=0.3)
    assert time.monotonic() - started < 5
    assert trial == Trial(0.3, finished=False)


def test_a_first_step_that_fails_says_how():
    class Broken:
        def run(self, batch):
            raise NotImplementedError("no kernel for Half")

    trial = try_first_step(Broken, None, limit_s=10)
    assert trial.error == "NotImplementedError: no kernel for Half"


def slow_in_bf16(model, x):
    loss = model(x).float().square().mean()
    time.sleep(0.3 if torch.is_autocast_enabled("cpu") else 0.005)
    return loss


def broken_in_bf16(model, x):
    out = model(x)
    if out.dtype == torch.bfloat16:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")
    return out.square().mean()


def bench(task, *precisions, **settings) -> BenchReport:
    config = BenchConfig(
        CPU,
        [Policy.parse(each) for each in precisions],
        budget_s=10,
        **({"max_seeds": 0} | settings),
    )
    return run_bench(task, config, Silent())


def test_a_hopeless_arm_is_cut_short_and_the_others_go_on():
    report = bench(small_task(loss=slow_in_bf16), "bf16", "tf32", max_rounds=5)
    fp32, bf16, tf32 = report.precisions
    assert bf16.status == "cut short"
    assert "its first step took 0." in bf16.reason
    assert bf16.requirements["speedup"].status == "not measured"
    assert fp32.step_ms is not None
    assert tf32.speedup is not None


def test_an_arm_without_memory_or_kernel_fails_alone():
    report = bench(small_task(loss=broken_in_bf16), "bf16", "tf32", max_rounds=5)
    _, bf16, tf32 = report.precisions
    assert (bf16.status, tf32.status) == ("failed", "measured")
    assert "tried to allocate 20 GiB" in bf16.reason


def test_an_arm_that_fails_first_in_the_memory_stage_fails_alone(monkeypatch):
    """As on an accelerator, where no first step is tried apart."""
    monkeypatch.setattr(Stages, "first_steps", lambda self: None)
    report = bench(small_task(loss=broken_in_bf16), "bf16", "tf32", max_rounds=5)
    _, bf16, tf32 = report.precisions
    assert (bf16.status, tf32.status) == ("failed", "measured")
    assert bf16.reason == "bf16: OutOfMemoryError: tried to allocate 20 GiB"
    assert bf16.requirements["memory_reduction"].status == "not measured"


def test_fp32_that_fails_in_the_memory_stage_ends_the_bench(monkeypatch):
    monkeypatch.setattr(Stages, "first_steps", lambda self: None)

    def broken(model, x):
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        bench(small_task(loss=broken), "tf32", max_rounds=5)


def test_an_arm_that_only_skips_falls_out_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(racing, "DECIDED", 0.0)

    def nan_in_bf16(model, x):
        out = model(x)
        loss = out.float().square().mean()
        return loss * float("nan") if out.dtype == torch.bfloat16 else loss

    report = bench(small_task(loss=nan_in_bf16), "bf16", "tf32", max_rounds=70)
    _, bf16, tf32 = report.precisions
    assert (bf16.status, tf32.status) == ("failed", "measured")
    assert bf16.reason.startswith("bf16: SkippedStepsError: ")
    assert bf16.reason.endswith("ampwise diagnose finds out why")
    assert bf16.speedup is None
    assert report.rounds == 70


def test_a_control_that_falls_out_costs_the_noise_floor_and_nothing_else(monkeypatch):
    run = Arm.run

    def without_control(self, batch):
        if self.name == CONTROL:
            raise RuntimeError("out of something")
        run(self, batch)

    monkeypatch.setattr(Arm, "run", without_control)
    report = bench(small_task(), "bf16", max_rounds=20)
    assert report.noise is None
    assert report.precisions[1].speedup is not None
    assert any(
        "fp32 again fell out" in note and "out of something" in note for note in report.notes
    )


def test_an_arm_that_fails_in_the_middle_of_the_race(monkeypatch):
    monkeypatch.setattr(racing, "DECIDED", 0.0)
    calls = []

    def fails_later(model, x):
        calls.append(1)
        out = model(x)
        if out.dtype == torch.bfloat16 and len(calls) > 30:
            raise RuntimeError("out of something")
        return out.float().square().mean()

    task = small_task(loss=fails_later)
    arms = [Arm(task, PRESETS[name], Settings(CPU)) for name in ("fp32", "bf16", "tf32")]
    race = Race()

    def endless():
        while True:
            yield from task.batches()

    run_race(arms, endless(), race, max_rounds=30, budget_s=20, progress=lambda race: None)
    assert "out of something" in race.fell_out["bf16"]
    assert set(speedups(race, "fp32")) == {"tf32"}
    assert race.rounds == 30


def test_ctrl_c_in_the_race_keeps_what_was_measured():
    class Interrupting(Silent):
        def round(self, race):
            if race.rounds == 6:
                raise KeyboardInterrupt

    config = BenchConfig(CPU, [PRESETS["bf16"]], max_rounds=50)
    report = run_bench(small_task(), config, Interrupting())
    assert report.interrupted
    assert report.rounds == 6
    assert report.precisions[1].speedup is not None
    assert report.precisions[1].peak_memory_bytes is not None
    assert "Interrupted" in report.verdict[0]
    accuracy = report.precisions[1].requirements["accuracy_difference"]
    assert accuracy.reason == "interrupted before it was measured"


def test_ctrl_c_in_the_first_seed_says_interrupted_of_accuracy():
    class Interrupting(Silent):
        def seed(self, name, seed, planned):
            raise KeyboardInterrupt

    config = BenchConfig(CPU, [PRESETS["bf16"]], max_rounds=3, parity_steps=5, max_seeds=5)
    report = run_bench(small_task(), config, Interrupting())
    accuracy = report.precisions[1].requirements["accuracy_difference"]
    assert accuracy.reason == "interrupted before it was measured"


def test_an_error_in_parity_keeps_the_race_and_the_seeds_so_far():
    made: list[int] = []

    def evaluate(model):
        made.append(1)
        if len(made) == 9:
            raise ValueError("data set unmounted")
        return {"loss": model(torch.ones(4, 32)).float().square().mean().item()}

    task = dataclasses.replace(small_task(), evaluate=evaluate)
    config = BenchConfig(CPU, [PRESETS["bf16"]], max_rounds=5, parity_steps=5, max_seeds=5)
    kept: list[BenchReport] = []
    with pytest.raises(ValueError, match="unmounted"):
        run_bench(task, config, Silent(), kept.append)
    (report,) = kept
    assert report.ended == "failed"
    assert report.rounds == 5
    assert report.verdict[0] == "Failed: ValueError: data set unmounted."
    assert report.parity.seeds == 1
    assert report.precisions[1].requirements["speedup"].value is not None
    assert BenchReport.from_json(json.loads(json.dumps(report.to_json()))).failed == report.failed


# -- the record ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> BenchReport:
    return bench(small_task(), "bf16", "bf16-master", max_rounds=12)


def test_every_arm_starts_from_the_same_weights_and_learns(report):
    before = {each.loss_before for each in report.precisions[:1]}
    assert len(before) == 1
    for each in report.precisions:
        assert each.loss_after < each.loss_before
        assert each.loss_before == pytest.approx(report.precisions[0].loss_before, rel=2e-2)


def test_what_ran_and_what_it_cost_the_host(report):
    _, bf16, master = report.precisions
    assert set(bf16.matmul_dtypes) == {"bfloat16"}
    assert bf16.host_syncs_per_step == master.host_syncs_per_step == 0
    assert bf16.skipped_steps == 0


def test_json_has_every_key_of_the_contract_and_is_strict(report):
    text = json.dumps(report.to_json(), allow_nan=False)
    read = json.loads(text)
    assert read["schema"] == "ampwise.bench/1"
    assert {"task", "device", "environment", "precisions", "verdict"} <= read.keys()
    wanted = {
        "name", "step_ms", "samples_per_s", "peak_memory_bytes", "memory", "speedup",
        "memory_reduction", "accuracy", "loss_difference", "host_syncs_per_step",
        "skipped_steps", "requirements",
    }  # fmt: skip
    for each in read["precisions"]:
        assert wanted <= each.keys()
        assert set(each["step_ms"]) == {"median", "low", "high"}
    requirements = read["precisions"][1]["requirements"]
    assert set(requirements) == {"speedup", "memory_reduction", "accuracy_difference"}
    for each in requirements.values():
        assert set(each) == {"status", "value", "threshold", "reason"}
    assert requirements["accuracy_difference"]["status"] == "not measured"


def test_the_callers_random_state_is_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    bench(small_task(), max_rounds=2)
    assert torch.equal(torch.rand(3), expected)


def test_batches_that_draw_from_the_global_generator_leave_it_as_it_was():
    task = Task(
        name="drawing",
        model=lambda: nn.Linear(8, 4),
        batches=lambda: (torch.randn(4, 8) for _ in range(3)),
        loss=lambda model, x: model(x).float().square().mean(),
    )
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    bench(task, max_rounds=2)
    assert torch.equal(torch.rand(3), expected)


def test_the_terminal_rendering_fits_80_columns(report):
    import io

    from ampwise.report.bench import render
    from ampwise_lint.base.console import Console

    out = io.StringIO()
    render(report, Console(file=out, width=80))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    for each in report.precisions:
        assert each.name in text
    assert "…" not in text


# -- conclusions -----------------------------------------------------------------------------------


def precision(speedup=None, saved=None, **settings) -> PrecisionResult:
    interval = None if speedup is None else Interval(speedup, speedup - 0.05, speedup + 0.05)
    return PrecisionResult("bf16", speedup=interval, memory_reduction=saved, **settings)


@pytest.mark.parametrize(
    ("speedup", "status"),
    [(1.9, "pass"), (1.2, "fail"), (1.52, "not measured"), (None, "not measured")],
)
def test_speedup_is_judged_by_its_interval(speedup, status):
    assert judge(precision(speedup), Thresholds(), None)["speedup"].status == status


@pytest.mark.parametrize(
    ("saved", "status"), [(0.41, "pass"), (0.40, "pass"), (0.39, "fail"), (None, "not measured")]
)
def test_memory_is_judged_by_its_value(saved, status):
    assert judge(precision(saved=saved), Thresholds(), None)["memory_reduction"].status == status


def report_of(*precisions: PrecisionResult, **settings) -> BenchReport:
    baseline = PrecisionResult(
        "fp32",
        step_ms=Interval(50, 49, 51),
        peak_memory_bytes=100,
        memory=dict.fromkeys(PARTS, 0) | {"activations": 70, "parameters": 30},
    )
    return BenchReport("t", "cpu", {}, precisions=[baseline, *precisions], **settings)


def test_verdict_switches_where_it_is_faster():
    said = verdict(report_of(precision(1.9, 0.3)), Thresholds())
    assert said[0] == "Use bf16: 1.90x [1.85, 1.95] of fp32's speed, with 30% less peak memory."


def test_verdict_says_when_the_gain_is_below_what_was_asked():
    said = verdict(report_of(precision(1.3, 0.3)), Thresholds())
    assert "below the asked 1.5x" in said[0]


def test_verdict_keeps_fp32_where_it_is_not_and_says_why():
    slow = precision(0.4, 0.25, note="bfloat16 matmul on this CPU is emulated")
    said = verdict(report_of(slow), Thresholds())
    assert said[0].startswith("Keep fp32: bf16 runs at 0.40x")
    assert "emulated" in said[0]
    assert any("worth it only if memory" in each for each in said)
    assert any("Activations are 70% of fp32's peak" in each for each in said)


def test_verdict_does_not_advise_the_precision_that_it_picks():
    """Seen: Use bf16-master ... a larger batch, or bf16-master, moves the rest."""
    found = precision(1.9, 0.3)
    [rest] = [each for each in verdict(report_of(found), Thresholds()) if "the rest" in each]
    assert rest.endswith("a larger batch, or bf16-master, moves the rest.")
    found.name = "bf16-master"
    [rest] = [each for each in verdict(report_of(found), Thresholds()) if "the rest" in each]
    assert rest.endswith("a larger batch moves the rest.")


def test_verdict_does_not_call_faster_what_may_not_be():
    """Seen: Keep fp32: bf16 runs at 1.19x of its speed here."""
    found = precision(1.19, 0.25)
    found.speedup = Interval(1.19, 0.9, 1.5)
    said = verdict(report_of(found), Thresholds())
    assert said[0] == (
        "Keep fp32: bf16, 1.19x [0.90, 1.50] of its speed, is not for sure faster here."
    )


def test_verdict_says_once_what_is_true_of_several_precisions():
    fp16 = precision(0.1, 0.26)
    fp16.name = "fp16"
    said = verdict(report_of(fp16, precision(0.4, 0.25)), Thresholds())
    assert [each for each in said if "only if memory" in each] == [
        "fp16 saves 26%, bf16 saves 25% of the peak memory: worth it only if memory, not time, is "
        "what limits you."
    ]


def test_verdict_names_several_precisions_of_one_accuracy_in_one_breath():
    """Seen: fp16 and bf16 and bf16-master: as accurate as fp32."""
    as_good = Parity(5, 0.001, -0.001, 0.003, 0.0015, 0.0002, 0.9998, "equivalent")
    names = ("fp16", "bf16", "bf16-master")
    found = report_of(precision(1.9, 0.3))
    found.parity = ParityReport(margin=0.01, steps=80, seeds=5, arms=dict.fromkeys(names, as_good))
    assert verdict(found, Thresholds())[-1] == (
        "fp16, bf16 and bf16-master: as accurate as fp32 (within 0.01), by 5 paired seeds of 80 "
        "steps."
    )


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_verdict_never_picks_a_fast_precision_that_diverged(loss):
    fast = precision(2.0, 0.3, loss_after=loss)
    told = report_of(fast)
    told.precisions[0].loss_after = 2.0
    said = verdict(told, Thresholds())
    assert said[0] == "Keep fp32: no other precision trained as well here."
    assert said[1] == f"Do not use bf16: its held-out loss ends at {loss}, fp32's at 2.000."
    fast.loss_after = 2.01
    assert verdict(told, Thresholds())[0].startswith("Use bf16")


def test_verdict_names_a_precision_that_only_costs():
    slow = PrecisionResult("fp16", speedup=Interval(0.2, 0.19, 0.21), note="emulated")
    said = verdict(report_of(precision(1.9, 0.3), slow), Thresholds())
    assert "fp16 is slower than fp32, 0.20x [0.19, 0.21]: emulated." in said


def test_verdict_tells_what_is_around_products_from_arithmetic():
    bound = precision(1.2, 0.3, matmul_speedup=6.0)
    said = verdict(report_of(bound), Thresholds())
    assert any(each.startswith("Products alone are 6.0x as fast in bf16") for each in said)
    free = precision(3.5, 0.3, matmul_speedup=6.0)
    assert not any("sets the pace" in each for each in verdict(report_of(free), Thresholds()))


class CastsByHand(nn.Module):
    """Two layers of which the second switches autocast off."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


def test_products_that_ran_in_another_dtype_are_named_instead_of_memory_traffic():
    task = dataclasses.replace(small_task(), model=CastsByHand)
    report = bench(task, "bf16")
    (bf16,) = report.precisions[1:]
    assert bf16.matmul_dtypes == {"bfloat16": 1, "float32": 1}
    line = inspect.getsourcelines(CastsByHand.forward)[1] + 3
    assert {(each.module, each.dtype, each.line) for each in bf16.exceptions} == {
        ("head", "float32", line)
    }
    assert sum(each.times for each in bf16.exceptions) == 3  # forward, and two in backward
    bf16.speedup, bf16.matmul_speedup = Interval(1.2, 1.19, 1.21), 6.0
    said = verdict(report, Thresholds())
    (named,) = [each for each in said if each.startswith("Not all products ran in bf16")]
    assert f"3 in float32: addmm, mm, head, {place(__file__, line)}." in named
    assert not any("sets the pace" in each for each in said)
    assert BenchReport.from_json(report.to_json()).precisions[1].exceptions == bf16.exceptions


def test_islands_are_no_exceptions():
    report = bench(small_task(), "bf16:islands=2")
    assert report.precisions[1].matmul_dtypes == {"bfloat16": 1, "float32": 1}
    assert not report.precisions[1].exceptions


def test_verdict_names_a_slow_loader():
    said = verdict(report_of(precision(1.9, 0.3), loading_ms=25.0), Thresholds())
    assert any(
        each.startswith("A batch takes 25.0 ms to load, 50% of fp32's step") for each in said
    )
    said = verdict(report_of(precision(1.9, 0.3), loading_ms=1.0), Thresholds())
    assert not any("to load" in each for each in said)


def test_verdict_names_the_baseline_on_a_gpu():
    told = report_of(precision(1.9, 0.3))
    told.device = "cuda:0"
    assert any("IEEE float32" in each for each in verdict(told, Thresholds()))


def test_verdict_without_any_other_precision():
    gone = precision(status="failed", reason="no kernel")
    assert verdict(report_of(gone), Thresholds())[0].startswith("Keep fp32: no other precision")


def test_verdict_names_a_task_that_is_too_small():
    tiny = report_of(precision(1.1))
    tiny.precisions[0].step_ms = Interval(0.4, 0.39, 0.41)
    assert any("overhead, not arithmetic" in each for each in verdict(tiny, Thresholds()))


@pytest.mark.parametrize(
    "settings",
    [
        {"speedup": 0},
        {"memory_reduction": 1.5},
        {"memory_reduction": -0.1},
        {"accuracy_difference": 0},
    ],
)
def test_thresholds_out_of_range_are_refused(settings):
    with pytest.raises(UsageError, match="expected a"):
        Thresholds(**settings)


def test_default_precisions_are_what_gains_and_fp16(monkeypatch):
    from types import SimpleNamespace

    def capability(**gains):
        return SimpleNamespace(
            formats={
                name: SimpleNamespace(gains=gain, reason=f"{name} measured")
                for name, gain in gains.items()
            }
        )

    amx, left_out = choose(None, capability(tf32=True, bfloat16=True, float16=False))
    assert [each.name for each in amx] == ["fp32", "tf32", "fp16", "bf16", "bf16-master"]
    own = {"bf16-pure": "it changes what the model holds; name it to measure it"}
    assert left_out == own
    plain, left_out = choose(None, capability(tf32=False, bfloat16=False, float16=False))
    assert [each.name for each in plain] == ["fp32", "fp16", "bf16"]
    assert left_out == own | {"tf32": "tf32 measured", "bf16-master": "bfloat16 measured"}


def test_a_race_cut_short_gives_no_figure(monkeypatch):
    """Seen on a busy machine: 2.38x [2.38, 2.38], a pass, of one round."""
    monkeypatch.setattr(Stages, "first_steps", lambda self: None)

    def interrupted(self, name):
        self.turns = getattr(self, "turns", 0) + 1
        if self.turns == 3 * 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("ampwise.bench.stages.Watch.after_turn", interrupted)
    report = run_bench(small_task(), BenchConfig(CPU, [PRESETS["tf32"]], max_seeds=0), Silent())
    _, tf32 = report.precisions
    assert (report.interrupted, report.rounds) == (True, 3)
    assert (tf32.step_ms, tf32.speedup) == (None, None)
    assert tf32.requirements["speedup"].status == "not measured"
    assert "race: 3 rounds decide nothing" in report.notes


def test_what_does_not_fit_into_the_whole_budget_is_not_measured_and_said(monkeypatch):
    """Also where others take the processor: here each step takes as long as on a busy one."""
    monkeypatch.setattr(Stages, "first_steps", lambda self: None)
    monkeypatch.setattr(Stages, "memory", lambda self: None)

    def slow(model, x):
        time.sleep(0.02)
        return model(x).float().square().mean()

    config = BenchConfig(CPU, [PRESETS["tf32"]], parity_steps=1000, levers_s=2.0, total_s=4.0)
    started = time.monotonic()
    report = run_bench(small_task(loss=slow), config, Silent())
    assert time.monotonic() - started < 5
    _, tf32 = report.precisions
    assert 0 < report.rounds < config.max_rounds
    assert tf32.speedup is not None
    accuracy = tf32.requirements["accuracy_difference"]
    assert accuracy.status == "not measured"
    assert accuracy.reason == "the time was up (--budget); no seed was trained"


def test_the_race_ends_when_it_is_decided(monkeypatch):
    monkeypatch.setattr(racing, "DECIDED", float("inf"))
    report = bench(small_task(), "tf32", max_rounds=100)
    assert report.rounds == racing.MIN_ROUNDS


@pytest.mark.parametrize(
    ("asked", "taught"),
    [({}, ["fp32", "bf16"]), ({"precisions": [PRESETS["fp16"]]}, ["fp32", "bf16", "fp16"]),
     ({"parity_steps": 50}, ["fp32", "bf16", "fp16"])],
)  # fmt: skip
def test_a_hopelessly_slow_precision_is_not_taught_unless_asked_for(asked, taught):
    """Emulated float16 would take the time in which the others learn something."""
    steps = {"fp32": 10.0, "bf16": 30.0, "fp16": 170.0}
    results = {
        name: PrecisionResult(name, step_ms=Interval(ms, ms, ms)) for name, ms in steps.items()
    }
    parity = ParityReport()
    config, policies = BenchConfig(CPU, **asked), [PRESETS[name] for name in steps]
    kept = to_train(small_task(), config, policies, results, parity)
    assert [each.text for each in kept] == taught
    assert set(parity.left_out) == set(steps) - set(taught)
    judged = judge(results["fp16"], Thresholds(), parity)
    if asked:
        return
    assert judged["accuracy_difference"].status == "not measured"
    assert "17 times as long" in judged["accuracy_difference"].reason


# -- emulated --------------------------------------------------------------------------------------


def with_linears() -> Task:
    """A task whose head does not fit float8."""
    task = small_task()
    return dataclasses.replace(
        task, model=lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    )


def test_an_emulated_precision_has_memory_and_accuracy_but_no_speed():
    pytest.importorskip("torchao", reason="needs ampwise[fp8]")
    config = BenchConfig(
        CPU, [PRESETS["fp8"]], max_rounds=4, max_seeds=3, parity_steps=4, parity_budget_s=60
    )
    report = run_bench(with_linears(), config, Silent())
    (_, fp8) = report.precisions
    assert fp8.status == "measured"
    assert fp8.speedup is None
    speed = fp8.requirements["speedup"]
    assert speed.status == "not measured"
    assert speed.reason.startswith("emulated: float8 is multiplied in float32 here, so speed says")
    assert fp8.memory_reduction is not None
    assert fp8.accuracy is not None
    assert fp8.matmul_dtypes == {"float8_e4m3fn": 1, "bfloat16": 1}
    assert "fp8: not in float8: 2 (out_features of 8 is no multiple of 16)" in report.notes
    assert any(each.startswith("fp8 is emulated") for each in report.notes)
    assert report.verdict[0] == "Keep fp32: no other precision runs here other than emulated."


class LastInFloat32(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.weight = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 8))

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight


def test_products_in_float8_are_no_exceptions_of_fp8():
    pytest.importorskip("torchao", reason="needs ampwise[fp8]")
    task = dataclasses.replace(small_task(), model=LastInFloat32)
    config = BenchConfig(CPU, [PRESETS["fp8"]], max_rounds=2, max_seeds=0)
    (_, fp8) = run_bench(task, config, Silent()).precisions
    assert fp8.matmul_dtypes == {"float8_e4m3fn": 1, "float32": 1}
    assert {each.dtype for each in fp8.exceptions} == {"float32"}


def test_a_model_that_fp8_does_not_fit_leaves_the_others_alone():
    pytest.importorskip("torchao", reason="needs ampwise[fp8]")
    policies = [PRESETS["bf16"], PRESETS["fp8"]]
    report = run_bench(
        small_task(width=24), BenchConfig(CPU, policies, max_rounds=2, max_seeds=0), Silent()
    )
    _, bf16, fp8 = report.precisions
    assert (bf16.status, fp8.status) == ("measured", "failed")
    assert "no layer of the model can multiply in float8" in fp8.reason


@pytest.mark.parametrize("installed", [False, True])
def test_fp8_is_measured_by_default_where_it_gains_and_torchao_is_there(installed, monkeypatch):
    from ampwise.bench import config
    from ampwise.capability import Measurement, classify, hardware

    monkeypatch.setattr(config, "find_spec", lambda _: object() if installed else None)
    fast = dict.fromkeys(hardware.PROBED, Measurement(4096, 9.0, 9.0, 9.0))
    hopper = classify(hardware.cuda("cuda:0", "H100", (9, 0)), fast)
    chosen, left_out = choose(None, hopper)
    assert (PRESETS["fp8"] in chosen) == installed
    assert ("torchao is not installed" in left_out.get("fp8", "")) != installed
