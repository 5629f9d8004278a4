"""AMP2xx: what the wrong dtype costs, measured against float64 or the same code done right."""

from __future__ import annotations

import contextlib
import copy
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel.parallel_apply import parallel_apply

from .helpers import (
    SCALE,
    OpCounter,
    Training,
    batches,
    finite,
    gradient,
    network,
    right_step,
    trained,
    vector,
)


def half_autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


class Island(nn.Module):
    """Features near 1e5 pass a linear layer that is kept float32 for their range."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            hidden = self.inner(x * 1e5) / 1e5
        return self.head(hidden.relu())


def backward_inside(run, batch):
    run.optimizer.zero_grad()
    with run.autocast():
        run.scaler.scale(run.loss(batch)).backward()
    run.scaler.step(run.optimizer)
    run.update_scale()


def test_amp201_backward_undoes_an_island(record_property):
    """Backward under autocast runs a float32 island's products in half: 20 of 20 steps skipped."""
    wrong = trained(backward_inside, steps=20, model=Island)
    right = trained(right_step, steps=20, model=Island)
    record_property("steps skipped of 20, wrong", sum(wrong.skips))
    record_property("steps skipped of 20, right", sum(right.skips))
    assert sum(wrong.skips) == 20
    assert sum(right.skips) == 0


def test_amp201_gradient_error_of_an_island(record_property):
    """The island's weight gradient: relative error 2e-4 with backward inside, 1e-7 outside."""
    x, _ = batches(1)[0]
    errors, dtypes = {}, {}
    layer = nn.Linear(16, 4)
    exact = copy.deepcopy(layer).double()
    exact(x.double()).pow(2).mean().backward()
    for inside in (True, False):
        layer.zero_grad()
        with half_autocast():
            with torch.autocast("cpu", enabled=False):
                loss = layer(x).pow(2).mean()
        with half_autocast() if inside else contextlib.nullcontext(), OpCounter() as ops:
            loss.backward()
        errors[inside] = relative(gradient(layer), gradient(exact))
        dtypes[inside] = [dtype for name, found in ops.calls if name == "mm" for dtype in found]
    record_property("relative gradient error, wrong", errors[True])
    record_property("relative gradient error, right", errors[False])
    assert dtypes == {True: [torch.float16] * 2, False: [torch.float32] * 2}
    assert errors[False] < 1e-6 < 1e-5 < errors[True]


def test_amp201_nothing_to_undo(record_property):
    """Where autocast covers the whole forward, backward inside changes no bit in 20 steps."""
    wrong, right = trained(backward_inside, steps=20), trained(right_step, steps=20)
    distance = (vector(wrong.model) - vector(right.model)).norm().item()
    record_property("distance of the parameters after 20 steps", distance)
    assert distance == 0
    assert right.movement > 0.1


def test_amp202_loss_outside_autocast(record_property):
    """Cross-entropy on half logits: a mean is off by 1.5e-3, a sum over 16384 tokens is inf."""
    torch.manual_seed(0)
    model = nn.Linear(16, 64)
    x, labels = torch.randn(16384, 16), torch.randint(64, (16384,))
    with half_autocast():
        logits = model(x)
        right = F.cross_entropy(logits, labels, reduction="sum")
    wrong = F.cross_entropy(logits, labels, reduction="sum")
    record_property("sum, wrong", wrong.item())
    record_property("sum, right", right.item())
    assert wrong.isinf()
    assert right.item() == pytest.approx(
        F.cross_entropy(logits.double(), labels, reduction="sum").item(), rel=1e-6
    )

    half, single = [], []
    for start in range(0, 16384, 256):
        part, targets = logits[start : start + 256], labels[start : start + 256]
        exact = F.cross_entropy(part.double(), targets).item()
        half.append(abs(F.cross_entropy(part, targets).item() / exact - 1))
        single.append(abs(F.cross_entropy(part.float(), targets).item() / exact - 1))
    record_property("largest relative error of the mean, wrong", max(half))
    record_property("largest relative error of the mean, right", max(single))
    assert max(half) > 1e-4 > 1e-6 > max(single)


