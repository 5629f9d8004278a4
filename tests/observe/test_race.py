"""The race: which steps run in which precision, what is timed, and what it leaves alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampwise.cli.main import main
from ampwise.errors import UsageError
from ampwise.observe import race as racing
from ampwise.observe.race import racers
from tests.observe.inside import Seen, line_of, observe

HEAD = """
import contextlib, io, json, sys, time
from pathlib import Path
import torch
from torch import nn

torch.manual_seed(0)
ran = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        hidden = self.first(x)
        ran.append(str(hidden.dtype).removeprefix("torch."))
        after(hidden)
        return self.second(hidden)

def after(hidden):
    pass

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(4, 8), torch.ones(4, 1)

def train(steps, around=contextlib.nullcontext):
    for _ in range(steps):
        with around():
            output = net(x)
            loss = ((output - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LEAVE = "\nPath('ran.json').write_text(json.dumps(ran))\n"
STEPS = 60


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Makes a script of lines after `HEAD`, that leaves what it ran in."""
    monkeypatch.chdir(tmp_path)

    def write(lines: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(HEAD + lines + LEAVE)
        return path

    return write


def ran() -> list[str]:
    return json.loads(Path("ran.json").read_text())


def raced(path: Path, text: str = "bf16", **options: object) -> Seen:
    return observe(path, race=racers(text), **{"steps": 1000, **options})


def test_steps_take_turns_after_the_first_three(script):
    seen = raced(script(f"train({STEPS})"))
    dtypes = ran()
    assert dtypes[:3] == ["float32"] * 3
    rounds = [tuple(dtypes[i : i + 2]) for i in range(3, STEPS - 1, 2)]
    assert seen.report.race["bf16"].note == f"28 of {STEPS} steps ran in bf16"
    assert set(rounds) == {("float32", "bfloat16"), ("bfloat16", "float32")}
    assert seen.report.race["bf16"].pairs >= STEPS // 2 - 3 - racing.MAX_WARM_UP


def test_two_precisions_race_in_rounds_of_three(script):
    raced(script(f"train({STEPS})"), "bf16,fp16")
    dtypes = ran()
    for i in range(3, STEPS - 2, 3):
        assert sorted(dtypes[i : i + 3]) == ["bfloat16", "float16", "float32"]


def test_regions_that_the_script_enters_switch_and_are_reported_as_its_own(script):
    lines = f"train({STEPS}, lambda: torch.autocast('cpu', torch.bfloat16))"
    seen = raced(script(lines), "fp32,fp16")
    assert set(ran()[3:6]) == {"bfloat16", "float32", "float16"}
    assert [each.dtype for each in seen.report.precision.regions] == ["bfloat16"]


def test_a_region_that_spans_all_steps_is_switched_inside(script):
    lines = f"""
with torch.autocast("cpu", torch.bfloat16):
    train({STEPS})
"""
    raced(script(lines), "fp32")
    assert ran()[:3] == ["bfloat16"] * 3
    assert sorted(ran()[3:5]) == ["bfloat16", "float32"]


def test_what_a_model_keeps_in_float32_stays_so(script):
    lines = f"""
inner = nn.Linear(8, 8)
kept = []
def after(hidden):
    with torch.autocast("cpu", enabled=False):
        kept.append(inner(hidden.float()).dtype)
train({STEPS})
assert set(kept) == {{torch.float32}}
"""
    assert raced(script(lines)).report.exit_code == 0
    assert "bfloat16" in ran()


def test_the_loss_gets_float32(script):
    lines = f"""
outputs = set()
real = net.forward
def train_with(loss_of):
    for _ in range({STEPS}):
        output = torch.sigmoid(net(x))
        outputs.add(output.dtype)
        loss_of(output, y).backward()
        optimizer.step()
train_with(nn.BCELoss())  # raises under autocast, and for other dtypes than float32
assert outputs == {{torch.float32}}
"""
    assert raced(script(lines)).report.exit_code == 0
    assert "bfloat16" in ran()


def test_evaluation_is_left_alone(script):
    lines = f"""
for _ in range({STEPS}):
    train(1)
    with torch.no_grad():
        net(x)
        assert ran.pop() == "float32"
"""
    assert raced(script(lines)).report.exit_code == 0
    assert "bfloat16" in ran()


@pytest.fixture
def clock(monkeypatch):
    """A clock that a script moves by hand."""
    made = SimpleNamespace(now=0.0)
    made.perf_counter = lambda: made.now
    monkeypatch.setitem(sys.modules, "clock", made)
    monkeypatch.setattr("ampwise.observe.race.done_at", lambda _: made.now)
    monkeypatch.setattr("ampwise.observe.loaders.time", made)
    return made


@pytest.mark.usefixtures("clock")
def test_speed_is_of_steps_side_by_side(script):
    lines = f"""
import clock
def after(hidden):
    clock.now += (1 + len(ran) // 10) * (3 if hidden.dtype == torch.float32 else 2)
train({STEPS})
"""
    raced_bf16 = raced(script(lines)).report.race["bf16"]
    assert raced_bf16.speed is not None
    assert raced_bf16.speed.median == pytest.approx(1.5)
    assert raced_bf16.pairs >= 15


@pytest.mark.usefixtures("clock")
def test_waiting_for_data_is_nobodys_time(script):
    lines = f"""
import clock
class Slow(torch.utils.data.Dataset):
    def __len__(self): return {STEPS}
    def __getitem__(self, index):
        clock.now += 10
        return x[0]
def after(hidden):
    clock.now += 3 if hidden.dtype == torch.float32 else 1
for batch in torch.utils.data.DataLoader(Slow()):
    train(1)
"""
    speed = raced(script(lines)).report.race["bf16"].speed
    assert speed is not None
    assert speed.median == pytest.approx(3)


@pytest.mark.usefixtures("clock")
def test_a_hopelessly_slow_precision_falls_out(script):
    lines = f"""
import clock
def after(hidden):
    clock.now += 1 if hidden.dtype == torch.float32 else 50
train({STEPS})
"""
    found = raced(script(lines)).report.race["bf16"]
    assert "fell out: 50 times slower in its first steps" in found.note
    assert found.speed is None
    assert set(ran()[9:]) == {"float32"}


def test_the_schedule_depends_on_nothing_but_the_step(script):
    """Ranks of one training would otherwise wait for each other in different collectives."""
    raced(script(f"train({STEPS})"))
    quick = ran()
    lines = f"""
def after(hidden):
    time.sleep(0.003 * (len(ran) % 5))
train({STEPS})
"""
    raced(script(lines))
    assert ran() == quick


def test_it_ends_the_script_when_it_has_run_long_enough(script, monkeypatch):
    monkeypatch.setattr(racing, "MAX_ROUNDS", 10)
    report = raced(script("train(1000)"), steps=None).report
    assert (report.ending, report.steps, report.exit_code) == ("stopped", 23, 0)


def test_it_ends_the_script_once_it_is_decided(script, monkeypatch):
    monkeypatch.setattr("ampwise.bench.race.DECIDED", 100.0)
    report = raced(script("train(1000)"), steps=None).report
    assert report.ending == "stopped"
    assert report.race["bf16"].pairs == 20


def test_a_precision_that_raises_falls_out_and_the_script_goes_on(script):
    lines = f"""
def after(hidden):
    if hidden.dtype == torch.bfloat16:
        raise RuntimeError("no kernel for it")
train({STEPS})
"""
    report = raced(script(lines)).report
    assert report.ending == "finished"
    assert report.race["bf16"].speed is None
    assert "fell out: RuntimeError: no kernel for it" in report.race["bf16"].note
    assert ran().count("bfloat16") == 1


def test_what_raises_in_any_precision_is_the_scripts_own(script):
    lines = f"""
def after(hidden):
    if len(ran) > 20:
        raise RuntimeError("broken anyway")
train({STEPS})
"""
    report = raced(script(lines)).report
    assert report.ending == "raised RuntimeError"
    assert "fell out" not in report.race["bf16"].note


def test_a_step_of_the_races_that_ends_the_script_is_named(script):
    lines = f"""
def after(hidden):
    if hidden.dtype == torch.float16:
        raise RuntimeError("no kernel for it")
train({STEPS}, lambda: torch.autocast("cpu", torch.bfloat16))
"""
    report = raced(script(lines), "fp16").report
    assert report.ending == "raised RuntimeError"
    assert "raised RuntimeError in a step that the race ran in fp16" in report.race["fp16"].note


def test_parameters_in_sixteen_bits_cannot_be_raced(script):
    report = raced(script(f"net.bfloat16(); x, y = x.bfloat16(), y.bfloat16(); train({STEPS})"))
    assert "parameters are in torch.bfloat16" in report.report.race["bf16"].note
    assert report.report.race["bf16"].speed is None


def test_a_script_without_modules_is_not_said_to_race(script):
    lines = f"""
weight = nn.Parameter(torch.ones(8, 1))
by_hand = torch.optim.SGD([weight], lr=0.01)
for _ in range({STEPS}):
    (x @ weight).sum().backward()
    by_hand.step()
"""
    found = raced(script(lines)).report.race["bf16"]
    assert found.speed is None
    assert "nothing was switched" in found.note


def test_few_pairs_are_not_a_result(script):
    found = raced(script("train(1000)"), steps=8).report.race["bf16"]
    assert found.speed is None
    assert "too few pairs to tell: 0, of 5 at least" in found.note


def test_float16_without_a_scaler_is_said(script):
    assert (
        "without a loss scaler" in raced(script(f"train({STEPS})"), "fp16").report.race["fp16"].note
    )


def test_steps_that_a_scaler_skips_do_not_count(script):
    lines = f"""
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range({STEPS}):
    loss = net(x).sum() * (float("inf") if step % 2 else 1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
    seen = raced(script(lines))
    assert len(seen.report.skips) == STEPS // 2
    assert seen.report.race["bf16"].pairs == 0


LOUD = """
class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, x):
        large = 1e4 * self.first(x)
        large = large * large.detach()  # squares
        return self.second(large / 1e8)

net = Loud()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
"""


def test_a_precision_whose_loss_is_not_finite_falls_out_and_spoils_nothing(script):
    lines = f"""{LOUD}
train({STEPS})
Path("finite.json").write_text(json.dumps(all(bool(p.isfinite().all()) for p in net.parameters())))
"""
    report = raced(script(lines), "fp16,bf16").report
    assert "fell out: its loss is not finite in step " in report.race["fp16"].note
    assert report.race["fp16"].speed is None
    assert "fell out" not in report.race["bf16"].note
    assert report.race["bf16"].pairs > 0
    assert json.loads(Path("finite.json").read_text()) is True
    assert report.faults == []


def test_a_precision_whose_loss_is_not_finite_falls_out_beside_a_scaler(script):
    lines = f"""{LOUD}
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range({STEPS}):
    with torch.autocast("cpu", torch.bfloat16):
        loss = ((net(x) - y).float() ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
    seen = raced(script(lines), "fp16")
    assert "fell out: its loss is not finite in step " in seen.report.race["fp16"].note
    assert len(seen.report.skips) == 1
    assert seen.report.faults == []


@pytest.mark.parametrize("scaled", [True, False])
def test_a_fault_in_the_script_s_own_precision_is_examined_in_a_race(script, scaled):
    """Whoever's turn it is while the data are bad; what follows from it is held against nobody."""
    lines = f"""{LOUD}
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled={scaled})
for step in range({STEPS}):
    loss = ((net(x * (1e30 if step in (20, 21, 22) else 1)) - y) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
    path = script(lines)
    report = raced(path).report
    (found,) = report.faults
    assert (found.status, found.cause) == ("fault", "RANGE_OVERFLOW")
    assert found.origin is not None
    assert found.origin.line == line_of(path, "# squares")
    assert not any("race" in each.why for each in report.not_observed)


SAVES = """
train(10)
torch.save(net.state_dict(), "named.pt")
torch.save(net.state_dict(), f=Path("path.pt"))
buffer = io.BytesIO()
torch.save(net.state_dict(), buffer)
buffer.seek(0)
torch.load(buffer)
import safetensors.torch
safetensors.torch.save_file(net.state_dict(), "tensors.safetensors")
import torch.distributed.checkpoint as dcp
dcp.save(net.state_dict(), checkpoint_id="folder")
dcp.async_save(net.state_dict(), checkpoint_id="later").result()
"""


def test_no_checkpoint_is_left_behind(script):
    pytest.importorskip("safetensors")
    before = torch.save
    report = raced(script(SAVES)).report
    assert report.ending == "finished"
    assert sorted(each.name for each in Path().iterdir()) == ["ran.json", "script.py"]
    assert "5 checkpoints not written" in report.race["bf16"].note
    assert torch.save is before


def test_checkpoints_are_kept_for_those_who_ask(script):
    pytest.importorskip("safetensors")
    lines = SAVES.replace("dcp.async_save", "False and dcp.async_save")
    lines = lines.replace(".result()", "")
    report = raced(script(lines), keep_checkpoints=True).report
    assert report.ending == "finished"
    for name in ("named.pt", "path.pt", "tensors.safetensors", "folder"):
        assert Path(name).exists()
    assert "not written" not in report.race["bf16"].note


def test_nothing_is_switched_any_more_afterwards(script):
    before = torch.backends.mkldnn.matmul.fp32_precision
    call = nn.Module.__call__
    raced(script(f"train({STEPS})"), "tf32")
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    assert nn.Module.__call__ is call


def test_tf32_is_a_mode_and_no_autocast(script):
    lines = f"""
modes = []
def after(hidden):
    modes.append(torch.backends.mkldnn.matmul.fp32_precision)
train({STEPS})
assert sorted(set(modes)) == ["bf16", "none"], modes
"""
    assert raced(script(lines), "tf32").report.exit_code == 0
    assert set(ran()) == {"float32"}


@pytest.mark.parametrize("text", ["bf16-master", "fp8", "bf16,nonsense", "bf16:islands=head", ""])
def test_what_cannot_be_switched_is_refused(text):
    with pytest.raises(UsageError, match=r"--race .*fp32, tf32, fp16, bf16 .*ampwise bench"):
        racers(text)


def test_a_precision_is_raced_once():
    with pytest.raises(UsageError, match="named twice"):
        racers("bf16, bf16")


def test_the_command_refuses_before_the_script_begins(script, capsys):
    path = script("Path('begun').touch()")
    assert main(["run", "--race", "bf16-master", str(path)]) == 2
    assert "ampwise bench" in capsys.readouterr().err
    assert not Path("begun").exists()


def test_the_command_races(script):
    path = script("train(100)\ntorch.save(net, 'model.pt')")
    words = ["run", "--keep-checkpoints", "--steps", "100", "--race", "bf16"]
    assert main([*words, "--json", "report.json", str(path)]) == 0
    found = json.loads(Path("report.json").read_text())["race"]["bf16"]
    assert found["pairs"] >= 30
    assert found["speed"]["low"] <= found["speed"]["median"] <= found["speed"]["high"]
