"""The site: its commands give the output they show, and nothing public is left out."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

import ampwise
from ampwise.cli.main import COMMANDS
from tests.forked import Python

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SYMPTOMS = ROOT / "examples" / "symptoms"
BLOCK = re.compile(r"^```text\n\$ ampwise (.*)\n((?:.*\n)+?)```$", re.MULTILINE)
SHOWN = [found.groups() for found in BLOCK.finditer((DOCS / "troubleshooting.md").read_text())]
QUICK = ("lint", "run nan_")
DEPENDS_ON_THE_MACHINE = ("bench", "--race")


def said(text: str) -> set[str]:
    """Lines without what differs from run to run: numbers, and the space around them."""
    return {
        re.sub(r"[-+.,\d]*\d[\d.e%-]*", "#", " ".join(line.split())) for line in text.splitlines()
    }


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(*each, id=each[0], marks=() if each[0].startswith(QUICK) else pytest.mark.slow)
        for each in SHOWN
    ],
)
def test_a_symptom_is_answered_as_its_page_says(command, shown, tmp_path):
    shutil.copytree(SYMPTOMS, tmp_path, dirs_exist_ok=True)
    words = ["-m", "ampwise", *shlex.split(command)]
    code, out, err = Python(words, tmp_path, {"COLUMNS": "80"}).ended()
    assert code in {0, 1}, err
    expected, actual = said(shown), said(out + err)
    if any(word in command for word in DEPENDS_ON_THE_MACHINE):
        expected, actual = (
            {line.partition(" ")[0] for line in each} for each in (expected, actual)
        )
    assert expected <= actual, (expected - actual, out + err)


def test_every_symptom_is_on_the_page():
    named = {word for command, _ in SHOWN for word in command.split() if word.endswith(".py")}
    assert named == {each.name for each in SYMPTOMS.glob("*.py")}


def test_every_command_has_its_place():
    page = (DOCS / "commands.md").read_text()
    assert set(re.findall(r"^## ([a-z]+)$", page, re.MULTILINE)) == set(COMMANDS)


def test_the_library_page_has_every_public_name():
    page = (DOCS / "api.md").read_text()
    shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", page, re.MULTILINE))
    homes = {name for name, home in ampwise._HOME_OF.items() if home != "ampwise.errors"}
    assert homes <= shown
    assert "::: ampwise.errors" in page


def test_the_numbers_of_the_numerics_page_are_the_measured_ones():
    page = (DOCS / "numerics.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "numerics-cpu.json").read_text())
    arms = results["stagnation"]["arms"]
    for name in ("float32", "bfloat16"):
        last = sum(arms[name]["loss"][-20:]) / 20
        assert f"{last:.2f}" in page, name
    moved = arms["bfloat16"]["moved"]
    assert f"{moved[0]:.0%} falling to {moved[-1]:.0%}".replace("%", " %") in page
    assert min(arms["float32"]["moved"]) > 0.999
    scaling = results["scaling"]
    lost = dict(zip(scaling["log2_scale"], scaling["share_lost"], strict=True))
    assert f"{lost[-10]:.0%} with a factor of 1/1024".replace("%", " %") in page
    assert f"{lost[-12]:.0%} with 1/4096".replace("%", " %") in page
    sizes = zip(scaling["log2_size"], scaling["share"], strict=True)
    subnormal = sum(share for size, share in sizes if size < -14)
    assert f"{subnormal:.0%} are below".replace("%", " %") in page
    for row in results["overflow"].values():
        exact = float(row["float32"])
        assert abs(float(row["bfloat16"]) / exact - 1) <= 2**-7  # bfloat16 has the range
    assert [name for name, row in results["overflow"].items() if "inf" in str(row["float16"])]


def test_what_an_install_brings_is_what_was_measured():
    page = (DOCS / "install.md").read_text()
    measured = json.loads((ROOT / "benchmarks" / "results" / "install-size.json").read_text())
    beside = measured["beside_torch_mb"]
    core = beside["core"]
    assert f"| {len(core)} packages | {sum(core.values()):.1f} | | |" in page
    rows = page.partition("| package |")[2].partition(f"| {len(core)} packages")[0]
    assert set(core) == set(re.findall(r"[a-z][a-z-]+", " ".join(_first_cells(rows)))) - {"with"}
    for name in ("digits", "nvml", "tensorboard", "wandb", "mlflow"):
        assert f"| `{name}` | {len(beside[name])} | {sum(beside[name].values()):.0f} |" in page


def _first_cells(rows: str) -> list[str]:
    """The first column of a table, below its head."""
    return [line.split("|")[1] for line in rows.splitlines()[2:] if line.startswith("|")]


def test_the_page_names_what_the_project_asks_for():
    page = (DOCS / "install.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "torch>=2.9" in project["dependencies"]
    assert "Python 3.11 and torch 2.9 or newer" in page
