"""The measurement on this machine, and its cache."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ampwise import capability
from ampwise.capability import (
    PROBED,
    Hardware,
    Measurement,
    cache,
    float32_precision,
    hardware,
    matmul,
    present_devices,
    probe,
)
from ampwise.capability.matmul import measure

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what this process measured, as a new process would."""
    return lambda: monkeypatch.setattr(capability, "_measured", {})


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats measured, in order; the measurement itself is replaced."""
    formats: list[str] = []

    def fake(_device: torch.device, fmt: str, **_: object) -> Measurement:
        formats.append(fmt)
        return Measurement(256, 2.0, 1.9, 2.1)

    monkeypatch.setattr(capability, "measure", fake)
    return formats


def test_probe_of_this_cpu_is_short_and_complete() -> None:
    probe("cpu")  # builds oneDNN's kernels once
    start = time.perf_counter()
    found = probe("cpu", refresh=True)
    assert time.perf_counter() - start < 5, "under a second here; 5 with a busy neighbour"
    assert tuple(found.formats) == PROBED
    for support in found.formats.values():
        assert support.measured.error or support.measured.size >= 128
        assert support.reason.startswith(("bf16 math", support.format))
    assert (found.device, found.kind, found.cached) == ("cpu", "cpu", False)


def test_float8_products_are_those_of_what_was_rounded() -> None:
    """The probe times what it says: a product in float8, against one in float64."""
    left, right = (torch.randn(32, 32).to(torch.float8_e4m3fn) for _ in "ab")
    found = matmul._product(left, right)()
    torch.testing.assert_close(
        found.double(), left.double() @ right.double().t(), rtol=2**-8, atol=0
    )


def test_a_measurement_that_lacks_a_format_is_not_recalled(
    count: list[str], forget: Callable[[], None], cache_folder: Path
) -> None:
    """As those kept by a version that probed fewer formats."""
    probe("cpu")
    (path,) = cache_folder.glob("capability-*.json")
    stored = json.loads(path.read_text())
    del stored["measurements"][hardware.FLOAT8]
    path.write_text(json.dumps(stored))
    forget()
    probe("cpu")
    assert count == [*PROBED, *PROBED]


def test_ratio_is_float32_time_over_format_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With clocks replaced: the format takes 4 ms where float32 takes 8 and then 10."""
    times_ms = {"float32": iter([8.0, 8.0, 10.0] * 99), "bfloat16": iter([4.0] * 99)}
    _replace_clock(monkeypatch, times_ms)
    found = measure(CPU, "bfloat16", decisive=1.1)
    assert (found.size, found.speedup, found.low, found.high) == (128, 2.0, 2.0, 2.5)


def test_a_hopeless_format_is_cut_short_at_the_first_size(monkeypatch: pytest.MonkeyPatch) -> None:
    times_ms = {"float32": iter([0.05] * 99), "float16": iter([5.0] * 99)}
    _replace_clock(monkeypatch, times_ms)
    found = measure(CPU, "float16", decisive=1.1, budget_s=1e9)
    assert (found.size, found.speedup) == (128, 0.01)
    assert 99 - len(list(times_ms["float16"])) == 1 + 2, "one warm-up and two rounds"


def test_sizes_grow_until_float32_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_clock(
        monkeypatch, {"float32": iter([1.0] * 12 + [6.0] * 99), "bfloat16": iter([1.0] * 99)}
    )
    assert measure(CPU, "bfloat16", decisive=1.1, budget_s=1e9).size == 512


def test_a_size_that_would_not_fit_the_budget_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_clock(monkeypatch, {"float32": iter([1.0] * 99), "bfloat16": iter([1.0] * 99)})
    assert measure(CPU, "bfloat16", decisive=1.1, budget_s=0.05).size == 128


def test_undecided_rounds_are_followed_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    float32 = iter([6.0] + [6.0, 5.0] * 49)
    _replace_clock(monkeypatch, {"float32": float32, "bfloat16": iter([5.0] * 99)})
    measure(CPU, "bfloat16", decisive=1.1, budget_s=1e9)
    assert 99 - len(list(float32)) == 1 + 15


def test_a_format_pytorch_refuses_is_an_error_not_a_crash() -> None:
    found = measure(CPU, "bool", decisive=1.1)
    assert found.speedup is None and found.size == 0
    assert "Error: " in found.error and "\n" not in found.error


def test_the_probe_leaves_global_state_as_it_was() -> None:
    switch = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        random_state, threads = torch.get_rng_state(), torch.get_num_threads()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            probe("cpu", refresh=True)
            assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
        assert torch.equal(torch.get_rng_state(), random_state)
        assert torch.get_num_threads() == threads
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before