def test_amp202_loss_outside_autocast_caps_the_scale(record_property):
    """A half loss takes the scale as its half gradient: 65536 is inf, so every growth is a skip."""

    class LossOutside(Training):
        def loss(self, batch):
            x, y = batch
            with self.autocast():
                logits = self.model(x)
            return self.criterion(logits, y)

    skipped = {}
    for name, kind in (("wrong", LossOutside), ("right", Training)):
        run = kind(scale=2.0**15)
        run.scaler.set_growth_interval(10)
        for batch in batches(30):
            right_step(run, batch)
        skipped[name] = sum(run.skips)
        record_property(f"steps skipped of 30, growth interval 10, {name}", skipped[name])
    assert skipped["right"] == 0
    assert skipped["wrong"] >= 2


def test_amp203_eval_without_autocast(record_property):
    """Validated in float32, a bfloat16-trained model answers otherwise on 25 of 16384 examples."""
    run = trained(right_step, steps=200, dtype=torch.bfloat16, scaled=False)
    x, y = (torch.cat(each) for each in zip(*batches(512), strict=True))
    with torch.no_grad():
        plain = run.model(x)
        with run.autocast():
            as_trained = run.model(x)
        training_loss = run.loss((x, y)).item()
    wrong, right = (F.cross_entropy(each.float(), y).item() for each in (plain, as_trained))
    flipped = int((plain.argmax(1) != as_trained.argmax(1)).sum())
    record_property("classes that differ, of 16384", flipped)
    record_property("relative difference of the mean loss", abs(wrong / right - 1))
    assert right == pytest.approx(training_loss, rel=1e-6)
    assert flipped >= 5


