"""Planted faults in scripts that nobody changed: line, cause, and nothing said where nothing is."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from ampwise.observe.replay import Observed
from ampwise.step.recorder import finite
from tests.observe.inside import line_of, observe

SCRIPT = """
import sys, torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

kind, dtype, scaled = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3] == "scaled"
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if "norm" in kind else nn.Identity()
        self.calls = 0

    def forward(self, x):
        h = self.drop(torch.relu(self.norm(self.first(x))))
        self.calls += 1
        if kind in ("forward", "forward norm", "checkpoint", "accumulate", "compile"):
            h = self.first.weight.shape[0] * 1e20 * h * 1e30  # overflow in forward
        if kind == "counter" and self.calls == 7:
            h = h * 1e30 * 1e30  # seventh
        if kind == "backward":
            z = h - h.detach()
            h = h + torch.where(z > 0, torch.sqrt(z), z)  # root
        return self.last(h)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        if kind == "checkpoint":
            return checkpoint(self.net, x, use_reentrant=False)
        return self.net(x)


model = Outer()
data, labels = torch.randn(96, 8), torch.randint(0, 4, (96,))
if kind == "data":
    data[50, 3] = float("inf")
if kind == "loss data":
    labels[50] = 99
step = model
if kind == "compile":
    step = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
state, losses = {"n": 0}, []
every = 3 if kind == "accumulate" else 1
for index, (x, y) in enumerate(DataLoader(TensorDataset(data, labels), 8)):
    if kind == "given data":
        x = x.clone()
        x[2, 1] = float("nan") if index == 4 else x[2, 1]
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        out = step(x)
        if kind == "loss":
            h = out * 1e4
            out = h @ h.t() @ h  # overflow in the loss
        if kind == "from the fifth" and index >= 4:
            out = out * 1e30 * 1e30 * (1 + index)  # fifth
        if kind == "stateful":
            state["n"] += 1
            loss = F.cross_entropy(out, y) * (1e60 if state["n"] == 7 else 1.0 / state["n"])
        elif kind == "loss data":
            loss = F.cross_entropy(out, y.clamp(max=3)) / (y < 4).all().float().add(0.0)  # divides
        else:
            loss = F.cross_entropy(out, y)
    losses.append(float(loss.detach()))
    scaler.scale(loss / every).backward()  # backward
    if index % every == every - 1:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
