"""The driver's view of a GPU: the right GPU, words for bits, and no figure that cannot be had.

Everything here runs against a stand-in for NVML; tests/gpu has what needs a GPU.
"""

from __future__ import annotations

import inspect
import os
import sys

import pytest
import torch

from ampwise.installation import extra_command
from ampwise.telemetry.environment import environment
from ampwise.telemetry.nvml import REASONS, Gpu, Reading, reasons_in
from tests import fake_nvml
from tests.fake_nvml import FakeNvml, NVMLError, NVMLError_FunctionNotFound

CUDA = torch.device("cuda:0")


@pytest.fixture
def nvml(monkeypatch) -> FakeNvml:
    return fake_nvml.install(monkeypatch)


def test_the_fake_is_like_the_real_client():
    real = pytest.importorskip("pynvml")
    names = [each for each in vars(FakeNvml) if each.lower().startswith("nvml")]
    assert len(names) > 25
    for name in names:
        fake = getattr(FakeNvml, name)
        if isinstance(fake, int):
            assert getattr(real, name, fake) == fake, name  # older clients lack the newest bits
        elif inspect.isclass(fake):
            assert issubclass(getattr(real, name), real.NVMLError)
        elif name != "nvmlDeviceGetCurrentClocksEventReasons" or hasattr(real, name):
            asked = list(inspect.signature(fake).parameters)[1:]
            assert list(inspect.signature(getattr(real, name)).parameters) == asked, name


def test_a_reading_has_units(nvml):
    nvml.mask, nvml.pids = 0x4, [os.getpid(), 4242]
    gpu = Gpu(CUDA)
    assert gpu.read() == Reading(1980, ("power cap",), 60, 412.5, (4242,))
    assert gpu.unread == {}


def test_every_bit_of_the_client_has_words():
    bits = {
        name: bit
        for name, bit in vars(FakeNvml).items()
        if name.startswith("nvmlClocksThrottleReason")
    }
    assert sorted(bits.values()) == [each.bit for each in REASONS]
    assert reasons_in(0) == ()
    assert reasons_in(0x1) == ("idle",)
    assert reasons_in(0x24) == ("power cap", "software thermal slowdown")
    assert reasons_in(0x1004) == ("power cap", "unknown reason 0x1000")


def test_the_cause_hides_the_general_slowdown():
    assert reasons_in(0x08) == ("hardware slowdown",)
    assert reasons_in(0x48) == ("hardware thermal slowdown",)
    assert reasons_in(0x88) == ("power brake",)


def test_the_gpu_is_found_by_uuid_or_by_bus_never_by_index(monkeypatch):
    nvml = fake_nvml.install(monkeypatch)
    nvml.bus_ids = set()
    assert Gpu(CUDA).readable
    nvml = fake_nvml.install(monkeypatch, uuid="another-one")
    assert Gpu(CUDA).readable
    nvml.bus_ids = {"00000000:66:00.0"}  # some other GPU, first by index
    gpu = Gpu(CUDA)
    assert not gpu.readable
    assert gpu.unread == {"gpu": "NVML says code 6"}
    assert gpu.read() == Reading()


def test_a_torch_that_does_not_tell_the_bus(monkeypatch):
    fake_nvml.install(monkeypatch, uuid="another-one")
    monkeypatch.delattr(torch.cuda.get_device_properties(CUDA), "pci_bus_id")
    assert Gpu(CUDA).unread == {"gpu": "NVML says code 6"}


@pytest.mark.parametrize("error", [None, NVMLError_FunctionNotFound(13)])
def test_older_clients_and_drivers_know_another_name(nvml, monkeypatch, error):
    name, nvml.mask = "nvmlDeviceGetCurrentClocksEventReasons", 0x20
    if error is None:
        monkeypatch.delattr(FakeNvml, name)
    else:
        nvml.denied[name] = error
    gpu = Gpu(CUDA)
    assert gpu.read().throttled == ("software thermal slowdown",)
    assert gpu.unread == {}


def test_what_the_driver_denies_is_a_gap_with_its_reason(nvml):
    nvml.denied = {
        "nvmlDeviceGetPowerUsage": NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED),
        "nvmlDeviceGetCurrentClocksEventReasons": NVMLError(nvml.NVML_ERROR_NO_PERMISSION),
        "nvmlDeviceGetMigMode": NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED),  # no gap: it has none
    }
    gpu = Gpu(CUDA)
    assert gpu.read() == Reading(1980, None, 60, None, ())
    assert gpu.unread == {
        "throttled": "NVML says Insufficient Permissions",
        "power_w": "NVML says Not Supported",
    }


def test_a_driver_that_does_not_answer_at_all(nvml):
    nvml.denied["nvmlInit"] = NVMLError(9)
    assert Gpu(CUDA).unread == {"gpu": "NVML says code 9"}


def test_an_instance_of_a_partitioned_gpu_is_not_read(nvml):
    nvml.mig = 1
    gpu = Gpu(CUDA)
    assert "MIG" in gpu.unread["gpu"]
    assert gpu.read() == Reading()


def test_process_numbers_of_another_namespace_accuse_nobody(nvml):
    nvml.pids = [4242]  # this process, as its host counts
    gpu = Gpu(CUDA)
    assert gpu.read().others is None
    assert "container" in gpu.unread["others"]


def test_without_the_client_the_extra_is_named(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    command = extra_command("nvml")
    assert Gpu(CUDA).unread == {"gpu": f"nvidia-ml-py is not installed: {command}"}


def test_amd_is_not_asked_for_an_extra_that_would_not_help(nvml, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert Gpu(CUDA).unread == {"gpu": "NVML knows NVIDIA's GPUs only"}


def test_the_environment_records_the_clock_where_it_is_readable(nvml, monkeypatch):
    hardware = "ampwise.capability.hardware"
    monkeypatch.setattr(f"{hardware}._cpuinfo", lambda: "cpu MHz\t\t: 2500.5\ncpu MHz : 2600.5\n")
    assert environment(torch.device("cpu"))["clocks_mhz"] == 2550.5
    monkeypatch.setattr(f"{hardware}._cpuinfo", lambda: "")
    assert environment(torch.device("cpu"))["clocks_mhz"] is None
    assert environment(CUDA)["clocks_mhz"] == 1980
    nvml.denied["nvmlDeviceGetClockInfo"] = NVMLError(nvml.NVML_ERROR_NO_PERMISSION)
    assert environment(CUDA)["clocks_mhz"] is None
