"""Mistakes as they happen: each is found on its line, and nothing else is."""

import pytest

from tests.observe.inside import line_of, observe

SCRIPT = """
import sys, torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

kind = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
x, y = torch.randn(512, 32), torch.randint(0, 10, (512,))
if kind == "half":
    model, x = model.bfloat16(), x.bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
first = 2.0**40 if kind == "skips" else 1024.0
scaler = torch.amp.GradScaler("cpu", init_scale=first)  # made
other = torch.amp.GradScaler("cpu", init_scale=1024.0)
if kind in ("load", "load both"):
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    state = {i: dict(step=torch.ones(()), exp_avg=a, exp_avg_sq=b) for i, (a, b) in enumerate(moments)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})  # loaded
if kind == "load both":
    scaler.scale(torch.zeros(()))
    scaler.load_state_dict(scaler.state_dict())
dtype = torch.bfloat16 if kind == "bf16" else torch.float16
for i in range(12):
    bx, by = x[i * 32 : i * 32 + 32], y[i * 32 : i * 32 + 32]
    if kind == "recomputed":
        with torch.autocast("cpu", dtype=dtype):  # recomputed
            loss = F.cross_entropy(checkpoint(model, bx, use_reentrant=False), by)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        continue
    if kind == "remade":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # remade
    with torch.autocast("cpu", dtype=dtype):  # region
        loss = F.cross_entropy(model(bx), by)
        if kind == "inside":
            scaler.scale(loss).backward()  # backward
    if kind == "collapse" and i:
        loss = loss * float("inf")
    if kind in ("no scaler", "scaled by hand", "scaled by its gradient"):
        if kind == "scaled by hand":
            loss = loss * 128.0
        loss.backward(torch.tensor(128.0) if kind == "scaled by its gradient" else None)
        optimizer.step()
        optimizer.zero_grad()
        continue
    if kind == "plain backward":
        scaler.scale(loss)
        loss.backward()
    elif kind != "inside":
        scaler.scale(loss).backward()
    if kind == "micro-batch" and i % 2 == 0:
        scaler.unscale_(optimizer)
        scaler.update()  # micro
        continue
    if kind == "accumulate" and i % 3:
        continue
    if kind != "clip":
        scaler.unscale_(optimizer)
    if kind == "twice":
        try:
            scaler.unscale_(optimizer)  # twice
        except RuntimeError:
            pass
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clip
    if kind == "bypass":
        optimizer.step()  # bypass
    elif kind == "second" and i % 2:
        other.scale(torch.zeros(()))
        other.step(optimizer)  # second
        other.update()
    else:
        scaler.step(optimizer)  # step
    scaler.update(0.5 if kind == "collapse" and i else None)
    if kind in ("skips", "held") and (kind == "skips" or scaler.get_scale() >= 1024.0):
        schedule.step()  # schedule
    optimizer.zero_grad()
    if kind in ("evaluate", "evaluate alike") and i == 5:
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=kind == "evaluate alike"):
            model(bx)  # evaluate
        model.train()
"""

MISTAKES = {
    "clip": ("AMP101", "# clip"),
    "twice": ("AMP103", "# twice"),
    "plain backward": ("AMP104", "# step"),
    "bypass": ("AMP105", "# bypass"),
    "micro-batch": ("AMP107", "# micro"),
    "remade": ("AMP110", "# remade"),
    "load": ("AMP111", "# loaded"),
    "skips": ("AMP112", "# schedule"),
    "inside": ("AMP201", "# backward"),
    "evaluate": ("AMP203", "# evaluate"),
    "bf16": ("AMP204", "# made"),
    "no scaler": ("AMP205", "# region"),
    "recomputed": ("AMP205", "# recomputed"),
    "collapse": ("AMP502", "# step"),
    "second": ("AMP503", "# second"),
}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_found_on_its_line_and_nothing_else(script, kind):
    code, mark = MISTAKES[kind]
    seen = observe(script, kind, on_fault="off")
    assert seen.codes == {code: line_of(script, mark)}
    assert all(each.file == str(script) for each in seen.report.findings)


@pytest.mark.parametrize(
    "kind",
    [
        "right",
        "accumulate",
        "load both",
        "held",
        "evaluate alike",
        "scaled by hand",
        "scaled by its gradient",
    ],
)
def test_what_is_right_gives_no_finding(script, kind):
    seen = observe(script, kind)
    assert seen.report.findings == []
    assert seen.report.exit_code == 0
    assert seen.report.steps == (4 if kind == "accumulate" else 12)


def test_16_bit_parameters_under_a_scaler_are_named(script):
    seen = observe(script, "half", on_fault="off")
    (finding,) = [each for each in seen.report.findings if each.code == "AMP504"]
    assert "bfloat16 parameters" in finding.message
    assert seen.report.precision.parameters == {"bfloat16": 4}


def test_the_evidence_names_the_scale_and_the_count(script):
    (finding,) = observe(script, "clip").report.findings
    assert finding.evidence == "loss scale 1,024"
    assert finding.times == 12
    assert finding.severity == "error"


def test_the_norm_of_scaled_gradients_is_that_of_true_ones(script):
    clipped, right = observe(script, "clip").lines, observe(script, "right").lines
    assert clipped[0]["amp/grad_norm"] == pytest.approx(right[0]["amp/grad_norm"], rel=1e-5)
