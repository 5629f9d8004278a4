"""Both ways to decide about a step, on one machine.

On the CPU the host reads found_inf and leaves a skipped optimizer alone. On an accelerator it must
not read it: the optimizer's kernel skips by itself, and the norm is summed in float64. The CPU's
fused kernels can do that too, so the accelerator's way runs here as well.
"""

from __future__ import annotations

import pytest

from ampwise.step import gradients as grads
from ampwise.step.guard import Guard

from .idioms import KINDS, POLICIES

BOTH_WAYS = ("test_guard", "test_buffers", "test_followers", "test_references", "test_host_syncs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    chosen = any(mark.args[0] == "decided_on" for mark in marks)
    if not chosen and metafunc.module.__name__.rpartition(".")[2] in BOTH_WAYS:
        metafunc.parametrize("decided_on", ["host", "device"], indirect=True)


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of optimizer: fused or not."""
    return request.param


@pytest.fixture(autouse=True)
def decided_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the decision about a step is taken."""
    place = getattr(request, "param", "host")
    if place == "device":
        as_on_an_accelerator(monkeypatch)
    return place


def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, steps on the CPU decide as those on an accelerator do."""
    made = Guard.__init__

    def blind(self: Guard, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        self.flag.on_host = False

    monkeypatch.setattr(Guard, "__init__", blind)
    monkeypatch.setattr(grads, "norms", grads.norms_in_float64)
