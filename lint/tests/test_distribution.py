"""The linter is light: it stands on what its distribution declares, and on nothing of ampwise."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ampwise_lint
from test_source import BAD

PACKAGE = Path(ampwise_lint.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def imported(file: Path) -> set[str]:
    """Top-level modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", each)[0] for each in requirements}


def test_the_dependencies_are_libcst_and_rich():
    assert names(PROJECT["dependencies"]) == {"libcst", "rich"}


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda e: e.relative_to(PACKAGE).as_posix()
)
def test_what_is_imported_is_declared(file):
    allowed = {"ampwise_lint", *sys.stdlib_module_names, *names(PROJECT["dependencies"])}
    if file.name == "page.py":
        allowed |= {"jinja2", "markupsafe"}
    assert imported(file) <= allowed
    if file.parent.name == "base":
        assert all(
            each.module.startswith("ampwise_lint.base")
            for each in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(each, ast.ImportFrom) and "ampwise_lint" in str(each.module)
        )


def test_the_version_is_said_once():
    assert PROJECT["version"] == ampwise_lint.__version__


def test_the_command_is_a_module_too(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    done = subprocess.run(
        [sys.executable, "-m", "ampwise_lint"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "1 file: no findings\n")


def test_checking_needs_neither_libcst_nor_jinja2(tmp_path):
    (tmp_path / "a.py").write_text(BAD)
    block = "import sys; sys.modules |= dict.fromkeys(['libcst', 'jinja2', 'torch', 'ampwise'])"
    run = "from ampwise_lint.main import main; sys.exit(main(['--format', 'sarif']))"
    done = subprocess.run([sys.executable, "-c", f"{block}; {run}"], cwd=tmp_path)
    assert done.returncode == 1
