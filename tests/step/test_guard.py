"""Invariants 3 and 4: unscaled once, true norms, and nothing non-finite ever gets through."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ampwise.errors import SkippedStepsError, UsageError
from ampwise.step import LossScale, TrainStep

from .helpers import OPTIMIZERS, batches, classify, gradients, mlp, parameters

BAD = {"inf": float("inf"), "nan": float("nan")}
MORE_OPTIMIZERS = OPTIMIZERS | {
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


def state_of(optimizer: torch.optim.Optimizer) -> dict:
    return copy.deepcopy(optimizer.state_dict())


def assert_same_state(one: dict, other: dict) -> None:
    assert one["state"].keys() == other["state"].keys()
    for key, values in one["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][key][name]))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-master"])
@pytest.mark.parametrize("optimizer", MORE_OPTIMIZERS)
def test_non_finite_gradients_reach_neither_parameters_nor_state(optimizer, precision, bad):
    model = mlp()
    made = MORE_OPTIMIZERS[optimizer](model.parameters())
    step = TrainStep(model, made, policy=precision, max_grad_norm=1.0)
    good, poisoned = batches(2)
    poisoned[0][2, 3] = BAD[bad]
    step(classify, good)
    before, state = parameters(model), state_of(made)
    step(classify, poisoned)
    assert torch.equal(before, parameters(model))
    assert_same_state(state, state_of(made))
    step(classify, good)
    assert not torch.equal(before, parameters(model))
    assert parameters(model).isfinite().all()
    assert [record.skipped for record in step.history] == [False, True, False]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", MORE_OPTIMIZERS)
def test_a_skipped_first_step_leaves_no_trace(optimizer, precision):
    """Fused SGD allocates momentum uninitialised and skips filling it: trap of torch 2.13."""
    garbage = [torch.full((128,), float("nan")) for _ in range(2000)]
    del garbage  # what the allocator hands out next is NaN
    clean, hurt = mlp(), mlp()
    good, poisoned = batches(2)
    poisoned[0].fill_(float("inf"))
    reference = TrainStep(
        clean,
        MORE_OPTIMIZERS[optimizer](clean.parameters()),
        policy=precision,
        loss_scale=LossScale(2.0**15),
    )
    step = TrainStep(hurt, MORE_OPTIMIZERS[optimizer](hurt.parameters()), policy=precision)
    step(classify, poisoned)
    for _ in range(3):
        step(classify, good)
        reference(classify, good)
    assert torch.equal(parameters(clean), parameters(hurt))


def test_fused_sgd_with_dampening_takes_the_general_path():
    """From zeroed momentum its kernel would compute another first step."""
    clean, ours = mlp(), mlp()
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    by_hand = torch.optim.SGD(clean.parameters(), **settings)
    optimizer = torch.optim.SGD(ours.parameters(), **settings, fused=True)
    step = TrainStep(ours, optimizer, policy="fp32")
    for batch in batches(3):
        classify(clean, batch).backward()
        by_hand.step()
        by_hand.zero_grad()
        step(classify, batch)
    assert torch.allclose(parameters(clean), parameters(ours), rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-plain"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-master"])
def test_norm_that_overflows_is_not_a_reason_to_skip(precision, optimizer):
    """Trap 8: finite gradients around 1e25 have a squared norm beyond float32."""
    model = nn.Linear(8, 4)
    step = TrainStep(
        model, OPTIMIZERS[optimizer](model.parameters()), policy=precision, max_grad_norm=1.0
    )
    before = parameters(model)
    step(lambda m, x: m(x).float().sum() * 1e25, torch.ones(2, 8))
    (record,) = step.history
    assert not record.found_inf
    assert record.grad_norm == pytest.approx(1e25 * 2 * 36**0.5, rel=1e-2)
    assert parameters(model).isfinite().all()
    assert not torch.equal(before, parameters(model))


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-plain"])
def test_reported_norm_is_the_true_one_before_clipping(optimizer):
    model = mlp()
    (batch,) = batches(1)
    reference = copy.deepcopy(model).double()
    classify(reference, (batch[0].double(), batch[1])).backward()
    expected = gradients(reference).norm().item()
    step = TrainStep(
        model, OPTIMIZERS[optimizer](model.parameters()), policy="fp16", max_grad_norm=1e-3
    )
    step(classify, batch)
    assert step.history[0].grad_norm == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_clipped_update_has_the_asked_norm(fused):
    model = mlp()
    before = parameters(model)
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0, fused=fused),
        policy="fp16",
        max_grad_norm=0.05,
    )
    step(classify, batches(1)[0])
    assert (parameters(model) - before).norm().item() == pytest.approx(0.05, rel=1e-4)


def test_non_finite_values_put_in_after_unscaling_are_caught():
    """Trap 5: torch's scaler checks in `unscale_` and never again."""
    model = mlp()
    step = TrainStep(model, OPTIMIZERS["adamw-fused"](model.parameters()), policy="fp16")
    before = parameters(model)
    with step.autocast():
        loss = classify(model, batches(1)[0])
    step.backward(loss)
    step.gradients()["0.weight"][0, 0] = float("nan")
    step.update()
    assert torch.equal(before, parameters(model))
    assert step.history[0].skipped


