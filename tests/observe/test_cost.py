"""What observing costs: it waits for no device, and says what it took."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.observe.script import Target, run
from tests.observe.inside import observe

SCRIPT = """
import torch
from torch import nn
from tests.observe.test_cost import Reads

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to("{device}")
optimizer = torch.optim.{optimizer}
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled={scaled})
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
x = torch.randn(4, 8, device="{device}")

def closure():
    loss = model(x).square().mean()
    loss.backward()
    return loss

def step():
    optimizer.zero_grad()
    if {closure}:
        optimizer.step(closure)
        return
    with torch.autocast("cpu", torch.bfloat16, enabled={scaled}):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    if {clipped}:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()

for _ in range(5):
    step()
with Reads():
    for _ in range(20):
        step()
"""
PLAIN = {
    "optimizer": "SGD(model.parameters(), lr=0.1)",
    "scaled": False, "clipped": False, "closure": False, "device": "cpu",
}  # fmt: skip
READ: Counter[str] = Counter()


class Reads(TorchDispatchMode):
    """Counts what has the host wait, were the tensor on another device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero"):
            READ[name] += 1
        return func(*args, **(kwargs or {}))


def reads(path: Path, *, observed: bool) -> Counter[str]:
    READ.clear()
    # At a fault the host looks at what is on the CPU, and only there: see the next test.
    seen = partial(observe, on_fault="off")
    ending = seen(path).report.ending if observed else run(Target(str(path)), list, list).words
    assert ending == "finished"
    return Counter(READ)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clipped": True},
        {"scaled": True},
        {"scaled": True, "clipped": True},
        {"closure": True},
        {"optimizer": "AdamW(model.parameters(), fused=True)"},
    ],
    ids=str,
)
def test_no_tensor_is_read_that_the_script_does_not_read(tmp_path, changes):
    """On an accelerator each such read has the host wait until the device has caught up."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(**{**PLAIN, **changes}))
    alone = reads(path, observed=False)
    assert reads(path, observed=True) == alone
    assert changes.get("scaled") is None or alone["_local_scalar_dense"] >= 20


def _answering(real: Any, answer: Any) -> Any:
    """Asked for `meta`, which torch refuses: an answer of its own."""
    return lambda device, *more: answer if device == "meta" else real(device, *more)


class NoRing:
    """Rows that go nowhere; a real ring has memory that its device can be copied to."""

    def __init__(self, device: torch.device) -> None:
        self.row = torch.empty(5, device=device)
        self.rows = 0

    def written(self, lr: float) -> None:
        self.rows += lr > 0

    def poll(self) -> list[Any]:
        return []

    drain = poll


@pytest.mark.parametrize("changes", [{}, {"clipped": True}, {"closure": True}], ids=str)
def test_on_a_device_that_is_not_the_host_nothing_is_read(tmp_path, monkeypatch, changes):
    """Tensors on `meta` raise when read: all that listens would be dropped, or the script end."""
    rings: list[NoRing] = []
    monkeypatch.setattr(
        "ampwise.observe.records.Ring", lambda device: rings.append(NoRing(device)) or rings[-1]
    )
    path = tmp_path / "script.py"
    for name, answer in (("is_autocast_enabled", False), ("get_autocast_dtype", torch.bfloat16)):
        monkeypatch.setattr(torch, name, _answering(getattr(torch, name), answer))
    path.write_text(SCRIPT.format(**{**PLAIN, **changes, "device": "meta"}))
    report = observe(path).report
    assert (report.ending, report.steps) == ("finished", 25)
    assert [each.rows for each in rings] == [25]


def test_the_report_says_what_observing_took(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(**PLAIN))
    report = observe(path).report
    took = report.overhead
    assert took.per_step_ms is not None
    assert took.share is not None
    assert took.per_step_ms * report.steps < 1e3 * took.seconds  # the first steps cost more
    assert report.step_ms is not None
    assert took.share == pytest.approx(took.per_step_ms / report.step_ms)
    assert 0 < took.per_step_ms < 50


def test_what_is_done_aside_is_no_overhead(tmp_path, monkeypatch):
    """A diagnosis takes seconds, once."""
    from ampwise.observe.precision import Dtypes
    from ampwise.observe.session import Session

    sessions: list[Session] = []
    real = Session.__init__
    monkeypatch.setattr(
        Session, "__init__", lambda self, **more: (real(self, **more), sessions.append(self))[0]
    )
    now = [0.0]

    def attempted(self: Dtypes, attempt: Any) -> None:
        now[0] += 1
        with sessions[0].aside():
            now[0] += 100

    monkeypatch.setattr(Dtypes, "attempted", attempted)
    monkeypatch.setattr("ampwise.observe.session.time.perf_counter", lambda: now[0])
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(**PLAIN))
    took = observe(path).report.overhead
    assert took.seconds == pytest.approx(25)
