"""Faults as task files, and the patches of them that a reviewer has accepted.

``python -m tests.numerics.patches.corpus [NAME ...]`` diagnoses them and writes the patches that
were verified as ``NAME.diff`` beside this file: read what changed before you commit it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

from ampwise.numerics import fix
from ampwise.numerics.diagnose import DiagnoseConfig, run_diagnosis
from ampwise.numerics.examine import Silent
from ampwise.numerics.remedy.handover import TaskSource
from ampwise.numerics.result import Diagnosis
from ampwise.policy import Policy
from ampwise.tasks import load_task

HERE = Path(__file__).parent
FAULTS = HERE / "faults"
NAMES = sorted(each.stem for each in FAULTS.glob("*.py") if each.stem != "faulty")


def precision(name: str) -> str:
    """What a fault shows in."""
    lines = (FAULTS / f"{name}.py").read_text().splitlines()
    return next((e.split('"')[1] for e in lines if e.startswith("PRECISION")), "fp16")


def marked(name: str) -> int:
    """The line that breaks."""
    lines = (FAULTS / f"{name}.py").read_text().splitlines()
    return next(number for number, each in enumerate(lines, 1) if "# <- here" in each)


def diagnosed(name: str) -> Diagnosis:
    """The diagnosis of a fault, with patches, and without fixes in memory alone."""
    file = f"{name}.py"
    config = DiagnoseConfig(Policy.parse(precision(name)), steps=6, source=TaskSource(file))
    with contextlib.chdir(FAULTS), mock.patch.object(fix, "tried", return_value=[]):
        return run_diagnosis(load_task(file), config, Silent())


def accepted(name: str) -> Path:
    """Where its accepted patch is."""
    return HERE / f"{name}.diff"


def main(names: list[str]) -> None:
    for name in names or NAMES:
        found = diagnosed(name)
        verified = next((each for each in found.fixes if each.verified), None)
        print(f"##### {name}: {found.status} {found.cause}")
        for each in found.fixes:
            print(f"  {each.what}: {each.patch_status}")
        if verified is not None and verified.patch is not None:
            accepted(name).write_text(verified.patch)
            print(verified.patch)
        sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
