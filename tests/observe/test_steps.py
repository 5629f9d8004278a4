"""Which step is open: accumulation, several optimizers, closures, skips."""

import textwrap

import pytest
import torch

from tests.observe.inside import observe

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""


@pytest.fixture
def script(tmp_path):
    def write(body):
        path = tmp_path / "script.py"
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    return write


def test_two_optimizers_in_an_iteration_are_one_step(script):
    seen = observe(
        script("""
        one, two = nn.Linear(4, 4), nn.Linear(4, 1)
        first = torch.optim.SGD(one.parameters(), 0.01)
        second = torch.optim.Adam(two.parameters(), 0.01)
        for _ in range(7):
            made = one(torch.randn(3, 4))
            two(made.detach()).sum().backward()
            two(torch.randn(3, 4)).sum().backward()
            second.step(); second.zero_grad()
            two(made).sum().backward()
            first.step(); first.zero_grad()
    """)
    )
    assert seen.report.steps == 7
    assert seen.report.optimizers == ["Adam", "SGD"]
    assert seen.report.micro_batches_per_step == 1
    assert [each["step"] for each in seen.lines] == list(range(1, 8))


def test_an_optimizer_that_steps_more_rarely_joins_the_step_of_the_other(script):
    seen = observe(
        script("""
        one, two = nn.Linear(4, 4), nn.Linear(4, 1)
        rare = torch.optim.SGD(one.parameters(), 0.01)
        often = torch.optim.SGD(two.parameters(), 0.01)
        for i in range(23):
            two(torch.randn(3, 4)).sum().backward()
            often.step(); often.zero_grad()
            if i % 5 == 4:
                two(one(torch.randn(3, 4))).sum().backward()
                rare.step(); rare.zero_grad()
    """)
    )
    assert seen.report.steps == 23


@pytest.mark.parametrize("count", [1, 3])
def test_micro_batches_are_counted_and_their_losses_added(script, count):
    seen = observe(
        script(f"""
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        x = torch.ones(2, 4)
        for _ in range(5):
            for _ in range({count}):
                (model(x).mean() / {count}).backward()
            optimizer.step(); optimizer.zero_grad()
        print(model(x).mean().item())
    """)
    )
    assert seen.report.micro_batches_per_step == count
    losses = {round(each["train/loss"], 5) for each in seen.lines}
    assert len(losses) == 1
    assert seen.report.steps == 5


def test_a_closure_is_a_step_and_its_gradients_are_looked_at_inside(script):
    seen = observe(
        script("""
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.ones(2, 4)
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss
        for _ in range(4):
            optimizer.step(closure)
    """)
    )
    assert seen.report.steps == 4
    assert all(each["amp/grad_norm"] > 0 for each in seen.lines)
    assert seen.lines[3]["train/loss"] < seen.lines[0]["train/loss"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_skip_is_seen_also_where_a_fused_optimizer_hides_it(script, fused):
    seen = observe(script(f"""
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), fused={fused})
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-30)
        for _ in range(5):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.ones(2, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    """), on_fault="off")  # fmt: skip
    skips = [each.step for each in seen.report.skips]
    assert skips == list(range(1, len(skips) + 1))
    assert 1 <= len(skips) <= 4
    assert seen.report.loss_scale is not None
    assert seen.report.loss_scale.backoffs == len(skips)
    assert seen.report.loss_scale.first == 2.0**127
    assert [each["amp/found_inf"] for each in seen.lines] == [
        each["step"] in skips for each in seen.lines
    ]


def test_the_norm_is_that_of_true_gradients_before_clipping(script):
    body = """
        model = nn.Linear(4, 1)
        optimizer = torch.optim.{kind}(model.parameters(), 0.0 {fused})
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled={scaled})
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if {clip}:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer); scaler.update()
    """
    wanted = (4 * 2**2 + 2**2) ** 0.5
    for kind, fused in (("SGD", ""), ("AdamW", ", fused=True")):
        for scaled in (False, True):
            for clip in (False, True):
                path = script(body.format(kind=kind, fused=fused, scaled=scaled, clip=clip))
                (line,) = observe(path).lines
                assert line["amp/grad_norm"] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("schedule", "noticed"),
    [
        ("schedule.step()", False),
        ("schedule.step() if scaler.get_scale() >= before else None", True),
        ("optimizer.param_groups[0].update(lr=0.1 / (i + 1))", False),
        ("None", None),
        ("schedule.step() if i % 6 == 5 else None", None),
    ],
    ids=["moves on", "held", "by hand", "no schedule", "once an epoch"],
)
def test_whether_the_schedule_was_held_in_a_skip(script, schedule, noticed):
    seen = observe(script(f"""
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(12):
            before = scaler.get_scale()
            loss = model(torch.ones(2, 4)).mean() * (float("inf") if i == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
            {schedule}
    """), on_fault="off")  # fmt: skip
    (skip,) = seen.report.skips
    assert (skip.step, skip.noticed_by_schedule) == (5, noticed)


