"""A patch counts as verified only where its source was run: the failing step, and the next ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import ampwise
from ampwise.bench.arm import Settings
from ampwise.cli.main import main
from ampwise.errors import UsageError
from ampwise.numerics.diagnose import DiagnoseConfig, explore
from ampwise.numerics.observe.reference import reference
from ampwise.numerics.progress import Silent
from ampwise.numerics.remedy import apply, handover, trial
from ampwise.numerics.remedy.fresh import Fresh, fresh
from ampwise.numerics.remedy.handover import Failing, TaskSource
from ampwise.numerics.remedy.verify import Outcome, Trials
from ampwise.numerics.result import Diagnosis, Fix
from ampwise.numerics.updates.of_task import Trained, failing_update
from ampwise.policy import Policy
from ampwise.step.replay import Replay
from ampwise.tasks import load_task
from tests.numerics.patches.corpus import FAULTS

GAIN = """import torch
from torch import nn

from ampwise import Task


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        h = self.project(x) * 1e5
        return h / h.norm(dim=-1, keepdim=True)


def loss(model, batch):
    return (model(batch).float() - 0.5).pow(2).mean()


def task():
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    return Task(model=Model, batches=lambda: [batch] * 12, loss=loss)
"""


@pytest.fixture
def gain(tmp_path, monkeypatch):
    file = tmp_path / "gain.py"
    file.write_text(GAIN)
    monkeypatch.chdir(tmp_path)
    return file


@pytest.fixture
def trials(gain, tmp_path):
    """Trials of the step of `GAIN` that fails."""
    source, settings = TaskSource("gain.py"), Settings(torch.device("cpu"))
    config = DiagnoseConfig(Policy.parse("fp16"), settings, steps=2)
    arm, _, stash, _ = explore(load_task("gain.py"), config, Silent())
    folder = tmp_path / "trials"
    folder.mkdir()
    wanted = reference(Replay(arm.step), stash)
    handover.save(folder / "step.pt", Failing(source, arm, settings, stash), wanted)
    with fresh(folder, settings.device) as processes:
        yield Trials(folder, gain, processes, stash.step)


@pytest.mark.slow
def test_a_source_is_judged_by_what_it_does_in_a_fresh_process(trials, gain):
    assert trials.control() == ""
    right = trials.of(1, GAIN.replace("self.project(x) *", "self.project(x).float() *").encode())
    assert right.verified
    assert right.next_steps == 25  # they are quick
    assert right.left == ""
    assert right.sqnr_db is not None
    assert right.sqnr_db > 40
    assert 5 < len(right.next_db) <= 12
    assert min(right.next_db) > 40
    clean = trials.of(2, GAIN.replace("* 1e5", "* 1e-5").encode())  # finite, and a part is lost
    assert not clean.verified
    still = trials.of(3, GAIN.replace("1e5", "2e5").encode())
    assert still.complaint == "still not finite"
    broken = trials.of(4, GAIN.replace("nn.Linear(8, 8)", "nn.Linear(8, 9)").encode())
    assert broken.complaint.startswith("raises")
    later = GAIN.replace("self.project(x) * 1e5", "self.project(x).float() * self.gain()").replace(
        "    def forward",
        "    first = None\n\n    def gain(self):\n        weight = self.project.weight.detach()\n"
        "        if Model.first is None:\n            Model.first = weight.clone()\n"
        "        moved = float((weight - Model.first).abs().max())\n"
        "        return 1e5 if moved < 2.5e-3 else float('inf')\n\n    def forward",
    )
    beside = GAIN.replace("self.project(x) *", "self.project(x).float() *").replace(
        "        return h", "        torch.full((4,), 3e4).half().sum()\n        return h"
    )
    assert trials.of(6, beside.encode()).left.startswith("sum on line 14 overflows")
    ends = trials.of(5, later.encode())
    assert not ends.complaint
    assert (ends.next_steps, ends.next_complaint) == (2, "its loss is not finite")
    assert not ends.verified
    assert gain.read_text() == GAIN


def test_where_the_step_is_right_without_a_patch_a_trial_says_nothing(trials, gain):
    gain.write_text(GAIN.replace("1e5", "1.0"))
    assert "right without a patch" in trials.control()


@pytest.mark.parametrize(
    ("unmended", "silent", "patched", "holds"),
    [
        (Outcome("of x is missing", sqnr_db=9.0), False, 9.5, False),  # noise, as before
        (Outcome("of x is missing", sqnr_db=9.0), False, 20.0, True),
        (Outcome("of x is missing", sqnr_db=15.0), False, 16.0, True),  # a small part of the whole
        (Outcome("still not finite"), False, 8.0, True),
        (Outcome("", sqnr_db=20.0), True, 25.0, False),
        (Outcome("", sqnr_db=20.0), True, 31.0, True),
        (Outcome("", sqnr_db=24.0), True, 31.0, True),  # more than layers leave
        (Outcome("", sqnr_db=27.0), True, 31.0, False),
    ],
)
def test_a_patch_has_to_gain(monkeypatch, tmp_path, unmended, silent, patched, holds):
    outcomes = {"control": unmended, "patch-1": Outcome("", False, patched, 5)}
    monkeypatch.setattr(Trials, "_run", lambda self, name: outcomes[name])
    made = Trials(tmp_path, tmp_path / "x.py", Fresh(tmp_path), 3, silent=silent, enough=32.0)
    assert made.control() == ""
    outcome = made.of(1, b"")
    assert outcome.verified is holds
    assert ("hardly nearer to float64" in outcome.complaint) is not holds


@pytest.mark.parametrize(("skipped", "left"), [(5, ""), (6, "6 steps between them were skipped")])
def test_steps_that_are_skipped_once_some_were_made_are_left(skipped, left):
    assert Outcome("").followed_by(25, "", skipped).left == left
    assert Outcome("", left="mul overflows").followed_by(25, "", skipped).left == "mul overflows"


def test_neither_does_one_of_a_task_that_a_fresh_process_cannot_load(trials, gain):
    gain.write_text("import nowhere_to_be_found\n")
    assert "no outcome: the task raises ModuleNotFoundError" in trials.control()


def test_what_is_no_tensor_and_no_plain_value_is_said_to_be_in_the_way(gain, tmp_path):
    gain.write_text(GAIN.replace("[batch] * 12", "[(batch, {1, 2})] * 12").replace(
        "model(batch)", "model(batch[0])"))  # fmt: skip
    config = DiagnoseConfig(Policy.parse("fp16"), steps=2)
    arm, _, stash, _ = explore(load_task("gain.py"), config, Silent())
    stash.micro_batches[0].batch[1].add(open)
    wanted = reference(Replay(arm.step), stash)
    with pytest.raises(UsageError, match="cannot be handed over"):
        handover.save(
            tmp_path / "s.pt", Failing(TaskSource("gain.py"), arm, config.settings, stash), wanted
        )


@dataclass
class Pair:
    left: torch.Tensor
    right: list[int]


def test_batches_come_back_as_they_were():
    batch = {"a": (torch.ones(2), [Pair(torch.zeros(1), [3])]), "b": torch.Size([1])}
    again = handover._as_it_was(handover._plain(batch))
    assert isinstance(again["a"][1][0], Pair)
    assert again["a"][1][0].right == [3]
    assert torch.equal(again["a"][0], torch.ones(2))


def outcome_of(task, content):
    return trial._mended(*handover.restored(task, content), content)[0]


def test_an_update_is_judged_by_what_it_leaves_beside_float64(monkeypatch, tmp_path):
    """The step of the fault is right; its update is not, and that is why it is tried."""
    monkeypatch.chdir(FAULTS)
    monkeypatch.syspath_prepend(FAULTS)
    source, settings = TaskSource("half_state.py"), Settings(torch.device("cpu"))
    task = load_task("half_state.py")
    found = Trained(task, Policy.parse("fp16"), settings, steps=1)
    failing = failing_update(found, source)
    wanted = reference(failing.step, failing.stash)
    handover.save(tmp_path / "step.pt", failing, wanted)
    content = handover.load(tmp_path / "step.pt")
    outcome = outcome_of(task, content)
    assert "is still not finite after the update" in outcome.complaint
    mended = replace(task, optimizer=lambda m: torch.optim.Adam(m.parameters(), 1e-3))
    content["optimizer"] = mended.optimizer(task.model()).state_dict()
    assert not outcome_of(mended, content).complaint
    off = replace(task, optimizer=lambda m: torch.optim.SGD(m.parameters(), 1e-3, maximize=True))
    content["optimizer"] = off.optimizer(task.model()).state_dict()
    assert "its update is off" in outcome_of(off, content).complaint


def test_an_overlay_is_what_is_imported_whatever_is_cached(tmp_path):
    (tmp_path / "mine.py").write_text("VALUE = 1\n")
    code = (
        "import sys, inspect; from pathlib import Path\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from ampwise.numerics.remedy.overlay import Overlay\n"
        f"file = Path({str(tmp_path / 'mine.py')!r})\n"
        "o = Overlay({file: b'def f():\\n    return 2\\nVALUE = 2\\n'}) if len(sys.argv) > 1 else None\n"
        "import mine; assert mine.__file__ == str(file)\n"
        "print(mine.VALUE, o and o.not_loaded, o and inspect.getsource(mine.f))\n"
    )
    for words, wanted in (([], "1"), (["x"], "2 [] def f():"), ([], "1")):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(ampwise.__file__).parent.parent)},
        )  # fmt: skip
        assert done.stdout.startswith(wanted), done.stderr


# -- the words --------------------------------------------------------------------------------------


def test_a_status_of_an_update_says_so():
    said = Outcome("", of_update=True, next_steps=5).in_words(3)
    assert "makes the update of step 3 as float64 does, and the next 5 steps train" in said


def test_a_status_says_what_was_shown_or_why_it_is_a_suggestion():
    assert Outcome("", False, 41.2, 5).in_words(3) == (
        "verified: the patched source, in a fresh process, makes step 3 finite, its gradients "
        "41 dB from float64, and the next 5 steps train"
    )
    assert Outcome("still not finite").in_words(3).startswith("suggestion: tried")
    stopped = Outcome("", False, 41.2, 2, "its loss is not finite").in_words(3)
    assert stopped.startswith("suggestion: the failing step is mended, but step 6 is not right")
    assert "patched source in float64" in Outcome("", True, 41.2, 5).in_words(3)
    weak = Outcome("", False, 11.2, 5, weakest="shape.weight").in_words(3)
    assert "its gradient of shape.weight, which was wrong, 11 dB from float64" in weak
    wrong = Outcome("", False, 41.2, 5, left="the loss is 2 and should be 3").in_words(3)
    assert wrong.endswith("the next 5 steps train; but the loss is 2 and should be 3")
    ahead = Outcome("", False, 62.0, 5, next_db=[40.0, 56.0, 16.0]).in_words(3)
    assert "62 dB from float64 (on the next 3 steps, 16 dB at worst), and" in ahead


# -- the command ------------------------------------------------------------------------------------


@pytest.fixture
def repository(gain, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    for words in (["init", "-q"], ["add", "gain.py"], ["commit", "-qm", "task"]):
        subprocess.run(["git", *words], check=True)
    return gain


def test_the_command_writes_the_patch_applies_it_and_says_how_to_take_it_back(
    repository, tmp_path, capsys
):
    command = ["diagnose", "gain.py", "--device", "cpu", "--steps", "2", "--out", "run", "--quiet"]
    assert main([*command, "--patch", "gain.diff", "--fix", "--json", "found.json"]) == 1
    shown = capsys.readouterr()
    assert "+        h = self.project(x).float() * 1e5" in shown.out
    assert "git apply -R run/patch.diff" in shown.err
    found = Diagnosis.from_json(json.loads((tmp_path / "found.json").read_text()))
    best = found.fixes[0]
    assert best.verified
    assert best.patch_status.startswith("verified: the patched source, in a fresh process")
    patched = repository.read_text()
    assert patched == GAIN.replace("self.project(x) *", "self.project(x).float() *")
    for text in ("run/report.html", "gain.diff"):
        assert "self.project(x).float() * 1e5" in (tmp_path / text).read_text()
    subprocess.run(["git", "apply", "-R", "run/patch.diff"], check=True)
    assert repository.read_text() == GAIN
    subprocess.run(["git", "apply", "gain.diff"], check=True)
    assert repository.read_text() == patched
    assert main(["diagnose", "gain.py", "--device", "cpu", "--steps", "2", "--fix", "--quiet"]) == 0
    assert "no patch: no fault" in capsys.readouterr().err


def verified(file: Path) -> Fix:
    before, after = "h = self.project(x) * 1e5", "h = self.project(x).float() * 1e5"
    from ampwise.numerics.remedy.patches.source import unified

    patch = unified(GAIN.encode(), GAIN.replace(before, after).encode(), file.name)
    return Fix("operands", "why", verified=True, cost="", patch=patch, patch_status="verified: x")


def test_a_file_that_is_not_committed_is_not_changed(repository):
    fix = verified(repository)
    apply.check(fix, force=False)
    repository.write_text("# mine\n" + GAIN)
    with pytest.raises(UsageError, match="not committed: commit them first, or pass --force"):
        apply.check(fix, force=False)
    apply.check(fix, force=True)
    with pytest.raises(UsageError, match="has changed since it was diagnosed"):
        apply.apply(fix)
    repository.write_text(GAIN)
    apply.apply(fix)
    assert ".float() * 1e5" in repository.read_text()


def test_a_file_in_no_git_tree_is_not_changed(gain):
    with pytest.raises(UsageError, match="in no git tree"):
        apply.check(verified(gain), force=False)
    apply.check(verified(gain), force=True)


def test_a_file_that_git_ignores_or_does_not_know_is_not_changed(repository):
    other = repository.with_name("other.py")
    other.write_text(GAIN)
    with pytest.raises(UsageError, match="not committed"):
        apply.check(verified(other), force=False)
    repository.with_name(".gitignore").write_text("other.py\n")
    with pytest.raises(UsageError, match="in no git tree"):
        apply.check(verified(other), force=False)


def over_two_files(folder: Path) -> Fix:
    from ampwise.numerics.remedy.patches.source import unified

    (folder / "ops").mkdir()
    parts: list[str] = []
    for name in ("gain.py", "ops/one.py"):
        (folder / name).write_text(GAIN)
        parts.append(unified(GAIN.encode(), GAIN.replace("1e5", "1e4").encode(), name))
    patch = "".join(parts)
    return Fix("both", "", verified=True, cost="", patch=patch, patch_status="verified: x")


def test_a_patch_of_two_files_is_applied_to_both_or_to_none(gain, tmp_path):
    fix = over_two_files(tmp_path)
    one = tmp_path / "ops" / "one.py"
    assert apply.files_of(fix) == [Path("gain.py"), Path("ops/one.py")]
    apply.apply(fix)
    assert gain.read_text() == one.read_text() == GAIN.replace("1e5", "1e4")
    gain.write_text(GAIN)
    with pytest.raises(UsageError, match=r"ops/one\.py has changed since"):
        apply.apply(fix)
    assert gain.read_text() == GAIN


def test_git_and_patch_take_a_patch_of_two_files(gain, tmp_path):
    fix = over_two_files(tmp_path)
    (tmp_path / "both.diff").write_text(apply.text_of(fix))
    for command in (["git", "apply"], ["patch", "-s", "-p1", "-i"]):
        gain.write_text(GAIN)
        (tmp_path / "ops" / "one.py").write_text(GAIN)
        subprocess.run([*command, "both.diff"], check=True)
        assert gain.read_text() == GAIN.replace("1e5", "1e4")


def test_a_patch_with_a_file_outside_is_refused_as_a_whole(gain, tmp_path, monkeypatch):
    fix = over_two_files(tmp_path)
    monkeypatch.chdir(tmp_path / "ops")
    (tmp_path / "ops" / "gain.py").write_text(GAIN)
    with pytest.raises(UsageError, match=r"ops/one\.py is not below the working directory"):
        apply.check(fix, force=True)
    outside = replace(fix, patch=fix.patch.replace("a/ops/one.py", "a/../gain.py"))
    with pytest.raises(UsageError, match=r"\.\./gain\.py is not below"):
        apply.check(outside, force=True)


def test_helpers_are_given_float32_where_they_are_called(monkeypatch):
    """Of the ball's helpers the second shows what the first rounded; the caller feeds both."""
    texts = texts_for("hyperbolic.py", "geometry/ball.py", "clamp", "EPS_UNDERFLOW", monkeypatch)
    text = texts["what from_tangent and depth are given, in float32"][FAULTS / "hyperbolic.py"]
    assert b"ball.depth(ball.from_tangent(self.project(x).float() * 4))" in text


