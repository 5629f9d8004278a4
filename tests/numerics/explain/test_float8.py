"""What is lost in float8: beyond the format, below its scale, and by a scale that is inf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.explain.causes import of_itself
from ampwise.numerics.observe.exact import exact
from ampwise.numerics.observe.gradient_errors import GradientErrors
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.shadow import ShadowRun, shadow
from ampwise.numerics.result import Diagnosis
from ampwise.places import NOWHERE
from ampwise.step import TrainStep
from ampwise.step.replay import Replay
from tests.numerics.cases import apart, data, line_of, task

pytestmark = pytest.mark.filterwarnings("ignore:policy fp8.*emulated")


def verified(found: Diagnosis) -> list[str]:
    return [each.what for each in found.fixes if each.verified]


def rounded(values: Tensor, dtype: torch.dtype, scale: Any = 1.0) -> Tensor:
    """Through float8 and back, with the gradient passed on as it is."""
    back = (values * scale).to(dtype).float() / scale  # <- here
    return values + (back - values).detach()


class Rounding(nn.Module):
    """A layer whose result the model itself rounds to float8."""

    def __init__(self, dtype: torch.dtype, scale: Any = lambda _: 1.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64, bias=False), nn.Linear(64, 32)
        self._dtype, self._scale = dtype, scale

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.a(x).float())
        return self.b(rounded(hidden, self._dtype, self._scale(hidden)))


class Normalised(nn.Module):
    """A layer of which each row counts alike, however large it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.norm(self.a(x))))  # <- here


def one_row_larger() -> Tensor:
    x = data(32, 32)
    x[0] *= 1e9
    return x


# -- casts of the model's own ----------------------------------------------------------------------


def test_what_saturates_is_told_with_the_scale_that_fits() -> None:
    torch.manual_seed(0)
    found = diagnose(
        task(lambda: Rounding(torch.float8_e4m3fn), apart, data(32, 32) * 1e4), "bf16", steps=3
    )
    assert (found.status, found.cause) == ("fault", "RANGE_OVERFLOW")
    assert found.origin is not None
    assert (found.origin.op, found.origin.line) == ("_to_copy", line_of(rounded))
    assert "lie beyond it, up to" in found.explanation
    assert "it saturates, and they become 448" in found.explanation
    assert "which takes the largest to 448, fits all of it into the format" in found.explanation


def test_what_overflows_to_inf_is_told_with_the_scale_that_fits() -> None:
    torch.manual_seed(0)
    found = diagnose(
        task(lambda: Rounding(torch.float8_e5m2), apart, data(32, 32) * 1e6), "bf16", steps=3
    )
    assert (found.status, found.cause) == ("fault", "RANGE_OVERFLOW")
    assert "float8_e5m2 ends at 57,344" in found.explanation
    assert "which takes the largest to 57,344, fits all of it" in found.explanation


def test_overflow_to_nan_is_one_of_range() -> None:
    """As casts to e4m3, which has no inf, give it in torch up to 2.11."""
    value = torch.tensor([1.0, 1792.0])
    root = Root(
        0, "_to_copy", NOWHERE, 1, func=torch.ops.aten._to_copy.default, args=(value,),
        kwargs={"dtype": torch.float8_e4m3fn},
        outputs=[torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)],
    )  # fmt: skip
    found = of_itself(root)
    assert found is not None
    assert found.cause == "RANGE_OVERFLOW"
    assert "would be 1,792; float8_e4m3fn ends at 448" in found.words
    assert "A scale of 0.25, which takes the largest to 448, fits all" in found.words


def test_an_infinite_scale_is_named_as_one() -> None:
    """Of a tensor of zeros: 448 / 0."""
    torch.manual_seed(0)
    model = lambda: Rounding(torch.float8_e4m3fn, lambda h: 448 / h.abs().max())  # noqa: E731
    found = diagnose(task(model, apart, torch.zeros(32, 32)), "bf16", steps=3)
    assert (found.status, found.cause) == ("fault", "DOMAIN_ERROR")
    assert "It scales a tensor into float8_e4m3fn" in found.explanation
    assert "amax.float().clamp(min=1e-12)" in found.explanation


def test_a_scale_that_overflows_its_own_format_is_named_as_one() -> None:
    torch.manual_seed(0)
    model = lambda: Rounding(  # noqa: E731
        torch.float8_e4m3fn, lambda h: (448 / h.abs().max().clamp(min=1e-12)).half()
    )
    found = diagnose(task(model, apart, data(32, 32) * 1e-4), "bf16", steps=3)
    assert (found.status, found.cause) == ("fault", "RANGE_OVERFLOW")
    assert "float16 ends at 65,504" in found.explanation
    assert "keep scales in float32" in found.explanation


