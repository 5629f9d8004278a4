"""The project as a whole: what is public is documented, and what must stay light is light."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import ampwise

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
    [TRAINING, "import ampwise.bench.run, ampwise.verify.run, ampwise.numerics.search"],
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
    for name in COMMANDS:
        assert (Path(ampwise.__file__).parent / "cli" / f"{name}.py").exists()


def test_pins_cover_the_declared_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["dev"]
    for extra in ("digits", "docs", "mlflow", "peers", "tensorboard", "wandb"):
        wanted += extras[extra]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    for requirement in wanted:
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


def test_the_wheel_has_the_package_its_types_and_the_command(tmp_path):
    pytest.importorskip("build")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        info = f"ampwise-{ampwise.__version__}.dist-info"
        points = content.read(f"{info}/entry_points.txt").decode()
    package = Path(ampwise.__file__).parent
    for file in package.rglob("*.py"):
        assert f"ampwise/{file.relative_to(package).as_posix()}" in names
    assert {"ampwise/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    assert "ampwise = ampwise.cli.main:main" in points
