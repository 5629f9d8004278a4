"""``ampwise advise``: its table, its JSON, and where they go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ampwise import capability
from ampwise.advice import AdviseReport, DeviceAdvice, advise
from ampwise.capability import DeviceCapability, Hardware, Measurement, classify, hardware
from ampwise.cli.advise import Options, run
from ampwise.errors import UsageError
from ampwise.policy import FP16_ON_CPU, Resolution, decide
from ampwise.report.advise import render
from ampwise_lint.base.console import Console

AMX = hardware.cpu(frozenset({"amx_bf16", "avx512_fp16"}), "AVX512", "Intel Xeon 8488C")
PLAIN = hardware.cpu(frozenset({"avx2"}), "AVX2", "A plain CPU")
H100 = hardware.cuda("cuda:0", "NVIDIA H100 80GB HBM3", (9, 0))


def device(machine: Hardware, tf32: float, bf16: float, fp16: float) -> DeviceCapability:
    ratios = {"tf32": tf32, "bfloat16": bf16, "float16": fp16}
    return classify(
        machine,
        {fmt: Measurement(4096, value, 0.9 * value, 1.1 * value) for fmt, value in ratios.items()},
    )


def report(*devices: DeviceCapability, note: str = "") -> AdviseReport:
    advices = []
    for item in devices:
        policy, reasons = decide(None, item)
        pick = Resolution("auto", policy, item.device, reasons, changed=False)
        advices.append(DeviceAdvice(item, pick))
    return AdviseReport("2.13.0", 2, tuple(advices), note)


def drawn(what: AdviseReport, width: int = 80) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        render(what, console)
    return capture.get()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(capability, "_measured", {})


def test_the_table_fits_80_columns_without_breaking_a_row() -> None:
    text = drawn(report(device(H100, 6.8, 13.2, 13.0), device(AMX, 3.2, 3.4, 0.97)))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text, "no colours where there is no terminal"
    rows = [line.split() for line in text.splitlines()]
    assert ["bfloat16", "bf16,", "bf16-master", "tensor", "cores", "13.2x"] in [r[:6] for r in rows]
    assert ["float16", "fp16", "AVX512-FP16", "0.97x"] in [r[:4] for r in rows]
    float8 = [row[1:3] for row in rows if row[:1] == ["float8"]]
    assert float8 == [["fp8", "tensor"], ["fp8", "none"]], "on each device"


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            device(AMX, 3.2, 3.4, 0.97),
            "Try bf16 or bf16-master on cpu: bfloat16 matmul on this CPU is native (AMX-BF16): "
            "3.4x of float32, measured at 4096x4096. That is a guess from matrix products: "
            "--precision auto races them on the first step of a training.",
        ),
        (
            device(PLAIN, 0.97, 0.3, 0.003),
            "Keep fp32 on cpu: none of tf32, bfloat16, float16, float8_e4m3fn is faster than float32 there.",
        ),
        (
            device(PLAIN, 0.97, 0.3, 1.8),
            f"Keep fp32 on cpu: only float16 is faster, and {FP16_ON_CPU}.",
        ),
    ],
)
def test_one_sentence_says_what_to_pick_and_why(found: DeviceCapability, sentence: str) -> None:
    what = report(found)
    assert what.devices[0].sentence == sentence
    assert sentence in drawn(what, width=300)


@pytest.mark.parametrize(
    ("machine", "measured", "sentence"),
    [
        (
            hardware.cuda("cuda:0", "H100", (9, 0)),
            Measurement(4096, 20.0, 19.0, 21.0),
            "fp8 has to be asked for: measure it, compiled, with ampwise bench --precisions "
            "bf16,fp8 --compile: float8_e4m3fn matmul on H100 (sm_90) is native (tensor cores): "
            "20.0x of float32, measured at 4096x4096.",
        ),
        (
            hardware.rocm("cuda:0", "MI300X", "gfx942"),
            Measurement(4096, 9.0, 9.0, 9.0),
            "fp8 has to be asked for: measure it, compiled, with ampwise bench --precisions "
            "bf16,fp8 --compile: float8_e4m3fn matmul on MI300X (gfx942) is native (matrix cores): "
            "9.0x of float32, measured at 4096x4096.",
        ),
        (
            hardware.cuda("cuda:0", "A100", (8, 0)),
            Measurement(error="RuntimeError: only from 8.9 on"),
            "fp8 runs emulated here, for its numerics only: float8_e4m3fn matmul on A100 (sm_80) "
            "is emulated: RuntimeError: only from 8.9 on.",
        ),
        (
            PLAIN,
            Measurement(128, 0.003, 0.003, 0.003),
            "fp8 runs emulated here, for its numerics only: float8_e4m3fn matmul on this CPU is "
            "emulated (no float8_e4m3fn unit): 0.003x of float32, measured at 128x128.",
        ),
        (
            hardware.mps("Apple M3", "15.1"),
            Measurement(error="TypeError: no such dtype"),
            "fp8 cannot run here, not even emulated: float8_e4m3fn matmul on Apple M3 (macOS "
            "15.1) is unsupported: TypeError: no such dtype.",
        ),
    ],
)
def test_what_fp8_is_good_for_is_said_of_each_device(
    machine: hardware.Hardware, measured: Measurement, sentence: str
) -> None:
    what = report(classify(machine, {"float8_e4m3fn": measured}))
    assert what.devices[0].on_float8 == sentence
    assert drawn(what, width=400).count(sentence) == 1
    assert what.to_json()["devices"][0]["float8"] == sentence  # pyright: ignore[reportIndexIssue]


def test_an_unsupported_format_is_shown_with_its_error() -> None:
    found = classify(PLAIN, {"bfloat16": Measurement(error="RuntimeError: no kernel")})
    text = drawn(report(found), width=300)
    assert "bfloat16 matmul on this CPU is unsupported: RuntimeError: no kernel" in text


def test_json_says_everything_the_table_says() -> None:
    plain = json.loads(json.dumps(report(device(AMX, 3.2, 3.4, 0.97)).to_json()))
    assert plain["schema"] == "ampwise.advise/1"
    (cpu,) = plain["devices"]
    assert (cpu["device"], cpu["name"], cpu["architecture"]) == ("cpu", AMX.name, "AVX512")
    formats = {item["format"]: item for item in cpu["formats"]}
    assert formats["float16"]["verdict"] == "native"
    assert formats["float16"]["gains"] is False
    assert formats["bfloat16"]["speedup"]["median"] == 3.4
    assert cpu["pick"]["precision"] == "bf16"
    assert cpu["advice"].startswith("Try bf16 or bf16-master on cpu")


def test_every_device_present_is_advised_on(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"cuda:0": device(H100, 6.8, 13.2, 13.0), "cpu": device(AMX, 3.2, 3.4, 0.97)}
    monkeypatch.setattr(capability, "present_devices", lambda: tuple(devices))
    monkeypatch.setattr(capability, "probe", lambda name, refresh=False: devices[name])
    assert [item.pick.device for item in advise().devices] == ["cuda:0", "cpu"]
    only_cpu = advise("cpu")
    assert [item.pick.device for item in only_cpu.devices] == ["cpu"]
    assert only_cpu.note == "cpu as asked, although cuda:0 is present"


def test_this_machine_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Options(device="cpu")) == 0
    text = capsys.readouterr().out
    assert f"torch {torch.__version__}" in text
    assert ("Try " in text) != ("Keep fp32 on cpu" in text)


def test_json_on_stdout_is_all_that_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Options(device="cpu", json="-")) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "ampwise.advise/1"


def test_json_file_is_written_and_a_replaced_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "advice.json"
    for did in ("wrote", "replaced"):
        assert run(Options(device="cpu", json=str(path))) == 0
        output = capsys.readouterr()
        assert output.err == f"{did} {path}\n"
        assert "float32" in output.out
    assert json.loads(path.read_text())["devices"]


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write the report to .*: .+; name a writable"):
        run(Options(device="cpu", json=str(tmp_path / "none" / "advice.json")))


def test_an_unknown_device_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"device 'gpu' is no device PyTorch knows"):
        run(Options(device="gpu"))


def test_the_options_do_not_import_torch() -> None:
    code = "import sys, ampwise.cli.advise; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ))
    assert done.returncode == 0


def test_ratios_of_many_digits_take_no_other_column_away() -> None:
    ratios = {"bfloat16": (7.0, 5.3, 30.9), "float16": (1.06, 0.12, 41.9)}
    ratios["float8_e4m3fn"] = (0.0013, 0.0012, 0.0014)
    measured = {name: Measurement(1024, *each) for name, each in ratios.items()}
    text = drawn(report(classify(AMX, measured)))
    assert max(map(len, text.splitlines())) <= 80
    for shown in ("AVX512-FP16", "0.0013x", "0.0012-0.0014", "bf16-master", "emulated"):
        assert shown in text
