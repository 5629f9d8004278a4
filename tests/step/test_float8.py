"""`fp8`: linear layers in float8, by torchao, on a model that stays the user's own."""

from __future__ import annotations

import copy
import io
import logging
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ampwise import TrainStep
from ampwise.errors import InactivePolicyError, MissingExtraError, PolicyError
from ampwise.policy import RECIPES, Policy

from .helpers import OPTIMIZERS, gradients, parameters

pytest.importorskip("torchao", reason="needs ampwise[fp8]")
pytestmark = pytest.mark.filterwarnings("ignore:policy fp8.*emulated")

FLOAT8 = "float8_e4m3fn"


def model_of(seed: int = 0) -> Any:
    """Two layers that fit, and a head that does not."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 5)
    )


def batch_of(rows: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 32, generator=generator),
        torch.randint(0, 5, (rows,), generator=generator),
    )


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def step_of(model: nn.Module, policy: str = "fp8", **settings: Any) -> TrainStep:
    optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
    return TrainStep(model, optimizer, policy=policy, **settings)


def texts() -> list[str]:
    return [f"fp8:recipe={each}" for each in RECIPES]


# -- what it computes ------------------------------------------------------------------------------


def scaled(tensor: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """A tensor rounded to float8 under a scale of its own, in float64: the recipe, by hand."""
    magnitudes = tensor.double().abs()
    amax = magnitudes.amax() if dim is None else magnitudes.amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / amax.clamp(min=1e-12)).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    # float32 times float32, rounded once to float32, then to float8: both as torchao does.
    return (tensor.float() * scale).to(dtype).double() / scale.double()


def by_hand(x: Tensor, weight: Tensor, gradient: Tensor, recipe: str) -> tuple[Tensor, ...]:
    """Output, gradient of input and of weight of a linear layer, by the recipe's definition."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    if recipe == "tensorwise":
        x8, w8, g8 = scaled(x, e4m3, None), scaled(weight, e4m3, None), scaled(gradient, e5m2, None)
        return x8 @ w8.t(), g8 @ w8, g8.t() @ x8
    output = scaled(x, e4m3, 1) @ scaled(weight, e4m3, 1).t()
    if recipe == "rowwise":
        return (
            output,
            scaled(gradient, e4m3, 1) @ scaled(weight, e4m3, 0),
            scaled(gradient, e4m3, 0).t() @ scaled(x, e4m3, 0),
        )
    whole = scaled_by_power(weight)
    return output, scaled(gradient, e4m3, 1) @ whole, gradient.double().t() @ x.double()


def scaled_by_power(weight: Tensor) -> Tensor:
    """Tensorwise, with a scale that is a power of 2."""
    scale = (448 / weight.double().abs().amax()).float()
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (weight * scale).to(torch.float8_e4m3fn).double() / scale.double()


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_recipe(recipe: str) -> None:
    """Against the definition in float64, up to float32 sums and bfloat16 results."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=False)
    x = torch.randn(64, 32).bfloat16().requires_grad_()
    towards = torch.randn(64, 48).bfloat16()
    step = step_of(nn.Sequential(layer), f"fp8:recipe={recipe}")
    with step.autocast():
        found = layer(x)
    assert found.dtype == torch.bfloat16
    found.backward(towards)
    assert x.grad is not None and layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    wanted = by_hand(x.detach(), layer.weight.detach(), towards, recipe)
    for each, expected in zip((found, x.grad, layer.weight.grad), wanted, strict=True):
        error = (each.double() - expected).norm() / expected.norm()
        assert error < 2**-8, recipe


@pytest.mark.parametrize("text", texts())
def test_it_trains_about_as_bf16_does(text: str) -> None:
    batch, losses = batch_of(64), {}
    for policy in ("bf16", text):
        step = step_of(model_of(), policy, strict=True)
        losses[policy] = [step(classify, batch).item() for _ in range(30)]
    assert losses[text][-1] < 0.5 * losses[text][0]
    assert losses[text][-1] == pytest.approx(losses["bf16"][-1], abs=0.1)
    assert losses[text] != losses["bf16"]


def test_activity_counts_what_ran_in_float8() -> None:
    step = step_of(model_of(), strict=True)
    step(classify, batch_of())
    assert step.activity is not None
    assert step.activity.matmul_dtypes == {FLOAT8: 2, "bfloat16": 1}
    assert step.activity.parameter_dtypes == {"float32": 6}


def test_a_model_that_switches_autocast_off_is_told_of() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model_of()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.body(x)

    step = step_of(Stubborn(), strict=True)
    with pytest.raises(InactivePolicyError, match=f"no matrix product ran in {FLOAT8}, but 3 in"):
        step(classify, batch_of())


def test_who_names_it_where_it_is_emulated_is_told() -> None:
    with pytest.warns(UserWarning, match=r"policy fp8: no unit of cpu multiplies float8") as caught:
        step_of(model_of())
    assert caught[0].filename == __file__


def test_an_evaluation_runs_in_float8_too() -> None:
    model = model_of()
    step, (x, _) = step_of(model), batch_of()
    with torch.no_grad():
        plain = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            lowered = model(x)
        with step.autocast():
            found = model(x)
    assert not torch.equal(found, lowered)
    assert (found - plain).norm() < 0.1 * plain.norm()


@pytest.mark.parametrize("rows", [1, 13, 16, 17])
@pytest.mark.parametrize("text", texts())
def test_any_number_of_rows(text: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `_scaled_mm` itself, which wants inner sides of 16 on GPUs: it must not see others."""
    from ampwise.step.precision import float8

    inner: list[int] = []
    product = torch._scaled_mm

    def watched(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inner.append(a.shape[1])
        assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0, (a.shape, b.shape)
        return product(a, b, *args, **kwargs)

    found: dict[bool, Tensor] = {}
    for native in (False, True):
        monkeypatch.setattr(float8, "multiplies_float8", lambda _, native=native: native)
        monkeypatch.setattr(torch, "_scaled_mm", watched)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 16, bias=False))
        step = step_of(model, text)
        x, _ = batch_of(rows)
        with step.autocast():
            loss = model(x).float().square().mean()
        step.backward(loss)
        found[native] = gradients(model)
    assert inner, "emulated products alone were made"
    assert (found[True] - found[False]).norm() < 0.02 * found[False].norm()