def test_autocast_around_the_probe_does_not_turn_the_float32_arm_to_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    run_ms = matmul._Arm.run_ms

    def spy(arm: matmul._Arm) -> float:
        seen.append(torch.is_autocast_enabled("cpu"))
        return run_ms(arm)

    monkeypatch.setattr(matmul._Arm, "run_ms", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measure(CPU, "bfloat16", decisive=1.1)
    assert seen and not any(seen)


def test_float32_precision_is_restored_when_the_body_raises() -> None:
    switch = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = switch.fp32_precision
    with pytest.raises(ZeroDivisionError), float32_precision("cpu", "bf16"):
        assert switch.fp32_precision == "bf16"
        _ = 1 / 0
    assert switch.fp32_precision == before


def test_a_measurement_is_kept_between_processes(
    count: list[str], forget: Callable[[], None], cache_folder: Path
) -> None:
    first = probe("cpu")
    forget()
    again = probe("cpu")
    assert count == list(PROBED)
    assert (first.cached, again.cached) == (False, True)
    assert again == first
    assert [path.suffix for path in cache_folder.iterdir()] == [".json"], "nothing left aside"


def test_refresh_measures_again(count: list[str]) -> None:
    probe("cpu")
    assert not probe("cpu", refresh=True).cached
    assert count == [*PROBED, *PROBED]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        '"text"',
        '{"schema": "ampwise.capability/1"}',
        "\x00\x01",
        "wrong schema",
        "not mine",
        "missing field",
        "a word for a number",
        "a negative ratio",
        "a list of measurements",
    ],
)
def test_a_damaged_or_stale_cache_means_measuring_again(
    count: list[str], forget: Callable[[], None], cache_folder: Path, content: str
) -> None:
    probe("cpu")
    (path,) = cache_folder.iterdir()
    path.write_text(_damaged(json.loads(path.read_text()), content))
    forget()
    assert not probe("cpu").cached
    assert len(count) == 2 * len(PROBED)


def test_another_torch_version_means_measuring_again(
    count: list[str], forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe("cpu")
    forget()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert not probe("cpu").cached


def test_a_cache_that_cannot_be_written_costs_one_measurement_a_process(
    count: list[str], cache_folder: Path
) -> None:
    cache_folder.write_text("a file where the folder should be")
    assert not probe("cpu").cached
    assert probe("cpu").cached
    assert count == list(PROBED)


def test_an_incomplete_measurement_is_not_kept_on_disk(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    monkeypatch.setattr(capability, "measure", lambda *_args, **_kwargs: Measurement())
    probe("cpu")
    assert not cache_folder.exists()


def test_a_measurement_that_others_disturbed_is_not_kept_on_disk(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    """Seen on a busy machine: 93x, from rounds of 50x to 288x, and kept for good."""
    wild, hopeless = Measurement(128, 93.0, 50.4, 288.4), Measurement(128, 0.002, 0.001, 0.01)
    monkeypatch.setattr(capability, "measure", lambda *_args, **_kwargs: hopeless)
    probe("cpu")
    assert len(list(cache_folder.iterdir())) == 1
    monkeypatch.setattr(capability, "measure", lambda *_args, **_kwargs: wild)
    probe("cpu", refresh=True)
    (path,) = cache_folder.iterdir()
    assert "288" not in path.read_text()


def test_where_the_cache_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.folder() == tmp_path / "cache"
    monkeypatch.delenv("AMPWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "ampwise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path(os.path.expanduser("~/.cache/ampwise"))


def test_this_machine_is_described_without_a_guess() -> None:
    assert present_devices()[-1] == "cpu"
    found = hardware.describe(CPU)
    assert (found.device, found.kind) == ("cpu", "cpu")
    flags = hardware.cpu_flags()
    assert found.units == hardware.cpu(flags, "").units


def test_flags_survive_a_torch_that_cannot_tell_and_a_system_without_cpuinfo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(hardware, "_torch_capabilities", dict)
    assert hardware.cpu_flags() == frozenset()
    found: Hardware = hardware.describe(CPU)
    assert set(found.units.values()) == {None}


def _damaged(stored: dict[str, object], how: str) -> str:
    """The stored content with one thing wrong, or `how` itself."""
    good = {"size": 1, "speedup": 1.0, "low": 1.0, "high": 1.0, "error": ""}
    changes: dict[str, dict[str, object]] = {
        "wrong schema": {"schema": "ampwise.capability/0"},
        "not mine": {"key": {"device": "cuda:0"}},
        "missing field": {"measurements": {"tf32": {"size": 1}}},
        "a word for a number": {"measurements": {"tf32": good | {"speedup": "fast"}}},
        "a negative ratio": {"measurements": {"tf32": good | {"low": -1.0}}},
        "a list of measurements": {"measurements": [1, 2]},
    }
    return json.dumps(stored | changes[how]) if how in changes else how


def _replace_clock(monkeypatch: pytest.MonkeyPatch, times_ms: dict[str, object]) -> None:
    """Arms that take the given times instead of running."""

    class FakeArm:
        def __init__(self, _device: torch.device, fmt: str, _size: int) -> None:
            self.fmt, self.fastest_ms = fmt, float("inf")

        def run_ms(self) -> float:
            elapsed_ms = next(times_ms[self.fmt])  # pyright: ignore
            self.fastest_ms = min(self.fastest_ms, elapsed_ms)
            return elapsed_ms

    monkeypatch.setattr(matmul, "_Arm", FakeArm)
