"""A missing extra names the command that installs it, for however ampwise was installed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest

from ampwise import installation

TREE = Path(installation.__file__).parents[2]


class Made(importlib.metadata.Distribution):
    """Metadata made up for a test."""

    def __init__(self, files: dict[str, str]) -> None:
        self.held = files

    def read_text(self, filename: str) -> str | None:
        return self.held.get(filename)

    def locate_file(self, path):
        return Path(path)


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """A Python in an environment of its own, whose `bin` is all that is on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda _: "here")
    return programs


@pytest.fixture
def made(monkeypatch):
    def made(origin: object = None, installer: str = "pip\n") -> None:
        files = {"INSTALLER": installer}
        if origin is not None:
            files["direct_url.json"] = origin if isinstance(origin, str) else json.dumps(origin)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Made(files))

    return made


def program(folder: Path, name: str) -> None:
    (folder / name).write_text("")
    (folder / name).chmod(0o755)


def test_an_index(environment, made):
    made()
    python = environment / "python"
    command = f"{python} -m pip install 'ampwise[wandb]'"
    assert installation.extra_command("wandb") == command


def test_the_pip_of_this_python_goes_by_its_name_and_another_does_not(
    environment, made, monkeypatch
):
    made()
    elsewhere = environment / "elsewhere"
    elsewhere.mkdir()
    program(elsewhere, "pip")
    monkeypatch.setenv("PATH", f"{elsewhere}{os.pathsep}{environment}")
    assert installation.extra_command("wandb").startswith(f"{environment}/python -m pip install ")
    monkeypatch.setenv("PATH", str(environment))
    program(environment, "pip")
    assert installation.extra_command("wandb") == "pip install 'ampwise[wandb]'"


@pytest.mark.parametrize(
    "origin",
    [
        {"url": "file:///tmp/ampwise-0.1.0.whl", "archive_info": {}},
        {"url": "https://example.org/ampwise", "vcs_info": {"vcs": "git"}},
        {"url": "file:///home/me/ampwise", "dir_info": {}},
        "[]", "{", '{"dir_info": {"editable": true}}', '{"dir_info": 7, "url": 7}',
    ],
    ids=str,
)  # fmt: skip
def test_a_copy_is_completed_by_name(environment, made, origin):
    made(origin)
    program(environment, "pip")
    assert installation.extra_command("wandb") == "pip install 'ampwise[wandb]'"


def test_a_tree_that_is_installed_in_place_stays_there(environment, made):
    made({"url": "file:///home/me/my%20code", "dir_info": {"editable": True}})
    program(environment, "pip")
    assert installation.extra_command("wandb") == (
        "pip install -e '/home/me/my code/lint' -e '/home/me/my code[wandb]'"
    )


def test_a_tree_that_is_not_installed(environment, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    program(environment, "pip")
    assert installation.extra_command("wandb") == f"pip install -e {TREE}/lint -e '{TREE}[wandb]'"
    assert (TREE / "pyproject.toml").exists()


def test_uv(environment, made):
    made(installer="uv")
    program(environment, "pip")
    assert installation.extra_command("wandb") == "pip install 'ampwise[wandb]'"  # uv is gone
    program(environment, "uv")
    command = f"uv pip install --python {environment / 'python'} 'ampwise[wandb]'"
    assert installation.extra_command("wandb") == command


def test_an_environment_without_pip(environment, made, monkeypatch):
    made()
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda _: None)
    program(environment, "uv")
    assert installation.extra_command("wandb").startswith("uv pip install --python ")


def test_pipx(environment, made):
    made()
    prefix = environment.parent
    (prefix / "pipx_metadata.json").write_text("{}")
    command = f"pipx runpip {prefix.name} install 'ampwise[wandb]'"
    assert installation.extra_command("wandb") == command


def test_conda_has_no_extras_so_its_own_pip_installs_them(environment, made):
    made(installer="conda")
    command = f"{environment / 'python'} -m pip install 'ampwise[wandb]'"
    assert installation.extra_command("wandb") == command
