"""A script under observation behaves as it does by itself: words, exit code, signals, processes."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.observe.running import Ran, by_itself, ended, observed, start

TRAIN = """
import sys
import torch

def train(steps=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 4)).float().square().mean()
        loss.backward()
        optimizer.step()
    return model
"""

# Each is run after `train` is defined; they differ in how they end and what they look at.
ENDINGS = {
    "sees itself": """
import atexit, os
import helper
atexit.register(lambda: print("goodbye"))
train()
print(__name__, __file__, sys.argv, os.getcwd(), sys.path[0], helper.VALUE)
print(sys.modules["__main__"].train is train, __spec__, __package__, end="")
sys.exit()
""",
    "crashes": """
def load(path):
    try:
        return {}[path]
    except KeyError as error:
        raise ValueError(f"no such file: {path}") from error

train()
load("data.bin")
""",
    "exits with 3": "train(); sys.exit(3)",
    "exits with words": "train(); sys.exit('out of data')",
    "has a hook of its own": """
def hook(kind, error, trace):
    import traceback
    print("hooked:", kind.__name__, error, [each.name for each in traceback.extract_tb(trace)])
sys.excepthook = hook
train()
raise RuntimeError("at the end")
""",
    "stores its model": """
import copy, io, pickle

class Net(torch.nn.Sequential):
    pass

model = Net(train())
held = io.BytesIO()
torch.save(model, held)
again = torch.load(io.BytesIO(held.getvalue()), weights_only=False)
for each in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
    print(type(each) is Net, all(map(torch.equal, each.parameters(), model.parameters())))
    optimizer = torch.optim.SGD(each.parameters())
    print(type(copy.deepcopy(optimizer)).__name__, len(pickle.dumps(optimizer)) > 0)
    each(torch.ones(1, 4)).sum().backward()
print(pickle.loads(pickle.dumps(torch.amp.GradScaler("cpu"))).state_dict())
""",
    "forks": """
import os
sys.stdout.flush()
child = os.fork()
train()
if child == 0:
    print("in the child", flush=True)
    sys.exit(5)
print("the child's code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "has other processes": """
import multiprocessing, subprocess
from torch.utils.data import DataLoader

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return torch.tensor(index ** 2), torch.utils.data.get_worker_info().id

def square(value):
    return value * value, __name__

print("imported as", __name__, flush=True)
if __name__ == "__main__" and sys.argv[-1] == "child":
    print(train().weight.shape)
elif __name__ == "__main__":
    train()
    for how in ("fork", "spawn"):
        loader = DataLoader(Squares(), 2, num_workers=1, multiprocessing_context=how)
        print(how, [each[0].tolist() for each in loader])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [2, 3]))
    command = [sys.executable, __file__, "child"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.returncode, done.stdout, done.stderr)
""",
}


def both(cwd: Path, script: list[str], *, fresh: bool = False) -> tuple[Ran, Ran]:
    """A script by itself, and under observation with nothing said of it."""
    alone = by_itself(script, cwd)
    watched = observed(script, cwd, ["--quiet"], fresh=fresh)
    return alone, watched


def same(alone: Ran, watched: Ran) -> None:
    assert watched.out == alone.out
    assert watched.err.startswith(alone.err)
    assert "ampwise/" not in watched.err
    assert watched.code == alone.code


LONG = ("has other processes", "exits with words", "stores its model")
FRESH = ("sees itself", "has other processes")
"""What a fork could hide: how Python begins, and what its children take from it."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in ENDINGS],
)
def test_a_script_says_and_returns_what_it_does_by_itself(tmp_path: Path, name: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "helper.py").write_text("VALUE = 7\n")
    (tmp_path / "src" / "job.py").write_text(TRAIN + ENDINGS[name])
    # Arguments are the script's own, also those that look like ours.
    script = ["src/job.py", "--out", "x", "--steps", "1", "-h", "--", "--json", "-"]
    alone, watched = both(tmp_path, script, fresh=name in FRESH)
    same(alone, watched)
    assert not (tmp_path / "x").exists()
    assert watched.report["exit_code"] == alone.code
    assert watched.report["steps"] == 3
    assert [each["step"] for each in watched.steps()] == [1, 2, 3]


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("print('package')\n")
    (tmp_path / "package" / "other.py").write_text("VALUE = 7\n")
    (tmp_path / "package" / "job.py").write_text(
        TRAIN + "from .other import VALUE\ntrain()\n"
        "print(VALUE, __name__, __package__, __spec__.name, sys.argv, sys.path[0])\n"
    )
    alone, watched = both(tmp_path, ["-m", "package.job", "--lr", "1"])
    same(alone, watched)
    assert watched.report["steps"] == 3