def test_gradients_are_unscaled_exactly_once():
    model, reference = mlp(), mlp()
    (batch,) = batches(1)
    by_hand = TrainStep(reference, torch.optim.SGD(reference.parameters(), lr=1.0), policy="fp16")
    by_hand(classify, batch)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), policy="fp16")
    with step.autocast():
        loss = classify(model, batch)
    step.backward(loss)
    first = {name: each.clone() for name, each in step.gradients().items()}
    second = step.gradients()
    assert all(torch.equal(first[name], second[name]) for name in first)
    step.update()
    assert torch.equal(parameters(model), parameters(reference))


def test_backward_after_gradients_is_refused():
    model = mlp()
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=1.0), policy="fp16", accumulate=2
    )
    batch = batches(1)[0]
    step(classify, batch)
    step.gradients()
    with pytest.raises(UsageError, match="unscaled already"):
        step(classify, batch)


def test_half_loss_of_shape_1_is_scaled_in_float32():
    """Trap 6: multiplied by 65536 in float16 it would be inf at once."""
    model = mlp()
    step = TrainStep(
        model,
        OPTIMIZERS["adamw-fused"](model.parameters()),
        policy="fp16",
        loss_scale=LossScale(2.0**10),
    )
    loss = step(lambda m, b: classify(m, b).half().reshape(1), batches(1)[0])
    assert loss.shape == (1,)
    assert not step.history[0].found_inf


def test_parameters_of_every_kind():
    """Groups, sparse, frozen, unused, empty, and of other dtypes, in one step."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.used = nn.Linear(4, 2)
            self.unused = nn.Linear(4, 2)
            self.frozen = nn.Linear(4, 4)
            self.empty = nn.Parameter(torch.zeros(0))
            self.factor = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(self.frozen(self.table(x))) * self.factor + self.empty.sum()

    torch.manual_seed(0)
    model = Odd()
    sgd = torch.optim.SGD(
        [{"params": model.table.parameters(), "lr": 0.5}, {"params": [
            *model.used.parameters(), *model.unused.parameters(), *model.frozen.parameters(),
            model.empty, model.factor,
        ]}],
        lr=0.1,
    )  # fmt: skip
    step = TrainStep(model, sgd, policy="bf16", max_grad_norm=1.0)
    before = {name: each.clone() for name, each in model.named_parameters()}
    step(lambda m, x: m(x).square().mean(), torch.tensor([1, 1, 2]))
    changed = {n for n, each in model.named_parameters() if not torch.equal(before[n], each)}
    assert changed == {"table.weight", "used.weight", "used.bias", "factor"}
    assert not step.history[0].skipped


def test_an_optimizer_without_any_gradient_is_no_fault():
    """Trap 4: torch's scaler asserts 'No inf checks were recorded'."""
    model, other = mlp(), nn.Linear(2, 2)
    for fused in (True, False):
        both = [
            torch.optim.AdamW(each.parameters(), lr=0.1, fused=fused) for each in (model, other)
        ]
        step = TrainStep([model, other], both, policy="fp16")
        step(lambda models, batch: classify(models[0], batch), batches(1)[0])
        assert not step.history[0].skipped


