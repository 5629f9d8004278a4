"""Mutated real files: no crash, no hang, and never an edit."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from ampwise_lint.engine import SECONDS, check_file
from ampwise_lint.source.project import Project

FIXTURES = sorted((Path(__file__).parents[2] / "lint" / "tests" / "fixtures").rglob("*.py"))
TORCH = Path(torch.__file__).parent


def real_files() -> list[Path]:
    """Training code of ours, and torch's own files about training."""
    folders = ("cuda/amp", "amp", "optim", "nn/utils", "distributed/fsdp", "utils/data")
    own = [file for each in folders for file in sorted((TORCH / each).rglob("*.py"))]
    return [*FIXTURES, *(each for each in own if each.stat().st_size < 60_000)]


def mutated(text: str, rng: random.Random) -> str:
    """A few edits as a person, or a bad disk, would make them."""
    lines = text.split("\n")
    for _ in range(rng.randint(1, 6)):
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(8):
            case 0:
                del lines[at]
            case 1:
                lines[at], lines[other] = lines[other], lines[at]
            case 2:
                lines.insert(at, lines[other])
            case 3:
                lines[at] = " " * rng.randrange(16) + lines[at].lstrip()
            case 4:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            case 5:
                words = lines[at].split(" ")
                rng.shuffle(words)
                lines[at] = " ".join(words)
            case 6:
                names = ("scaler", "loss", "optimizer", "model", "self", "None", "torch", "x")
                old, new = rng.sample(names, 2)
                lines = [each.replace(old, new) for each in lines]
            case _:
                spot = rng.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:spot] + chr(rng.randrange(1, 0x3000)) + lines[at][spot:]
        lines = lines or [""]
    return "\n".join(lines)


def fuzz(count: int, folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = real_files()
    work = folder / "mutant.py"
    read = 0
    for number in range(count):
        source = rng.choice(files)
        text = mutated(source.read_text(encoding="utf-8"), rng)
        data = text.encode("utf-8", errors="surrogatepass")
        work.write_bytes(data)
        began = time.monotonic()
        try:
            checked = check_file(work, Project(frozenset({work})))
        except Exception as error:
            raise AssertionError(f"mutant {number} of {source} (seed {seed})\n{text}") from error
        assert "a bug in ampwise" not in checked.skipped, f"seed {seed}, mutant {number}\n{text}"
        assert time.monotonic() - began < 2 * SECONDS
        assert work.read_bytes() == data
        read += not checked.skipped
    assert read > count / 10  # not all of them may be broken Python


def test_mutants_neither_crash_nor_hang_nor_change(tmp_path):
    fuzz(250, tmp_path, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_mutants(tmp_path, seed):
    fuzz(1000, tmp_path, seed)
