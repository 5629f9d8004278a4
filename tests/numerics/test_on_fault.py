"""Faults are examined in the middle of training, and training does not notice."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from ampwise.cli.main import main
from ampwise.errors import AmpwiseError, UsageError
from ampwise.step import LossScale, TrainStep, log
from ampwise.step.recorder import Recorder
from ampwise.step.replay import Replay
from tests.numerics.cases import data
from tests.step.conftest import as_on_an_accelerator


class Net(nn.Module):
    """Everything a replay has to put back: dropout, running statistics, accumulation."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(16, 1)

    def forward(self, x):
        h = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(h)


def mean_square(model, batch):
    return model(batch).float().square().mean()


def batches(bad: int | None, count: int = 12):
    for index in range(count):
        batch = data(6, 8, seed=index)
        if index == bad:
            batch[2] = 1e6  # beyond float16, whatever the scale
        yield batch


def trained(bad, precision="fp16", accumulate=1, fused=False, **settings):
    torch.manual_seed(0)
    model = Net()
    step = TrainStep(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused),
        policy=precision,
        accumulate=accumulate,
        loss_scale=LossScale(256.0) if precision == "fp16" else None,
        **settings,
    )
    torch.manual_seed(1)
    for batch in batches(bad):
        step(mean_square, batch)
    return model, step


