"""Where an operation comes from, in the places where that is hard to say."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.errors import UsageError
from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.observe.roots import BadValues, Root
from ampwise.numerics.progress import Silent
from ampwise.places import Place
from ampwise.step import TrainStep
from ampwise.tasks import Task
from tests.numerics.cases import data, line_of, square, task


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        nn.init.normal_(self.lin.weight, std=25.0)

    def forward(self, x):
        h = self.lin(x)
        h = self.lin(h)
        return 1e-6 * self.lin(h).float()  # <- here


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def inner(self, h):
        return torch.sqrt(self.last(h) * 0)  # <- here

    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=True)


class NotReentrant(Reentrant):
    def inner(self, h):
        return torch.sqrt(self.last(h) * 0)  # <- here

    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=False)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x.square() / (x - x)  # <- here


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return Cube.apply(self.lin(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x * 1e5)  # <- here


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        room = torch.zeros(x.shape, dtype=torch.float16)
        room[:, :4] = self.lin(x)[:, 4:]
        room[:, 2:6].mul_(0).add_(6e4).mul_(4)  # <- here
        return room * self.lin(x)


class Logged(nn.Module):
    """A finite number beside an infinity in the same memory, which is only logged."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = F.normalize(self.lin(x), p=float("inf"), eps=1e-3)  # 1 at most
        stats = torch.stack([h.detach().amax() * 60000, h.detach().amax() * 60000 * 60000])
        self.logged = stats[1]
        return self.lin(2 * h * stats[0])  # <- here


def penalty(model, batch):
    batch = batch.detach().requires_grad_()
    out = (model(batch).float().abs() ** 1.5).sum()  # <- here
    (grad,) = torch.autograd.grad(out, batch, create_graph=True)
    return grad.square().sum() + out


class Lin(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.lin(x)


HARD = {
    "a module that is called three times": (Shared, square, data(4, 8), "lin", Shared),
    "a reentrant checkpoint": (Reentrant, square, data(4, 8), "", Reentrant.inner),
    "a checkpoint that is not": (NotReentrant, square, data(4, 8), "", NotReentrant.inner),
    "a custom function's backward": (Custom, square, data(4, 8), "", Cube),
    "an encoder layer": (Encoder, square, data(2, 5, 8), "layer.self_attn", Encoder),
    "a finite view beside an infinity": (Logged, square, data(4, 8), "", Logged),
    "a write through a view": (InPlace, square, data(4, 8), "", InPlace),
    "a derivative of a derivative": (Lin, penalty, 0 * data(4, 8), "", penalty),
}


@pytest.mark.parametrize("name", HARD)
def test_the_line_is_found_in(name):
    torch.manual_seed(0)
    model, loss, batch, module, code = HARD[name]
    found = diagnose(task(model, loss, batch), "fp16", steps=3)
    assert found.status == "fault", found
    assert found.origin is not None
    assert found.origin.line == line_of(code), (found.origin, found.explanation)
    assert found.origin.module == module
    assert found.origin.file == inspect.getsourcefile(code)


def test_the_call_of_a_shared_module_is_said():
    torch.manual_seed(0)
    found = diagnose(task(Shared, square, data(4, 8)), "fp16", steps=3)
    assert found.origin is not None
    assert found.origin.call == 2


class Blows(torch.optim.SGD):
    """Divides by zero in its third update."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                nothing = parameter.grad * 0 + (self.count != 3)
                parameter.sub_(0.01 * parameter.grad / nothing)  # <- here


def test_an_optimizer_that_breaks_the_parameters():
    torch.manual_seed(0)
    batch = data(4, 8)
    broken = Task(model=Lin, batches=lambda: [batch] * 9, loss=square, optimizer=lambda m:
                  Blows(m.parameters()), name="blows")  # fmt: skip
    found = diagnose(broken, "bf16", steps=8)
    assert (found.cause, found.phase, found.step) == ("DOMAIN_ERROR", "optimizer", 3)
    assert found.origin is not None
    assert found.origin.line == line_of(Blows)
    assert "The update of step 3 made it so" in found.explanation


class Unlucky:
    """A loss that depends on how often it was called: no replay can repeat it."""

    calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return square(model, batch) * (math.nan if self.calls == 2 else 1.0)


def test_what_does_not_repeat_is_not_explained():
    torch.manual_seed(0)
    found = diagnose(task(Lin, Unlucky(), data(4, 8)), "bf16", steps=4)
    assert (found.status, found.cause) == ("not_reproduced", "NONDETERMINISTIC")


class Backward(torch.autograd.Function):
    """Makes inf of the gradient, and of `y`'s what `factor` gives for each backward."""

    factor: Callable[[], float]

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad / torch.zeros_like(grad), grad * Backward.factor()  # <- here


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        return Backward.apply(self.one(x), self.other(x))


CHANGES = {
    "a gradient that only the record has": [2.0],
    "another one that is not finite": [math.nan],
    "another each time": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_of_the_replay_are_those_of_the_record(monkeypatch, change):
    """To the bit, unless the replays differ among themselves: then which ones are not finite."""
    values = iter(CHANGES[change])
    monkeypatch.setattr(Backward, "factor", lambda: next(values, 1.0), raising=False)
    torch.manual_seed(0)
    model = Twice()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32",
                     on_fault=lambda _: None)  # fmt: skip
    step(square, data(4, 8))
    found = step.diagnosis
    if change == "another each time":
        assert (found.status, found.origin.line) == ("fault", line_of(Backward))
        assert any("not deterministic" in each for each in found.notes)
    else:
        assert (found.status, found.cause) == ("not_reproduced", "NONDETERMINISTIC")


def breaking(graph, inputs):
    """A compiler backend that makes NaN of everything."""

    def run(*args):
        return tuple(
            each * math.nan if isinstance(each, torch.Tensor) and each.requires_grad else each
            for each in graph.forward(*args)
        )

    return run


def test_a_diagnosis_leaves_a_compiled_model_compiled():
    runs = []

    def counting(graph, inputs):
        def run(*args):
            runs.append(1)
            return graph.forward(*args)

        return run

    torch.manual_seed(0)
    model = torch.compile(Lin(), backend=counting)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16",
                     on_fault=lambda _: None)  # fmt: skip
    step(square, data(4, 8))
    bad = data(4, 8)
    bad[1] = math.inf
    step(square, bad)
    assert step.diagnosis.cause == "BAD_INPUT"
    before = len(runs)
    step(square, data(4, 8))
    assert len(runs) == before + 1
    torch._dynamo.reset()


