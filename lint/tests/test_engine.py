"""What surrounds the rules: silencing, settings, cache, processes, files that import files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ampwise_lint import analysis, baseline
from ampwise_lint.base.errors import UsageError
from ampwise_lint.engine import lint
from ampwise_lint.findings import Finding, LintReport
from ampwise_lint.settings import Settings, codes, load_settings
from test_source import BAD


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(BAD)
    return path


def found(report: LintReport) -> list[str]:
    return [each.code for each in report.findings]


def found_in(path: Path, text: str, code: str) -> list[Finding]:
    """What one rule finds in a file of this text."""
    path.write_text(text)
    return [each for each in lint([path], use_cache=False).findings if each.code == code]


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("# ampwise: ignore[AMP101]", []),
        ("#ampwise:ignore[ amp101 , AMP305]", []),
        ("# ampwise: ignore", []),
        ("# ampwise: ignore[AMP1]", []),
        ("# noqa  # ampwise: ignore[AMP101] reviewed", []),
        ("# ampwise: ignore[AMP102]", ["AMP101"]),
    ],
)
def test_a_comment_silences_its_line(file, comment, expected):
    file.write_text(BAD.replace("1.0)", f"1.0)  {comment}"))
    assert found(lint([file], use_cache=False)) == expected


def test_a_comment_elsewhere_or_in_a_string_silences_nothing(file):
    file.write_text('TEXT = "# ampwise: ignore-file"\n# ampwise: ignore[AMP101]\n' + BAD)
    assert found(lint([file], use_cache=False)) == ["AMP101"]


def test_a_comment_silences_a_file(file):
    file.write_text("# ampwise: ignore-file\n" + BAD)
    assert found(lint([file], use_cache=False)) == []


def test_selecting_and_ignoring(file):
    for settings, expected in [
        (Settings(select=("AMP2",)), []),
        (Settings(select=("AMP1",)), ["AMP101"]),
        (Settings(ignore=("AMP101",)), []),
        (Settings(per_file_ignores={"train.py": ("AMP101",)}, root=file.parent), []),
        (Settings(per_file_ignores={"tests/*": ("AMP101",)}, root=file.parent), ["AMP101"]),
    ]:
        assert found(lint([file], settings, use_cache=False)) == expected


def test_codes_by_name_and_beginning():
    assert codes(["clip-before-unscale, amp2"], "--select") == ("AMP101", "AMP2")
    assert codes(["ALL"], "--select") == ("AMP",)
    with pytest.raises(UsageError, match="did you mean 'clip-before-unscale'"):
        codes(["clip-before-unscal"], "--select")


def test_settings_of_pyproject(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.ampwise.lint]\n"
        'select = ["AMP1"]\nignore = ["AMP112"]\nexclude = ["third_party"]\n'
        'baseline = "known.json"\n[tool.ampwise.lint.per-file-ignores]\n"old/*" = ["AMP1"]\n'
    )
    (tmp_path / "src").mkdir()
    settings = load_settings(tmp_path / "src")
    assert settings.select == ("AMP1",)
    assert settings.ignore == ("AMP112",)
    assert settings.baseline == tmp_path / "known.json"
    assert settings.excludes(tmp_path / "third_party" / "x.py")
    assert settings.root == tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.ampwise.lint]\nselekt = []\n", "did you mean 'select'"),
        ("[tool.ampwise.lint]\nselect = 3\n", "expected a list of strings"),
        ("[tool.ampwise.lint]\nselect = ['XYZ1']\n", "expected a rule's code"),
        ("[tool.ampwise.lint\n", "not readable as TOML"),
        ("tool = 5\n", "tool: expected a table, got 5"),
        ("tool.ampwise = 5\n", "ampwise: expected a table, got 5"),
        ("tool.ampwise.lint = []\n", r"lint: expected a table, got \[\]"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, text, message):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_settings(tmp_path)


def test_a_mistake_in_the_tables_of_other_tools_is_theirs(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.black]\nlist = [{\n    a = 1,\n}]\n")
    assert load_settings(tmp_path / "src") == Settings(root=tmp_path)


def test_unchanged_files_are_remembered_and_changed_ones_checked(file):
    assert (lint([file]).cached, lint([file]).cached) == (0, 1)
    assert found(lint([file])) == ["AMP101"]
    file.write_text(
        BAD.replace("        clip_grad", "        scaler.unscale_(optimizer)\n        clip_grad")
    )
    report = lint([file])
    assert (report.cached, found(report)) == (0, [])


HELPER = """\
def backward(scaler, loss):
    scaler.scale(loss).backward()


def finish(scaler, optimizer):
    scaler.step(optimizer)
    scaler.update()
"""
USER = """\
import torch
from helpers import backward, finish