def same(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return all(torch.equal(a[key].nan_to_num(7.0), b[key].nan_to_num(7.0)) for key in a)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_training_goes_on_bit_for_bit_as_without_a_diagnosis(accumulate):
    plain, _ = trained(7, accumulate=accumulate)
    watched, step = trained(7, accumulate=accumulate, on_fault="diagnose")
    assert step.diagnosis.cause == "RANGE_OVERFLOW"
    assert step.diagnosis.step == 7 // accumulate + 1
    assert same(plain, watched)
    assert step.recorder is None  # asked once: from here on it costs nothing


class Counting(Net):
    """Keeps state in plain Python, and one buffer that it assigns anew."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.largest = 0, {"sizes": []}, {0.0}
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen["sizes"].append(len(x))
        self.largest.add(float(x.detach().abs().max()))
        self.average = 0.9 * self.average + x.detach().float().mean()
        return super().forward(x) * (1 + 0.1 * self.calls) + self.average


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_model_keeps_in_python_is_as_it_was(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "Net", Counting)
    plain, _ = trained(7)
    watched, step = trained(7, on_fault="diagnose")
    assert step.diagnosis is not None
    assert (watched.calls, watched.seen) == (plain.calls, plain.seen)
    assert watched.largest == plain.largest
    assert same(plain, watched)


class OneLate:
    """Outcomes as an accelerator has them: known one step later."""

    def __init__(self):
        self.pending = []
        self.at_once = False

    def settle(self, flag):
        known, self.pending = self.pending, [bool(flag.tensor)]
        return known

    def last_skipped(self):
        return bool(self.pending and self.pending[-1])

    def drain(self):
        known, self.pending = self.pending, []
        return known


@pytest.mark.parametrize("accumulate", [1, 3])
def test_on_an_accelerator_the_next_step_waits_for_the_diagnosis(accumulate, monkeypatch):
    as_on_an_accelerator(monkeypatch)
    monkeypatch.setattr(log, "Outcomes", lambda *_, **__: OneLate())
    told = []
    plain, _ = trained(7, accumulate=accumulate, fused=True)
    watched, step = trained(7, accumulate=accumulate, fused=True, on_fault=told.append)
    assert [each.cause for each in told] == ["RANGE_OVERFLOW"]
    assert told[0].step == 7 // accumulate + 1
    assert told[0].fixes[0].verified
    assert same(plain, watched)
    assert step.recorder is None


def test_the_warning_names_line_cause_and_fix():
    with pytest.warns(UserWarning, match="was skipped") as caught:
        trained(7, on_fault="diagnose")
    assert caught[0].filename == __file__  # the user's line, not one of ours
    text = str(caught[0].message)
    assert "step 8 was skipped: RANGE_OVERFLOW" in text
    assert "self.first(x)" in text
    assert "Verified fix" in text


def test_a_function_is_told_once_and_may_stop_training():
    told = []
    _, step = trained(7, on_fault=told.append)
    assert told == [step.diagnosis]

    def stop(found):
        raise RuntimeError(found.cause)

    with pytest.raises(RuntimeError, match="RANGE_OVERFLOW"):
        trained(7, on_fault=stop)


def test_a_loss_scale_that_settles_is_no_fault():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=1e-4), policy="fp16", on_fault="diagnose"
    )
    for _ in range(4):
        step(lambda m, b: m(b).sum(), torch.full((4, 4), 0.75))
    assert any(each.skipped for each in step.history)
    assert step.diagnosis is None
    assert step.recorder is not None


def test_bfloat16_and_float32_are_examined_too():
    for precision in ("bf16", "fp32"):
        torch.manual_seed(0)
        model = Net()
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=precision,
                         on_fault=lambda _: None)  # fmt: skip
        batch = data(6, 8)
        batch[1, 1] = float("nan")
        step(mean_square, batch)
        assert (step.diagnosis.cause, step.diagnosis.phase) == ("BAD_INPUT", "data")


class HalfWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8).half()

    def forward(self, x):
        return self.lin(x.half())


def with_half_weights(**settings):
    """Adam on float16, where its eps is 0."""
    torch.manual_seed(0)
    model = HalfWeights()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = TrainStep(model, optimizer, policy="fp32", **settings)
    for index in range(4):
        step(lambda model, batch: 1e-2 * mean_square(model, batch), data(6, 8, seed=index))
    return model, optimizer, step


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_update_that_breaks_a_parameter_is_told_a_step_later():
    found = []
    model, optimizer, _ = with_half_weights(on_fault=found.append)
    (fault,) = found
    assert (fault.status, fault.phase, fault.cause) == ("fault", "optimizer", "EPS_UNDERFLOW")
    assert fault.step == 1
    assert fault.origin.source.startswith("step(lambda model, batch")
    plain, others, _ = with_half_weights()
    assert same(model, plain)
    assert repr(optimizer.state_dict()) == repr(others.state_dict())


@pytest.mark.filterwarnings("ignore:model. parameters are float16", "ignore:precision fp32")
def test_the_warning_says_that_an_update_broke_it():
    with pytest.warns(UserWarning, match="step 1 broke a parameter: EPS_UNDERFLOW at .*test_on_fa"):
        with_half_weights(on_fault="diagnose")


def test_what_cannot_be_replayed_says_so():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, policy="bf16", on_fault="diagnose")
    with step.autocast():
        loss = model(torch.full((2, 2), float("inf"))).sum()
    step.backward(loss)
    with pytest.raises(AmpwiseError, match=r"needs steps of the form step\(loss_fn, batch\)"):
        step.update()
    with pytest.raises(UsageError, match="on_fault: expected 'diagnose' or a function"):
        TrainStep(model, optimizer, on_fault="diagnos")


def test_a_replay_repeats_the_step_and_changes_nothing():
    torch.manual_seed(0)
    model = Net()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), policy="bf16",
                     accumulate=2)  # fmt: skip
    step.recorder = Recorder()
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    losses = [step(mean_square, batch) for batch in batches(None, 2)]
    stash = step.recorder.closed
    assert stash is not None
    step(mean_square, data(6, 8, seed=50))  # an open window, with gradients
    before = {name: each.clone() for name, each in model.state_dict().items()}
    gradients = [each.grad.clone() for each in model.parameters()]
    state, position = torch.get_rng_state(), step.position
    recorded = seen[len(list(model.parameters())) : 2 * len(list(model.parameters()))]
    again = Replay(step).replay(stash)
    # Buffers moved on since, which nothing in training mode depends on; the rest is bit for bit.
    assert all(torch.equal(a, b) for a, b in zip(losses, again.losses, strict=True))
    assert len(recorded) == len(again.gradients)
    assert all(
        any(torch.equal(gradient, each) for each in recorded)
        for gradient in again.gradients.values()
    )
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert step.position == position == 1


TASK = """
import torch
from torch import nn
import ampwise

def task(bad=3):
    def batches():
        for index in range(6):
            x = torch.ones(4, 4)
            yield x * 1e6 if index == bad else x
    return ampwise.Task(
        model=lambda: nn.Linear(4, 1), batches=batches,
        loss=lambda model, batch: model(batch).float().square().mean(),
    )
"""


def test_train_writes_the_diagnosis_into_the_run_and_goes_on_or_stops(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(TASK)
    command = ["train", str(tmp_path / "mine.py"), "--precision", "fp16", "--allow-emulated"]
    assert main([*command, "--on-fault", "diagnose", "--out", "a"]) == 0
    found = json.loads((tmp_path / "a" / "diagnosis.json").read_text())
    assert (found["status"], found["cause"], found["step"]) == ("fault", "RANGE_OVERFLOW", 4)
    assert (tmp_path / "a" / "diagnosis.html").exists()
    said = capsys.readouterr().err
    assert "step 4 was skipped: RANGE_OVERFLOW" in said
    assert main([*command, "--on-fault", "stop", "--out", "b"]) == 3
    assert "diagnosis.html says more" in capsys.readouterr().err
    assert main(["report", "a"]) == 0
    assert "of them skipped" in capsys.readouterr().out
    assert main(["report", "a/diagnosis.json"]) == 0
    assert "RANGE_OVERFLOW at step 4" in capsys.readouterr().out
