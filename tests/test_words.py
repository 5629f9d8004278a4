"""One of a thing is not several."""

from __future__ import annotations

import pytest

from ampwise_lint.base.words import counted, joined


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0 batches"), (1, "1 batch"), (2, "2 batches"), (1797, "1,797 batches")],
)
def test_counted(number, said):
    assert counted(number, "batch", "batches") == said
    assert counted(number, "step") == said.replace("batches", "steps").replace("batch", "step")


@pytest.mark.parametrize(
    ("names", "said"),
    [("", ""), ("a", "a"), ("ab", "a and b"), ("abc", "a, b and c"), ("abcd", "a, b, c and d")],
)
def test_joined(names, said):
    assert joined(iter(names)) == said
