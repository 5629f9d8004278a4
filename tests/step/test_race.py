"""The race that ``auto`` decides by: it leaves no trace, and takes the fastest precision that holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise import LossScale, TrainStep
from ampwise.policy import PRESETS, Policy, Resolution
from ampwise.policy.resolution import GUESSED
from ampwise.stats import Interval
from ampwise.step import race

from .helpers import batches, classify, mlp, parameters

GUESS = Resolution("auto", PRESETS["fp32"], "cpu", (GUESSED,), changed=False, guess=True)
ALL = ("tf32", "bf16", "bf16-master", "fp16")


class Everything(nn.Module):
    """Whatever a forward may leave behind: statistics, draws, counters, weights it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16, max_norm=0.5)
        self.first, self.norm, self.drop = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2)
        self.last = nn.Linear(32, 4)
        self.calls, self.seen = 0, list[int]()

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(words))
        return self.last(self.drop(self.norm(self.first(self.words(words)).relu())))


def everything(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, 50, (8,), generator=generator),
            torch.randint(0, 4, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def raced(monkeypatch: pytest.MonkeyPatch, winner: str, names: Sequence[str] = ALL) -> list[str]:
    """Have a precision win; the turns that were run, by precision."""
    turns: list[str] = []
    run = race._Arm.turn_ms

    def turn_ms(self: Any) -> float:
        name = self._rerun.policy.name
        turns.append(name)
        run(self)
        return 1.0 if name == winner else 4.0 if name == "fp32" else 3.9

    monkeypatch.setattr(race._Arm, "turn_ms", turn_ms)
    monkeypatch.setattr(race, "candidates", lambda _: ([PRESETS[each] for each in names], {}))
    return turns


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path))


# -- without a trace -------------------------------------------------------------------------------


def _trained(policy: Any, **settings: Any) -> tuple[list[float], dict[str, Any], Tensor, TrainStep]:
    torch.manual_seed(0)
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = TrainStep(model, optimizer, policy=policy, **settings)
    losses = [step(classify, batch).item() for batch in everything()]
    state = {
        **model.state_dict(),
        "calls": torch.tensor(model.calls),
        "seen": torch.tensor(model.seen),
    }
    return losses, state, torch.get_rng_state(), step


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("winner", ["fp32", *ALL])
def test_what_is_trained_after_a_race_is_as_in_a_run_that_was_told_the_winner(
    monkeypatch: pytest.MonkeyPatch, winner: str, accumulate: int
) -> None:
    turns = raced(monkeypatch, winner)
    settings: dict[str, Any] = {"accumulate": accumulate, "max_grad_norm": 0.5}
    losses, state, random_state, step = _trained(GUESS, **settings)
    assert step.policy == PRESETS[winner]
    assert len(turns) >= 5 * race.MIN_ROUNDS
    told, expected, told_random_state, _ = _trained(winner, **settings)
    assert losses == told
    assert torch.equal(random_state, told_random_state)
    for name, each in expected.items():
        assert torch.equal(state[name], each), name


def test_settings_of_the_loss_scale_wait_for_float16_to_win(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    raced(monkeypatch, "fp16")
    *_, step = _trained(GUESS, loss_scale=LossScale(1024.0, growth_interval=2))
    assert (step.policy.name, step.loss_scale.value) == ("fp16", 8192.0)  # grown in six steps
    assert not [each for each in recwarn if "loss_scale" in str(each.message)]


def test_the_first_batch_of_a_generator_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    raced(monkeypatch, "bf16")
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
    source = iter(batches(3))
    assert len([step(classify, batch) for batch in source]) == 3
    assert step.steps == len(step.history) == 3


# -- who takes part --------------------------------------------------------------------------------

ATTENTION = "bf16:islands=scaled_dot_product_attention()"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.body(x).unsqueeze(1).chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v).squeeze(1))