def test_a_fault_of_the_compiler_is_told_from_one_of_the_model():
    torch.manual_seed(0)
    made = lambda: torch.compile(Lin(), backend=breaking)  # noqa: E731
    found = diagnose(task(made, square, data(4, 8)), "bf16", steps=2)
    assert found.status == "not_reproduced"
    assert "fails compiled and is clean in aot_eager and eager" in found.explanation
    torch._dynamo.reset()
    made = lambda: torch.compile(Custom(), backend="aot_eager")  # noqa: E731
    found = diagnose(task(made, square, data(4, 8)), "fp16", steps=2)
    assert found.origin is not None
    assert found.origin.line == line_of(Cube)
    assert "in eager mode, too" in " ".join(found.notes)
    # Errors inside compiled code leave autocast regions open; weights would stay as they were cast.
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
    torch._dynamo.reset()


class Counted(torch.autograd.Function):
    """Counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Counted.calls += 1
        return grad


class Overflowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return 1e6 * Counted.apply(self.lin(x))


def test_a_bad_loss_is_explained_before_any_backward():
    class Watching(Silent):
        before_fixes = -1

        def found(self, diagnosis):
            self.before_fixes = Counted.calls

    Counted.calls, progress = 0, Watching()
    found = diagnose(task(Overflowing, square, data(6, 8)), "fp16", steps=2, progress=progress)
    assert found.cause == "RANGE_OVERFLOW"
    assert progress.before_fixes == 0
    assert Counted.calls > 0  # fixes are verified by whole replays


class Halved(nn.Module):
    """Forward writes a buffer that the next forward reads."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x):
        self.temperature.mul_(0.5)
        return 1e6 * self.lin(x) * self.temperature


def test_fixes_after_a_bad_loss_begin_with_the_buffers_of_before():
    found = diagnose(task(Halved, lambda m, x: 1e-6 * m(x).float().abs().mean(), data(6, 8)),
                     "fp16", steps=2)  # fmt: skip
    assert found.cause == "RANGE_OVERFLOW"
    assert found.fixes[0].verified, found.fixes


def test_a_bad_loss_that_is_no_scalar_is_an_error():
    with pytest.raises(UsageError, match=r"reduce it with \.mean"):
        diagnose(task(Overflowing, lambda m, x: m(x).float().sum(1), data(6, 8)), "fp16", steps=2)


def test_a_line_of_another_file_is_told_with_the_name_of_its_file():
    here, there = (Place("forward", "", 0, f"/code/{each}.py", 7) for each in ("spline", "flow"))
    values = BadValues()
    values.roots[0] = Root(0, "log", here, 1)
    values.carried(1, "mul", replace(here, line=9), [0])
    values.carried(2, "sum", there, [1])
    assert values.earliest([2])[1] == ["line 7", "line 9", "line 7 of flow.py"]
