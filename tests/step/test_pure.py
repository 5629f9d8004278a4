"""`bf16-pure`: bfloat16 everywhere, and updates that are not lost all the same."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ampwise import TrainStep, UsageError
from ampwise.step.precision import pure
from ampwise.step.precision.pure import COMPENSATION, _Bits, round_, round_and_keep_

from .conftest import as_on_an_accelerator
from .helpers import OPTIMIZERS, batches, classify, mlp

ROUNDINGS = ("bf16-pure", "bf16-pure:rounding=kahan")
CPU = torch.device("cpu")


def bits(count: int, *numbers: int) -> Tensor:
    made = _Bits(CPU)
    made.begin(*numbers)
    return made.draw(torch.Size([count]))


def rounded(value: float, count: int = 2**16) -> Tensor:
    target = torch.empty(count, dtype=torch.bfloat16)
    round_(torch.full((count,), value), target, bits(count, 1, 2, 3))
    return target


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-39, -7.77e30, 1 + 2**-8 - 2**-23])
def test_the_mean_of_stochastic_rounding_is_exact(value: float) -> None:
    found = rounded(value).double()
    below, above = found.min(), found.max()
    assert below <= value <= above
    step = 2.0 ** (math.frexp(abs(value))[1] - 8) if abs(value) > 1e-38 else 2.0**-133
    assert above - below <= step
    # The mean of n draws of one of two neighbours: at most half a step / sqrt(n) of deviation.
    assert abs(found.mean() - value) < 5 * step / 2 / math.sqrt(len(found))


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -0.5, 2.0**-133, 3.3895e38, math.inf, -math.inf, math.nan]
)
def test_what_is_bfloat16_already_stays(value: float) -> None:
    value = torch.tensor(value).bfloat16().item()
    found = rounded(value)
    expected = torch.full_like(found, value)
    if math.isnan(value):
        assert found.isnan().all()
    else:
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_all_sixteen_bits_are_drawn_evenly() -> None:
    drawn = bits(2**20, 7)
    assert (drawn.min() < 100, drawn.max() > 65_400) == (True, True)
    for bit in range(16):
        share = ((drawn >> bit) & 1).float().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / 2**10


def test_bits_follow_from_each_number_that_they_begin_with() -> None:
    first = bits(64, 1, 2, 3)
    assert torch.equal(first, bits(64, 1, 2, 3))
    for other in [(0, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3)]:
        assert (first == bits(64, *other)).float().mean() < 0.1


def test_kahan_keeps_sixteen_bits_and_repeats_itself() -> None:
    exact = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).mul_(1e3)
    near, left = (torch.empty(2**16, dtype=torch.bfloat16) for _ in "ab")
    round_and_keep_(exact.clone(), near, left)
    assert torch.equal(near, exact.bfloat16())
    both = near.float() + left.float()
    assert ((both - exact).abs() <= exact.abs() * 2**-15).all()
    again, left_again = torch.empty_like(near), torch.empty_like(left)
    round_and_keep_(both.clone(), again, left_again)
    assert torch.equal(again, near)
    assert torch.equal(left_again, left)


# -- training --------------------------------------------------------------------------------------


def _moved(policy: str, model: nn.Module) -> Tensor:
    nn.init.ones_(model.weight)  # pyright: ignore[reportArgumentType]
    step = TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0), policy=policy
    )
    for _ in range(400):
        step(lambda m, x: m(x).float().mean(), torch.ones(1, 256))
    return model.weight.float()  # pyright: ignore[reportReturnType]


@pytest.mark.filterwarnings("ignore:model. parameters are bfloat16")
def test_where_bfloat16_weights_stagnate_these_do_not() -> None:
    """400 updates of 1e-4 from 1.0, whose ULP below is 2**-8: float32 ends at 0.96."""
    linear = nn.Linear(256, 1, bias=False)
    assert _moved("fp32", linear).mean().item() == pytest.approx(0.96, abs=1e-4)
    plain = _moved("bf16", nn.Linear(256, 1, bias=False).bfloat16())
    assert (plain == 1).all()
    for policy in ROUNDINGS:
        found = _moved(policy, nn.Linear(256, 1, bias=False))
        # Single weights by an ULP; the mean of 256 by 2**-8 * sqrt(0.04 / 2**-8) / 2 / 16.
        assert found.mean().item() == pytest.approx(0.96, abs=2e-3), policy
        assert (found - 0.96).abs().max() < 0.05


def test_moving_averages_follow_also_where_they_fall() -> None:
    model = nn.Linear(512, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    step = TrainStep(model, optimizer, policy="bf16-pure")
    loss: Callable[..., Tensor] = lambda m, x: m(x).float().mean()  # noqa: E731
    step(loss, torch.full((1, 512), 8.0))
    (state,) = optimizer.state.values()
    before = state["exp_avg_sq"].float().mean().item()
    for _ in range(700):
        step(loss, torch.full((1, 512), 1e-3))
    assert state["exp_avg_sq"].dtype == torch.bfloat16
    # To nearest it would stay where it is: 0.1 % is less than half an ULP.
    assert state["exp_avg_sq"].float().mean().item() / before == pytest.approx(0.999**700, rel=0.02)


ANY: dict[str, Callable[[Any], Optimizer]] = {
    **OPTIMIZERS,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "own": lambda p: Counting(p, lr=1e-2),
}


class Counting(Optimizer):
    """Somebody's: it counts in its groups, and uses all gradients for each parameter."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [each for group in self.param_groups for each in group["params"]]
        length = torch.linalg.vector_norm(torch.stack([each.grad.norm() for each in every]))
        for group in self.param_groups:
            group["count"] += 1
            for each in group["params"]:
                average = self.state[each].setdefault("average", torch.zeros_like(each))
                average.mul_(0.9).add_(each.grad / length)
                each.sub_(average, alpha=group["lr"])


