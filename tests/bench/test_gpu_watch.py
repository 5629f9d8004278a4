"""A GPU that throttles, or is shared, is told from a quiet one, with the arm that it hit."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import ampwise.bench.run as running
import ampwise.bench.stages as stages
from ampwise import Task
from ampwise.bench import gpu_watch
from ampwise.bench.arm import Arm
from ampwise.bench.config import BenchConfig
from ampwise.bench.contamination import Contamination, Watch
from ampwise.bench.gpu_watch import GpuFigures, GpuRecord, GpuWatch, Spread
from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.bench.run import run_bench
from ampwise.installation import extra_command
from ampwise.policy import PRESETS
from ampwise.report.html import to_html
from ampwise.report.markdown import to_markdown
from ampwise.stats import Interval
from tests import fake_nvml
from tests.fake_nvml import NVMLError

CUDA = torch.device("cuda:0")


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setattr(gpu_watch, "PERIOD_S", 0.0)
    return fake_nvml.install(monkeypatch)


class Silent:
    def stage(self, what): ...

    def round(self, race): ...

    def seed(self, name, seed, planned): ...


def raced() -> BenchReport:
    """A bench whose arms run on the CPU while the watch believes in a GPU."""
    task = Task(
        name="small",
        model=lambda: torch.nn.Linear(8, 4),
        batches=lambda: [torch.randn(4, 8) for _ in range(4)],
        loss=lambda model, x: model(x).float().square().mean(),
    )
    config = BenchConfig(torch.device("cpu"), [PRESETS["bf16"]], max_rounds=6, max_seeds=0)
    return run_bench(task, config, Silent())


@pytest.fixture
def watched(nvml, monkeypatch):
    monkeypatch.setattr(stages, "Watch", lambda device: Watch(CUDA))
    return nvml


def gpu_notes(report: BenchReport) -> list[str]:
    return [each for each in report.notes if "GPU" in each]


def test_a_steady_gpu_of_ones_own_is_recorded_without_a_word(watched):
    watched.mask = 0x2  # clocks locked by the user: what a measurement wants
    report = raced()
    gpu = report.contamination.gpu
    assert gpu.race == GpuFigures(
        18,
        Spread(1980, 1980, 1980),
        {"application clocks setting": 1.0},
        Spread(60, 60, 60),
        Spread(412.5, 412.5, 412.5),
        0.0,
    )
    assert {name: each.samples for name, each in gpu.arms.items()} == {
        "fp32": 6,
        "fp32 again": 6,
        "bf16": 6,
    }
    assert gpu_notes(report) == []


def test_the_throttled_arm_is_named_with_what_to_do(watched, monkeypatch):
    run = Arm.run

    def hot(arm, batch):
        watched.mask, watched.clock_mhz = (0x4, 1410) if arm.name == "bf16" else (0x1, 1980)
        run(arm, batch)

    monkeypatch.setattr(Arm, "run", hot)
    report = raced()
    gpu = report.contamination.gpu
    assert gpu.arms["bf16"].throttled == {"power cap": 1.0}
    assert gpu.arms["fp32"].throttled == {"idle": 1.0}  # which is no fault
    assert gpu.race.throttled["power cap"] == pytest.approx(1 / 3)
    assert gpu.race.clock_mhz == Spread(1410, 1980, 1980)
    assert gpu_notes(report) == [
        "while the race ran, the GPU's clock was held down (power cap; share of the samples: "
        "bf16 100%): raise the cap (nvidia-smi -pl), or lock a lower clock (nvidia-smi -lgc)",
        "while the race ran, the GPU's clock was 1410 MHz in bf16, 1980 MHz in "
        f"{max(gpu.arms, key=lambda name: gpu.arms[name].clock_mhz.median)}: lock it to what it "
        "can hold (nvidia-smi -lgc 1410)",
    ]
    written = json.loads(json.dumps(report.to_json()))
    assert written["contamination"]["gpu"]["arms"]["bf16"]["throttled"] == {"power cap": 1.0}
    assert BenchReport.from_json(written) == report
    page = to_html(report)
    assert '<table id="gpu">' in page
    assert "power cap 100%" in page
    assert "nvidia-smi -pl" in page
    assert "nvidia-smi -pl" in to_markdown(report)


def test_an_undecided_speed_points_at_what_disturbed_the_race(nvml):
    nvml.mask, watch = 0x40, Watch(CUDA)
    watch.after_turn("bf16")
    undecided = PrecisionResult("bf16", speedup=Interval(1.5, 1.4, 1.6))
    report = BenchReport("small", "cuda:0", {}, precisions=[PrecisionResult("fp32"), undecided])
    report.contamination = Contamination(gpu=watch.read().gpu)
    running._conclude(report, BenchConfig(CUDA, max_seeds=0), 1)
    said = undecided.requirements["speedup"]
    assert said.status == "not measured"
    assert said.reason.endswith("the notes say what disturbed the race, and what to do")
    assert [each for each in report.notes if "hardware thermal slowdown" in each]


def test_a_report_from_before_still_loads(watched):
    written = raced().to_json()
    written["contamination"] = {"pressure": 0.1, "steal": 0.0, "others": 0.0, "clock": 1.0}
    assert BenchReport.from_json(written).contamination == Contamination(0.1, 0.0, 0.0)


def test_another_process_on_the_gpu_is_named(watched):
    watched.pids = [*watched.pids, 4242]
    report = raced()
    assert report.contamination.gpu.others == [4242]
    assert gpu_notes(report) == [
        "while the race ran, other processes were on the GPU in 100% of the samples (process "
        "4242): stop them, or take another GPU"
    ]


def test_what_cannot_be_read_is_said_once(watched):
    watched.denied["nvmlDeviceGetPowerUsage"] = NVMLError(watched.NVML_ERROR_NOT_SUPPORTED)
    report = raced()
    assert report.contamination.gpu.race.power_w is None
    assert report.contamination.gpu.race.clock_mhz is not None
    assert gpu_notes(report) == ["power_w of the GPU was not read: NVML says Not Supported"]
    assert "<td>not read</td>" in to_html(report)


def test_without_the_client_the_extra_is_named_once(watched, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    report = raced()
    assert report.contamination.gpu.race == GpuFigures(0)
    assert gpu_notes(report) == [
        "the GPU's clocks and throttling were not watched: nvidia-ml-py is not installed: "
        f"{extra_command('nvml')}"
    ]
    assert '<table id="gpu">' not in to_html(report)


def test_a_cpu_has_no_gpu_to_report():
    report = raced()
    assert report.contamination.gpu is None
    assert gpu_notes(report) == []


@pytest.mark.parametrize(
    ("mask", "words", "remedy"),
    [
        (0x08, "hardware slowdown", "see to cooling and power supply"),
        (0x10, "sync boost", "sync boost group"),
        (0x20, "software thermal slowdown", "cool the GPU, or lock a lower clock"),
        (0x40, "hardware thermal slowdown", "cool the GPU"),
        (0x80, "power brake", "the server's power supply"),
    ],
)
def test_every_trouble_has_its_remedy(nvml, mask, words, remedy):
    nvml.mask, watch = mask, GpuWatch(CUDA)
    watch.sample("fp32")
    (said,) = watch.read().complaints()
    assert f"({words}; share of the samples: fp32 100%)" in said
    assert remedy in said


def test_a_single_throttled_sample_of_many_is_no_complaint(nvml):
    watch = GpuWatch(CUDA)
    for mask in [0x4] + [0] * 30:
        nvml.mask = mask
        watch.sample("fp32")
    assert watch.read().complaints() == []


def test_a_clock_that_falls_for_all_arms_alike():
    def record(low: float, median: float, high: float) -> GpuRecord:
        figures = GpuFigures(9, Spread(low, median, high))
        return GpuRecord(figures, {"fp32": figures, "bf16": figures})

    (said,) = record(1400, 1500, 1980).complaints()
    assert said.startswith("the GPU's clock moved between 1400 and 1980 MHz, median 1500: lock it")
    assert record(1400, 1975, 1980).complaints() == []


def test_samples_are_not_taken_faster_than_the_driver_renews_them(nvml, monkeypatch):
    monkeypatch.setattr(gpu_watch, "PERIOD_S", 60.0)
    watch = GpuWatch(CUDA)
    for _ in range(5):
        watch.sample("fp32")
    assert watch.read().race.samples == 1
