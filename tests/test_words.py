"""One of a thing is not several."""

from __future__ import annotations

import pytest

from ampwise_lint.base.words import counted, figure, joined


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


@pytest.mark.parametrize(
    ("number", "said"),
    [(-102_400, "-102,400"), (0.0316, "0.0316"), (1.2e-7, "1.2e-7"), (-1e9, "-1e9"),
     (3.4028235e38, "3.403e38"), (1e-10, "1e-10"), (1e10, "1e10")],
)  # fmt: skip
def test_a_figure_is_written_as_people_do(number, said):
    assert figure(number) == said
