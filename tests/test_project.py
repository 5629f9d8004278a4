"""The project as a whole: what is public is documented, and what must stay light is light."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement

import ampwise
import ampwise_lint

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def modules_after(statement: str) -> set[str]:
    """Top-level modules loaded by a fresh Python that runs `statement`."""
    code = f"{statement}\nimport sys; print(*{{each.partition('.')[0] for each in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_every_public_name_loads_and_is_documented():
    for name in ampwise.__all__:
        value = getattr(ampwise, name)
        assert name.startswith("__") or value.__doc__, name
        assert name.startswith("__") or f"`{name}`" in README, f"{name} is not in README.md"


def test_what_the_readme_lists_is_public():
    library = README.partition("## The library")[2].partition("\n## ")[0]
    documented = {name for name in re.findall(r"`(\w+)`", library) if name != "GradScaler"}
    assert documented == {name for name in ampwise.__all__ if not name.startswith("__")}


def test_the_export_list_is_sorted_and_complete():
    assert sorted(ampwise.__all__) == ampwise.__all__ == dir(ampwise)
    assert set(ampwise._HOME_OF) | {"__version__"} == set(ampwise.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'TrainStpe'"):
        _ = ampwise.TrainStpe


def test_the_version_is_said_once_and_the_changelog_knows_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ampwise.__version__
    assert f"ampwise-lint=={ampwise_lint.__version__}" in project["dependencies"]
    assert f"## {ampwise.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "statement",
    [
        "import ampwise",
        "import ampwise.errors, ampwise.formats",
        "from ampwise.cli.main import main; main(['--help'])",
        "from ampwise.cli.main import main; main(['bench', '--help'])",
        "from ampwise.cli.main import main; main(['train', '--help'])",
        "from ampwise.cli.main import main; main(['advise', '--help'])",
        "from ampwise.cli.main import main; main(['lint', '--help'])",
        "from ampwise.cli.main import main; assert main(['bench', '--steps', 'x']) == 2",
    ],
)
def test_light_things_load_nothing_heavy(statement):
    loaded = modules_after(statement)
    assert "ampwise" in loaded
    assert not loaded & {"torch", "numpy", "scipy", "sklearn", "rich", "yaml"}


TRAINING = """
import torch, ampwise, ampwise.step
for policy in ("fp32", "bf16", "fp16", "bf16-master"):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    step = ampwise.TrainStep(
        model, optimizer, policy=policy, accumulate=2, max_grad_norm=1.0, scheduler=schedule
    )
    for _ in range(6):
        step(lambda model, batch: model(batch).float().square().mean(), torch.randn(8, 4))
    assert len(step.history) == 3
    step.state_dict()
