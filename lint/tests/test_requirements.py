"""What versions of torch a project asks for, and what that means for names it has to use."""

from __future__ import annotations

import pytest

from ampwise_lint.engine import lint
from ampwise_lint.fix import fix_files
from ampwise_lint.settings import Settings
from ampwise_lint.source.requirements import Requirements, asked

SCALER = "import torch\n\nscaler = torch.cuda.amp.GradScaler()\n"
REGION = "import torch\n\nregion = torch.cuda.amp.autocast()\n"
IMPORT = (
    "from torch.cuda.amp import autocast, GradScaler\n\nscaler, region = GradScaler(), autocast()\n"
)


@pytest.mark.parametrize(
    ("words", "lowest", "below"),
    [
        (">=1.8,<2", (1, 8), (2,)),
        ("==1.13.1+cu117", (1, 13, 1), (1, 13, 2)),
        ("==1.13.*", (1, 13), (1, 14)),
        ("<=2.2", None, (2, 2, 1)),
        ("~=1.13.1", (1, 13, 1), (1, 14)),
        ("^1.8", (1, 8), (2,)),
        ("~1.8", (1, 8), (1, 9)),
        ("2.0.1", (2, 0, 1), (2, 0, 2)),
        (">1.7,!=1.9", (1, 7), None),
    ],
)
def test_bounds_are_read(words, lowest, below):
    found = asked(words)
    assert (found.lowest, found.below) == (lowest, below)


def test_one_sign_of_conda_is_a_prefix():
    assert asked("=1.13", is_conda=True).below == (1, 14)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["torch>=1.8, <2", "tqdm==1"]\n', [">=1.8, <2"]),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = "^1.0"\n', ["^1.0"]),
        ("pyproject.toml", 'torch = {version = "^1.0 || ^2.0", source = "x"}\n', ["^1.0", "^2.0"]),
        ("pyproject.toml", '[tool.uv.sources]\ntorch = { index = "pytorch-cu124" }\n', []),
        ("setup.py", 'setup(install_requires=["numpy>=1", "torch>=1.8"])\n', [">=1.8"]),
        ("setup.cfg", "install_requires =\n    torch (>=1.8)\n", [">=1.8"]),
        ("requirements-dev.txt", "# torch==1.4\ntorch==1.13.1+cu117  # old\n", ["==1.13.1+cu117"]),
        ("requirements/base.txt", "torch ~= 1.13\ntorchvision==0.14\npytorch-lightning<2\n", ["~= 1.13"]),
        ("environment.yml", "  - pytorch=2.0.0=py3.8_0\n  - pytorch-cuda=11.8\n", ["=2.0.0"]),
        ("environment.yaml", "  - pytorch::pytorch==1.7\n  - pip:\n      - torch==1.8\n", ["==1.7", "==1.8"]),
        ("requirements.txt", "torch\n-f https://x.org/torch-1.8.0-cp39.whl\n", []),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_found(tmp_path, name, text, words):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    found = Requirements().of(tmp_path / "package" / "train.py")
    assert [each.words for each in found.asked] == words


def test_nothing_is_asked_above_a_repository(tmp_path):
    (tmp_path / "requirements.txt").write_text("torch==1.8\n")
    (tmp_path / "project" / ".git").mkdir(parents=True)
    assert not Requirements().of(tmp_path / "project" / "train.py").asked


@pytest.mark.parametrize(
    ("required", "text", "severity", "fix"),
    [
        ("torch", SCALER, "warning", "safe"),
        ("torch==2.0.1", SCALER, "info", None),
        ("torch==2.0.1", REGION, "warning", "safe"),
        ("torch==2.0.1", IMPORT, "info", None),
        ("torch<1.12", REGION, "info", None),
        ("torch>=1.8", REGION, "warning", "unsafe"),
        ("torch>=2.0", SCALER, "warning", "unsafe"),
        ("torch>=2.0", REGION, "warning", "safe"),
        ("torch>=2.0,<3", IMPORT, "warning", "unsafe"),
        ("torch>=2.4", IMPORT, "warning", "safe"),
    ],
)
def test_old_names_stay_where_the_new_ones_may_not_be(tmp_path, required, text, severity, fix):
    (tmp_path / "requirements.txt").write_text(f"{required}\n")
    file = tmp_path / "train.py"
    file.write_text(text)
    report = lint([file], use_cache=False)
    found = [each.to_json() for each in report.findings if each.code == "AMP401"]
    assert [(each["severity"], each["fix"]) for each in found] == [(severity, fix)]
    fix_files(report, [file], Settings(), unsafe=False)
    assert (file.read_text() != text) == (fix == "safe")


def test_what_is_kept_of_a_file_goes_with_its_requirements(tmp_path, monkeypatch):
    monkeypatch.setenv("AMPWISE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "train.py"
    file.write_text(SCALER)
    severities: list[str] = []
    for required in ("", "torch<2", "torch>=2.4"):
        (tmp_path / "requirements.txt").write_text(required)
        severities += [e.severity for e in lint([file]).findings if e.code == "AMP401"]
    assert severities == ["warning", "info", "warning"]
    assert lint([file]).cached == 1