class Loud(nn.Module):
    """One activation of a training step exceeds 65504; float32 does not notice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.inner(x * 1e5).relu() / 1e5)


def test_amp203_eval_hides_an_overflow(record_property):
    """float32 validation says 1.4 of a model whose float16 forward gives NaN."""
    x, y = batches(1)[0]
    model = Loud()
    with torch.no_grad():
        wrong = F.cross_entropy(model(x), y)
        with half_autocast():
            right = F.cross_entropy(model(x), y)
    record_property("validation loss, wrong", wrong.item())
    record_property("validation loss, right", right.item())
    assert wrong.isfinite()
    assert not right.isfinite()


def test_amp204_scaler_with_bfloat16(record_property):
    """Under bfloat16 the scaler changes no bit in 50 steps and costs one host sync a step."""
    data = batches(50)
    results = {}
    for scaled in (True, False):
        run = Training(dtype=torch.bfloat16, scaled=scaled)
        with OpCounter() as ops:
            for x, y in data:
                run.optimizer.zero_grad()
                with run.autocast():
                    loss = F.cross_entropy(run.model(x), y)
                run.scaler.scale(loss).backward()
                run.scaler.step(run.optimizer)
                run.scaler.update()
        results[scaled] = (vector(run.model), ops.host_syncs)
    record_property(
        "distance of the parameters", (results[True][0] - results[False][0]).norm().item()
    )
    record_property("host syncs in 50 steps, wrong", results[True][1])
    record_property("host syncs in 50 steps, right", results[False][1])
    assert torch.equal(results[True][0], results[False][0])
    assert results[False][1] == 0
    assert results[True][1] >= 50


def zero_share(run: Training) -> float:
    grads = gradient(run.model)
    return (grads == 0).double().mean().item()


def test_amp205_fp16_without_scaler(record_property):
    """A loss weighted 1e-6: without a scaler float16 flushes every gradient and learns nothing."""
    settings = {"loss": lambda output, y: 1e-6 * F.cross_entropy(output, y), "lr": 1e5}
    first = {"steps": 1, **settings}
    wrong = trained(right_step, scaled=False, **first)
    right = trained(right_step, **first)
    exact = trained(right_step, dtype=None, scaled=False, **first)
    record_property("share of zero gradients, wrong", zero_share(wrong))
    record_property("share of zero gradients, right", zero_share(right))
    record_property("share of zero gradients, float32", zero_share(exact))
    assert zero_share(wrong) > 0.8
    assert zero_share(right) < zero_share(exact) + 0.02 < 0.5

    wrong = trained(right_step, steps=200, scaled=False, **settings)
    right = trained(right_step, steps=200, **settings)
    record_property("mean loss of steps 181-200, wrong", 1e6 * sum(wrong.losses[-20:]) / 20)
    record_property("mean loss of steps 181-200, right", 1e6 * sum(right.losses[-20:]) / 20)
    assert sum(wrong.losses[-20:]) > 1.5 * sum(right.losses[-20:])


def half_network() -> nn.Module:
    return network().half()


def test_amp206_half_parameters_and_a_scaler(record_property):
    """With float16 parameters the first `scaler.step` raises."""
    with pytest.raises(ValueError) as raised:
        trained(right_step, steps=1, model=half_network)
    record_property("raises", str(raised.value))
    assert str(raised.value) == "Attempting to unscale FP16 gradients."
    assert trained(right_step, steps=20).movement > 0.1


@pytest.mark.parametrize(("steps", "least"), [(1, 0.05), (2, 0.99)])
def test_amp206_half_parameters_and_adam(record_property, steps, least):
    """Adam's eps 1e-8 is 0 in float16: 0/0 or x/0 spoils some weights at step 1, all at step 2."""
    settings = {"optimizer": torch.optim.Adam, "lr": 1e-3, "scaled": False}
    shares = {}
    for name, model in (("wrong", half_network), ("right", network)):
        run = trained(right_step, steps=steps, model=model, **settings)
        shares[name] = 1 - vector(run.model).isfinite().double().mean().item()
        record_property(f"share of parameters not finite, steps {steps}, {name}", shares[name])
    assert shares["wrong"] > least
    assert shares["right"] == 0