def test_several_functions_may_be_in_float32_in_their_own_files(monkeypatch):
    texts = texts_for("similarities.py", "geometry/kernel.py", "mm", "RANGE_OVERFLOW", monkeypatch)
    both = next(each for what, each in texts.items() if what.startswith("the functions at "))
    assert [each.name for each, data in both.items() if data != each.read_bytes()] == [
        "kernel.py", "mixing.py"
    ]  # fmt: skip
    assert all(b"enabled=False" in data for data in both.values())


def texts_for(task, file, op, cause, monkeypatch):
    """What is proposed for a fault, by what it is called: the texts of files."""
    from ampwise.numerics.remedy.own_source import own_source
    from ampwise.numerics.result import Origin

    monkeypatch.chdir(FAULTS)
    config = DiagnoseConfig(Policy.parse("fp16"), Settings(torch.device("cpu")), steps=2)
    arm, _, stash, _ = explore(load_task(task), config, Silent())
    path = FAULTS / file
    line = next(i for i, each in enumerate(path.read_text().splitlines(), 1) if "# <-" in each)
    origin = Origin(op, "", str(path), line, "", "float16")
    found = Diagnosis("fault", "t", "fp16", "cpu", 1, origin=origin, cause=cause)
    source = own_source(found, Replay(arm.step), stash, [FAULTS])
    return {each.what: {path: each.data, **each.beside} for each in source.with_caller}