torch.save([model.state_dict(), losses, torch.get_rng_state(), str(scaler.state_dict())], sys.argv[4])
"""

KINDS = {
    "forward": ("overflow in forward", "RANGE_OVERFLOW"),
    "forward norm": ("overflow in forward", "RANGE_OVERFLOW"),
    "checkpoint": ("overflow in forward", "RANGE_OVERFLOW"),
    "accumulate": ("overflow in forward", "RANGE_OVERFLOW"),
    "compile": ("overflow in forward", "RANGE_OVERFLOW"),
    "counter": ("# seventh", "RANGE_OVERFLOW"),
    "backward": ("# root", "BACKWARD_SINGULARITY"),
    "data": (None, "BAD_INPUT"),
    "given data": (None, "BAD_INPUT"),
    "loss data": ("# divides", "DOMAIN_ERROR"),
}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


precisions = pytest.mark.parametrize(
    ("dtype", "scaled"), [("float16", "scaled"), ("bfloat16", "plain")]
)


@precisions
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_found_on_its_line_with_its_cause_and_training_does_not_notice(
    script, tmp_path, monkeypatch, kind, dtype, scaled
):
    text, cause = KINDS[kind]
    seen = not_noticed(script, tmp_path, monkeypatch, kind, dtype, scaled)
    (found,) = seen.report.faults
    assert (found.status, found.cause) == ("fault", cause), found.explanation
    if text is not None:
        assert found.origin is not None
        assert found.origin.line == line_of(script, text)


@precisions
@pytest.mark.parametrize("kind", ["clean", "norm", "loss", "stateful", "from the fifth"])
def test_training_does_not_notice(script, tmp_path, monkeypatch, kind, dtype, scaled):
    not_noticed(script, tmp_path, monkeypatch, kind, dtype, scaled)


def not_noticed(script, tmp_path, monkeypatch, kind, dtype, scaled):
    """Parameters, buffers, losses, random state and loss scale, bit for bit; what was seen."""
    plain, watched = tmp_path / "plain.pt", tmp_path / "seen.pt"
    monkeypatch.setattr(sys, "argv", [str(script), kind, dtype, scaled, str(plain)])
    runpy.run_path(str(script), run_name="__main__")
    seen = observe(script, kind, dtype, scaled, str(watched))
    (a, *rest), (b, *others) = torch.load(plain), torch.load(watched)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key].nan_to_num(7.0), b[key].nan_to_num(7.0)) for key in a)
    assert repr(rest) == repr(others)
    return seen


def test_a_fix_under_which_the_loss_is_not_finite_has_no_backward(script, tmp_path, monkeypatch):
    replay, ended = Observed.replay, []

    def noting(*args, until_bad=False, **options):
        result = replay(*args, until_bad=until_bad, **options)
        if until_bad and not all(map(finite, result.losses)):
            ended.append(result.gradients)
        return result

    monkeypatch.setattr(Observed, "replay", noting)
    observe(script, "forward", "float16", "scaled", str(tmp_path / "out.pt"))
    assert ended
    assert not any(ended)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nothing_is_found_where_nothing_is(script, tmp_path, dtype):
    seen = observe(script, "clean", dtype, "scaled", str(tmp_path / "out.pt"))
    assert seen.report.faults == []


@precisions
def test_a_loss_that_keeps_state_is_said_to(script, tmp_path, dtype, scaled):
    seen = observe(script, "stateful", dtype, scaled, str(tmp_path / "out.pt"))
    (found,) = seen.report.faults
    assert (found.status, found.cause, found.step) == ("not_reproduced", None, 7)
    assert found.origin is not None
    assert found.origin.line == line_of(script, "# backward")
    assert "What Outer returns is finite" in found.explanation
    assert "depends on more than the batch" in found.explanation


def test_what_does_not_fit_is_looked_at_in_the_next_step(script, tmp_path):
    """A scaler has skipped it, so nothing is lost; the code that fails was not there before."""
    seen = observe(script, "from the fifth", "float16", "scaled", str(tmp_path / "out.pt"))
    (found,) = seen.report.faults
    assert (found.status, found.cause, found.step) == ("fault", "RANGE_OVERFLOW", 6)
    assert found.origin is not None
    assert found.origin.line == line_of(script, "# fifth")
    assert "Met in 7 steps, and examined in one." in found.notes


def test_without_a_scaler_only_the_first_bad_step_says_anything(script, tmp_path):
    seen = observe(script, "from the fifth", "bfloat16", "plain", str(tmp_path / "out.pt"))
    (found,) = seen.report.faults
    assert (found.status, found.step) == ("not_reproduced", 5)
    assert "the cause of 7 bad steps" in [each.what for each in seen.report.not_observed]


@precisions
def test_the_number_of_the_step_is_right_in_the_second_one(script, tmp_path, dtype, scaled):
    """Until then nobody knows how many updates a step has."""
    script.write_text(script.read_text().replace("self.calls == 7", "self.calls == 2"))
    seen = observe(script, "counter", dtype, scaled, str(tmp_path / "out.pt"))
    assert [each.step for each in seen.report.faults] == [2]


@precisions
def test_a_loss_that_is_not_finite_while_its_gradients_are(script, tmp_path, dtype, scaled):
    text = script.read_text()
    script.write_text(
        text.replace(
            "out = step(x)",
            "out = step(x)\n        extra = x.sum().log() if index > 3 else 0.0  # log",
        ).replace(
            "F.cross_entropy(out, y)\n    losses", "F.cross_entropy(out, y) + extra\n    losses"
        )
    )
    seen = observe(script, "clean", dtype, scaled, str(tmp_path / "out.pt"))
    (found,) = seen.report.faults
    assert (found.status, found.cause, found.phase) == ("fault", "DOMAIN_ERROR", "forward")
    assert found.origin is not None
    assert found.origin.line == line_of(script, "# log")


def test_a_scale_that_is_only_too_high_is_no_fault(script, tmp_path):
    text = script.read_text()
    script.write_text(text.replace("init_scale=1024.0", "init_scale=2.0**40"))
    seen = observe(script, "clean", "float16", "scaled", str(tmp_path / "out.pt"))
    assert len(seen.report.skips) > 3
    assert seen.report.faults == []


def test_the_script_can_be_stopped_before_the_update(script, tmp_path):
    seen = observe(
        script, "counter", "bfloat16", "plain", str(tmp_path / "out.pt"), on_fault="stop"
    )
    (found,) = seen.report.faults
    assert (found.cause, found.step) == ("RANGE_OVERFLOW", 7)
    assert seen.report.steps == 6
    assert not (tmp_path / "out.pt").exists()


def test_nobody_looks_where_that_is_switched_off(script, tmp_path):
    seen = observe(script, "forward", "float16", "scaled", "", on_fault="off", steps=3)
    assert seen.report.faults == []


def test_fixes_are_spelled_for_a_script(script, tmp_path):
    text = script.read_text()
    script.write_text(text.replace("* 1e20 * h * 1e30", "* h * 1e4"))
    seen = observe(script, "forward", "float16", "scaled", str(tmp_path / "out.pt"))
    verified = {each.what: each.how for each in seen.report.faults[0].fixes if each.verified}
    assert (
        'torch.autocast("cpu", dtype=torch.bfloat16)'
        in verified["bfloat16, which has float32's range"]
    )
    assert not any("TrainStep" in how or "--precision" in how for how in verified.values())


# -- patches ---------------------------------------------------------------------------------------

OVERFLOWS = """
import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)

    def forward(self, x):
        h = self.first(x) * 3e3
        scores = h @ h.t() / 1e6  # scores
        return self.last(torch.softmax(scores, -1) @ h / 3e3)