def test_samples_and_waiting_are_counted(script):
    seen = observe(
        script("""
        import time
        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 12
            def __getitem__(self, i):
                time.sleep(0.002)
                return torch.ones(4), i
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, _ in torch.utils.data.DataLoader(Slow(), batch_size=3):
            model(x).mean().backward(); optimizer.step(); optimizer.zero_grad()
    """)
    )
    assert [each["train/samples"] for each in seen.lines] == [3, 3, 3, 3]
    assert seen.report.waited_for_data is not None
    assert 0.02 <= seen.report.waited_for_data <= 0.5
    assert all(each["train/data_wait_s"] <= each["train/step_s"] for each in seen.lines)


def test_a_script_is_stopped_after_so_many_steps(script, tmp_path):
    path = script(f"""
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            for i in range(100):
                model(torch.ones(2, 4)).mean().backward(); optimizer.step()
        finally:
            open({str(tmp_path / "cleaned")!r}, "w").write(str(i))
    """)
    seen = observe(path, steps=6)
    assert seen.report.steps == 6
    assert (seen.report.ending, seen.report.exit_code) == ("stopped", 0)
    assert (tmp_path / "cleaned").read_text() == "5"


def test_torch_is_as_before_afterwards(script):
    from torch.amp.autocast_mode import autocast
    from torch.amp.grad_scaler import GradScaler
    from torch.nn.utils import clip_grad
    from torch.optim import Optimizer, lr_scheduler, optimizer
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def state():
        owners = (
            torch.nn.Module, autocast, GradScaler, Optimizer, _BaseDataLoaderIter,
            lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau, clip_grad, torch.nn.utils,
        )  # fmt: skip
        hooks = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
        return [dict(vars(each)) for each in owners], torch.autograd.backward, list(map(len, hooks))

    before = state()
    observe(script("print(nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward())"))
    assert state() == before


def test_a_warning_names_the_line_that_it_names_without_us(script):
    path = script("""
        torch.autocast("cuda")  # here
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        schedule.step()  # and here
    """)
    with pytest.warns(UserWarning, match="CUDA is not available|lr_scheduler.step") as caught:
        observe(path)
    lines = path.read_text().splitlines()
    assert {lines[each.lineno - 1].partition("# ")[2] for each in caught} == {"here", "and here"}
    assert {each.filename for each in caught} == {str(path)}


def test_what_cannot_be_hooked_is_said_and_the_rest_goes_on(script, monkeypatch):
    from torch.nn.utils import clip_grad

    monkeypatch.delattr(clip_grad, "clip_grad_value_")
    seen = observe(
        script("""
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    """)
    )
    (missing,) = [each for each in seen.report.not_observed if each.what == "gradient clipping"]
    assert "clip_grad_value_" in missing.why
    assert seen.report.steps == 1


def test_a_failure_of_ours_leaves_the_script_alone_and_is_said(script, monkeypatch):
    from ampwise.observe.misuse import Misuse

    def broken(self, loss, scaler):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(Misuse, "backward_begins", broken)
    path = script("""
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    """)
    with pytest.raises(AssertionError):
        observe(path)


def test_the_norm_is_one_over_gradients_of_several_dtypes(script):
    (line,) = observe(
        script("""
        one, two = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False).double()
        three = nn.Linear(4, 1, bias=False).bfloat16()
        held = [each for model in (one, two, three) for each in model.parameters()]
        optimizer = torch.optim.SGD(held, 0.0)
        x = torch.ones(1, 4)
        (one(x) + two(x.double()) + three(x.bfloat16())).sum().backward()
        optimizer.step()
    """)
    ).lines
    assert line["amp/grad_norm"] == pytest.approx(12**0.5)


def test_a_race_of_precisions_is_no_training_of_the_scripts(script, monkeypatch, tmp_path):
    from ampwise.policy import PRESETS
    from ampwise.step import race

    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(race, "candidates", lambda _: ([PRESETS["bf16"]], {}))
    monkeypatch.setattr(
        race._Arm, "turn_ms", lambda arm: arm.gradients() and 2.0 - arm._rerun.policy.autocast
    )
    path = script("""
        import ampwise
        from ampwise.policy import PRESETS, Resolution
        guess = Resolution("auto", PRESETS["fp32"], "cpu", (), changed=False, guess=True)
        model = nn.Linear(4, 2)
        step = ampwise.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=guess)
        for _ in range(4):
            step(lambda m, x: m(x).float().mean(), torch.ones(8, 4))
        assert step.policy.name == "bf16" and "8 rounds" in str(step.resolution)
    """)
    seen = observe(path)
    assert (seen.report.exit_code, seen.report.steps) == (0, 4)
    assert seen.report.micro_batches_per_step == 1
    ran = seen.report.precision.ran.forward
    assert set(ran) == {"bfloat16"}
