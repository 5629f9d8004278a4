"""Invariant 13: what torch compiles in a plain loop stays compiled under the step.

A backend that counts says how many graphs were made and how often one ran; the loop by hand, under
the same precision, says how many it should be. Inductor compiles only a handful of times here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from ampwise import LossScale, TrainStep

from .helpers import batches, classify, parameters
from .idioms import (
    ByHand,
    assert_follows,
    nothing_left_open,  # noqa: F401 - a fixture
    poisoned,
    run,
    sgd,
    values,
)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs as they are, and counts graphs made and graphs run."""

    def __init__(self, *, autograd: bool = False) -> None:
        self.graphs = self.runs = 0
        self._backend = aot_autograd(fw_compiler=self._count, bw_compiler=self._plain)
        self._autograd = autograd

    def _count(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def ran(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return ran

    @staticmethod
    def _plain(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return graph.forward

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return self._backend(graph, inputs) if self._autograd else self._count(graph, inputs)


class Net(nn.Module):
    """A body, a function, a head; a forward of its own, for containers' are not compiled."""

    def __init__(self, function: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.function = nn.Linear(8, 16), nn.Linear(16, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.body(x)))


Made = tuple[nn.Module, Any, Callable[[Any, Any], Tensor]]


def function(backend: Any) -> Made:
    """A compiled function inside a plain module."""
    model = Net(torch.compile(lambda x: F.gelu(x) * 2, backend=backend, fullgraph=True))
    return model, model, classify


def submodule_in_place(backend: Any) -> Made:
    """``model.body.compile()``."""
    model = Net()
    model.body = nn.Sequential(model.body)
    inner = Net()
    inner.body, inner.head = nn.Linear(16, 16), nn.Linear(16, 16)
    model.function = inner
    inner.compile(backend=backend, fullgraph=True)
    return model, model, classify


def submodule_wrapped(backend: Any) -> Made:
    """``model.part = torch.compile(model.part)``."""
    model, inner = Net(), Net()
    inner.body, inner.head = nn.Linear(16, 16), nn.Linear(16, 16)
    model.function = torch.compile(inner, backend=backend, fullgraph=True)
    return model, model, classify


def model_in_place(backend: Any) -> Made:
    """``model.compile()``."""
    model = Net()
    model.compile(backend=backend, fullgraph=True)
    return model, model, classify


def model_wrapped(backend: Any) -> Made:
    """``torch.compile(model)``."""
    model = Net()
    return model, torch.compile(model, backend=backend, fullgraph=True), classify


def loss_function(backend: Any) -> Made:
    """``step(torch.compile(loss_fn), batch)``."""
    model = Net()
    return model, model, torch.compile(classify, backend=backend, fullgraph=True)


def part_of_the_loss(backend: Any) -> Made:
    """Only what comes after the model."""
    model = Net()
    criterion = torch.compile(
        lambda out, y: F.cross_entropy(out.float(), y), backend=backend, fullgraph=True
    )
    return model, model, lambda m, batch: criterion(m(batch[0]), batch[1])


PLACES = {
    each.__name__: each
    for each in (
        function, submodule_in_place, submodule_wrapped, model_in_place, model_wrapped,
        loss_function, part_of_the_loss,
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "autograd"),
    [(each, False) for each in PLACES]
    + [(each, True) for each in ("function", "model_wrapped", "loss_function")],
)
def test_as_many_graphs_run_as_in_a_plain_loop(place, autograd, policy):
    """From the first step on, without a graph break, and made once for all steps."""
    seen, trained = [], []
    for of in (ByHand, TrainStep):
        torch._dynamo.reset()
        counters.clear()
        backend = Counting(autograd=autograd)
        model, given, loss_fn = PLACES[place](backend)
        start = parameters(model)
        loop = of(given, sgd(model), policy=policy)
        data = batches(6)
        run(loop, loss_fn, data[:2])
        early = backend.graphs
        run(loop, loss_fn, data[2:])
        assert backend.graphs == early, "made anew in the middle of training"
        seen.append((backend.runs, dict(counters["graph_break"])))
        trained.append(model)
        if of is ByHand:
            by_hand = backend.graphs
    assert seen[0][0] >= 6
    assert seen[1] == seen[0]
    assert backend.graphs <= by_hand + 1
    assert_follows(trained[1], trained[0], start, policy)


def test_skipped_steps_changes_of_scale_and_evaluation_compile_nothing_anew():
    backend = Counting()
    model, given, loss_fn = model_wrapped(backend)
    scale = LossScale(2.0**10, growth_interval=1)
    step = TrainStep(given, sgd(model), policy="fp16", loss_scale=scale, max_grad_norm=1.0)
    data = batches(4)
    run(step, loss_fn, data[:2])
    with torch.no_grad(), step.autocast():
        given(data[0][0])
    early = backend.graphs
    run(step, loss_fn, [poisoned(data[2]), data[3], *data])
    with torch.no_grad(), step.autocast():
        given(data[0][0])
    assert [record.skipped for record in step.history][:3] == [False, False, True]
    assert backend.graphs == early


def test_steps_one_after_the_other_run_the_same_compiled_code(policy):
    """A new step on a compiled model is not a reason to compile it again and again."""
    backend = Counting()
    model, given, loss_fn = model_wrapped(backend)
    optimizer = sgd(model)
    made = []
    for index in range(4):
        step = TrainStep(given, optimizer, policy=policy)
        run(step, loss_fn, batches(2, seed=index))
        made.append(backend.graphs)
    assert backend.runs == 8
    assert made[-1] == made[1]


def test_compiled_between_two_steps(policy):
    """`model.compile()` after training has begun, as scripts do after a warm-up."""
    ours, hand = Net(), Net()
    start, data = parameters(ours), batches(6)
    backend = Counting()
    step, loop = TrainStep(ours, sgd(ours), policy=policy), ByHand(hand, sgd(hand), policy)
    run(step, classify, data[:2])
    run(loop, classify, data)
    ours.compile(backend=backend, fullgraph=True)
    run(step, classify, data[2:])
    assert backend.runs == 4
    assert_follows(ours, hand, start, policy)


def test_edits_of_weights_count_in_compiled_code(policy):
    """Compiled code reads the parameters that are there, not those it was made with."""
    model, given, loss_fn = model_wrapped(Counting())
    optimizer, (batch,) = sgd(model), batches(1)
    step = TrainStep(given, optimizer, policy=policy)
    run(step, loss_fn, [batch, batch])
    for each in model.parameters():
        each.data.mul_(0.5)
    twin = Net()
    twin.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()})
    expected = TrainStep(twin, sgd(twin), policy=policy)(classify, batch)
    assert torch.equal(step(loss_fn, batch), expected)
    optimizer.param_groups[0]["lr"] = 0.0
    edited = values(model)
    step(loss_fn, batch)
    assert all(torch.equal(a, b) for a, b in zip(edited, values(model), strict=True))


def test_an_error_in_compiled_code_leaves_the_step_as_before(policy):
    model, given, loss_fn = model_wrapped(Counting())
    step = TrainStep(given, sgd(model), policy=policy, accumulate=2)
    data = batches(2)
    step(loss_fn, data[0])
    before = [each.grad.clone() for each in model.parameters()]
    with pytest.raises(RuntimeError):
        step(loss_fn, (torch.ones(8, 9), data[1][1]))
    assert step.position == 1
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    assert not torch.is_autocast_enabled("cpu")
    assert [type(each) for each in model.parameters()] == [nn.Parameter] * 4
    step(loss_fn, data[1])
    assert step.steps == 1


# -- islands and casts -------------------------------------------------------------------------


DELTA = 2.0**-12  # 1 + DELTA is 1 in both 16-bit formats, and itself in float32


class Telling(nn.Module):
    """Its loss says which layers ran in float32: 40 + 8 * DELTA * (body + 4 * head)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.body.weight.copy_(torch.eye(8) * (1 + DELTA))
            self.head.weight.copy_(torch.eye(8) * (1 + DELTA))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).float().sum() + 4 * self.head(x).float().sum()


def in_float32(loss: Tensor) -> str:
    """The layers that ran in float32."""
    found = round((loss.item() - 40) / (8 * DELTA))
    return {0: "none", 1: "body", 4: "head", 5: "both"}[found]


def telling_loss(model: Any, x: Tensor) -> Tensor:
    return model(x)


def make_telling(
    how: str, backend: Any, spelling: str, *, fullgraph: bool = False
) -> tuple[TrainStep, Any]:
    """Compiled here or there, before or after the step was made."""
    model, settings = Telling(), {"backend": backend, "fullgraph": fullgraph}
    given, loss_fn = model, telling_loss
    if how == "in place, before":
        model.compile(**settings)
    elif how == "wrapped":
        given = torch.compile(model, **settings)
    elif how == "loss":
        loss_fn = torch.compile(telling_loss, **settings)
    elif how == "layers":
        model.body.compile(**settings)
        model.head.compile(**settings)
    step = TrainStep(given, sgd(model, lr=0.0), policy=spelling)
    if how == "in place, after":
        model.compile(**settings)
    return step, loss_fn


HOW = ("in place, before", "in place, after", "wrapped", "loss", "layers")
SPELLINGS = {
    "fp32": "both", "bf16": "none", "fp16": "none", "bf16-master": "none",
    "bf16:islands=head": "head", "fp16:islands=head": "head", "bf16-master:islands=head": "head",
    "bf16:islands=body": "body", "bf16:islands=linear()": "both",
}  # fmt: skip
# Under autocast, float16 takes the way of bfloat16.
COMPILED = [
    pytest.param(each, marks=pytest.mark.slow if each.startswith("fp16") else ())
    for each in SPELLINGS
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_telling_model_tells(spelling):
    """Without compilation."""
    step = TrainStep(model := Telling(), sgd(model, lr=0.0), policy=spelling)
    assert in_float32(step(telling_loss, torch.ones(1, 8))) == SPELLINGS[spelling]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("spelling", COMPILED)
def test_islands_and_casts_survive_compilation(spelling, how, backend):
    """In every step, and still in evaluation under the policy."""
    step, loss_fn = make_telling(how, backend, spelling)
    x = torch.ones(1, 8)
    ran = [in_float32(step(loss_fn, x)) for _ in range(3)]
    assert ran == [SPELLINGS[spelling]] * 3
    with torch.no_grad(), step.autocast():
        assert in_float32(loss_fn(step.model, x)) == SPELLINGS[spelling]


@pytest.mark.parametrize("how", HOW[:-1])  # torch compiles no layer of its own as one graph
@pytest.mark.parametrize("spelling", [each for each in SPELLINGS if "islands" in each])
def test_islands_are_no_graph_break(spelling, how):
    """``fullgraph=True``, which a plain loop compiles, raises at the first one."""
    step, loss_fn = make_telling(how, "eager", spelling, fullgraph=True)
    ran = [in_float32(step(loss_fn, torch.ones(1, 8))) for _ in range(2)]
    assert ran == [SPELLINGS[spelling]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["bf16:islands=head", "bf16-master:islands=head"])
def test_islands_and_casts_survive_inductor(spelling):
    step, loss_fn = make_telling("wrapped", "inductor", spelling)
    ran = [in_float32(step(loss_fn, torch.ones(1, 8))) for _ in range(2)]
    assert ran == ["head", "head"]


def test_inductor_trains_as_eager():
    """Fused operations round less often: a few roundings of bfloat16 over three steps."""
    trained = []
    for backend in (None, "inductor"):
        model = Net()
        start = parameters(model)
        given = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        run(TrainStep(given, sgd(model), policy="bf16-master"), classify, batches(3))
        trained.append(parameters(model))
    assert (trained[0] - trained[1]).norm() <= 0.05 * (trained[0] - start).norm()


# -- flex_attention ----------------------------------------------------------------------------


class Attends(nn.Module):
    """A target by compiled attention without grad, all that flex_attention can do on a CPU."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.head, self.attend = nn.Linear(8, 48), nn.Linear(16, 16), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        with torch.no_grad():
            target = self.attend(q.detach(), k.detach(), v.detach())
        return (self.head(v) - target).float().square().mean()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_flex_attention_stays_compiled(backend):
    """``fullgraph=True`` raises where it is not; uncompiled it would hold all scores."""
    seen = []
    for of in (ByHand, TrainStep):
        torch._dynamo.reset()
        counters.clear()
        model = Attends(torch.compile(flex_attention, backend=backend, fullgraph=True))
        start = parameters(model)
        x = torch.randn(1, 32, 8, generator=torch.Generator().manual_seed(1))
        run(of(model, sgd(model), policy="bf16"), lambda m, b: m(b), [x] * 3)
        seen.append((parameters(model), dict(counters["graph_break"]), counters["frames"]["ok"]))
    assert not torch.equal(seen[0][0], start)
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[0][1:] == seen[1][1:]
