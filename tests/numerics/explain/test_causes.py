"""Each cause in its own words, at the place where it began, with what broke and how it grew."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.progress import Silent
from ampwise.numerics.result import Diagnosis
from ampwise.report.diagnosis import render, to_html, to_markdown
from ampwise.tasks import Task
from ampwise_lint.base.console import Console
from tests.numerics.cases import (
    CASES,
    apart,
    data,
    line_of,
    square,
    task,
    zero_row,
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Applies(nn.Module):
    """A linear layer, and a function of what it gives."""

    def __init__(self, function):
        super().__init__()
        self.lin, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.lin(x).float())


def origin_line(found: Diagnosis) -> int:
    assert found.origin is not None
    return found.origin.line


def verified(found: Diagnosis) -> list[str]:
    return [each.what for each in found.fixes if each.verified]


# -- by the elements that were lost ----------------------------------------------------------------


class Diffusion(nn.Module):
    """Of a thousand noise levels the first few are 0 in 16 bits."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        rates = torch.linspace(1e-5, 2e-2, 1000)
        self.register_buffer("alpha_bar", torch.cumprod(1 - rates, 0))

    def forward(self, x):
        alpha_bar = self.alpha_bar.to(torch.bfloat16)
        variance = 1 - alpha_bar  # <- here
        return self.lin(x) / variance.sqrt()[:, None]


def test_one_zero_among_a_thousand_differences_is_a_cancellation():
    found = diagnose(task(Diffusion, square, data(1000, 8)), "bf16", steps=2)
    assert (found.cause, origin_line(found)) == ("CANCELLATION", line_of(Diffusion))
    assert "numbers that rounded to 1" in found.explanation
    assert "0.996094" in found.explanation
    assert found.extent is not None
    assert found.extent.spans[0].count == 13  # samples, of 1,000