@pytest.mark.parametrize("policy", ROUNDINGS)
@pytest.mark.parametrize("name", ANY)
def test_any_optimizer_trains_as_in_float32(name: str, policy: str) -> None:
    losses: dict[str, list[float]] = {}
    for each in ("fp32", policy):
        model = mlp(width=64)
        optimizer = ANY[name](model.parameters())
        step = TrainStep(model, optimizer, policy=each, max_grad_norm=1.0)
        losses[each] = [step(classify, batch).item() for batch in batches(5) * 12]
        if each == policy:
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            tensors = [
                value
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor) and value.dim()
            ]
            assert {value.dtype for value in tensors} <= {torch.bfloat16}
            assert all(p.grad is None for p in model.parameters())
            assert len(optimizer.state) <= 4, "of parameters only"
    first, last = losses["fp32"][:5], losses["fp32"][-5:]
    assert sum(last) < 0.9 * sum(first), "it trains"
    assert sum(losses[policy][-5:]) == pytest.approx(sum(last), rel=0.03)


def test_groups_keep_what_optimizers_count_in_them() -> None:
    model = mlp()
    optimizer = Counting(model.parameters(), lr=1e-2)
    step = TrainStep(model, optimizer, policy="bf16-pure")
    for batch in batches(3):
        step(classify, batch)
    assert optimizer.param_groups[0]["count"] == 3
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [
        id(each) for each in model.parameters()
    ]


@pytest.mark.parametrize("policy", ROUNDINGS)
def test_how_many_are_stepped_on_together_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    found: list[list[Tensor]] = []
    for most in (1, 2**20):
        monkeypatch.setattr(pure, "_CHUNK", {"cpu": most})
        model = mlp()
        step = TrainStep(model, torch.optim.AdamW(model.parameters()), policy=policy)
        for batch in batches(5):
            step(classify, batch)
        found.append([each.detach() for each in model.parameters()])
    assert all(map(torch.equal, *found))


# -- what stays, and what belongs to whom ----------------------------------------------------------