def loss_of(out):
    return (out * 1e4).pow(2).mean() / 1e8  # squares


model = Net()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(model(torch.randn(8, 8)))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def patches_of(tmp_path, monkeypatch, text):
    path = tmp_path / "overflows.py"
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    (found,) = observe(path).report.faults
    return path, found, [each for each in found.fixes if each.patch]


def test_a_patch_of_a_script_is_run_in_place_of_its_function(tmp_path, monkeypatch):
    path, found, patches = patches_of(tmp_path, monkeypatch, OVERFLOWS)
    assert found.origin.line == line_of(path, "# scores")
    best = found.fixes[0]
    assert best.verified
    assert best.patch_status.startswith("verified: step 1, run again with the patched function")
    assert best.patch.startswith("--- a/overflows.py\n+++ b/overflows.py\n")
    assert path.read_text() == OVERFLOWS
    assert "time not measured: " in best.cost or "] the time of " in best.cost
    assert all(each.patch_status.startswith("suggestion: tried") for each in patches[1:])


def test_a_patch_that_no_replay_runs_is_a_suggestion(tmp_path, monkeypatch):
    text = OVERFLOWS.replace("* 3e3\n", "\n").replace("/ 1e6  #", " #").replace("/ 3e3", "")
    path, found, patches = patches_of(tmp_path, monkeypatch, text)
    assert found.origin.line == line_of(path, "# squares")
    (only,) = patches
    assert not only.verified
    assert only.patch_status.startswith("suggestion: not run: the step is run again without this")


def test_the_code_of_functions_is_put_back():
    from ampwise.numerics.remedy.live import Patched

    before = b"def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x\n"
    names: dict = {}
    exec(compile(before, "/mine.py", "exec"), names)
    patched = Patched.of("/mine.py", before, before.replace(b"x + 1", b"x + 2"))
    assert [each for each, _ in patched.functions] == [names["f"]]
    code = names["f"].__code__
    with pytest.raises(KeyError), patched.in_place():
        assert names["f"](1) == 3
        raise KeyError
    assert names["f"].__code__ is code
    assert not Patched.of("/mine.py", before, b"\n\n" + before).functions
