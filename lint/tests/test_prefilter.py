"""What the prefilter may not overlook in a file's text."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampwise_lint.prefilter import Prefilter
from ampwise_lint.rules import all_triggers
from ampwise_lint.source.project import Project
from ampwise_lint.triggers import Trigger

LOOP = "loss = f(x)\n{}\nopt.step()\n"


def concerns(text, triggers=None):
    prefilter = Prefilter(Project(frozenset()), triggers or all_triggers())
    return prefilter.concerns(Path("train.py"), text, set())


@pytest.mark.parametrize(
    "text",
    [
        "model.to(torch.half)\nloss.backward()\n",
        "from torch import half\nmodel.to(half)\nopt.step()\n",
        LOOP.format('scalers["g"].scale(loss).backward()'),
        LOOP.format("gs.scale(loss).backward()"),
        LOOP.format("loss.backward(); gs.unscale_(opt)"),
        "total = torch.zeros(\n    1,\n    dtype=torch.float16,\n)\n",
    ],
)
def test_a_file_with_mixed_precision_is_read(text):
    assert concerns(text)


@pytest.mark.parametrize("text", ["loss.backward()\nopt.step()\n", "x = half_life(scale)\n", ""])
def test_others_are_not(text):
    assert not concerns(text)


def test_a_word_that_only_one_rule_knows_is_looked_for():
    text = LOOP.format("step_in_float4(loss)")
    assert not concerns(text)
    assert concerns(text, (Trigger(("float4",)),))
    assert not concerns("x = float4\n", (Trigger(("float4",)),))  # no part of a step
    assert concerns("x = float4\n", (Trigger(("float4",), anywhere=True),))


def test_words_beside_have_to_be_there_too():
    trigger = Trigger(("lightning",), beside=("precision",), anywhere=True)
    assert concerns("import lightning\nprecision = 16\n", (trigger,))
    assert not concerns("import lightning\n", (trigger,))