class Standardised(nn.Module):
    """Features near 1e5 are brought to size 1 in float32 before the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return self.inner(x / 1e5)


def test_amp207_manual_cast_of_inputs(record_property):
    """`.half()` on features near 1e5 makes half of them inf: 20 of 20 steps skipped."""

    def step(cast):
        def inner(run, batch):
            x, y = batch
            x = x * 1e5
            right_step(run, (x.half() if cast else x, y))

        return inner

    wrong = trained(step(cast=True), steps=20, model=Standardised)
    right = trained(step(cast=False), steps=20, model=Standardised)
    record_property("steps skipped of 20, wrong", sum(wrong.skips))
    record_property("steps skipped of 20, right", sum(right.skips))
    assert sum(wrong.skips) == 20
    assert sum(right.skips) == 0


def test_amp207_manual_cast_of_positions(record_property):
    """4096 positions cast to float16 are 3073 different ones, in bfloat16 769."""
    position = torch.arange(4096)
    distinct = {
        dtype: len(position.to(dtype).unique()) for dtype in (torch.float16, torch.bfloat16)
    }
    record_property("distinct of 4096, float16", distinct[torch.float16])
    record_property("distinct of 4096, bfloat16", distinct[torch.bfloat16])
    assert len(position.float().unique()) == 4096
    assert distinct[torch.float16] < 3100
    assert distinct[torch.bfloat16] < 800


def test_amp208_nested_dtypes_share_the_cast_cache(record_property):
    """A weight used in float16 and again in a nested bfloat16 region raises: the cache keeps one."""
    layer, x = nn.Linear(16, 16), batches(1)[0][0]

    def forward(inner_dtype):
        with half_autocast():
            first = layer(x)
            with torch.autocast("cpu", dtype=inner_dtype):
                return layer(first)

    with pytest.raises(RuntimeError) as raised:
        forward(torch.bfloat16)
    record_property("raises", str(raised.value))
    assert "same dtype" in str(raised.value)
    assert forward(torch.float16).isfinite().all()


def test_amp208_sibling_dtypes(record_property):
    """A bfloat16 encoder before a float16 head: 6 times the error, and inf for values past 65504."""
    torch.manual_seed(0)
    encoder, head = nn.Linear(16, 64), nn.Linear(64, 4)
    x = batches(1)[0][0]
    exact = copy.deepcopy(head).double()(copy.deepcopy(encoder).double()(x.double()))

    def forward(first, second, factor=1.0):
        with torch.autocast("cpu", dtype=first):
            hidden = encoder(x * factor)
        with torch.autocast("cpu", dtype=second):
            return head(hidden).float()

    mixed = relative(forward(torch.bfloat16, torch.float16), exact)
    half = relative(forward(torch.float16, torch.float16), exact)
    record_property("relative error, bfloat16 then float16", mixed)
    record_property("relative error, float16 only", half)
    assert mixed > 3 * half
    assert not forward(torch.bfloat16, torch.float16, 1e5).isfinite().all()
    assert forward(torch.bfloat16, torch.bfloat16, 1e5).isfinite().all()


def test_amp209_raises_under_cuda_autocast(record_property):
    """`binary_cross_entropy` raises under CUDA autocast (asked of fake CUDA tensors)."""
    with FakeTensorMode():
        probability, target = torch.rand(4, device="cuda"), torch.ones(4, device="cuda")
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            with pytest.raises(RuntimeError) as raised:
                F.binary_cross_entropy(probability, target)
            F.binary_cross_entropy_with_logits(probability, target)
        finally:
            torch.set_autocast_enabled("cuda", before)
    record_property("raises", str(raised.value).splitlines()[0])
    assert "binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast" in str(raised.value)


def test_amp209_lost_logarithm_on_a_cpu(record_property):
    """A half sigmoid of 12 is 1: the loss reads 100 instead of 12, and its gradient is NaN, not 1."""
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, 12.0)
    nn.init.zeros_(layer.bias)
    x, y = torch.ones(1, 1), torch.zeros(1, 1)
    results = {}
    for name, loss in (
        ("wrong", lambda logit: F.binary_cross_entropy(torch.sigmoid(logit), y)),
        ("right", lambda logit: F.binary_cross_entropy_with_logits(logit, y)),
    ):
        layer.zero_grad()
        with half_autocast():
            value = loss(layer(x))
        value.backward()
        results[name] = (value.item(), layer.weight.grad.item())
        record_property(f"loss, {name}", results[name][0])
        record_property(f"gradient, {name}", results[name][1])
    assert results["wrong"][0] == 100
    assert math.isnan(results["wrong"][1])
    assert results["right"] == pytest.approx((12, 1), rel=1e-3)


def test_amp210_log_of_softmax(record_property):
    """With logits 20 apart log(softmax) is -inf in float16: 20 of 20 steps skipped, not 0."""
    wrong = trained(
        right_step,
        20,
        scale=1.0,
        loss=lambda z, y: F.nll_loss(torch.log(torch.softmax(40 * z, 1)), y),
    )
    right = trained(
        right_step, 20, scale=1.0, loss=lambda z, y: F.nll_loss(torch.log_softmax(40 * z, 1), y)
    )
    record_property("steps skipped of 20, wrong", sum(wrong.skips))
    record_property("steps skipped of 20, right", sum(right.skips))
    assert sum(wrong.skips) >= 15
    assert sum(right.skips) == 0
    half = torch.tensor([-20.0, 0.0], dtype=torch.float16)
    assert torch.log(torch.softmax(half, 0))[0] == -torch.inf
    assert torch.log_softmax(half, 0)[0] == -20


class Normalised(nn.Module):
    """Hidden vectors divided by their norm plus eps; a padding row is all zeros."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.eps = eps
        self.inner, self.head = nn.Linear(16, 32, bias=False), nn.Linear(32, 4)

    def forward(self, x):
        hidden = self.inner(x)
        norm = hidden.square().sum(1, keepdim=True)
        return self.head(hidden / (norm + self.eps))


