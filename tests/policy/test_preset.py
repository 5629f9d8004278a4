"""Policies as values: presets, the text spelling, and what is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampwise.errors import PolicyError
from ampwise.policy import DTYPES, PRESETS, Policy
from ampwise.policy.preset import RECIPES, ROUNDINGS

HALF = ["fp16", "bf16", "bf16-master", "bf16-pure", "fp8"]
patterns = st.text("ab0._-*?[]!=λ", min_size=1)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any valid policy."""
    preset = PRESETS[draw(st.sampled_from(list(PRESETS)))]
    changes: dict[str, object] = {"reduce_dtype": draw(st.sampled_from(DTYPES))}
    if preset.autocast:
        changes |= {
            "output_dtype": draw(st.sampled_from(["float32", preset.compute_dtype])),
            "loss_scaling": draw(st.booleans()),
            "tf32": draw(st.booleans()),
            "islands": tuple(draw(st.lists(patterns, max_size=4))),
        }
    if preset.pure:
        changes["rounding"] = draw(st.sampled_from(ROUNDINGS))
    if preset.float8:
        changes["recipe"] = draw(st.sampled_from(RECIPES))
    return dataclasses.replace(preset, **changes)


@given(policies())
def test_text_round_trips(policy: Policy) -> None:
    assert Policy.parse(policy.text) == policy
    assert Policy.parse(str(policy)).text == policy.text
    assert "," not in policy.text


def test_presets_are_what_the_design_says() -> None:
    table = {
        name: (p.param_dtype, p.compute_dtype, p.loss_scaling, p.tf32)
        for name, p in PRESETS.items()
    }
    assert table == {
        "fp32": ("float32", "float32", False, False),
        "tf32": ("float32", "float32", False, True),
        "fp16": ("float32", "float16", True, False),
        "bf16": ("float32", "bfloat16", False, False),
        "bf16-master": ("bfloat16", "bfloat16", False, False),
        "bf16-pure": ("bfloat16", "bfloat16", False, False),
        "fp8": ("float32", "bfloat16", False, False),
    }
    assert [p.recipe for p in PRESETS.values() if p.float8] == ["tensorwise"]
    assert [p.rounding for p in PRESETS.values() if p.pure] == ["stochastic"]
    assert [p.name for p in PRESETS.values() if p.autocast] == HALF
    assert [p.name for p in PRESETS.values() if p.master_weights] == ["bf16-master"]
    assert [p.compute_format for p in PRESETS.values()] == [
        "float32",
        "tf32",
        "float16",
        "bfloat16",
        "bfloat16",
        "bfloat16",
        "float8_e4m3fn",
    ]
    assert all(p.reduce_dtype == p.output_dtype == "float32" for p in PRESETS.values())


@pytest.mark.parametrize("name", PRESETS)
def test_the_text_of_a_preset_is_its_name(name: str) -> None:
    assert PRESETS[name].text == str(PRESETS[name]) == name


def test_text_names_only_what_differs_from_the_preset() -> None:
    policy = dataclasses.replace(
        PRESETS["fp16"],
        loss_scaling=False,
        islands=("head", "*.norm", "softmax()"),
        reduce_dtype="bfloat16",
    )
    assert policy.text == "fp16:reduce=bf16:scaling=off:islands=head+*.norm+softmax()"
    assert Policy.parse("fp16:islands=head+*.norm+softmax():scaling=off:reduce=bf16") == policy


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("half", "fp16"),
        ("float16", "fp16"),
        ("torch.bfloat16", "bf16"),
        (" FP32 ", "fp32"),
    ],
)
def test_a_dtype_spelling_names_its_preset(text: str, name: str) -> None:
    assert Policy.parse(text) == PRESETS[name]


def test_fields_accept_any_spelling_of_a_dtype_and_keep_one() -> None:
    assert Policy("fp16", compute_dtype="half", loss_scaling=True) == PRESETS["fp16"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "bf61",
            r"unknown precision 'bf61': .*fp32, tf32, fp16, bf16.*did you mean 'bf16'\?",
        ),
        ("float64", r"unknown precision 'float64'"),
        ("", r"unknown precision ''"),
        ("bf16:recipe=rowwise", r"a recipe is of products in float8; that is fp8"),
        ("fp8:recipe=mx", r"recipe is tensorwise or rowwise or rowwise_with_gw_hp, not mx"),
        ("fp8:recipe=", r"recipe is tensorwise .*, not none"),
        ("fp8:rounding=kahan", r"rounding is of updates of 16-bit parameters"),
        ("fp8:compute=fp16", r"compute_dtype is bfloat16, not float16"),
        (
            "bf16-master:rounding=kahan",
            r"rounding is of updates of 16-bit parameters; that is bf16-",
        ),
        ("bf16-pure:rounding=nearest", r"rounding is stochastic or kahan, not nearest"),
        ("auto", r"'auto' is a request for ampwise.resolve"),
        ("bf16:island=head", r"'island=head' is no setting.*did you mean 'islands'"),
        ("bf16:scaling", r"'scaling' is no setting"),
        ("bf16:scaling=yes", r"scaling: expected on or off, not 'yes'"),
        (
            "bf16:reduce=float64",
            r"reduce: a policy cannot use float64: expected one of float32",
        ),
        ("bf16:tf32=on:tf32=off", r"sets 'tf32' twice"),
        (
            "fp16:compute=bf16",
            r"compute_dtype is float16, not bfloat16; that is bf16 or bf16-ma",
        ),
        ("tf32:compute=bf16", r"compute_dtype is float32, not bfloat16"),
        ("bf16:param=fp16", r"param_dtype is float32, not float16$"),
        ("fp32:tf32=on", r"TF32 on is the preset 'tf32'"),
        ("tf32:tf32=off", r"TF32 off is the preset 'fp32'"),
        ("fp32:scaling=on", r"loss scaling protects 16-bit gradients"),
        ("tf32:islands=head", r"islands are modules kept in float32"),
        ("bf16:output=fp16", r"output is float32 or the compute dtype, not float16"),
        ("bf16:islands=a++b", r"island pattern '' is empty"),
        ("bf16:islands=a,b", r"island pattern 'a,b'"),
    ],
)
def test_what_is_refused_and_how(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        Policy.parse(text)
    assert "\n" not in str(caught.value)


def test_a_policy_is_hashable_and_frozen() -> None:
    assert len({*PRESETS.values(), Policy.parse("bf16")}) == len(PRESETS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["bf16"].tf32 = True  # pyright: ignore[reportAttributeAccessIssue]


def test_importing_policy_does_not_import_torch() -> None:
    code = "import sys, ampwise.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
