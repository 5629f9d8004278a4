"""The driver's view of a real GPU, against `nvidia-smi` and while a race runs."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from ampwise import load_task
from ampwise.bench.config import BenchConfig
from ampwise.bench.gpu_watch import GpuWatch
from ampwise.bench.run import run_bench
from ampwise.telemetry.environment import environment
from ampwise.telemetry.nvml import Gpu
from tests.gpu.test_bench import Quiet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None, reason="NVML knows NVIDIA's GPUs only"),
]


@pytest.fixture
def gpu() -> Gpu:
    pytest.importorskip("pynvml")
    torch.zeros(1, device="cuda")  # so that this process is on the GPU
    found = Gpu(torch.device("cuda"))
    if not found.readable:
        pytest.skip(found.unread["gpu"])
    return found


def nvidia_smi(field: str) -> str:
    properties = torch.cuda.get_device_properties(0)
    command = [
        "nvidia-smi",
        f"--id=GPU-{properties.uuid}",
        f"--query-gpu={field}",
        "--format=csv,noheader,nounits",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_figures_are_plausible_and_of_the_same_gpu_as_nvidia_smi_says(gpu):
    reading = gpu.read()
    assert reading.clock_mhz is None or 0 < reading.clock_mhz <= float(nvidia_smi("clocks.max.sm"))
    assert reading.power_w is None or 0 < reading.power_w < 3000
    assert reading.temperature_c is not None
    assert abs(reading.temperature_c - float(nvidia_smi("temperature.gpu"))) <= 10
    assert reading.throttled is None or not [r for r in reading.throttled if "unknown" in r]
    assert reading.others is None or os.getpid() not in reading.others
    for field in ("clock_mhz", "throttled", "power_w", "others"):
        assert (getattr(reading, field) is None) == (field in gpu.unread)
    assert environment(torch.device("cuda"))["clocks_mhz"] is not None or gpu.unread


def test_a_look_does_not_wait_for_the_device(gpu):
    watch = GpuWatch(torch.device("cuda"))
    torch.cuda._sleep(1_000_000_000)  # some half a second of the GPU's time
    done = torch.cuda.Event()
    done.record()
    watch.sample("fp32")
    assert not done.query()
    torch.cuda.synchronize()


def test_a_race_is_sampled_and_every_arm_has_its_share(gpu):
    config = BenchConfig(torch.device("cuda"), max_rounds=60, budget_s=60.0, max_seeds=0)
    report = run_bench(load_task("charlm", {"size": "small"}), config, Quiet())
    assert report.contamination is not None
    record = report.contamination.gpu
    assert record is not None
    assert record.race.samples == sum(each.samples for each in record.arms.values()) > 5
    assert {each.name for each in report.precisions if each.step_ms} >= record.arms.keys() - {
        "fp32 again"
    }
    assert record.race.clock_mhz is None or record.race.clock_mhz.low > 0