class Gumbel(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = self.lin(x)
        u = torch.linspace(0.001, 0.9999, h.numel()).view(h.shape).to(h.dtype)
        return h + torch.log(1 - u)  # <- here


def test_a_uniform_number_that_rounded_to_1_is_said():
    found = diagnose(task(Gumbel, square, data(4, 8)), "fp16", steps=2)
    assert (found.cause, origin_line(found)) == ("CANCELLATION", line_of(Gumbel))
    assert "numbers that rounded to 1. Next below it float16 has 0.999512" in found.explanation
    assert any("the function around line" in each for each in verified(found))


class Weighted(nn.Module):
    """Divides by differences of which a few are off by more than half; none is 0."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        left = torch.linspace(0.0, 0.9975, len(x)).to(torch.bfloat16)
        rest = 1.002 - left  # <- here
        return self.lin(x) / rest[:, None]


def test_differences_that_are_off_are_found_behind_the_division_that_shows_them():
    found = diagnose(task(Weighted, square, data(400, 8)), "bf16", steps=2)
    assert (found.status, found.cause) == ("fault", "CANCELLATION")
    assert origin_line(found) == line_of(Weighted)
    assert "of its result lost" in found.explanation
    assert "shows it" in found.explanation


# -- small constants -------------------------------------------------------------------------------


class Cosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        h = self.lin(x).half()
        return F.cosine_similarity(h, h.flip(0), dim=-1)  # <- here


class EpsBuffer(nn.Module):
    """An eps that is a tensor of no dimensions."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)
        self.register_buffer("eps", torch.tensor(1e-8))

    def forward(self, x):
        h = self.lin(x)
        norm = h.norm(dim=-1, keepdim=True)
        return h / (norm + self.eps.to(norm.dtype))  # <- here


@pytest.mark.parametrize("model", [Cosine, EpsBuffer])
def test_a_small_constant_that_is_a_tensor_counts(model):
    found = diagnose(task(model, apart, zero_row()), "fp16", steps=2)
    assert (found.cause, origin_line(found)) == ("EPS_UNDERFLOW", line_of(model))
    assert "the constant 1e-8" in found.explanation
    assert any("an eps that float16 holds" in each for each in verified(found))


class SquaredEps(nn.Module):
    """The eps is squared after it was added: 1.2e-4 squared is 0 as well."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        h = self.lin(x)
        norm = (h.norm(dim=-1, keepdim=True) + 1e-8) ** 2  # <- here
        return h / norm.half().sqrt()


def test_a_second_larger_eps_is_tried_where_the_first_fails():
    found = diagnose(task(SquaredEps, apart, zero_row()), "fp16", steps=2)
    assert (found.cause, origin_line(found)) == ("EPS_UNDERFLOW", line_of(SquaredEps))
    eps = {each.what: each for each in found.fixes if each.what.startswith("an eps that")}
    assert eps["an eps that float16 holds, larger"].verified
    assert eps["an eps that float16 holds"].cost.startswith("tried: ")


# -- inside the optimizer --------------------------------------------------------------------------


class HalfWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8).half()

    def forward(self, x):
        return self.lin(x.to(self.lin.weight.dtype))


class Told(Silent):
    """Which causes are told while a diagnosis goes on."""

    def __init__(self):
        self.causes = []

    def found(self, diagnosis):
        self.causes.append(diagnosis.cause)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.filterwarnings("ignore:model. parameters are float16", "ignore:precision fp32")
def test_an_eps_that_the_optimizers_format_lacks_is_found_in_the_optimizer(steps):
    broken = Task(
        model=HalfWeights,
        batches=lambda: [data(8, 8)] * 8,
        loss=square,
        optimizer=lambda m: torch.optim.Adam(m.parameters(), 1e-3),
        name="half Adam",
    )
    told = Told()
    found = diagnose(broken, "fp32", steps=steps, progress=told)
    assert "BAD_PARAMETER" not in told.causes  # what is found first is not the cause yet
    assert (found.cause, found.phase, found.step) == ("EPS_UNDERFLOW", "optimizer", 1)
    assert found.origin is not None
    assert (found.origin.op, found.origin.module) == ("addcdiv_", "lin")
    assert "its eps of 1e-8 is lost in float16" in found.explanation
    assert verified(found) == ["float32 parameters and optimizer state"]
    assert found.extent is not None
    assert 0 < found.extent.elements < 64
    assert [each.op for each in found.history][-2:] == ["div", "add_"]


# -- domains, masks and bounds ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda h: torch.acos(1.001 + 0 * h), "acos is defined from -1 to 1: 32 of 32 arguments are above, up to 1.001"),
        (lambda h: torch.sqrt(h - 2), "sqrt is defined from 0 on: 32 of 32 arguments are below, down to -"),
        (lambda h: torch.log(0 * h), "log is defined above 0: 32 of 32 arguments are 0"),
        (lambda h: torch.atanh(1.5 + 0 * h), "atanh is defined between -1 and 1: 32 of 32 arguments are above, up to 1.5"),
        (lambda h: torch.log1p(0 * h - 1), "log1p is defined above -1: 32 of 32 arguments are -1"),
    ],
)  # fmt: skip
def test_who_is_outside_of_a_domain_is_said_and_a_clamp_is_tried(function, said):
    found = diagnose(task(lambda: Applies(function), square, data(4, 8)), "bf16", steps=2)
    assert found.cause == "DOMAIN_ERROR"
    assert found.explanation.startswith(said)
    assert verified(found)[0].startswith("keep the argument of")
    assert "into the function's domain: x.clamp(m" in found.fixes[0].how


def test_a_spread_of_one_sample_says_that():
    model = lambda: Applies(lambda h: h[:1].std(0))  # noqa: E731
    found = diagnose(task(model, square, data(4, 8)), "bf16", steps=2)
    assert found.cause == "EMPTY_REDUCTION"
    assert "std of 1 value divides by one less than their number, which is 0" in found.explanation
    assert verified(found) == ["the spread of one sample is 0"]
    assert "correction=0" in found.fixes[0].how


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.temperature = nn.Linear(8, 8), nn.Parameter(torch.ones(()))

    def forward(self, x):
        scores = self.lin(x)
        scores = scores.masked_fill(torch.eye(8).bool(), float("-inf"))  # <- here
        return torch.softmax(scores * self.temperature, dim=-1)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_mask_that_a_learned_temperature_scales_is_named(precision):
    found = diagnose(task(Tempered, square, data(8, 8)), precision, steps=2)
    assert found.cause == "BACKWARD_SINGULARITY"
    assert origin_line(found) == line_of(Tempered)
    assert "8 elements of -inf, made on line" in found.explanation
    assert "0 times -inf" in found.explanation
    assert verified(found) == ["mask with a number that the format has"]


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        p = torch.sigmoid(20 * self.lin(x)).half()
        p = p.clamp(1e-6, 1 - 1e-6)  # <- here
        return torch.log(1 - p) * 1e-3 + self.lin(x)


class ClampedTanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = self.lin(x)
        p = torch.tanh(4 * h).half().clamp(-1 + 1e-6, 1 - 1e-6)  # <- here
        return 0.01 * torch.atanh(p) + h


@pytest.mark.parametrize("model", [Clamped, ClampedTanh])
def test_a_bound_that_rounds_to_1_is_named_with_one_that_does_not(model):
    found = diagnose(task(model, square, data(8, 8)), "fp16", steps=2)
    assert (found.cause, origin_line(found)) == ("EPS_UNDERFLOW", line_of(model))
    assert "0.999999 of clamp on line" in found.explanation
    assert "rounds to" in found.explanation
    assert "0.99951" in found.explanation
    assert "bounds that float16 holds" in verified(found)


# -- counting and positions ------------------------------------------------------------------------


class Counter(nn.Module):
    """Counts tokens one by one in 16 bits, and turns by the count."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        count = torch.full((4,), 250.0, dtype=torch.bfloat16)
        for _ in range(40):
            count = count + 1  # <- here
        return self.lin(x) * torch.cos(count.float())[:, None]


def test_counts_that_stop_are_said_to_stop():
    found = diagnose(task(Counter, apart, data(4, 8)), "bf16", steps=2)
    assert (found.cause, origin_line(found)) == ("PRECISION_LOSS", line_of(Counter))
    assert "Counts stop at 256 in bfloat16" in found.explanation


class NearOne(nn.Module):
    """A share of nearly all, rounded to 1 before what is left is needed."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("kept", torch.linspace(0.9, 0.9999, 8))

    def forward(self, x):
        return self.lin(x) * self.weight(self.kept)

    def weight(self, kept):
        kept = kept.half()
        return kept / (1 - kept)  # <- here


def test_float32_comes_before_float64_where_both_mend():
    found = diagnose(task(NearOne, square, data(8, 8)), "fp16", steps=2)
    assert found.cause == "CANCELLATION"
    held = [each.what.split()[-1] for each in found.fixes if each.verified]
    assert held.index("float32") < held.index("float64")


class Slots(nn.Module):
    """The place of each token among those before it, counted up in the format of a mask."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = self.lin(x)
        slot = torch.cumsum(torch.ones_like(h[:, :1]), dim=0)  # <- here
        return h * torch.nn.functional.one_hot(slot.long().squeeze(1), 602)[:, 1:9]


def test_a_sum_of_ones_in_16_bits_counts():
    found = diagnose(task(Slots, apart, data(600, 8)), "bf16", steps=2)
    assert (found.cause, origin_line(found)) == ("PRECISION_LOSS", line_of(Slots))
    assert "counts to 256 and goes on in steps of 2" in found.explanation


class Degree(nn.Module):
    """A mean over neighbours, whose number is added up in the format of the features."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h, to = self.lin(x), torch.zeros(len(x), dtype=torch.long)
        total = torch.zeros(1, 8).index_add_(0, to, h.float())
        degree = h.new_zeros(1).index_add_(0, to, torch.ones_like(h[:, 0]))  # <- here
        return total / degree


def test_ones_added_up_at_an_index_count():
    found = diagnose(task(Degree, square, data(1200, 8) + 1), "bf16", steps=2)
    assert (found.cause, origin_line(found)) == ("PRECISION_LOSS", line_of(Degree))
    assert "added one by one stop at 256" in found.explanation


def test_positions_are_told_their_steps():
    found = diagnose(CASES["rounded positions"].make(), "bf16", steps=2)
    assert "counts to 256 and goes on in steps of 2, of 4 at the end" in found.explanation


class Angles(nn.Module):
    """Rounded by hand, turned in float32 later."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        angles = (x.abs() * 1000 + 20000).to(torch.bfloat16)  # <- here
        return self.lin(torch.sin(angles.float()))


class ShownLater(nn.Module):
    """Digits that were rounded away are missed by a difference in float32."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        height = (x + 1000).to(torch.bfloat16)  # <- here
        return self.lin(height.float() - 1000)


def test_angles_are_told_their_spacing_where_they_were_rounded():
    found = diagnose(task(Angles, apart, data(8, 8)), "bf16", steps=2)
    assert (found.cause, origin_line(found)) == ("PRECISION_LOSS", line_of(Angles))
    assert "23,411 is kept in bfloat16 at a spacing of 128" in found.explanation
    assert "which repeats every 6.28" in found.explanation
    assert found.extent is not None
    assert 0 < found.extent.elements <= 64


def test_rounding_is_placed_where_it_began_not_where_float32_shows_it():
    found = diagnose(task(ShownLater, apart, data(8, 8)), "bf16", steps=2)
    assert (found.cause, origin_line(found)) == ("CANCELLATION", line_of(ShownLater))
    assert "at a spacing of 4" in found.explanation
    assert "takes a difference of at most 3.411 of such numbers" in found.explanation
    assert [each.op for each in found.history] == ["add", "_to_copy", "_to_copy"]
    assert all(1000 < each.extreme <= 1004 for each in found.history)


# -- extent, history, scale, signs -----------------------------------------------------------------


def few_rows() -> torch.Tensor:
    batch = torch.zeros(6, 10, 8)
    batch[1, 4:7, 2] = -3e3
    batch[5, 0, 2] = -3e3
    return batch


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        h = x.half() * 4
        return h * 10 * self.scale  # <- here


def test_extent_history_and_sign_are_said_everywhere(capsys):
    found = diagnose(
        task(Grows, lambda m, b: m(b).float().abs().mean(), few_rows()), "fp16", steps=2
    )
    assert found.cause == "RANGE_OVERFLOW"
    assert "would be -120,000; float16 ends at -65,504" in found.explanation
    assert "the largest -12,000" in found.explanation
    assert found.extent is not None
    assert (found.extent.elements, found.extent.of) == (4, 480)
    assert [(each.name, each.first) for each in found.extent.spans] == [
        ("sample", [1, 5]), ("axis 1", [0, 4, 5, 6]), ("axis 2", [2])
    ]  # fmt: skip
    assert [each.extreme for each in found.history] == [-3000, -12000, -120000]
    assert found.origin is not None
    assert (found.origin.inputs[0].low, found.origin.inputs[0].high) == (-12000, 0)
    assert Diagnosis.from_json(found.to_json()).to_json() == found.to_json()
    render(found, Console(width=200))
    broken = "samples 1, 5 of 6, 0, 4, 5, 6 of 10 along axis 1, 2 of 8 along axis 2"
    for shown in (capsys.readouterr().out, to_html(found)):
        assert broken in shown
        assert "-12,000" in shown
        assert "mul" in shown
    assert "samples 1, 5 of 6" in to_markdown(found)
    assert "How it came to that" in to_markdown(found)


def test_a_backward_figure_says_under_which_scale_it_was_measured():
    found = diagnose(CASES["length of zero"].make(), "fp16", steps=2)
    assert found.phase == "backward"
    assert found.measured_scale == 16
    assert found.explanation.endswith("Measured under a loss scale of 16.")
    benign = diagnose(CASES["scale too high"].make(), "fp16", steps=6)
    assert "Only the loss scale of 2^1" in benign.explanation
    assert benign.measured_scale == benign.loss_scale


@pytest.mark.parametrize(
    ("name", "elements", "of"),
    [
        ("bad data", 1, 256),
        ("bad parameter", 1, 1024),
        ("bfloat16 weights", 64, 64),
        ("gradients underflow", 1056, 1056),
        ("fully masked row", 72, 144),
        ("rounded positions", 269, 700),
        ("flushed to zero", 256, 256),
        ("digits shifted out", 256, 256),
    ],
)
@pytest.mark.filterwarnings("ignore:model. parameters", "ignore:precision bf16 was not active")
def test_every_cause_says_how_much_broke(name, elements, of):
    case = CASES[name]
    found = diagnose(case.make(), case.precision, steps=3)
    assert found.cause == case.cause
    assert found.extent is not None
    assert (found.extent.elements, found.extent.of) == (elements, of)


class SparseRoot(nn.Module):
    """The gradient of an embedding is sparse, and infinite."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, words):
        return (self.table(words) * 0).square().sum(-1).sqrt()  # <- here


def test_a_sparse_gradient_is_followed_like_any_other():
    words = torch.arange(20).view(4, 5)
    found = diagnose(task(SparseRoot, square, words), "fp32", steps=2)
    assert (found.cause, origin_line(found)) == ("BACKWARD_SINGULARITY", line_of(SparseRoot))
    assert found.extent is not None