@pytest.mark.parametrize("attends", [True, False])
def test_attention_in_float32_races_where_a_step_has_attention(
    monkeypatch: pytest.MonkeyPatch, attends: bool
) -> None:
    turns: list[str] = []
    run = race._Arm.turn_ms

    def turn_ms(self: Any) -> float:
        turns.append(self._rerun.policy.text)
        run(self)
        return 1.0 if turns[-1] == ATTENTION else 4.0

    monkeypatch.setattr(race._Arm, "turn_ms", turn_ms)
    policies = [PRESETS["bf16"], Policy.parse(ATTENTION)]
    monkeypatch.setattr(race, "candidates", lambda _: (policies, {}))
    for _ in range(2):  # the second time as the first has found
        model = Attention() if attends else mlp()
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
        step(classify, batches(1)[0])
        assert step.policy.text == (ATTENTION if attends else "fp32")
        assert step.resolution is not None
        assert (ATTENTION in str(step.resolution)) == attends
    assert set(turns) == {"fp32", "bf16"} | ({ATTENTION} if attends else set())


# -- who wins --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speedups", "winner"),
    [
        ({}, "fp32"),
        ({"bf16": (0.95, 0.9, 1.0)}, "fp32"),
        ({"bf16": (1.2, 1.02, 1.4)}, "fp32"),  # perhaps noise
        ({"bf16": (1.2, 1.1, 1.3)}, "bf16"),
        ({"bf16": (1.50, 1.4, 1.6), "bf16-master": (1.52, 1.4, 1.6)}, "bf16"),  # alike: the plainer
        ({"bf16": (1.50, 1.4, 1.6), "bf16-master": (1.60, 1.5, 1.7)}, "bf16-master"),
        ({"tf32": (1.6, 1.0, 2.2), "bf16": (1.3, 1.2, 1.4)}, "bf16"),
    ],
)
def test_the_fastest_beyond_noise_is_used(speedups: Any, winner: str) -> None:
    assert race.fastest({name: Interval(*each) for name, each in speedups.items()}) == winner


def test_what_it_says_has_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    raced(monkeypatch, "bf16", ["bf16"])
    *_, step = _trained(GUESS)
    assert "bf16 4.00x [4.00, 4.00] of fp32 in forward, backward and guard" in str(step.resolution)
    assert "raced on this step in" in str(step.resolution)
    assert "8 rounds" in str(step.resolution)
    assert step.resolution is not None
    assert not step.resolution.guess


