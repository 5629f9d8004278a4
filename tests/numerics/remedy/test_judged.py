"""A fix is held against what was wrong, and nothing is advised that was not tried."""

from __future__ import annotations

import importlib.util
import itertools
import re

import pytest
import torch
from torch import nn

from ampwise.numerics.diagnose import diagnose
from ampwise.numerics.examine import Examiner
from ampwise.numerics.observe.gradient_errors import GradientErrors
from ampwise.numerics.observe.reference import reference
from ampwise.numerics.remedy.candidate import AS_IT_IS, Candidate
from ampwise.numerics.remedy.fix import Judgement, judged, tried
from ampwise.numerics.result import Diagnosis, Fix
from ampwise.policy import PRESETS
from ampwise.step import TrainStep
from ampwise.step.replay import Replay
from tests.numerics.cases import CASES, Plain, data, square, task


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def fix(found: Diagnosis, begins: str) -> Fix:
    named = [each for each in found.fixes if each.what.startswith(begins)]
    assert named, [each.what for each in found.fixes]
    return named[0]


# -- what a fix is held against --------------------------------------------------------------------


def vanishing(model, batch):
    return square(model, batch) * 1e-19


def test_a_gradient_that_stays_zero_is_not_mended_however_small_it_should_be():
    found = diagnose(task(lambda: Plain(8), vanishing, data(8, 8)), "fp16", steps=3)
    assert found.cause == "UNDERFLOW"
    scaled = fix(found, "a loss scale of")
    assert scaled.verified
    assert scaled.what == "a loss scale of 2^58"
    assert "2^58, tried on this step" in found.explanation
    assert "init_scale=2.0**58, ceiling=2.0**58" in scaled.how


def test_nobody_is_advised_to_switch_on_what_is_on():
    found = diagnose(task(lambda: Plain(8), vanishing, data(8, 8)), "fp16", steps=3)
    assert "switch loss scaling on" not in fix(found, "a loss scale of").how
    off = diagnose(CASES["gradients underflow"].make(), "fp16:scaling=off", steps=3)
    assert fix(off, "a loss scale of").how.startswith("switch loss scaling on")


class Damp(torch.autograd.Function):
    """Makes the gradient smaller by far, in 16 bits."""

    @staticmethod
    def forward(ctx, h):
        return h * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 1e-7


class Damped(nn.Module):
    """The gradient is 1e-14 of what comes in: too large there, or too small here."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return Damp.apply(Damp.apply(self.lin(x)))


def test_a_scale_is_promised_only_if_the_step_is_right_under_it():
    found = diagnose(task(Damped, square, data(8, 8)), "fp16", steps=3)
    assert found.cause == "UNDERFLOW"
    assert "under which, as under smaller ones that were tried" in found.explanation
    assert not any(each.what.startswith("a loss scale of") for each in found.fixes)


class Exponential(nn.Module):
    """Its result is beyond float16, and its gradient, but for a loss scale below 1."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = self.lin(x)
        return torch.exp(h + 14)  # <- here


def mean_times(factor: float):
    return lambda model, batch: factor * model(batch).float().mean()


def test_a_fix_may_need_a_loss_scale_below_1():
    found = diagnose(task(Exponential, mean_times(8), data(8, 8)), "fp16", steps=2)
    assert found.cause == "RANGE_OVERFLOW"
    mended = fix(found, "line ")
    assert mended.verified, mended.cost
    assert mended.cost.endswith("under a loss scale of 2^-8")


def test_a_scale_that_settles_below_1_is_no_fault():
    found = diagnose(task(lambda: Plain(8), mean_times(1e7), data(8, 8)), "fp16", steps=1)
    assert (found.status, found.cause) == ("benign", "SCALE_TOO_HIGH")
    assert found.findings == []
    lower = fix(found, "a lower initial loss scale")
    assert lower.verified, lower.cost
    assert "init_scale=2.0**-5" in lower.how