def test_an_empty_batch_takes_the_layers_own_forward() -> None:
    model = model_of()
    step = step_of(model)
    with step.autocast():
        assert model(torch.ones(0, 32)).shape == (0, 5)


# -- which layers ----------------------------------------------------------------------------------


class Adapted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear calls it
        return super().forward(input) + 1


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fits = nn.Linear(32, 32)
        self.narrow = nn.Linear(32, 5)
        self.odd = nn.Linear(8, 32)
        self.adapted = Adapted(32, 32)
        self.computed = parametrizations.weight_norm(nn.Linear(32, 32))
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.adapted(self.computed(self.fits(x)))
        x, _ = self.attention(x, x, x)
        return self.narrow(self.head(self.odd(x[..., :8])))


def test_layers_that_do_not_fit_are_named_with_the_reason() -> None:
    step = step_of(Mixed(), "fp8:islands=head")
    assert step.left_out == {
        "narrow": "out_features of 5 is no multiple of 16",
        "odd": "in_features of 8 is no multiple of 16",
        "adapted": "Adapted has a forward of its own",
        "computed": "its weight is computed in forward",
        "attention.out_proj": "MultiheadAttention multiplies with its weight by itself",
        "head": "an island",
    }
    step(lambda m, x: m(x).float().square().mean(), torch.randn(2, 8, 32))
    assert step.activity is not None
    assert step.activity.matmul_dtypes[FLOAT8] == 1
    assert step.activity.matmul_dtypes["float32"] == 1, "the island"


def test_nothing_is_left_out_under_other_policies() -> None:
    assert step_of(model_of(), "bf16").left_out == {}


def test_a_model_without_a_layer_that_fits_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"no layer .* \(0 \(in_features of 8 is no multiple"):
        step_of(nn.Sequential(nn.Linear(8, 16)))
    with pytest.raises(PolicyError, match=r"it has no nn.Linear\).*take bf16"):
        step_of(nn.Sequential(nn.Conv2d(3, 4, 3)))


def test_a_layer_that_is_put_in_place_later_counts() -> None:
    model = model_of()
    step = step_of(model)
    step(classify, batch_of())
    model[4] = nn.Linear(32, 16)
    step.optimizer.add_param_group({"params": list(model[4].parameters())})
    assert step.left_out == {}


def test_several_models() -> None:
    models = {"body": model_of(), "head": nn.Linear(32, 64)}
    held = [each for model in models.values() for each in model.parameters()]
    step = TrainStep(models, torch.optim.AdamW(held), policy="fp8", strict=True)
    step(lambda m, x: m["head"](m["body"][:4](x)).float().square().mean(), batch_of()[0])
    assert step.activity is not None
    assert step.activity.matmul_dtypes == {FLOAT8: 3}
    assert set(step.left_out) == {"body.4"}


# -- what models and optimizers hold ---------------------------------------------------------------