def test_amp211_eps_below_format(record_property):
    """eps 1e-8 is 0 in float16: a padding row gives 0/0, and 20 of 20 steps are skipped."""

    def padded(run, batch):
        x, y = batch
        right_step(run, (torch.cat([x[:-1], torch.zeros(1, 16)]), y))

    wrong = trained(padded, steps=20, model=lambda: Normalised(1e-8), scale=256.0)
    right = trained(padded, steps=20, model=lambda: Normalised(1e-3), scale=256.0)
    record_property("steps skipped of 20, wrong", sum(wrong.skips))
    record_property("steps skipped of 20, right", sum(right.skips))
    assert sum(wrong.skips) == 20
    assert sum(right.skips) == 0


def attention(x: torch.Tensor, mask: torch.Tensor, fill: float) -> torch.Tensor:
    with half_autocast():
        scores = x @ x.mT
        return scores.masked_fill(mask, fill).softmax(-1) @ x


def test_amp212_mask_constant_overflow(record_property):
    """`masked_fill(-1e9)` on half scores raises; `finfo(float16).min` masks exactly."""
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)
    with pytest.raises(RuntimeError) as raised:
        attention(x, mask, -1e9)
    record_property("raises", str(raised.value))
    assert "value cannot be converted to type c10::Half without overflow" in str(raised.value)
    right = attention(x, mask, torch.finfo(torch.float16).min)
    exact = (x @ x.mT).masked_fill(mask, -torch.inf).softmax(-1) @ x
    assert relative(right, exact) < 2e-3


def test_amp212_additive_mask(record_property):
    """`(1 - mask) * -1e9` in half is -inf: a fully masked row is NaN, with `finfo.min` it is not."""
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    keep = torch.ones(8, 8, dtype=torch.float16).tril()
    keep[5] = 0
    with half_autocast():
        scores = x @ x.mT
        wrong = (scores + (1 - keep) * -1e9).softmax(-1) @ x
        right = (scores + (1 - keep) * torch.finfo(torch.float16).min).softmax(-1) @ x
    rows = int(wrong.isnan().any(1).sum())
    record_property("rows of 8 that are NaN, wrong", rows)
    assert rows == 1
    assert right.isfinite().all()