@pytest.mark.parametrize("ends", [("\n", ""), ("\r\n", "\r\n"), ("\n", "\n")])
def test_a_patch_is_applied_as_git_applies_it(repository, ends):
    from ampwise.numerics.remedy.patches.source import unified

    end, last = ends
    lines = [f"line {i}" for i in range(40)]
    changed = ["first", *lines[:10], "new", *lines[12:38], "last line"]
    before, after = ((end.join(each) + last).encode() for each in (lines, changed))
    file = repository.with_name("a file.py")
    file.write_bytes(before)
    patch = unified(before, after, file.name)
    (repository.parent / "x.diff").write_text(patch, newline="")
    apply.apply(Fix("", "", verified=True, cost="", patch=patch, patch_status="verified"))
    assert file.read_bytes() == after
    file.write_bytes(before)
    subprocess.run(["git", "apply", "x.diff"], check=True)
    assert file.read_bytes() == after


def test_a_suggestion_is_never_applied(gain, capsys, monkeypatch):
    from ampwise.cli.diagnose import Options, _use_patch

    found = Diagnosis("fault", "t", "fp16", "cpu", 1)
    found.fixes = [
        Fix(
            "a",
            "",
            verified=False,
            cost="",
            patch="--- a/gain.py\n",
            patch_status="suggestion: tried: no",
        ),
        Fix(
            "b",
            "",
            verified=False,
            cost="",
            patch="--- a/gain.py\n",
            patch_status="suggestion: not run: x",
        ),
    ]
    assert apply.best(found) is found.fixes[1]
    _use_patch(found, None, Options(fix=True))
    assert "nothing changed: suggestion: not run: x" in capsys.readouterr().err
    assert gain.read_text() == GAIN


