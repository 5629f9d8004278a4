"""Formats against torch.finfo, and against every bit pattern of the small ones."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampwise import formats
from ampwise.errors import PolicyError
from ampwise.formats import FORMATS, FloatFormat, lookup

DTYPES = {fmt.name: getattr(torch, fmt.name) for fmt in FORMATS if hasattr(torch, fmt.name)}
SMALL = [fmt for fmt in FORMATS if fmt.bits <= 16]
PATTERN_DTYPES = {8: torch.uint8, 16: torch.int16}


def all_values(fmt: FloatFormat) -> torch.Tensor:
    """Every bit pattern of an 8- or 16-bit format, as float64."""
    patterns = torch.arange(2**fmt.bits, dtype=torch.int32).to(PATTERN_DTYPES[fmt.bits])
    return patterns.view(DTYPES[fmt.name]).to(torch.float64)


@pytest.mark.parametrize("name", DTYPES)
def test_limits_equal_torch_finfo(name: str) -> None:
    fmt, info = lookup(name), torch.finfo(DTYPES[name])
    assert fmt.max == info.max
    assert fmt.min_normal == info.tiny
    assert fmt.eps == info.eps
    assert fmt.bits == info.bits
    assert fmt.min_subnormal == info.smallest_normal * info.eps


def test_every_torch_format_but_tf32_was_compared() -> None:
    assert {fmt.name for fmt in FORMATS} - set(DTYPES) == {"tf32"}


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_limits_equal_exhaustive_enumeration(fmt: FloatFormat) -> None:
    values = all_values(fmt)
    finite = values[values.isfinite()]
    assert fmt.max == finite.max().item()
    assert fmt.min_subnormal == finite[finite > 0].min().item()
    assert fmt.has_inf == bool(values.isinf().any())
    assert fmt.eps == finite[finite > 1].min().item() - 1


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_ulp_is_the_gap_to_the_next_value_at_every_value(fmt: FloatFormat) -> None:
    values = all_values(fmt)
    positive = values[values.isfinite() & (values >= 0)].unique().tolist()
    for value, following in zip(positive, positive[1:], strict=False):
        assert fmt.ulp(value) == fmt.ulp(-value) == following - value
    assert fmt.ulp(positive[-1]) == positive[-1] - positive[-2]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_ulp_of_what_is_not_finite_in_the_format(fmt: FloatFormat) -> None:
    assert math.isnan(fmt.ulp(math.nan))
    assert fmt.ulp(math.inf) == fmt.ulp(-math.inf) == math.inf
    if fmt.max < 1e300:
        assert fmt.ulp(2 * fmt.max) == math.inf


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_ulp_of_float64_is_math_ulp(x: float) -> None:
    assert formats.FLOAT64.ulp(x) == math.ulp(x)


def test_tf32_has_the_range_of_float32_and_the_precision_of_float16() -> None:
    assert formats.TF32.min_normal == formats.FLOAT32.min_normal
    assert formats.TF32.eps == formats.FLOAT16.eps
    assert formats.TF32.max == pytest.approx(formats.FLOAT32.max, rel=formats.TF32.eps)


@pytest.mark.parametrize(
    ("spellings", "fmt"),
    [
        (
            ["fp16", "float16", "half", "torch.float16", "FP16", torch.float16],
            formats.FLOAT16,
        ),
        (["bf16", "bfloat16", torch.bfloat16], formats.BFLOAT16),
        (["fp32", "float32", "float", "single", torch.float32], formats.FLOAT32),
        (["fp64", "double", torch.float64], formats.FLOAT64),
        (["e4m3", "e4m3fn", "torch.float8_e4m3fn"], formats.FLOAT8_E4M3FN),
        (["e5m2", torch.float8_e5m2], formats.FLOAT8_E5M2),
        (["tf32", "TensorFloat32"], formats.TF32),
    ],
)
def test_spellings(spellings: list[object], fmt: FloatFormat) -> None:
    assert {lookup(word) for word in spellings} == {fmt}
    assert lookup(fmt.short) is lookup(fmt.name) is fmt


def test_no_spelling_means_two_formats() -> None:
    words = [word for fmt in FORMATS for word in {fmt.name, *fmt.aliases}]
    assert len(words) == len(set(words))


def test_unknown_spelling_names_the_legal_ones_and_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"'flaot16'.*bfloat16, float16.*did you mean 'float16'"):
        lookup("flaot16")


def test_importing_formats_does_not_import_torch() -> None:
    code = "import sys, ampwise.formats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