class RMSNormed(nn.Module):
    """Root-mean-square normalisation by hand, of activations near 300."""

    def __init__(self, upcast: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.upcast = upcast
        self.inner, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        hidden = 1000 * self.inner(x)
        square = (hidden.float() if self.upcast else hidden).pow(2).mean(1, keepdim=True)
        return self.head((hidden * square.rsqrt()).relu())


def test_amp213_unprotected_square_sum(record_property):
    """x^2 of 300 overflows float16 and 1/inf is 0: the layer outputs zeros and its weights stay."""
    x = batches(1)[0][0]
    moved = {}
    for upcast in (False, True):
        run = trained(right_step, steps=20, model=lambda: RMSNormed(upcast), scale=256.0)
        start = RMSNormed(upcast).inner.weight
        moved[upcast] = (run.model.inner.weight - start).norm().item()
        with half_autocast():
            hidden = 1000 * run.model.inner(x)
            square = (hidden.float() if upcast else hidden).pow(2).mean(1, keepdim=True)
            zeros = (hidden * square.rsqrt() == 0).double().mean().item()
        name = "right" if upcast else "wrong"
        record_property(f"share of zero outputs, {name}", zeros)
        record_property(f"movement of the weights before it, {name}", moved[upcast])
        assert zeros > 0.99 if not upcast else zeros < 0.01
    assert moved[True] > 1e-2
    assert not moved[False] > 1e-3


class PlainProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class WrappedProduct(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        return PlainProduct.forward(ctx, x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return PlainProduct.backward(ctx, grad)


class Product(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weight = nn.Parameter(torch.randn(16, 4) / 4)

    def forward(self, x):
        return self.function.apply(x, self.weight)


def test_amp214_custom_function_raises_in_backward(record_property):
    """Without `custom_bwd` backward multiplies a half gradient by a float32 weight and raises."""
    with pytest.raises(RuntimeError) as raised:
        trained(right_step, steps=1, model=lambda: Product(PlainProduct))
    record_property("raises", str(raised.value))
    assert "same dtype" in str(raised.value)
    assert trained(right_step, steps=20, model=lambda: Product(WrappedProduct)).movement > 0.1


class SquareSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class SquareSumInFloat32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        return SquareSum.forward(ctx, x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        return SquareSum.backward(ctx, grad)


def test_amp214_custom_function_without_cast_inputs(record_property):
    """A hand-written square sum gets half inputs: inf, where `cast_inputs` gives 3.1e6."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 32), 300 * torch.ones(4, 16)
    with half_autocast():
        hidden = layer(x)
        wrong, right = SquareSum.apply(hidden), SquareSumInFloat32.apply(hidden)
    exact = hidden.double().square().sum().item()
    record_property("square sum, wrong", wrong.item())
    record_property("square sum, right", right.item())
    assert wrong.isinf()
    assert right.item() == pytest.approx(exact, rel=1e-6)


def test_amp215_autocast_is_thread_local(record_property):
    """A thread started in an autocast region, as DataParallel's are, runs its forward in float32."""
    layer, x = nn.Linear(16, 4), torch.ones(2, 16)
    seen = {}

    def wrong():
        seen["wrong"] = layer(x).dtype

    def right():
        with half_autocast():
            seen["right"] = layer(x).dtype

    with half_autocast():
        for target in (wrong, right):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    record_property("dtype in the thread, autocast outside forward", str(seen["wrong"]))
    record_property("dtype in the thread, autocast inside forward", str(seen["right"]))
    assert seen == {"wrong": torch.float32, "right": torch.float16}


class OwnAutocast(nn.Linear):
    def forward(self, x):
        with half_autocast():
            return super().forward(x)


def test_amp215_parallel_apply_loses_the_dtype(record_property, monkeypatch):
    """`parallel_apply` passes on that autocast is on, not its dtype: replicas run in the default.

    The CPU stands in for the accelerator, whose default is bfloat16 here and float16 on CUDA.
    `parallel_apply` asks for CUDA's autocast switch whatever the device, so it is set as well.
    """
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    x = torch.ones(2, 16)

    def replicas(layer: nn.Module) -> list[torch.dtype]:
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            with half_autocast():
                assert nn.functional.linear(x, torch.ones(4, 16)).dtype == torch.float16
                outputs = parallel_apply([layer, layer], [(x,), (x,)], devices=None)
        finally:
            torch.set_autocast_enabled("cuda", before)
        return [each.dtype for each in outputs]

    wrong, right = replicas(nn.Linear(16, 4)), replicas(OwnAutocast(16, 4))
    record_property("dtype of the replicas, autocast(float16) outside", str(wrong[0]))
    record_property("dtype of the replicas, autocast(float16) inside", str(right[0]))
    assert wrong == [torch.bfloat16] * 2
    assert right == [torch.float16] * 2


def constant_scale(scale: float):
    def step(run, batch):
        run.optimizer.zero_grad()
        (run.loss(batch) * scale).backward()
        for parameter in run.model.parameters():
            parameter.grad /= scale
        run.optimizer.step()

    return step


def test_amp216_constant_scale_overflows(record_property):
    """A constant 2^20 overflows float16 once and every parameter is NaN; a scaler backs off."""
    wrong = trained(constant_scale(2.0**20), steps=20)
    right = trained(right_step, steps=20, scale=2.0**20)
    share = 1 - vector(wrong.model).isfinite().double().mean().item()
    record_property("share of parameters not finite after 20 steps, wrong", share)
    record_property("steps skipped of 20, right", sum(right.skips))
    assert share > 0.5
    assert finite(right.model)
    assert right.movement > 0.1


def test_amp216_constant_scale_underflows(record_property):
    """A constant 128 is too small for a loss weighted 1e-8: most gradients are 0."""
    settings = {"steps": 1, "loss": lambda output, y: 1e-8 * F.cross_entropy(output, y)}
    wrong = trained(constant_scale(128.0), **settings)
    right = trained(right_step, **settings, scale=2.0**24)
    record_property("share of zero gradients at 128, wrong", zero_share(wrong))
    record_property("share of zero gradients at a scale grown to 2^24, right", zero_share(right))
    assert zero_share(wrong) > zero_share(right) + 0.5


@pytest.mark.parametrize(("dtype", "stop"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_amp217_counting_stops(record_property, dtype, stop):
    """5000 correct answers counted one by one: 256 in bfloat16, 2048 in float16."""
    half, single = torch.zeros((), dtype=dtype), torch.zeros(())
    for _ in range(5000):
        half += 1
        single += 1
    record_property(f"count of 5000 in {dtype}", half.item())
    assert half == stop
    assert single == 5000


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 0.5), (torch.float16, 0.02)])
def test_amp217_running_loss(record_property, dtype, least):
    """The mean of 2000 running losses in half is off by 5 % in float16, by 80 % in bfloat16."""
    run = trained(right_step, steps=20)
    losses = [torch.tensor(each) for each in run.losses * 100]
    half, single = torch.zeros((), dtype=dtype), torch.zeros(())
    for loss in losses:
        half += loss.to(dtype)
        single += loss
    exact = sum(run.losses) * 100
    record_property(f"relative error of the mean in {dtype}", abs(half.item() / exact - 1))
    assert abs(half.item() / exact - 1) > least
    assert single.item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_amp218_autocast_for_another_device(record_property):
    """`autocast("cuda")` around CPU work casts nothing: 20 steps equal float32 bit for bit."""

    class Misdirected(Training):
        def autocast(self):
            return torch.autocast("cuda", dtype=torch.float16)

    wrong = Misdirected(scale=1.0)
    for batch in batches(20):
        right_step(wrong, batch)
    single = trained(right_step, steps=20, dtype=None, scale=1.0)
    right = trained(right_step, steps=20, scale=SCALE)
    record_property(
        "distance to float32, wrong", (vector(wrong.model) - vector(single.model)).norm().item()
    )
    record_property(
        "distance to float32, right", (vector(right.model) - vector(single.model)).norm().item()
    )
    assert torch.equal(vector(wrong.model), vector(single.model))
    assert not torch.equal(vector(right.model), vector(single.model))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the scaler is only disabled without CUDA")
def test_amp218_scaler_for_another_device(record_property):
    """`GradScaler("cuda")` without CUDA warns once and does not scale: small gradients are 0."""
    settings = {"loss": lambda output, y: 1e-6 * F.cross_entropy(output, y)}
    wrong, right = Training(**settings), Training(**settings)
    with pytest.warns(UserWarning, match="GradScaler is enabled, but CUDA is not available"):
        wrong.scaler = torch.amp.GradScaler("cuda")
    assert not wrong.scaler.is_enabled()
    for run in (wrong, right):
        right_step(run, batches(1)[0])
    record_property("share of zero gradients, wrong", zero_share(wrong))
    record_property("share of zero gradients, right", zero_share(right))
    assert zero_share(wrong) > 0.8 > 0.5 > zero_share(right)
