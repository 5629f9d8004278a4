"""Hardware facts and verdicts, on fakes: no measurement here."""

from __future__ import annotations

import pytest

from ampwise.capability import FASTER, Hardware, Measurement, classify, hardware, ratio


def times(speedup: float, size: int = 512) -> Measurement:
    return Measurement(size, speedup, speedup * 0.9, speedup * 1.1)


def unit_hardware(unit: str | None) -> Hardware:
    return Hardware("cpu", "cpu", "a CPU", "AVX2", {"bfloat16": unit})


@pytest.mark.parametrize(
    ("unit", "measured", "verdict", "gains"),
    [
        ("AMX-BF16", times(3.4), "native", True),
        ("AMX-BF16", times(FASTER), "native", True),
        ("AMX-BF16", times(FASTER - 0.01), "native", False),
        ("AMX-BF16", times(0.5), "native", False),
        ("AMX-BF16", times(0.49), "emulated", False),
        ("AMX-BF16", Measurement(), "native", True),
        (None, times(FASTER), "native", True),
        (None, times(FASTER - 0.01), "emulated", False),
        (None, Measurement(), "emulated", False),
        ("", times(1.49), "emulated", False),
        ("", times(1.5), "native", True),
        ("", times(0.003), "emulated", False),
        ("", Measurement(), "emulated", False),
        ("AMX-BF16", Measurement(error="RuntimeError: no"), "unsupported", False),
        (None, Measurement(error="RuntimeError: no"), "unsupported", False),
    ],
)
def test_verdict_and_gain(
    unit: str | None, measured: Measurement, verdict: str, gains: bool
) -> None:
    support = classify(unit_hardware(unit), {"bfloat16": measured}).formats["bfloat16"]
    assert (support.verdict, support.gains) == (verdict, gains)


@pytest.mark.parametrize(
    ("unit", "measured", "reason"),
    [
        (
            "",
            times(0.003, 128),
            "is emulated (no bfloat16 unit): 0.003x of float32, measured at 128x128",
        ),
        ("AMX-BF16", times(3.4), "is native (AMX-BF16): 3.4x of float32, measured at 512x512"),
        ("AMX-BF16", times(0.98), "is native (AMX-BF16) but gains nothing: 0.98x of float32, "),
        ("AMX-BF16", times(0.3), "is emulated (AMX-BF16 is there, but PyTorch does not use it): "),
        (None, times(0.3), "is emulated: 0.30x of float32, measured at 512x512"),
        ("AMX-BF16", Measurement(), "is native (AMX-BF16): not measured"),
        ("", Measurement(error="RuntimeError: no kernel"), "is unsupported: RuntimeError: no ker"),
    ],
)
def test_reasons_carry_unit_and_figures(
    unit: str | None, measured: Measurement, reason: str
) -> None:
    support = classify(unit_hardware(unit), {"bfloat16": measured}).formats["bfloat16"]
    assert support.reason.startswith(f"bfloat16 matmul on this CPU {reason}")


def test_tf32_on_a_cpu_is_called_what_it_is() -> None:
    machine = hardware.cpu(frozenset({"amx_bf16"}), "AVX512")
    reason = classify(machine, {"tf32": times(3.2)}).formats["tf32"].reason
    assert reason.startswith("bf16 math for float32 matmuls on this CPU is native (AMX-BF16): 3.2x")


@pytest.mark.parametrize(
    ("machine", "measured", "verdict", "reason"),
    [
        (
            hardware.cuda("cuda:0", "H100", (9, 0)),
            times(20.0, 4096),
            "native",
            "float8_e4m3fn matmul on H100 (sm_90) is native (tensor cores): 20.0x of float32, "
            "measured at 4096x4096",
        ),
        (
            hardware.cuda("cuda:0", "A100", (8, 0)),
            Measurement(error="RuntimeError: only from 8.9 on"),
            "emulated",
            "float8_e4m3fn matmul on A100 (sm_80) is emulated: RuntimeError: only from 8.9 on",
        ),
        (
            hardware.cpu(frozenset({"avx2"}), "AVX2"),
            times(0.003, 128),
            "emulated",
            "float8_e4m3fn matmul on this CPU is emulated (no float8_e4m3fn unit): 0.003x of "
            "float32, measured at 128x128",
        ),
        (
            hardware.mps("Apple M3", "15.1"),
            Measurement(error="TypeError: no such dtype"),
            "unsupported",
            "float8_e4m3fn matmul on Apple M3 (macOS 15.1) is unsupported: TypeError: no such dtype",
        ),
    ],
)
def test_what_each_device_does_in_float8(
    machine: Hardware, measured: Measurement, verdict: str, reason: str
) -> None:
    support = classify(machine, {hardware.FLOAT8: measured}).formats[hardware.FLOAT8]
    assert (support.verdict, support.gains) == (verdict, verdict == "native")
    assert support.reason == reason


