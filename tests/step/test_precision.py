"""What a policy does to a model: autocast, float32 mode, islands, masters, and the proof of it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ampwise.errors import InactivePolicyError, PolicyError, UsageError
from ampwise.policy import PRESETS, Resolution
from ampwise.step import TrainStep

from .helpers import OPTIMIZERS, batches, classify, mlp, parameters


def step_of(model, policy, **settings) -> TrainStep:
    return TrainStep(
        model, OPTIMIZERS["adamw-fused"](model.parameters()), policy=policy, **settings
    )


@pytest.mark.parametrize(
    ("policy", "ran"),
    [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("bf16-master", "bfloat16")],
)
def test_activity_says_what_matmuls_ran_in(policy, ran):
    step = step_of(mlp(), policy, strict=True)
    step(classify, batches(1)[0])
    activity = step.activity
    assert activity.matmul_dtypes == {ran: 2}
    assert activity.parameter_dtypes == {"float32": 4}
    assert activity.loss_scale_live == (policy == "fp16")


def test_an_evaluation_before_training_proves_nothing():
    step = step_of(mlp(), "bf16", strict=True)
    with torch.no_grad(), step.autocast():
        pass
    assert step.activity is None
    step(classify, batches(1)[0])
    assert step.activity.matmul_dtypes == {"bfloat16": 2}


class Stubborn(nn.Module):
    """Switches autocast off by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.body(x.float())


def test_strict_fails_when_the_asked_precision_was_not_active():
    with pytest.raises(InactivePolicyError, match=r"bf16 was not active: .* 2 in float32"):
        step_of(Stubborn(), "bf16", strict=True)(classify, batches(1)[0])


def test_without_strict_it_warns_and_goes_on():
    step = step_of(Stubborn(), "bf16")
    with pytest.warns(UserWarning, match="was not active") as caught:
        step(classify, batches(1)[0])
    assert caught[0].filename == __file__
    assert step.steps == 1


def test_a_loop_of_ones_own_is_warned_at_its_own_line():
    step = step_of(Stubborn(), "bf16")
    batch = batches(1)[0]
    with step.autocast():
        loss = classify(step.model, batch)
    with pytest.warns(UserWarning, match="was not active") as caught:
        step.backward(loss)
    assert caught[0].filename == __file__


def test_a_compiled_model_is_not_watched_and_says_so():
    model = torch.compile(mlp(), backend="aot_eager")
    step = step_of(model, "bf16", strict=True)
    step(classify, batches(1)[0])
    assert not step.activity.watched
    assert "not watched" in str(step.activity)


def test_float32_that_ran_in_bfloat16_is_told():
    """Somebody else's autocast in the model, as a trainer's prepare() puts it there."""
    model = mlp()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    step = step_of(model, "fp32")
    with pytest.warns(UserWarning, match="fp32 was not active: 2 in bfloat16 of 2 matrix products"):
        step(classify, batches(1)[0])


def test_fp32_is_strict_and_switches_an_outer_autocast_off():
    seen = []

    def loss(model, batch):
        seen.append((torch.backends.mkldnn.matmul.fp32_precision, torch.is_autocast_enabled("cpu")))
        return classify(model, batch)

    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        step = step_of(mlp(), "fp32")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(loss, batches(1)[0])
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # as the caller left it
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    assert seen == [("ieee", False)]


def test_tf32_means_bf16_math_on_a_cpu():
    seen = []

    def loss(model, batch):
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return classify(model, batch)

    step_of(mlp(), "tf32")(loss, batches(1)[0])
    assert seen == ["bf16"]
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"


