"""Every public case is found, explained and mended; nothing is said where nothing is wrong."""

from __future__ import annotations

import pytest
import torch

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.result import Diagnosis
from tests.numerics.cases import CASES, LOOK_ALIKES, VARIANTS, line_of


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES | VARIANTS)
def test_a_public_case_is_found_explained_and_mended(name):
    case = (CASES | VARIANTS)[name]
    found = diagnose(case.make(), case.precision, steps=6)
    assert (found.status, found.cause, found.phase) == (case.status, case.cause, case.phase)
    assert found.origin is not None
    assert found.origin.module == case.module
    if case.line_of is not None:
        assert found.origin.line == line_of(case.line_of)
        assert "# <- here" in found.origin.source
    assert len(found.explanation.split(". ")) >= 2
    if case.fix:
        verified = [each.what for each in found.fixes if each.verified]
        assert any(case.fix in what for what in verified), (verified, found.fixes)
    assert Diagnosis.from_json(found.to_json()).to_json() == found.to_json()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_raises_no_alarm(name, precision):
    found = diagnose(LOOK_ALIKES[name](), precision, steps=6)
    assert found.status in ("clean", "benign"), (found.cause, found.explanation, found.origin)
    assert found.findings == []


def test_what_a_fix_costs_in_memory_is_what_forward_keeps():
    found = diagnose(CASES["scores before scaling"].make(), "fp16", steps=2)
    whole = next(each for each in found.fixes if "function" in each.what)
    bf16 = next(each for each in found.fixes if "bfloat16" in each.what)
    # Of float32, forward keeps twice what it keeps of 16 bits; bfloat16 keeps as much as float16.
    assert whole.activation_bytes is not None
    assert whole.activation_bytes > 0
    assert bf16.activation_bytes == 0
    assert "B of activations" in whole.cost