@pytest.mark.parametrize("zipped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_folder_or_an_archive_is_run_by_its_main(tmp_path: Path, zipped: bool) -> None:
    text = TRAIN + "import helper\ntrain()\nprint(__file__, __package__, sys.path[0], sys.argv)\n"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(text)
    (tmp_path / "app" / "helper.py").write_text("")
    if zipped:
        shutil.make_archive("app", "zip", tmp_path / "app")
    alone, watched = both(tmp_path, ["app.zip" if zipped else "app", "--lr", "1"])
    same(alone, watched)
    assert (alone.code, watched.report["steps"]) == (0, 3)


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    alone, watched = both(tmp_path, ["-m", "no.such.module"])
    _, _, words = alone.err.rstrip().partition(": ")
    assert (alone.code, len(alone.err.splitlines())) == (1, 1)
    assert (watched.code, len(watched.err.splitlines())) == (2, 1)
    assert watched.err.startswith(f"ampwise: error: -m: {words}")


def test_a_script_that_does_not_train_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('hello')\n")
    done = ended(start(["-m", "ampwise", "run", "job.py"], tmp_path), tmp_path)
    assert (done.code, done.out) == (0, "hello\n")
    assert [each.name for each in tmp_path.iterdir()] == ["job.py"]


@pytest.mark.parametrize(
    ("text", "words"), [("train(\n", "SyntaxError"), ("import no_such_thing\n", "no_such_thing")]
)
def test_a_script_that_does_not_begin(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "job.py").write_text(text)
    alone, watched = both(tmp_path, ["job.py"])
    same(alone, watched)
    assert (alone.code, words in alone.err) == (1, True)


@pytest.mark.parametrize("arguments", [["nowhere.py"], ["-m"], []])
def test_a_script_that_is_not_there_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    done = by_itself(["-m", "ampwise", "run", *arguments], tmp_path)
    assert (done.code, len(done.err.splitlines())) == (2, 1), done.err


ENDLESS = (
    TRAIN
    + """
import signal
{before}
model = train(3)
print("ready", flush=True)
{wait}
"""
)
WAIT = "while True: train(1)"


def sent(cwd: Path, number: signal.Signals) -> Ran:
    """A script under observation that gets a signal once it says that it is ready."""
    own = ["--quiet", "--out", "observed", "--json", "report.json"]
    process = start(["-m", "ampwise", "run", *own, "job.py"], cwd)
    process.wait_for("ready\n")
    process.signal(number)
    return ended(process, cwd)


def test_an_interrupted_script_ends_and_the_report_is_written(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ENDLESS.format(before="", wait=WAIT))
    watched = sent(tmp_path, signal.SIGINT)
    assert watched.code == watched.report["exit_code"] == 130
    assert watched.report["steps"] == len(watched.steps()) >= 3
    assert "KeyboardInterrupt" in watched.err
    assert "ampwise/" not in watched.err
    assert (watched.folder / "report.html").exists()


def test_a_terminated_script_dies_of_the_signal_and_the_report_is_written(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ENDLESS.format(before="", wait=WAIT))
    watched = sent(tmp_path, signal.SIGTERM)
    assert watched.code == -signal.SIGTERM
    assert watched.report["steps"] == len(watched.steps()) >= 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_line_is_lost_when_a_signal_comes_while_it_is_made(
    tmp_path: Path, number: signal.Signals
) -> None:
    sent_inside = f"""
import os
from ampwise.observe import records
made = records.write
def write(row, figures):
    write.calls += 1
    if write.calls == 3:
        os.kill(os.getpid(), {int(number)})
    made(row, figures)
write.calls = 0
records.write = write
train(9)
"""
    (tmp_path / "job.py").write_text(TRAIN + sent_inside)
    watched = observed(["job.py"], tmp_path)
    assert [each["step"] for each in watched.steps()] == [1, 2, 3, 4]
    assert watched.report["steps"] == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_handles_signals_still_does(tmp_path: Path, number: signal.Signals) -> None:
    before = f"signal.signal({int(number)}, lambda *_: (print('saved'), sys.exit(4)))"
    (tmp_path / "job.py").write_text(ENDLESS.format(before=before, wait=WAIT))
    watched = sent(tmp_path, number)
    assert (watched.code, watched.out, watched.report["exit_code"]) == (4, "ready\nsaved\n", 4)


def test_a_script_that_catches_the_interruption_goes_on(tmp_path: Path) -> None:
    wait = "try:\n    print('ready', flush=True)\n    while True: train(1)\nexcept KeyboardInterrupt:\n    print('saved')"
    (tmp_path / "job.py").write_text(TRAIN + wait)
    watched = sent(tmp_path, signal.SIGINT)
    assert (watched.code, watched.out, watched.report["exit_code"]) == (0, "ready\nsaved\n", 0)


def test_json_on_stdout_is_alone_there(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TRAIN + "train(); print('mine')")
    done = ended(start(["-m", "ampwise", "run", "--json", "-", "job.py"], tmp_path), tmp_path)
    assert json.loads(done.out)["schema"] == "ampwise.run/1"
    assert "mine" in done.err
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["run-job-1"]


@pytest.mark.parametrize(("gate", "code"), [("fail", 1), ("off", 0)])
def test_a_gate_says_no_only_when_asked(tmp_path: Path, gate: str, code: int) -> None:
    """float16 asked for on a CPU by way of a scaler for CUDA: never active."""
    wrong = "torch.amp.GradScaler('cuda')\ntrain()\n"
    (tmp_path / "job.py").write_text(TRAIN.replace("bfloat16)", "bfloat16, enabled=False)") + wrong)
    watched = observed(["job.py"], tmp_path, ["--gate", gate])
    assert watched.report["precision"]["active"] is False
    assert (watched.code, watched.report["exit_code"]) == (code, 0)


def test_it_stops_after_as_many_steps_as_asked(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TRAIN + "train(100); print('done')")
    watched = observed(["job.py"], tmp_path, ["--steps", "5"])
    assert (watched.code, watched.out, watched.report["steps"]) == (0, "", 5)