@pytest.mark.parametrize(
    ("flags", "bfloat16", "float16"),
    [
        ({"avx2", "avx512_f"}, "", ""),
        ({"amx_bf16", "avx512_bf16", "avx512_fp16"}, "AMX-BF16", "AVX512-FP16"),
        ({"avx512_bf16"}, "AVX512-BF16", ""),
        ({"amx_fp16", "avx512_fp16"}, "", "AMX-FP16"),
        ({"asimd", "asimdhp", "bf16"}, "BF16", "FP16"),
        ({"neon", "fp16_arith", "sve_bf16"}, "SVE-BF16", "FP16"),
        (set(), None, None),
    ],
)
def test_cpu_units_by_instruction_set(
    flags: set[str], bfloat16: str | None, float16: str | None
) -> None:
    units = hardware.cpu(frozenset(flags), "").units
    float8 = "" if flags else None
    wanted = {"tf32": bfloat16, "bfloat16": bfloat16, "float16": float16, "float8_e4m3fn": float8}
    assert units == wanted


@pytest.mark.parametrize(
    ("capability", "formats"),
    [
        ((6, 0), set()),
        ((6, 1), set()),
        ((7, 0), {"float16"}),
        ((7, 5), {"float16"}),
        ((8, 0), {"float16", "bfloat16", "tf32"}),
        ((8, 6), {"float16", "bfloat16", "tf32"}),
        ((8, 9), {"float16", "bfloat16", "tf32", "float8_e4m3fn"}),
        ((9, 0), {"float16", "bfloat16", "tf32", "float8_e4m3fn"}),
        ((10, 0), {"float16", "bfloat16", "tf32", "float8_e4m3fn"}),
    ],
)
def test_cuda_units_by_compute_capability(capability: tuple[int, int], formats: set[str]) -> None:
    units = hardware.cuda("cuda:0", "NVIDIA", capability).units
    assert {fmt for fmt, unit in units.items() if unit} == formats


@pytest.mark.parametrize(
    ("gfx", "formats"),
    [
        ("gfx906", {"float16"}),
        ("gfx1030", {"float16"}),
        ("gfx90a:sramecc+:xnack-", {"float16", "bfloat16"}),
        ("gfx942", {"float16", "bfloat16", "tf32", "float8_e4m3fn"}),
        ("gfx950", {"float16", "bfloat16", "float8_e4m3fn"}),
        ("gfx1100", {"float16", "bfloat16"}),
        ("gfx1201", {"float16", "bfloat16", "float8_e4m3fn"}),
        ("gfx803", set()),
    ],
)
def test_rocm_units_by_gfx_target(gfx: str, formats: set[str]) -> None:
    units = hardware.rocm("cuda:0", "AMD", gfx).units
    assert {fmt for fmt, unit in units.items() if unit} == formats


def test_mps_and_xpu_units() -> None:
    assert hardware.mps("Apple M1", "14.0").units == {
        "tf32": "",
        "bfloat16": None,
        "float16": "GPU ALU",
        "float8_e4m3fn": None,
    }
    for engines, unit in ((True, "XMX"), (False, ""), (None, None)):
        units = hardware.xpu("xpu:0", "Arc", engines).units
        assert units == dict.fromkeys(hardware.PROBED, unit) | {"float8_e4m3fn": None}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0028, "0.0028x"), (0.35, "0.35x"), (1.0, "1.00x"), (1.94, "1.94x"), (6.84, "6.8x")],
)
def test_ratios_show_the_digits_that_mean_something(value: float, text: str) -> None:
    assert ratio(value) == text