def _everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    state = [e for s in optimizer.state.values() for e in s.values() if isinstance(e, Tensor)]
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers(), *state)]


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("policy", ROUNDINGS)
@pytest.mark.parametrize("kind", ["adamw-fused", "adamw-plain", "sgd-fused"])
def test_a_skipped_step_leaves_every_bit(
    monkeypatch: pytest.MonkeyPatch, kind: str, policy: str, on: str
) -> None:
    if on == "device":
        as_on_an_accelerator(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = TrainStep(model, optimizer, policy=policy)
    for batch in batches(20):
        step(classify, batch)
    before = _everything(model, optimizer)
    step(classify, (torch.full((8, 8), math.inf), torch.zeros(8, dtype=torch.long)))
    assert step.history[-1].found_inf
    assert all(map(torch.equal, before, _everything(model, optimizer)))


@pytest.mark.parametrize("policy", ROUNDINGS)
@pytest.mark.parametrize("kind", ["adamw-fused", "sgd-plain"])
def test_a_resumed_run_continues_bit_for_bit(kind: str, policy: str) -> None:
    def made() -> tuple[nn.Module, Optimizer, TrainStep]:
        model = mlp()
        optimizer = OPTIMIZERS[kind](model.parameters())
        return model, optimizer, TrainStep(model, optimizer, policy=policy)

    model, optimizer, step = made()
    data = batches(10)
    for batch in data[:5]:
        step(classify, batch)
    file = io.BytesIO()
    torch.save([each.state_dict() for each in (model, optimizer, step)], file)
    for batch in data[5:]:
        step(classify, batch)
    expected = _everything(model, optimizer)

    model, optimizer, step = made()
    torch.manual_seed(99)  # the stream is the run's, whatever is seeded now
    states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for each, state in zip((model, optimizer, step), states, strict=True):
        each.load_state_dict(state)
    for batch in data[5:]:
        step(classify, batch)
    assert all(map(torch.equal, expected, _everything(model, optimizer)))


def test_rounding_follows_the_runs_seed_and_moves_nobodys_random_state() -> None:
    found: list[list[Tensor]] = []
    for seed in (1, 1, 2):
        model = mlp()
        torch.manual_seed(seed)
        step = TrainStep(model, torch.optim.AdamW(model.parameters()), policy="bf16-pure")
        before = torch.get_rng_state()
        for batch in batches(3):
            step(classify, batch)
        assert torch.equal(torch.get_rng_state(), before)
        found.append([each.detach() for each in model.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    assert not all(map(torch.equal, found[0], found[2]))


def test_what_stays_float32_is_what_stays_so_under_bf16_master() -> None:
    model = nn.ModuleDict(
        {
            "words": nn.Embedding(10, 8), "first": nn.Linear(8, 8), "norm": nn.LayerNorm(8),
            "batch": nn.BatchNorm1d(8), "head": nn.Linear(8, 8), "rnn": nn.LSTM(8, 8),
            "kept": nn.Linear(8, 8),
        }
    )  # fmt: skip
    model["head"].weight = model["words"].weight = nn.Parameter(torch.randn(8, 8))
    frozen = model["first"].weight.requires_grad_(requires_grad=False)
    parameters = dict(model.named_parameters())
    TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16-pure:islands=kept")
    lowered = {name for name, each in parameters.items() if each.dtype == torch.bfloat16}
    assert lowered == {"words.weight", "first.weight", "first.bias", "head.bias"}
    assert frozen is model["first"].weight
    assert dict(model.named_parameters()).keys() == parameters.keys()


def test_parameters_that_come_later_are_lowered_too() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, policy="bf16-pure")
    step(classify, batches(1)[0])
    model[2] = nn.Linear(16, 4)
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    before = model[2].weight.detach().clone()
    for batch in batches(2):
        step(classify, batch)
    assert model[2].weight.dtype == torch.bfloat16
    assert not torch.equal(model[2].weight.float(), before)


def test_hooks_of_an_optimizer_are_called_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pure, "_CHUNK", {"cpu": 1})
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(
        lambda of, *_: seen.append(f"{len(of.param_groups[0]['params'])}")
    )
    optimizer.register_step_post_hook(lambda of, *_: seen.append(f"{len(of.state)}"))
    step = TrainStep(model, optimizer, policy="bf16-pure")
    step(classify, batches(1)[0])
    assert seen == ["4", "4"]


def test_an_optimizer_that_raises_is_given_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = TrainStep(model, optimizer, policy="bf16-pure")
    groups, held = optimizer.param_groups, list(optimizer.param_groups[0]["params"])

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "_init_group", fails)
        with pytest.raises(RuntimeError, match="no room"):
            step(classify, batches(1)[0])
    assert optimizer.param_groups is groups
    assert all(a is b for a, b in zip(groups[0]["params"], held, strict=True))
    assert not optimizer.state
    step(classify, batches(1)[0])
    assert len(optimizer.state) == 4


def test_accumulated_clipped_gradients_are_those_of_the_window() -> None:
    model, data = mlp(), batches(3)
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.0), policy="bf16-pure", accumulate=3
    )
    twin = mlp()
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    for batch in data:
        step(classify, batch)
        (F.cross_entropy(twin(batch[0]), batch[1]) / 3).backward()
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.testing.assert_close(step.grad_norm, expected, rtol=0.02, atol=0)


def test_kahan_keeps_what_is_left_beside_the_parameter() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = TrainStep(model, optimizer, policy="bf16-pure:rounding=kahan")
    step(classify, batches(1)[0])
    for parameter, state in optimizer.state.items():
        assert state[COMPENSATION].dtype == torch.bfloat16
        assert state[COMPENSATION].shape == parameter.shape
    # Another rounding has no use for it.
    TrainStep(model, optimizer, policy="bf16-pure")(classify, batches(1)[0])
    assert not any(COMPENSATION in state for state in optimizer.state.values())


def test_an_ema_in_float32_follows() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = mlp()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = TrainStep(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), policy="bf16-pure", ema=ema
    )
    for batch in batches(30):
        step(classify, batch)
    for average, parameter in zip(ema.module.parameters(), model.parameters(), strict=True):
        assert average.dtype == torch.float32
        assert (average - parameter.float()).abs().max() < 0.2


def test_a_model_in_ddp_must_have_been_lowered_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampwise.step.members import Members

    model = mlp()
    monkeypatch.setattr(Members, "wrapped", property(lambda _: (nn.Sequential(model),)))
    with pytest.raises(UsageError, match=r"expected ampwise.distributed.replicate\(model, 'bf16-"):
        TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16-pure")
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_small_updates_are_no_stagnation_here() -> None:
    from ampwise import Task, diagnose

    def model() -> nn.Module:
        linear = nn.Linear(256, 1, bias=False)
        nn.init.ones_(linear.weight)
        return linear

    task = Task(
        model=model,
        batches=lambda: [torch.ones(1, 256)] * 8,
        loss=lambda m, x: m(x).float().mean(),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, weight_decay=0),
    )
    assert diagnose(task, precision="bf16-pure", steps=8).status == "clean"
    plain = Task(
        model=lambda: model().bfloat16(), batches=task.batches, loss=task.loss,
        optimizer=task.optimizer,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="parameters are bfloat16"):
        assert diagnose(plain, precision="bf16", steps=8).cause == "STAGNATION"