def test_a_finite_step_is_looked_at_under_a_scale_that_has_settled_below_1():
    model = Plain(8)
    step = Replay(TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp16"))
    loss = mean_times(1e7)
    stash = step.rehearsal(lambda step, x: step.micro_batch(loss, x), [data(8, 8)])
    found = Examiner(step, "plain").quiet(stash)
    assert (found.status, found.cause) == ("clean", None)
    assert "SQNR of the gradient against float64" in found.notes[0]


def test_a_fix_under_which_only_backward_fails_says_so():
    found = diagnose(task(Exponential, mean_times(1e12), data(8, 8)), "fp16", steps=2)
    complaint = fix(found, "line ").cost
    assert "still not finite: forward is, and gradients are not" in complaint


class Reciprocal(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("table", 1 / torch.arange(8.0))

    def forward(self, x):
        return self.lin(x) * self.table


def test_a_constant_that_its_constructor_makes_inf_is_not_restored():
    found = diagnose(task(Reciprocal, square, data(4, 8)), "fp16", steps=2)
    assert found.cause == "BAD_BUFFER"
    assert not any(each.verified for each in found.fixes)
    assert "table: 1 of 8 elements: index 0 of 8; look at its constructor" in found.fixes[0].how


# -- only what was tried is advised ----------------------------------------------------------------


def test_a_mask_is_told_only_the_constant_that_was_tried():
    found = diagnose(CASES["mask constant"].make(), "fp16", steps=2)
    mask = fix(found, "mask with a number")
    assert mask.verified
    assert "finfo(x.dtype).min" in mask.how
    assert "inf')" not in mask.how


@pytest.mark.parametrize(
    ("case", "never"),
    [
        ("normalize a zero row", "finfo(x.dtype).tiny"),
        ("fully masked row", "merge the masks"),
        ("nothing selected", "skip the batch"),
        ("bad buffer", "from a checkpoint"),
        ("length of zero", "x + eps"),
    ],
)
def test_nothing_is_advised_beside_what_was_verified(case, never):
    found = diagnose(CASES[case].make(), "fp16", steps=2)
    verified = [each for each in found.fixes if each.verified]
    assert verified
    assert not any(never in each.how for each in verified)


def test_computing_in_float64_is_called_so():
    found = diagnose(CASES["mean of squares"].make(), "fp16", steps=2)
    wide = fix(found, "the function around line")
    assert wide.verified
    assert "in float64" in wide.what
    assert "not tried" not in wide.how


# -- what could not be tried -----------------------------------------------------------------------


class FromIntegers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = self.lin(x)
        kept = (h > 0).float() - (x < 0).int().float()
        return (1 - kept) * (h * 1e5)  # <- here


class Forces(nn.Module):
    """Derivatives with respect to a 16-bit tensor, inside forward."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        x = x.half().detach().requires_grad_()
        energy = (self.lin(x) * 300).square().sum()  # <- here
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


class Particular(nn.Module):
    """Refuses what is not 16 bits."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = self.lin(x) * 1e3
        h = h * 1e3
        if h.dtype != torch.float16:
            raise TypeError("expected float16")
        return h


def test_integers_and_derivatives_of_copies_do_not_end_a_trial():
    for model in (FromIntegers, Forces):
        found = diagnose(task(model, square, data(4, 8)), "fp16", steps=2)
        assert found.cause == "RANGE_OVERFLOW"
        assert fix(found, "the function around line").verified, found.fixes
        assert not any("could not be tried" in each.cost for each in found.fixes)


def test_what_could_not_be_tried_says_so_and_why():
    found = diagnose(task(Particular, square, data(4, 8)), "fp16", steps=2)
    assert fix(found, "line").cost == "could not be tried: TypeError: expected float16"


# -- how often it is run ---------------------------------------------------------------------------


def test_a_fix_is_judged_by_one_replay_and_without_backward_where_the_loss_is_not_finite():
    model = nn.Linear(4, 4)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    backwards: list[int] = []
    model.weight.register_hook(lambda _: backwards.append(1))
    replay = Replay(step)

    def of(batch: torch.Tensor) -> Judgement:
        stash = replay.rehearsal(
            lambda again, x: again.micro_batch(lambda m, x: m(x).square().mean(), x), [batch]
        )
        wanted = reference(replay, stash)
        backwards.clear()
        return judged(replay, stash, AS_IT_IS, wanted)

    right = of(torch.randn(2, 4))
    assert not right.complaint
    assert right.sqnr_db is not None
    assert len(backwards) == 1
    assert of(torch.full((2, 4), float("inf"))).complaint == "still not finite"
    assert not backwards


# -- what does not show in the whole gradient ------------------------------------------------------


def test_a_gradient_that_was_wrong_counts_by_itself():
    ideal = {"large": torch.full((4, 4), 100.0).double(), "small": torch.ones(4, 4).double()}
    actual = {"large": torch.full((4, 4), 101.0), "small": torch.full((4, 4), -1.0)}
    before = GradientErrors(actual, ideal)
    assert before.sqnr_db > 30
    assert before.hidden() == ["small"]
    half = GradientErrors({**ideal, "small": torch.full((4, 4), 0.9)}, ideal)
    assert half.least([]) == (pytest.approx(60, abs=0.1), "")
    assert half.least(["small"]) == (pytest.approx(20, abs=0.1), "small")
    assert GradientErrors({**actual, "large": -ideal["large"]}, ideal).hidden() == []  # it shows


# -- costs -----------------------------------------------------------------------------------------


def test_costs_have_an_interval_or_are_not_measured():
    found = diagnose(CASES["scores before scaling"].make(), "fp16", steps=2)
    verified = [each for each in found.fixes if each.verified]
    for each in verified:
        if each.step_time_ratio is None:
            assert "time not measured: " in each.cost  # too noisy, or too slow
        else:
            assert each.step_time_low <= each.step_time_ratio <= each.step_time_high
            assert re.match(r"\d+\.\d\dx \[\d", each.cost)


def test_a_step_that_does_not_read_as_itself_measures_nothing(monkeypatch):
    times = itertools.cycle([1e-3, 4e-3, 2e-3, 9e-3, 1e-3, 3e-3, 7e-3])

    def noisy(step, stash, candidate, *, backward):
        return next(times)

    monkeypatch.setattr("ampwise.numerics.remedy.costs._time_s", noisy)
    found = diagnose(CASES["scores before scaling"].make(), "fp16", steps=2)
    for each in found.fixes:
        if each.verified:
            assert each.cost.startswith("time not measured: ")
            assert each.step_time_ratio is None


def test_a_step_that_takes_long_is_not_timed(monkeypatch):
    monkeypatch.setattr("ampwise.numerics.remedy.costs._time_s", lambda *_, backward: 3.0)
    found = diagnose(CASES["scores before scaling"].make(), "fp16", steps=2)
    assert fix(found, "line").cost.startswith("time not measured: one forward takes 3.0 s")


def test_no_backward_is_timed_where_the_forwards_already_take_too_long(monkeypatch):
    timed: list[bool] = []

    def noting(step, stash, candidate, *, backward):
        timed.append(backward)
        return 3.0

    monkeypatch.setattr("ampwise.numerics.remedy.costs._time_s", noting)
    diagnose(CASES["scores before scaling"].make(), "fp16", steps=2)
    assert timed == [False]


def test_where_the_step_takes_too_long_forwards_take_turns(monkeypatch):
    timed: list[bool] = []

    def noting(step, stash, candidate, *, backward):
        timed.append(backward)
        return 3.0 if backward else 1e-3

    monkeypatch.setattr("ampwise.numerics.remedy.costs._time_s", noting)
    found = diagnose(CASES["scores before scaling"].make(), "fp16", steps=2)
    assert timed.count(True) == 1
    assert "the time of forward" in fix(found, "line").cost


def test_arms_take_turns(monkeypatch):
    order: list[str] = []

    def noting(step, stash, candidate, *, backward):
        order.append(candidate.what)
        return 1e-3

    monkeypatch.setattr("ampwise.numerics.remedy.costs._time_s", noting)
    found = diagnose(CASES["summed cross-entropy"].make(), "fp16", steps=2)
    verified = [each.what for each in found.fixes if each.verified]
    assert len(verified) > 1
    rounds = order.count(verified[0])
    assert rounds > 5
    assert all(order.count(each) == rounds for each in verified)
    fixes = [each for each in order if each in verified]
    every = len(verified)
    assert all(sorted(fixes[i : i + every]) == sorted(verified)
               for i in range(0, len(fixes), every))  # fmt: skip


# -- when nothing single suffices ------------------------------------------------------------------


def shrunk(h, layer):
    y = layer(h)
    return y / 3e5


class Spread(nn.Module):
    """Too large over two functions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x) * 3e4 * 10  # <- here
        return shrunk(h, self.last)


def test_two_functions_mend_what_none_of_them_does():
    found = diagnose(task(Spread, square, data(4, 8)), "fp16", steps=2)
    assert found.fixes[0].what.startswith("the functions around lines")
    assert found.fixes[0].verified
    last = [each for each in found.fixes if each.verified][-1]
    assert last.what.startswith("bfloat16")
    assert not fix(found, "line").verified


def rounded(x):
    return (x + 1000).to(torch.bfloat16)


def shown(h):
    return h.to(torch.bfloat16).float() - 1000


class Twice16(nn.Module):
    """Rounds in one function, and again in another: each alone loses the digits."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return self.lin(shown(rounded(x)))


def test_two_functions_mend_a_silent_fault_too():
    found = diagnose(task(Twice16, square, data(8, 8)), "bf16", steps=2)
    assert found.cause == "CANCELLATION"
    held = [each.what for each in found.fixes if each.verified]
    assert [each.partition(" around lines")[0] for each in held] == ["the functions"]


STAGES = """
def stage{i}(x, layer):
    return x + layer(x)
"""


def staged(folder, count: int):
    """Functions that each stand in lines of their own, in a file."""
    path = folder / "stages.py"
    path.write_text("".join(STAGES.format(i=i) for i in range(count)))
    spec = importlib.util.spec_from_file_location("stages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [getattr(module, f"stage{i}") for i in range(count)]


class Tower(nn.Module):
    """Carries a large input through."""

    def __init__(self, stages):
        super().__init__()
        self.stages = stages
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in stages)

    def forward(self, x):
        for stage, layer in zip(self.stages, self.layers, strict=True):
            x = stage(x, layer)
        return x


def relative(model, batch):
    out = model(batch).float()
    return (out / out.detach().norm() - 1).square().mean()


def test_a_large_input_is_made_smaller_where_no_span_suffices(tmp_path):
    stages = staged(tmp_path, 9)
    found = diagnose(task(lambda: Tower(stages), relative, 1e6 * data(4, 8)), "fp16", steps=2)
    smaller = fix(found, "a smaller input")
    assert smaller.verified
    assert "divide batch (up to 2,115,219) by 2^22" in smaller.how


def carried(scores):
    return scores.half().transpose(-1, -2)


def again(scores):
    return carried(scores).half().contiguous()


def once_more(scores):
    return again(scores).half().transpose(-1, -2)


def further(scores):
    return once_more(scores).half().contiguous()


def scaled(scores):
    return further(scores).half() / 512


class FarScaling(nn.Module):
    """Scores that are divided only after five functions have passed them on."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x):
        q = self.project(x) + 40
        return torch.softmax(scaled(self.scores(q)), dim=-1) @ q

    def scores(self, q):
        return q @ q.transpose(-1, -2)  # <- here


def test_a_value_is_carried_in_another_unit_where_it_is_divided_later():
    found = diagnose(task(FarScaling, square, data(2, 5, 64)), "fp16", steps=2)
    assert found.cause == "RANGE_OVERFLOW"
    unit = fix(found, "carry the value in a larger unit")
    assert unit.verified, found.fixes
    assert "divide the first factor by 256" in unit.how


def test_what_is_in_float32_already_is_not_offered_float32():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            h = self.lin(x).float()
            return h * 1e30 * 1e30  # <- here

    found = diagnose(task(Wide, square, data(4, 8)), "fp16", steps=2)
    assert not any(each.what.startswith("line") for each in found.fixes)


def test_a_fix_that_gains_nothing_is_not_verified_on_a_step_that_holds_without_it():
    model = Plain(8)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16")
    again = Replay(step)
    stash = again.rehearsal(lambda step, x: step.micro_batch(square, x), [data(8, 8)])
    wanted = reference(again, stash)
    mends = [
        Candidate("nothing", ""),
        Candidate("float32", "", policy=PRESETS["fp32"]),
    ]
    nothing, float32 = sorted(
        tried(again, stash, mends, wanted), key=lambda each: each.what, reverse=True
    )
    assert not nothing.verified
    assert re.search(r"it gains next to nothing: gradients of (\d+) dB, \1 dB", nothing.cost)
    assert float32.verified


class Chosen(nn.Module):
    """Trains the one of two rows that is nearer, in 16 bits throughout."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.tensor([[256.0, 255.0], [256.0, 254.0]]))

    def forward(self, x):
        far = (self.rows.square().sum(1) - 2 * x @ self.rows.t()).argmin(-1)
        return (self.rows[far] - x).square().mean()


def test_the_reference_of_16_bit_parameters_chooses_by_itself():
    model, x = Chosen().bfloat16(), torch.tensor([[256.0, 254.0]], dtype=torch.bfloat16)
    assert float(model(x)) > 0  # by rounded squares it is the other row
    assert float(Chosen()(x.float())) == 0
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16-pure")
    again = Replay(step)
    stash = again.rehearsal(lambda step, x: step.micro_batch(lambda m, x: m(x), x), [x])
    assert reference(again, stash).losses == [0.0]


class Noisy(nn.Module):
    """Overflows in float16; bfloat16 leaves few digits of its small differences."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = self.lin(x) * 1e-2 + 1
        grown = h * 1e5  # <- here
        return (grown * 1e-5 - 1).float() * 100


def test_a_format_that_holds_says_of_which_matrix_it_leaves_little():
    found = diagnose(task(Noisy, square, data(32, 8)), "fp16", steps=2)
    other = fix(found, "bfloat16")
    assert other.verified, other.cost
    assert "; the gradient of lin.weight keeps " in other.cost
    assert "keeps" not in fix(found, "line ").cost