def main(model, loader, criterion):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        backward(scaler, loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        finish(scaler, optimizer)
"""


def test_functions_of_other_files_are_followed_if_those_are_given(tmp_path):
    helpers, user = tmp_path / "helpers.py", tmp_path / "user.py"
    helpers.write_text(HELPER)
    user.write_text(USER)
    assert found(lint([tmp_path])) == ["AMP101"]
    assert found(lint([user])) == []
    # What was remembered of one file depends on the other.
    helpers.write_text(
        HELPER.replace("    scaler.step", "    scaler.unscale_(optimizer)\n    scaler.step")
    )
    assert found(lint([tmp_path])) == ["AMP101"]
    helpers.write_text(
        HELPER.replace("backward()", "backward()\n    return loss").replace(
            "scaler.scale(loss)", "loss"
        )
    )
    assert "AMP101" not in found(lint([tmp_path]))


def test_several_processes_find_the_same(tmp_path):
    for number in range(12):
        (tmp_path / f"train_{number}.py").write_text(BAD)
    one = lint([tmp_path], jobs=1, use_cache=False)
    two = lint([tmp_path], jobs=2, use_cache=False)
    assert [each.to_json() for each in one.findings] == [each.to_json() for each in two.findings]
    assert len(one.findings) == 12


def test_circles_of_imports_end(tmp_path):
    (tmp_path / "a.py").write_text("from b import *\nfrom b import g\n\n\ndef f():\n    g()\n")
    (tmp_path / "b.py").write_text(
        "from a import f\nimport torch\nscaler = torch.amp.GradScaler()\n\n\ndef g():\n    f()\n    loss.backward()\n"
    )
    assert lint([tmp_path], use_cache=False).files == 2


BRANCHING = """
def train_{n}(model, optimizer, loader, a, b, c, d, e):
    for x in loader:
        loss = model(x)
        if a: loss.backward()
        if b: optimizer.step()
        if c: optimizer.zero_grad()
        if d: optimizer.step()
        if e: optimizer.zero_grad()
"""


def test_a_function_of_many_paths_leaves_room_for_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(analysis, "NODES", 8_000)
    monkeypatch.setattr(analysis, "KEPT", 2_000)
    path = tmp_path / "many.py"
    path.write_text("# autocast\n" + "".join(BRANCHING.format(n=n) for n in range(16)))
    assert not lint([path], jobs=1, use_cache=False).skipped
    monkeypatch.setattr(analysis, "KEPT", 0)
    assert lint([path], jobs=1, use_cache=False).skipped


def test_a_baseline_holds_what_is_known(file, tmp_path):
    settings = Settings(root=tmp_path)
    known = tmp_path / "known.json"
    baseline.write(lint([file], settings), settings, known)
    file.write_text(
        "import os\n\n"
        + BAD.replace("1.0)", "1.0)\n        clip_grad_norm_(model.parameters(), 2.0)")
    )
    report = lint([file], settings)
    assert found(report) == ["AMP101", "AMP101"]
    baseline.drop_known(report, settings, known)
    assert (found(report), report.baselined) == (["AMP101"], 1)
    assert "2.0" in report.findings[0].source


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"known": [1]}'])
def test_a_file_that_is_no_baseline(tmp_path, content):
    known = tmp_path / "known.json"
    known.write_text(content)
    with pytest.raises(UsageError, match="not a baseline"):
        baseline.drop_known(LintReport(), Settings(), known)


def test_nothing_is_executed_and_torch_is_not_imported(tmp_path):
    trace = tmp_path / "executed"
    (tmp_path / "evil.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nraise SystemExit(3)\n" + BAD
    )
    (tmp_path / "conftest.py").write_text("raise SystemExit(4)\n")
    script = (
        "import sys; from ampwise_lint.main import main;"
        f"code = main([{str(tmp_path)!r}, '--jobs', '1']);"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules);"
        "print(heavy or 'light'); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("light\n")
    assert not trace.exists()


GAN = """\
def train(loader, loss, opt_g, opt_d, scaler):
    for x in loader:
        scaler.scale(loss(x)).backward()
        scaler.step(opt_d)
        scaler.update()
{between}
        scaler.step(opt_g)
        scaler.update()
        opt_g.zero_grad()
        opt_d.zero_grad()
"""


@pytest.mark.parametrize(
    ("between", "severity", "words"),
    [
        ("", "error", "steps too far"),
        ("        scaler.scale(loss(-x)).backward()", "info", "the growth interval"),
    ],
)
def test_a_second_update_is_as_bad_as_what_it_does(tmp_path, between, severity, words):
    found = found_in(tmp_path / "gan.py", GAN.format(between=between), "AMP108")
    assert [(each.line, each.severity) for each in found] == [(5, severity)]
    assert words in found[0].message


MANY = """\
def train(model, loader, optimizer, scaler, criterion, verbose):
    total = []
    for x, y in loader:
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if y.any_key:
            total.append(loss.item())
        total.append(-loss.item())
        total.append(2 * loss.item())
"""


def test_waits_of_one_kind_in_one_loop_are_one_finding(tmp_path):
    found = found_in(tmp_path / "many.py", MANY, "AMP301")
    assert [each.line for each in found] == [10]
    assert "on each step that comes here (also in lines 11, 12)" in found[0].message


LEARNER = """\
import lightning
import torch


class Learner(lightning.LightningModule):
    {decorated}
    def training_step(self, batch, index):
        loss = self.net(batch).sum()
        loss.backward()
        return loss


lightning.Trainer(precision="{precision}").fit(Learner())
"""


@pytest.mark.parametrize(
    ("decorated", "precision", "words"),
    [
        ("", "16-mixed", "the trainer has opened it"),
        ('@torch.autocast("cuda")', "32", "decorate the function that computes the loss"),
    ],
)
def test_how_backward_leaves_autocast_depends_on_what_opened_it(
    tmp_path, decorated, precision, words
):
    found = found_in(
        tmp_path / "learner.py", LEARNER.format(decorated=decorated, precision=precision), "AMP201"
    )
    assert [each.line for each in found] == [9]
    assert words in found[0].message


SHOWN = """\
def train(model, loader, optimizer, scaler, criterion, writer):
    for step, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        writer.add_scalar("loss", loss, step)
{also}
"""


@pytest.mark.parametrize(
    ("also", "words"),
    [
        ("", "add_scalar waits for the device"),
        ("        print(loss)", "add_scalar and print wait for the device"),
        ('        log(f"{loss}")', "add_scalar and an f-string wait for the device"),
    ],
)
def test_what_waits_is_called_by_its_name(tmp_path, also, words):
    found = found_in(tmp_path / "shown.py", SHOWN.format(also=also), "AMP301")
    assert [each.line for each in found] == [8]
    assert words in found[0].message


OLD_NAMES = """\
import torch
from torch.cuda.amp import autocast, GradScaler

{use}
"""


@pytest.mark.parametrize(
    ("use", "name"),
    [
        ("scaler = GradScaler()", "GradScaler"),
        ("with autocast():\n    pass\nscaler = GradScaler()", "autocast"),
        ("def train(scaler: GradScaler):\n    pass", "GradScaler"),
        ("", "autocast"),
    ],
)
def test_of_old_names_one_that_is_used_is_told(tmp_path, use, name):
    found = found_in(tmp_path / "old.py", OLD_NAMES.format(use=use), "AMP401")
    assert [each.line for each in found] == [2]
    assert found[0].message.startswith(f"torch.cuda.amp.{name} is deprecated")


BEGINS = """\
import torch


def main(model, optimizer, loader, path):
    scaler = torch.amp.GradScaler("cuda"{scale})
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, path)
"""


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ("", "again at loss scale 65,536 "),
        (", 1024", "again at loss scale 1,024 "),
        (", init_scale=2.0**17.5", "again at loss scale 185,364 "),
        (", init_scale=path.scale", "again at the loss scale it is made with "),
    ],
)
def test_a_resumed_run_begins_with_the_scale_it_is_told(tmp_path, scale, words):
    found = found_in(tmp_path / "begins.py", BEGINS.format(scale=scale), "AMP111")
    assert [each.line for each in found] == [13]


TWICE = """\
def train(model, loader, optimizer, scaler, criterion):
    for x, y in loader:
        scaler.scale(criterion(model(x), y)).backward()
        scaler.unscale_(optimizer)
        {between}
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
AGAIN = "scaler.scale(criterion(model(-x), y)).backward()"


@pytest.mark.parametrize(
    ("between", "words"),
    [
        ("print()", "remove one of the calls"),
        (AGAIN, "behind the last backward"),
        (f"optimizer.zero_grad(); {AGAIN}", "call update() between them"),
    ],
)
def test_what_to_do_about_two_calls_depends_on_what_lies_between(tmp_path, between, words):
    found = found_in(tmp_path / "twice.py", TWICE.format(between=between), "AMP103")
    assert [each.line for each in found] == [6]
    assert words in found[0].message


NEVER = """\
def train(model, loader, optimizer, scaler, criterion):
    for x, y in loader:
        scaler.scale(criterion(model(x), y)).backward()
        {step}
"""


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("scaler.step(optimizer); scaler.update()", "skips every step"),
        ("optimizer.step()", "adds those of all earlier ones"),
    ],
)
def test_what_is_left_of_gradients_depends_on_who_steps(tmp_path, step, words):
    found = found_in(tmp_path / "never.py", NEVER.format(step=step), "AMP113")
    assert len(found) == 1
    assert words in found[0].message