def test_between_steps_the_model_is_the_users_own() -> None:
    """Classes, attributes, parameters and their dtypes; while it runs, the parameters too."""
    model = model_of()
    modules = [(name, each, type(each), {*vars(each)}) for name, each in model.named_modules()]
    held = list(model.named_parameters())
    state = {name: each.dtype for name, each in model.state_dict().items()}

    def unchanged() -> None:
        now = [(name, each, type(each), {*vars(each)}) for name, each in model.named_modules()]
        assert now == modules
        assert all(a is b for (_, a), (_, b) in zip(model.named_parameters(), held, strict=True))
        assert {name: each.dtype for name, each in model.state_dict().items()} == state

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert all(a is b for (_, a), (_, b) in zip(model.named_parameters(), held, strict=True))
        assert {name: each.dtype for name, each in model.state_dict().items()} == state
        return classify(model, batch)

    step = step_of(model)
    unchanged()
    step(loss_of, batch_of())
    unchanged()
    held_by_optimizer = step.optimizer.param_groups[0]["params"]
    assert all(a is b for a, (_, b) in zip(held_by_optimizer, held, strict=True))
    step.close()
    unchanged()
    assert torch.equal(model(batch_of()[0]), copy.deepcopy(model)(batch_of()[0]))


def test_hooks_of_layers_run_as_ever() -> None:
    model, seen = model_of(), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    step_of(model)(classify, batch_of())
    assert seen == ["forward", torch.float32]


def test_an_error_in_forward_leaves_the_model_as_it_was() -> None:
    model = model_of()
    step = step_of(model)
    with pytest.raises(RuntimeError):
        step(classify, (torch.ones(3, 99), torch.zeros(3, dtype=torch.long)))
    assert "forward" not in vars(model[0])
    step(classify, batch_of())


def test_a_copy_made_inside_forward_is_of_the_model_outside() -> None:
    model, copies = model_of(), []

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        copies.append(copy.deepcopy(model))
        return classify(model, batch)

    step_of(model)(loss_of, batch_of())
    assert "forward" not in vars(copies[0][0])


def test_edits_between_steps_count() -> None:
    model = model_of()
    step = step_of(model)
    step(classify, batch_of())
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    assert step(classify, batch_of()).item() == pytest.approx(torch.tensor(5.0).log().item())


def test_a_second_step_takes_over() -> None:
    model = model_of()
    first = step_of(model)
    first(classify, batch_of())
    before = parameters(model)
    second = step_of(model, "fp8:recipe=rowwise")
    second(classify, batch_of())
    assert not torch.equal(parameters(model), before)
    first(classify, batch_of())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_goes_on_bit_for_bit(accumulate: int) -> None:
    def run(step: TrainStep, seeds: range) -> None:
        for seed in seeds:
            step(classify, batch_of(seed=seed))

    whole = model_of()
    run(step_of(whole, accumulate=accumulate), range(6))

    first = model_of()
    step = step_of(first, accumulate=accumulate)
    run(step, range(3))
    stored = io.BytesIO()
    torch.save(
        {
            "model": first.state_dict(),
            "optimizer": step.optimizer.state_dict(),
            "step": step.state_dict(),
        },
        stored,
    )
    stored.seek(0)
    state = torch.load(stored, weights_only=True)
    second = model_of(7)
    second.load_state_dict(state["model"])
    step = step_of(second, accumulate=accumulate)
    step.optimizer.load_state_dict(state["optimizer"])
    step.load_state_dict(state["step"])
    run(step, range(3, 6))
    assert torch.equal(parameters(second), parameters(whole))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_recompute_what_they_computed(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def checkpointed(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        hidden: Any = checkpoint(model[:3], x, use_reentrant=reentrant)
        return F.cross_entropy(model[3:](hidden).float(), batch[1])

    found = []
    for loss_of in (classify, checkpointed):
        model = model_of()
        step = step_of(model)
        with step.autocast():
            loss = loss_of(model, batch_of())
        step.backward(loss)
        found.append(gradients(model))
    assert torch.equal(*found)


def test_non_finite_gradients_reach_nothing() -> None:
    model = model_of()
    step = step_of(model)
    before = parameters(model)
    x, y = batch_of()
    x[3, 3] = torch.inf
    step(classify, (x, y))
    assert torch.equal(parameters(model), before)
    assert step.history[-1].skipped


@pytest.mark.parametrize("text", texts())
def test_compiled_models_compute_the_same(text: str) -> None:
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = model_of()
        run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        step = step_of(run, text)
        found.append([step(classify, batch_of(seed=seed)).item() for seed in range(3)])
    assert found[0] == found[1]


def test_what_was_compiled_once_stays_so() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model: Any = torch.compile(model_of(), backend="aot_eager", fullgraph=True)
    step = step_of(model)
    for seed in range(4):
        step(classify, batch_of(seed=seed))
    assert counters["stats"]["unique_graphs"] == 1


# -- torchao ---------------------------------------------------------------------------------------


def test_without_torchao_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingExtraError, match=r"torchao is not installed .*\[fp8\]"):
        step_of(model_of())


def test_loading_torchao_leaves_logging_as_it_was() -> None:
    step_of(model_of())
    assert logging.root.manager.disable == logging.NOTSET


def test_recipes_are_those_that_torchao_has() -> None:
    from torchao.float8 import Float8LinearRecipeName

    assert [each.value for each in Float8LinearRecipeName] == list(RECIPES)
    assert Policy.parse("fp8").recipe == RECIPES[0]