class Lowered(torch.autograd.Function):
    """The identity, whose backward is wrong for bfloat16."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.low = x.dtype == torch.bfloat16
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * Lowered.factor if ctx.low else gradients[0]


def lowered(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    hidden = Lowered.apply(model[0](batch[0]))
    return F.cross_entropy(model[2](model[1](hidden)), batch[1])


@pytest.mark.parametrize(
    ("factor", "why"),
    [(float("nan"), "not finite"), (-1.0, r"dB SQNR of float32's, 10 dB expected")],
)
def test_a_candidate_that_does_not_hold_is_out(
    monkeypatch: pytest.MonkeyPatch, factor: float, why: str
) -> None:
    monkeypatch.setattr(Lowered, "factor", factor)
    raced(monkeypatch, "bf16", ["tf32", "bf16"])
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
    step(lowered, batches(1)[0])
    assert step.policy.name == "fp32"
    with pytest.raises(AssertionError, match=f"bf16 is out: its gradients are .*{why}"):
        raise AssertionError(str(step.resolution))


def test_what_raises_in_a_candidate_puts_that_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        if out.dtype == torch.bfloat16:
            raise RuntimeError("no kernel for BFloat16")
        return F.cross_entropy(out, batch[1])

    raced(monkeypatch, "bf16", ["bf16"])
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
    step(picky, batches(1)[0])
    assert step.policy.name == "fp32"
    assert "bf16 is out: RuntimeError: no kernel for BFloat16" in str(step.resolution)


def test_float16_takes_part_at_a_loss_scale_it_is_finite_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raced(monkeypatch, "fp16", ["fp16"])
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-6), policy=GUESS)
    step(lambda m, b: classify(m, b) * 1e3, batches(1)[0])  # inf at 65536
    assert step.policy.name == "fp16"


def test_a_step_of_its_own_randomness_is_not_held_against_a_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noisy(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        if out.dtype == torch.bfloat16:
            torch.rand(1)  # another precision draws other numbers, as dropout's kernels do on GPUs
        return F.cross_entropy(out * torch.randn_like(out.float()), batch[1])

    raced(monkeypatch, "bf16", ["bf16"])
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
    step(noisy, batches(1, size=2000)[0])
    assert step.policy.name == "bf16"


# -- once ------------------------------------------------------------------------------------------


def test_a_second_run_of_the_same_step_does_not_race_again(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = raced(monkeypatch, "bf16")
    _trained(GUESS)
    turns.clear()
    *_, step = _trained(GUESS)
    assert (step.policy.name, turns) == ("bf16", [])
    assert "raced before on a step like this" in str(step.resolution)


def test_what_was_raced_before_must_still_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = raced(monkeypatch, "bf16", ["tf32", "bf16"])
    model = mlp()
    TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)(
        lowered, batches(1)[0]
    )
    turns.clear()
    monkeypatch.setattr(Lowered, "factor", float("nan"))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
    step(lowered, batches(1)[0])
    assert (step.policy.name, turns) == ("fp32", [])
    assert "bf16 is out: its gradients are not finite" in str(step.resolution)


def test_another_batch_size_is_raced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = raced(monkeypatch, "bf16", ["bf16"])
    model = mlp()
    for size in (8, 16):
        turns.clear()
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
        step(classify, batches(1, size=size)[0])
        assert turns


def test_a_state_carries_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = raced(monkeypatch, "bf16-master")
    *_, step = _trained(GUESS)
    turns.clear()
    model = Everything()
    fresh = TrainStep(model, torch.optim.AdamW(model.parameters()), policy=GUESS)
    fresh.load_state_dict(step.state_dict())
    fresh(classify, everything(1)[0])
    assert (fresh.policy.name, turns) == ("bf16-master", [])


def test_a_state_from_before_the_decision_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    raced(monkeypatch, "bf16")
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(model, optimizer, policy=GUESS)
    step.load_state_dict(TrainStep(model, optimizer, policy=GUESS).state_dict())
    step(classify, everything(1)[0])
    assert step.policy.name == "bf16"


# -- where there is nothing to race ----------------------------------------------------------------


def test_a_loop_with_the_parts_of_the_step_keeps_the_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = raced(monkeypatch, "bf16")
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
    for _ in range(2):
        with step.autocast():
            loss = classify(model, batches(1)[0])
        step.backward(loss)
        step.update()
    step(classify, batches(1)[0])  # in the midst of training it would be too late
    assert (step.policy.name, turns) == ("fp32", [])
    assert GUESSED in str(step.resolution)


def test_a_named_precision_is_not_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = raced(monkeypatch, "bf16")
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="tf32")
    step(classify, batches(1)[0])
    assert (step.policy.name, turns) == ("tf32", [])


def test_an_error_of_the_users_is_raised_by_the_step_and_the_next_call_races(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raced(monkeypatch, "bf16")
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
    before = parameters(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step(classify, (torch.zeros(3, 3), torch.zeros(3, dtype=torch.long)))
    assert torch.equal(parameters(model), before)
    step(classify, batches(1)[0])
    assert step.policy.name == "bf16"


def test_where_float32_runs_out_of_memory_the_guess_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def large(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        if out.dtype == torch.float32:
            raise torch.OutOfMemoryError("out of memory")
        return F.cross_entropy(out, batch[1])

    raced(monkeypatch, "bf16")
    model = mlp()
    guess = Resolution("auto", PRESETS["bf16"], "cpu", (GUESSED,), changed=False, guess=True)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=guess)
    step(large, batches(1)[0])
    assert step.policy.name == "bf16"
    assert "not raced: fp32 failed: OutOfMemoryError" in str(step.resolution)


def test_compiled_models_are_raced_eagerly_and_stay_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    torch.compiler.reset()
    turns = raced(monkeypatch, "fp32")
    model: Any = torch.compile(mlp(), backend=backend)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=GUESS)
    for batch in batches(3):
        step(classify, batch)
    assert len(turns) > len(ALL)
    assert len(compiled) == 1
