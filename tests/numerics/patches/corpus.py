"""Faults as task files, and the patches of them that a reviewer has accepted.

``python -m tests.numerics.patches.corpus [NAME ...]`` diagnoses them and writes the patches that
were verified as ``NAME.diff`` beside this file: read what changed before you commit it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from ampwise.numerics.diagnose import DiagnoseConfig, run_diagnosis
from ampwise.numerics.progress import Silent
from ampwise.numerics.remedy import fix
from ampwise.numerics.remedy.handover import TaskSource
from ampwise.numerics.result import Diagnosis
from ampwise.policy import Policy
from ampwise.tasks import load_task
from tests.numerics.cases import CASES, VARIANTS

HERE = Path(__file__).parent
FAULTS = HERE / "faults"
ROOT = HERE.parents[2]

NO_CODE = ("bad data", "bad parameter", "bad buffer", "scale too high",
           "gradients underflow", "log of zero in the data", "loss stays NaN")  # fmt: skip
"""Public cases that no change of a line mends; of the last nobody can know what was meant."""


@dataclass(frozen=True)
class Fault:
    """A task that fails, and where it is run."""

    source: TaskSource
    precision: str
    folder: Path


def _of_file(file: Path) -> Fault:
    lines = file.read_text().splitlines()
    precision = next((e.split('"')[1] for e in lines if e.startswith("PRECISION")), "fp16")
    return Fault(TaskSource(file.name), precision, FAULTS)


def _of_case(name: str) -> Fault:
    source = TaskSource("tests.numerics.patches.existing", {"name": name})
    return Fault(source, (CASES | VARIANTS)[name].precision, ROOT)


ALL = {each.stem: _of_file(each) for each in sorted(FAULTS.glob("*.py")) if each.stem != "faulty"}
ALL |= {
    re.sub(r"\W+", "_", f"case {name}"): _of_case(name)
    for name in CASES | VARIANTS
    if name not in NO_CODE
}


def diagnosed(name: str) -> Diagnosis:
    """The diagnosis of a fault, with patches, and without fixes in memory alone."""
    fault = ALL[name]
    config = DiagnoseConfig(Policy.parse(fault.precision), steps=6, source=fault.source)
    with contextlib.chdir(fault.folder), mock.patch.object(fix, "tried", return_value=[]):
        task = load_task(fault.source.spec, fault.source.settings)
        return run_diagnosis(task, config, Silent())


def accepted(name: str) -> Path:
    """Where its accepted patch is."""
    return HERE / f"{name}.diff"


def main(names: list[str]) -> None:
    mended = 0
    for name in names or ALL:
        found = diagnosed(name)
        verified = next((each for each in found.fixes if each.verified), None)
        print(f"##### {name}: {found.status} {found.cause}")
        for each in found.fixes:
            print(f"  {each.what}: {each.patch_status}")
        if verified is not None and verified.patch is not None:
            mended += 1
            accepted(name).write_text(verified.patch, newline="")
            print(verified.patch)
        sys.stdout.flush()
    print(f"{mended} of {len(names or ALL)} have a verified patch")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
