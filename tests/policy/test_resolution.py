"""Every request on every kind of device, strict or not; the capabilities are injected."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch

from ampwise import capability, policy
from ampwise.capability import DeviceCapability, Measurement, classify, hardware
from ampwise.errors import PolicyError, UsageError
from ampwise.policy import PRESETS, Policy, choose_device, resolve


def fake(machine: hardware.Hardware, tf32: float, bf16: float, fp16: float) -> DeviceCapability:
    """A device on which the three formats measured these speedups (0: PyTorch refused)."""
    ratios = {"tf32": tf32, "bfloat16": bf16, "float16": fp16}
    return classify(
        machine,
        {
            fmt: Measurement(1024, ratio, ratio, ratio) if ratio else Measurement(error="no kernel")
            for fmt, ratio in ratios.items()
        },
    )


def x86(*flags: str) -> hardware.Hardware:
    return hardware.cpu(frozenset({"avx2", *flags}), "AVX512", "Xeon")


def nvidia(major: int, minor: int) -> hardware.Hardware:
    return hardware.cuda("cuda:0", "NVIDIA", (major, minor))


DEVICES = {
    "plain cpu": fake(x86("avx512_f"), 0.97, 0.3, 0.003),
    "amx cpu": fake(x86("amx_bf16", "avx512_bf16", "avx512_fp16"), 3.2, 3.4, 0.98),
    "avx512-bf16 cpu": fake(x86("avx512_bf16"), 1.3, 1.6, 0.01),
    "avx512-fp16 cpu": fake(x86("avx512_fp16"), 1.0, 0.4, 1.5),
    "pascal": fake(nvidia(6, 1), 1.0, 0.6, 0.7),
    "volta": fake(nvidia(7, 0), 1.0, 0.5, 6.0),
    "turing": fake(nvidia(7, 5), 1.0, 0.5, 5.0),
    "ampere": fake(nvidia(8, 0), 6.0, 12.0, 12.0),
    "hopper": fake(nvidia(9, 0), 6.8, 13.0, 13.0),
    "mi300": fake(hardware.rocm("cuda:0", "MI300X", "gfx942:sramecc+"), 3.0, 6.0, 6.0),
    "rdna2": fake(hardware.rocm("cuda:0", "RX 6800", "gfx1030"), 1.0, 0.8, 1.8),
    "mps": fake(hardware.mps("Apple M3", "15.1"), 0, 1.2, 1.3),
    "xpu": fake(hardware.xpu("xpu:0", "Max 1550", True), 4.0, 8.0, 8.0),
}

# device -> what auto, tf32, fp16, bf16 become; "-" is fp32 in place of what was asked.
TABLE = {
    "plain cpu": ("fp32", "-", "-", "-"),
    "amx cpu": ("bf16", "tf32", "-", "bf16"),
    "avx512-bf16 cpu": ("bf16", "tf32", "-", "bf16"),
    "avx512-fp16 cpu": ("fp32", "-", "fp16", "-"),
    "pascal": ("fp32", "-", "-", "-"),
    "volta": ("fp16", "-", "fp16", "-"),
    "turing": ("fp16", "-", "fp16", "-"),
    "ampere": ("bf16", "tf32", "fp16", "bf16"),
    "hopper": ("bf16", "tf32", "fp16", "bf16"),
    "mi300": ("bf16", "tf32", "fp16", "bf16"),
    "rdna2": ("fp16", "-", "fp16", "-"),
    "mps": ("bf16", "-", "fp16", "bf16"),
    "xpu": ("bf16", "tf32", "fp16", "bf16"),
}
REQUESTS = ("auto", "tf32", "fp16", "bf16", "fp32", "bf16-master")

Install = Callable[..., None]


def outcome(device: str, request: str) -> str:
    """The table's cell; fp32 always stands, bf16-master goes with bf16."""
    row = dict(zip(REQUESTS, TABLE[device], strict=False)) | {"fp32": "fp32"}
    if request == "bf16-master":
        return request if row["bf16"] == "bf16" else "-"
    return row[request]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make the given capabilities the devices of this machine, the best first."""

    def put(*found: DeviceCapability) -> None:
        by_device = {item.device: item for item in (*found, DEVICES["plain cpu"])}
        if found[-1].kind == "cpu":
            by_device["cpu"] = found[-1]
        present = (*(name for name in by_device if name != "cpu"), "cpu")
        monkeypatch.setattr(capability, "present_devices", lambda: present)
        monkeypatch.setattr(capability, "probe", lambda device: by_device[str(device)])

    return put


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_request_on_every_device(
    install: Install, device: str, request_: str, strict: bool
) -> None:
    found = DEVICES[device]
    install(found)
    expected = outcome(device, request_)
    if expected == "-" and strict:
        with pytest.raises(PolicyError, match=rf"'{request_}' refused on {found.device}: .+ is "):
            resolve(request_, strict=True)
        return
    result = resolve(request_, strict=strict)
    assert result.policy == PRESETS["fp32" if expected == "-" else expected]
    assert result.device == found.device
    assert result.request == request_
    assert result.changed == (expected == "-")
    assert result.reasons or request_ == "fp32"


@pytest.mark.parametrize("device", DEVICES)
def test_auto_never_picks_a_format_measured_slower_than_float32(device: str) -> None:
    chosen, _ = policy.decide(None, DEVICES[device])
    if chosen.compute_format != "float32":
        speedup = DEVICES[device].formats[chosen.compute_format].measured.speedup
        assert speedup is not None and speedup > 1


def test_a_reason_carries_the_figures(install: Install) -> None:
    install(DEVICES["plain cpu"])
    result = resolve("fp16", "cpu")
    assert result.reasons == (
        "float16 matmul on this CPU is emulated (no float16 unit): 0.003x of float32, "
        "measured at 1024x1024",
        "fp32 is the fastest here",
    )
    assert str(result) == f"asked for fp16, using fp32 on cpu: {'; '.join(result.reasons)}"


def test_fp16_where_it_gains_nothing_points_to_bf16(install: Install) -> None:
    install(DEVICES["amx cpu"])
    _, reason, instead = resolve("fp16").reasons
    assert reason.startswith("float16 matmul on this CPU is native (AVX512-FP16) but gains nothing")
    assert instead.startswith("bf16 would gain: bfloat16 matmul on this CPU is native (AMX-BF16)")


def test_bf16_where_it_is_emulated_points_to_fp16(install: Install) -> None:
    install(DEVICES["turing"])
    result = resolve("bf16", "cuda")
    assert "emulated (no bfloat16 unit): 0.50x" in result.reasons[0]
    assert result.reasons[1].startswith("fp16 would gain: float16 matmul on NVIDIA (sm_75)")


def test_fp16_on_a_cpu_warns_of_its_convolutions(install: Install) -> None:
    install(DEVICES["avx512-fp16 cpu"])
    assert policy.FP16_ON_CPU in resolve("fp16").reasons
    assert policy.FP16_ON_CPU in resolve("auto").reasons


def test_hopper_mentions_fp8(install: Install) -> None:
    install(DEVICES["hopper"])
    assert any("float8_e4m3fn" in reason for reason in resolve("bf16").reasons)
    assert not any("float8" in reason for reason in resolve("fp8").reasons[1:])
    install(DEVICES["ampere"])
    assert not any("float8" in reason for reason in resolve("bf16").reasons)


@pytest.mark.parametrize("device", DEVICES)
def test_auto_never_takes_fp8_and_says_so(device: str) -> None:
    found, left_out = policy.candidates(DEVICES[device])
    assert PRESETS["fp8"] not in found
    assert "asked for" in left_out["fp8"]
    assert policy.decide(None, DEVICES[device])[0] != PRESETS["fp8"]


def test_fp8_where_there_is_no_unit_is_for_its_numerics_only(install: Install) -> None:
    refused = {"float8_e4m3fn": Measurement(error="only on 8.9 and later")}
    for capability_ in (DEVICES["plain cpu"], classify(nvidia(8, 0), refused)):
        install(capability_)
        result = resolve("fp8", capability_.device)
        assert result.policy == PRESETS["fp32"]
        assert "is emulated" in result.reasons[0]
        assert "allow_emulated trains in it all the same" in result.reasons[1]
        with pytest.raises(PolicyError, match=r"'fp8' refused on .*allow_emulated"):
            resolve("fp8", capability_.device, strict=True)
        kept = resolve("fp8:recipe=rowwise", capability_.device, allow_emulated=True)
        assert kept.policy == Policy.parse("fp8:recipe=rowwise")
        assert not kept.changed


@pytest.mark.parametrize("device", ["hopper", "mi300"])
def test_fp8_is_used_where_it_gains(install: Install, device: str) -> None:
    install(DEVICES[device])
    result = resolve("fp8", strict=True)
    assert (result.policy, result.changed) == (PRESETS["fp8"], False)


def test_fp8_cannot_be_emulated_where_there_is_no_float8_at_all(install: Install) -> None:
    refused = {"float8_e4m3fn": Measurement(error="TypeError: MPS has no float8")}
    install(classify(hardware.mps("Apple M3", "15.1"), refused))
    assert resolve("fp8", "mps", allow_emulated=True).policy == PRESETS["fp32"]


@pytest.mark.parametrize("strict", [False, True])
def test_allow_emulated_keeps_the_request_and_says_so(install: Install, strict: bool) -> None:
    install(DEVICES["plain cpu"])
    result = resolve("bf16:islands=head", "cpu", strict=strict, allow_emulated=True)
    assert result.policy == Policy.parse("bf16:islands=head")
    assert not result.changed
    assert "0.30x of float32" in result.reasons[0]
    assert result.reasons[-1] == "kept all the same, as allowed"


def test_allow_emulated_cannot_keep_what_does_not_run(install: Install) -> None:
    broken = fake(x86(), 1.0, 0, 1.0)
    install(broken)
    result = resolve("bf16", "cpu", allow_emulated=True)
    assert result.policy == PRESETS["fp32"]
    assert result.reasons[0] == "bfloat16 matmul on this CPU is unsupported: no kernel"
    with pytest.raises(PolicyError, match="unsupported"):
        resolve("bf16", "cpu", allow_emulated=True, strict=True)


def test_a_policy_value_is_kept_with_its_settings(install: Install) -> None:
    install(DEVICES["ampere"])
    asked = dataclasses.replace(PRESETS["bf16"], islands=("head",))
    result = resolve(asked, torch.device("cuda"))
    assert result.policy == asked
    assert (result.request, result.device, result.changed) == ("bf16:islands=head", "cuda:0", False)


@pytest.mark.parametrize("request_", ["auto", "bf16", "fp32"])
def test_gpu_wanted_but_absent(install: Install, request_: str) -> None:
    install(DEVICES["amx cpu"])
    result = resolve(request_, "cuda")
    assert result.device == "cpu"
    assert result.changed
    assert result.reasons[0].startswith("cuda was asked for and is not present")
    assert str(result).startswith(f"asked for {request_}, using ")
    with pytest.raises(PolicyError, match="cuda was asked for and is not present"):
        resolve(request_, "cuda", strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_cpu_wins_when_the_user_says_so(install: Install, strict: bool) -> None:
    install(DEVICES["hopper"], DEVICES["amx cpu"])
    result = resolve("auto", "cpu", strict=strict)
    assert (result.device, result.policy.name, result.changed) == ("cpu", "bf16", False)
    assert result.reasons[0] == "cpu as asked, although cuda:0 is present"


def test_no_device_named_means_the_best_present(install: Install) -> None:
    install(DEVICES["hopper"], DEVICES["amx cpu"])
    assert resolve().device == resolve(device="auto").device == "cuda:0"
    install(DEVICES["amx cpu"])
    assert resolve().device == "cpu"


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("cuda", "cuda:1"),
        ("cuda:0", "cuda:0"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        ("auto", "cuda:1"),
    ],
)
def test_choice_among_several(wanted: str, chosen: str) -> None:
    """The current device comes first among those present, as `torch.device("cuda")` means it."""
    assert choose_device(wanted, ("cuda:1", "cuda:0", "cpu"))[0] == chosen


def test_mps_with_and_without_an_index() -> None:
    assert choose_device("mps", ("mps", "cpu"))[0] == "mps"
    assert choose_device("mps:0", ("mps", "cpu"))[0] == "mps"
    with pytest.raises(UsageError, match="'mps:1' is not present: expected one of mps, cpu"):
        choose_device("mps:1", ("mps", "cpu"))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("cuda:7", r"device 'cuda:7' is not present: expected one of cuda:0, cpu, auto"),
        ("gpu", r"device 'gpu' is no device PyTorch knows: expected one of cuda:0, cpu, auto"),
    ],
)
def test_a_device_that_cannot_be_meant(wanted: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_device(wanted, ("cuda:0", "cpu"))


def test_an_unknown_request_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capability, "probe", lambda _device: pytest.fail("measured"))
    with pytest.raises(PolicyError, match="did you mean 'bf16'"):
        resolve("bf61")
    assert resolve("fp32", "cpu").policy == PRESETS["fp32"]


def test_a_resolution_as_json_reads_back(install: Install) -> None:
    install(DEVICES["plain cpu"])
    result = resolve("bf16-master", "cpu")
    plain = json.loads(json.dumps(result.to_json()))
    assert Policy.parse(plain["precision"]) == result.policy
    assert (plain["request"], plain["changed"]) == ("bf16-master", True)
    assert tuple(plain["reasons"]) == result.reasons