def test_a_scale_that_vanishes_in_its_own_format_is_underflow() -> None:
    torch.manual_seed(0)
    model = lambda: Rounding(  # noqa: E731
        torch.float8_e4m3fn, lambda h: (448 / h.abs().max().clamp(min=1e-12)).half()
    )
    found = diagnose(task(model, apart, data(32, 32) * 1e11), "bf16", steps=3)
    assert (found.status, found.cause) == ("fault", "UNDERFLOW")


def test_a_scale_that_fits_is_no_fault() -> None:
    torch.manual_seed(0)
    model = lambda: Rounding(  # noqa: E731
        torch.float8_e4m3fn, lambda h: 448 / h.abs().max().clamp(min=1e-12)
    )
    for size in (1e-4, 1.0, 10.0):
        found = diagnose(task(model, apart, data(32, 32) * size), "bf16", steps=3)
        assert found.status == "clean", found.explanation


# -- the policy ------------------------------------------------------------------------------------


def seen_by_shadow(policy: str) -> tuple[ShadowRun, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    again = Replay(step)
    stash = again.rehearsal(lambda step, x: step.micro_batch(apart, x), [data(32, 32)])
    run = shadow(again, stash)
    assert run.replayed.error is None
    return run, GradientErrors(run.replayed.gradients, run.gradients).sqnr_db


@pytest.mark.parametrize("native", [False, True])
def test_the_shadow_goes_through_products_in_float8(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """29 dB, of 25 to 31 dB that a rounding to e5m2 and e4m3 leaves; also through `_scaled_mm`."""
    pytest.importorskip("torchao", reason="needs ampwise[fp8]")
    from ampwise.step.precision import float8

    monkeypatch.setattr(float8, "multiplies_float8", lambda _: native)
    run, sqnr_db = seen_by_shadow("fp8")
    assert 20 < sqnr_db < 35
    names = {each.name for each in run.errors}
    assert ("_scaled_mm" in names) == native
    assert {each.place.phase for each in run.errors if each.dtype == "float8_e5m2"} == {"backward"}
    assert {each.place.module for each in run.errors if "float8" in each.dtype} == {"0", "2"}
    _, in_bfloat16_db = seen_by_shadow("bf16")
    assert in_bfloat16_db > sqnr_db + 5


def test_the_float64_form_of_a_scaled_product() -> None:
    left, right = (data(16, 32, seed=each).to(torch.float8_e4m3fn) for each in (0, 1))
    scales = torch.tensor(0.5), torch.tensor(0.25)
    args = (left, right.t(), *scales)
    func = torch.ops.aten._scaled_mm.default
    wanted = exact(func, args, {"out_dtype": torch.bfloat16})[0]
    made = torch._scaled_mm(*args, out_dtype=torch.bfloat16)
    torch.testing.assert_close(made.double(), wanted, rtol=2**-7, atol=1e-6)


def test_a_healthy_step_is_clean() -> None:
    pytest.importorskip("torchao", reason="needs ampwise[fp8]")
    torch.manual_seed(0)
    found = diagnose(task(Normalised, apart, data(32, 32)), "fp8", steps=3)
    assert found.status == "clean", found.explanation


def test_an_outlier_that_takes_the_others_to_0_is_found_and_mended() -> None:
    pytest.importorskip("torchao", reason="needs ampwise[fp8]")
    torch.manual_seed(0)
    found = diagnose(task(Normalised, apart, one_row_larger()), "fp8", steps=3)
    assert (found.status, found.cause) == ("fault", "UNDERFLOW")
    assert found.origin is not None
    assert (found.origin.module, found.origin.line) == ("a", line_of(Normalised))
    assert found.origin.dtype == "float8_e4m3fn"
    assert "97% of the values that are rounded to float8_e4m3fn become 0" in found.explanation
    assert "They share a scale with one that it takes to 448" in found.explanation
    assert verified(found) == [
        "a scale for each row, and weight gradients in bfloat16",
        "module a in float32",
        "bfloat16, which needs no scales",
    ]
    (best, *_) = found.fixes
    assert "fp8:recipe=rowwise_with_gw_hp" in best.how
    assert best.cost == "cost not measured: float8 is emulated here"


def test_what_bfloat16_cannot_do_either_is_not_laid_on_float8() -> None:
    """A cancellation in bfloat16, beside casts that take an outlier's neighbours to 0."""
    pytest.importorskip("torchao", reason="needs ampwise[fp8]")

    class Cancelling(Normalised):
        def forward(self, x: Tensor) -> Tensor:
            hidden = super().forward(x)
            return ((hidden + 4096).bfloat16() - 4096).float() * 1e3

    torch.manual_seed(0)
    found = diagnose(task(Cancelling, apart, one_row_larger()), "fp8", steps=3)
    assert found.status == "fault"
    assert "They share a scale" not in found.explanation