def test_closures_are_refused_with_the_reason():
    model = mlp()
    with pytest.raises(UsageError, match="LBFGS needs a closure"):
        TrainStep(model, torch.optim.LBFGS(model.parameters()))


def test_a_third_party_optimizer_works_and_its_claims_are_not_trusted():
    class Sign(torch.optim.Optimizer):
        """Claims to unscale by itself, and does not."""

        _step_supports_amp_scaling = True

        def __init__(self, params) -> None:
            super().__init__(params, {"lr": 0.1})
            self.seen: list[float] = []

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for each in group["params"]:
                    self.seen.append(each.grad.abs().max().item())
                    each.add_(each.grad.sign(), alpha=-group["lr"])

    model = mlp()
    optimizer = Sign(model.parameters())
    step = TrainStep(model, optimizer, policy="fp16")
    step(classify, batches(1)[0])
    assert max(optimizer.seen) < 10  # true gradients; scaled ones are in the thousands
    assert step.syncs_per_step == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_of_skipped_steps_aborts_with_an_explanation(precision):
    model = mlp()
    step = TrainStep(model, OPTIMIZERS["adamw-fused"](model.parameters()), policy=precision)
    good, poisoned = batches(2)
    poisoned[0].fill_(float("nan"))
    step(classify, good)
    before = parameters(model)
    with pytest.raises(SkippedStepsError, match=r"steps 2 to 51 .* forward breaks") as failure:
        for _ in range(60):
            step(classify, poisoned)
    assert failure.value.exit_code == 3
    assert step.loss_scale.value > 0
    assert torch.equal(before, parameters(model))


def test_settling_of_the_loss_scale_does_not_abort():
    """From 2**16 down to the floor takes 30 skipped steps; then it trains."""
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-12), policy="fp16")
    for _ in range(35):
        step(lambda m, b: classify(m, b) * 1e8, batches(1)[0])
    assert step.history[0].skipped
    assert not step.history[-1].skipped


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"accumulate": 0},
            "accumulate: expected a whole number of micro-batches, 1 or more, got 0",
        ),
        ({"max_grad_norm": -1.0}, "max_grad_norm: expected a norm above 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm: expected a norm above 0"),
        ({"skip": "some"}, "skip: expected 'all' or 'each', got 'some'"),
        ({"max_skips": 0}, "max_skips: expected a whole number of skipped steps, 1 or more"),
        ({"policy": "fp15"}, "unknown precision 'fp15'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, complaint):
    model = mlp()
    with pytest.raises(UsageError, match=complaint):
        TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (lambda m, b: 1.0, "expected a scalar tensor, got float"),
        (lambda m, b: m(b[0]), r"expected a scalar, got shape \(8, 4\)"),
        (lambda m, b: classify(m, b).detach(), "does not require grad"),
        (lambda m, b: torch.tensor(1), "floating-point scalar, got torch.int64"),
    ],
)
def test_a_loss_that_is_no_loss_is_refused(loss, complaint):
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    with pytest.raises(UsageError, match=complaint):
        step(loss, batches(1)[0])


def test_an_overflow_in_the_first_of_two_updates_of_one_optimizer_is_not_forgotten():
    """Critics are often updated several times an iteration; the scale adapts to all of it."""
    model = mlp()
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    step = TrainStep(model, optimizer, policy="fp16")
    for factor, last in ((float("inf"), False), (1.0, True)):
        (batch,) = batches(1)
        with step.autocast():
            loss = classify(model, batch) * factor
        step.backward(loss, optimizers=[optimizer])
        step.update([optimizer], update_scale=last)
    (record,) = step.history
    assert record.found_inf
    assert record.scale_backoffs == 1