def test_a_library_is_never_edited():
    from ampwise.numerics.remedy.own_source import own_file
    from ampwise.numerics.result import Origin

    def of(file):
        origin = Origin("mul", "", str(file), 3, "", "float16")
        found = Diagnosis("fault", "t", "fp16", "cpu", 1, origin=origin, cause="RANGE_OVERFLOW")
        return own_file(found, [FAULTS])

    assert of(FAULTS / "gain.py") == FAULTS / "gain.py"
    assert of(Path(torch.nn.functional.__file__)) is None
    assert of(Path(json.__file__)) is None
    assert of(Path(handover.__file__)) is None
    assert of("/elsewhere/x.py") is None


def test_an_island_may_be_in_the_function_that_calls(monkeypatch):
    from ampwise.numerics.remedy.own_source import own_source
    from ampwise.numerics.result import Origin

    monkeypatch.chdir(FAULTS)
    config = DiagnoseConfig(Policy.parse("fp16"), Settings(torch.device("cpu")), steps=2)
    arm, _, stash, _ = explore(load_task("squared_relu.py"), config, Silent())
    file = FAULTS / "squared_relu.py"
    line = next(i for i, each in enumerate(file.read_text().splitlines(), 1) if "# <-" in each)
    origin = Origin("pow", "act", str(file), line, "", "float16")
    found = Diagnosis("fault", "t", "fp16", "cpu", 1, origin=origin, cause="RANGE_OVERFLOW")
    source = own_source(found, Replay(arm.step), stash, [FAULTS])
    assert source is not None
    texts = {each.what: each.data.decode() for each in source.with_caller}
    whole = next(text for what, text in texts.items() if what.startswith("the calling function"))
    assert "            return self.down(self.act(self.up(x)))" in whole
    assert whole not in [each.data.decode() for each in source.proposals]


@pytest.mark.slow
def test_what_a_patch_costs_is_its_step_beside_the_original(trials):
    wide = GAIN.replace("self.project(x) *", "self.project(x).float() *")
    slow = wide.replace("        return h /", "        import time\n\n        time.sleep(0.01)\n"
                        "        return h /")  # fmt: skip
    assert trials.control() == ""
    assert trials.of(1, slow.encode()).verified
    cost = trials.cost_of(1)
    assert cost is not None
    if cost.time is None:
        assert cost.words.startswith("time not measured: ")
    else:
        assert cost.time.low > 2
        assert "] the time of " in cost.words
    assert cost.activation_bytes is None or cost.activation_bytes > 0
