"""What a glance at a file's text may not overlook."""

from __future__ import annotations

import pytest

from ampwise_lint.words import concerns

LOOP = "loss = f(x)\n{}\nopt.step()\n"


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