"""
NOT_FOR_TRAINING = {
    "jinja2", "libcst", "matplotlib", "pandas", "rich", "scipy", "sklearn", "tyro", "yaml",
}  # fmt: skip


@pytest.mark.parametrize(
    "statement",
    [TRAINING, "import ampwise.bench.run, ampwise.verify.run, ampwise.tune.run"],
    ids=["steps", "bench"],
)
def test_what_one_part_needs_is_not_loaded_by_others(statement):
    loaded = modules_after(statement)
    assert "torch" in loaded
    assert not loaded & NOT_FOR_TRAINING


def test_scikit_learn_comes_only_with_the_task_that_needs_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any("scikit-learn" in each for each in project["dependencies"])
    assert project["optional-dependencies"]["digits"] == ["scikit-learn>=1.3"]


def test_commands_in_the_readme_are_the_commands():
    from ampwise.cli.main import COMMANDS

    table = README.partition("## Commands")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `ampwise (\w+)", table, re.MULTILINE)) == set(COMMANDS)
    for name in set(COMMANDS) - {"lint"}:
        assert (Path(ampwise.__file__).parent / "cli" / f"{name}.py").exists()


def test_pins_cover_the_declared_dependencies():
    wanted: list[str] = []
    for folder in (ROOT, ROOT / "lint"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        wanted += project["dependencies"]
        for extra in project["optional-dependencies"].values():
            wanted += extra
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    for requirement in wanted:
        if requirement.startswith("ampwise"):  # ours, from this tree
            continue
        name, _, least = requirement.partition(">=")
        assert _numbers(pins[name]) >= _numbers(least), requirement


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_example_task_learns():
    example = ampwise.load_task(str(ROOT / "examples" / "spirals.py"), {"width": "64"})
    torch.manual_seed(0)
    model = example.model()
    step = ampwise.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.02), policy="fp32")
    untrained = example.evaluate(model)["accuracy"]
    for _ in range(15):
        for batch in example.batches():
            step(example.loss, batch)
    assert untrained < 0.7 < 0.9 < example.evaluate(model)["accuracy"]


def test_make_lists_every_target():
    said = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    for target in targets[1].split():
        assert re.search(rf"^  make {target} +\S", said, re.MULTILINE), target


@pytest.mark.parametrize(
    ("package", "folder", "command"),
    [
        (ampwise, ROOT, "ampwise = ampwise.cli.main:main"),
        (ampwise_lint, ROOT / "lint", "ampwise-lint = ampwise_lint.main:main"),
    ],
    ids=["ampwise", "ampwise-lint"],
)
def test_the_wheel_has_the_package_its_types_and_the_command(tmp_path, package, folder, command):
    pytest.importorskip("build")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path, folder],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    name = package.__name__
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        info = f"{name}-{package.__version__}.dist-info"
        points = content.read(f"{info}/entry_points.txt").decode()
    home = Path(package.__file__).parent
    for file in (*home.rglob("*.py"), *home.rglob("*.html")):
        assert f"{name}/{file.relative_to(home).as_posix()}" in names
    assert {f"{name}/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert not [each for each in names if not each.startswith((f"{name}/", info))]
    assert command in points


def test_the_hook_names_all_that_the_linter_needs():
    """pre-commit installs ampwise itself, so dependencies, torch among them, are left out."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    first, linter, *named = hook["additional_dependencies"]
    assert (hook["language"], first, linter) == ("python", "--no-deps", "./lint")
    project = tomllib.loads((ROOT / "lint" / "pyproject.toml").read_text())["project"]
    needed, waiting = set[str](), list(project["dependencies"])
    while waiting:
        each = Requirement(waiting.pop())
        if each.name.lower() not in needed and (each.marker is None or each.marker.evaluate()):
            needed.add(each.name.lower())
            waiting += importlib.metadata.requires(each.name) or []
    assert {Requirement(each).name for each in named} == needed
    assert set(project["dependencies"]) <= set(named)
    assert hook["entry"].split()[0] in project["scripts"]


def test_the_action_keeps_the_findings_and_the_exit_code(tmp_path):
    """Its step ``Check``, as GitHub runs it; nothing from outside is put into a script."""
    action = yaml.safe_load((ROOT / "lint" / "action.yml").read_text())
    scripts = {
        each["name"]: each.get("run", "") for each in action["runs"]["steps"] if "name" in each
    }
    assert "${{" not in "".join(scripts.values())
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.amp.GradScaler()\n")
    command = tmp_path / "ampwise-lint" / "bin" / "ampwise-lint"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ampwise_lint "$@"\n')
    command.chmod(0o755)
    for arguments, code in (("train.py --select AMP4", "1"), ("--select AMP2 .", "0"), ("no", "2")):
        told = tmp_path / "told"
        told.write_text("")
        environment = {
            **os.environ, "RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(told),
            "ARGUMENTS": arguments,
        }  # fmt: skip
        subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", scripts["Check"]],
            env=environment, cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
        outputs = dict(line.split("=", 1) for line in told.read_text().splitlines())
        assert outputs["code"] == code
        assert ("sarif" in outputs) == (code != "2")
        if code != "2":
            log = json.loads(Path(outputs["sarif"]).read_text())
            assert bool(log["runs"][0]["results"]) == (code == "1")
        done = subprocess.run(["bash", "-c", scripts["Result"]], env={"CODE": outputs["code"]})
        assert done.returncode == int(code)


def test_the_task_for_vs_code_understands_what_the_linter_says(tmp_path):
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "lint.md").read_text(), re.DOTALL)
    (task,) = json.loads(blocks[0])["tasks"]
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.amp.GradScaler()\n")
    said = subprocess.run(
        [sys.executable, "-m", "ampwise_lint", *task["args"]],
        cwd=tmp_path, capture_output=True, text=True,
    ).stdout  # fmt: skip
    pattern = task["problemMatcher"]["pattern"]
    found = re.match(pattern["regexp"], said)
    assert found
    parts = [found[pattern[each]] for each in ("severity", "file", "line", "column", "code")]
    assert parts == ["warning", "train.py", "2", "1", "AMP401"]
    assert found[pattern["message"]]