class TestIslands:
    def test_an_island_runs_in_float32_forward_and_gradients(self):
        seen = {}

        class Noting(nn.Linear):
            def forward(self, x):
                out = super().forward(x)
                seen.update(input=x.dtype, output=out.dtype)
                return out

        model = mlp()
        model[2] = Noting(16, 4)
        step = step_of(model, "bf16:islands=2", strict=True)
        step(classify, batches(1)[0])
        assert step.activity.matmul_dtypes == {"bfloat16": 1, "float32": 1}
        assert seen == {"input": torch.float32, "output": torch.float32}

    def test_autocast_is_back_on_after_an_error_inside(self):
        model = mlp()
        step = step_of(model, "bf16:islands=2")
        with pytest.raises(RuntimeError), step.autocast():
            model[2](torch.ones(3, 99))
        with step.autocast():
            assert model[0](torch.ones(1, 8)).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")

    def test_a_pattern_that_matches_nothing_is_refused(self):
        with pytest.raises(PolicyError, match="no module matches 'head'; modules are named like 0"):
            step_of(mlp(), "bf16:islands=head")

    def test_a_typo_is_refused_also_where_the_device_falls_back_to_float32(self):
        fallen_back = Resolution(
            "bf16:islands=head", PRESETS["fp32"], "cpu", ("bfloat16 is emulated",), changed=True
        )
        with pytest.raises(PolicyError, match="no module matches 'head'"):
            step_of(mlp(), fallen_back)


class Attends(nn.Module):
    """Attention of one head, and a note of the formats it ran in."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 4)
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x):
        return self.head(self.attend(x))

    def attend(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        self.seen.append((q.dtype, out.dtype))
        return out


ATTENTION = "islands=scaled_dot_product_attention()"


class TestFunctionIslands:
    def test_a_function_runs_in_float32_and_what_is_around_it_does_not(self):
        model = Attends()
        step = step_of(model, f"bf16:{ATTENTION}", strict=True)
        step(classify, batches(1)[0])
        assert model.seen == [(torch.bfloat16, torch.float32)]
        assert step.activity.matmul_dtypes == {"bfloat16": 2, "float32": 2}
        model.seen.clear()
        model(torch.ones(3, 8))  # outside of a step
        assert model.seen == [(torch.float32, torch.float32)]
        with step.autocast(), torch.no_grad():
            model(torch.ones(3, 8))
        assert model.seen[1] == (torch.bfloat16, torch.float32)

    def test_gradients_are_those_of_casts_in_the_code(self):
        def cast(q, k, v):
            with torch.autocast("cpu", enabled=False):
                return attention(q.float(), k.float(), v.float())

        attention, found = F.scaled_dot_product_attention, []
        for policy, function in ((f"bf16:{ATTENTION}", attention), ("bf16", cast)):
            torch.manual_seed(0)
            model = Attends()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(F, "scaled_dot_product_attention", function)
                step_of(model, policy)(classify, batches(1)[0])
            found.append(parameters(model))
        assert torch.equal(*found)

    def test_it_holds_where_checkpointing_runs_forward_again(self):
        class Checkpointed(Attends):
            def forward(self, x):
                return self.head(checkpoint(self.attend, x, use_reentrant=False))

        model = Checkpointed()
        with set_checkpoint_early_stop(False):
            step_of(model, f"bf16:{ATTENTION}")(classify, batches(1)[0])
        assert model.seen == [(torch.bfloat16, torch.float32)] * 2

    def test_operators_go_by_the_name_of_their_function(self):
        seen = []

        def loss(model, batch):
            hidden = model[0](batch[0])
            seen.append((hidden @ hidden.T).dtype)
            return classify(model, batch)

        step_of(mlp(), "bf16:islands=matmul()")(loss, batches(1)[0])
        assert seen == [torch.float32]

    @pytest.mark.parametrize("policy", ["bf16:islands=sofmax()", "bf16:islands=0+sofmax()"])
    def test_a_function_that_torch_lacks_is_refused(self, policy):
        with pytest.raises(PolicyError, match=r"no function sofmax\(\); did you mean 'softmax'"):
            step_of(mlp(), policy)
        fallen_back = Resolution(policy, PRESETS["fp32"], "cpu", ("emulated",), changed=True)
        with pytest.raises(PolicyError, match="no function sofmax"):
            step_of(mlp(), fallen_back)

    def test_a_function_that_nothing_calls_is_named_once(self):
        step = step_of(mlp(), "bf16:islands=softmax()")
        step(classify, batches(1)[0])
        with pytest.warns(UserWarning, match=r"never called softmax\(\)"):
            step(classify, batches(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(classify, batches(1)[0])


class TestMasterWeights:
    @staticmethod
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def test_forward_has_bf16_copies_but_in_norm_layers_and_the_model_float32(self):
        model, seen = self.network(), {}
        own = dict(model.named_parameters())
        step = step_of(model, "bf16-master")

        def loss(m, batch):
            seen.update({name: each.dtype for name, each in m.named_parameters()})
            return classify(m, batch)

        step(loss, batches(1)[0])
        assert seen["0.weight"] == seen["3.bias"] == torch.bfloat16
        assert seen["1.weight"] == torch.float32
        assert all(own[name] is each for name, each in model.named_parameters())
        assert {each.dtype for each in model.parameters()} == {torch.float32}

    def test_small_updates_are_not_lost(self):
        """Case 13: bfloat16 weights at 1 cannot take a step of 1e-4; masters can."""
        model = nn.Linear(4, 4)
        nn.init.ones_(model.weight)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=True)
        step = TrainStep(model, adam, policy="bf16-master")
        for _ in range(400):
            step(lambda m, x: m(x).float().sum(), torch.ones(2, 4))
        assert torch.allclose(model.weight, torch.tensor(0.96), atol=1e-4)

    def test_state_dict_is_float32_and_goes_to_and_from_an_fp32_model(self):
        model, plain = self.network(), self.network()
        fp32 = step_of(plain, "fp32")
        for batch in batches(3):
            fp32(classify, batch)
        step = step_of(model, "bf16-master")
        model.load_state_dict(plain.state_dict())
        saved = model.state_dict()
        assert all(each.dtype != torch.bfloat16 for each in saved.values())
        assert all(torch.equal(each, plain.state_dict()[name]) for name, each in saved.items())
        step(classify, batches(1)[0])
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model[0].weight, plain[0].weight)

    def test_a_window_accumulates_in_float32(self):
        """256 gradients of 1 stop adding up at 256 in bfloat16; 1 / 1024 each lose earlier."""
        model = nn.Linear(1, 1, bias=False)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        step = TrainStep(model, sgd, policy="bf16-master", accumulate=1024)
        before = model.state_dict()["weight"].clone()
        for _ in range(1024):
            step(lambda m, x: m(x).float().mean(), torch.ones(1, 1))
        assert (before - model.state_dict()["weight"]).item() == pytest.approx(1.0, rel=1e-5)

    def test_the_optimizer_holds_what_it_held(self):
        model = mlp()
        adam = OPTIMIZERS["adamw-fused"](model.parameters())
        step = TrainStep(model, adam, policy="bf16-master")
        step(classify, batches(1)[0])
        (group,) = adam.param_groups
        assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))
        assert list(adam.state) == list(model.parameters())

    def test_a_forward_that_writes_to_a_weight_is_refused_by_its_name(self):
        class Scaling(nn.Linear):
            def forward(self, x):
                with torch.no_grad():
                    self.weight.mul_(0.5)
                return super().forward(x)

        class ThroughData(nn.Linear):
            def forward(self, x):
                self.weight.data.mul_(0.5)
                return super().forward(x)

        for kind in (Scaling, ThroughData):
            model = nn.Sequential(nn.Linear(8, 8), kind(8, 4))
            step = step_of(model, "bf16-master")
            with pytest.raises(
                UsageError, match=r"forward changes weight of 1 in place.*islands=1"
            ):
                step(classify, batches(1)[0])
            kept = step_of(model, "bf16-master:islands=1")
            before = model[1].weight.detach().clone()
            kept(classify, batches(1)[0])
            assert torch.allclose(model[1].weight, before / 2, atol=0.05)

    def test_it_follows_plain_bf16_closely(self):
        one, other = mlp(), mlp()
        first, second = step_of(one, "bf16"), step_of(other, "bf16-master")
        for batch in batches(50):
            first(classify, batch)
            second(classify, batch)
        masters = torch.cat([each.double().flatten() for each in other.state_dict().values()])
        assert (parameters(one) - masters).norm() <= 1e-2 * masters.norm()


def test_matmul_dtypes_include_attention():
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v).mean()

    step = step_of(Attend(), "bf16")
    step(lambda m, x: m(x).float(), torch.randn(2, 5, 8))
    assert step.activity.matmul_dtypes["bfloat16"] >= 2


def test_a_nested_region_leaves_the_float32_mode_to_the_outer_one():
    model = nn.Linear(4, 4)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="tf32")
    mode = torch.backends.mkldnn.matmul
    before = mode.fp32_precision
    with step.autocast():
        with step.autocast():
            pass
        assert mode.fp32_precision == "bf16"
    assert mode.fp32_precision == before
