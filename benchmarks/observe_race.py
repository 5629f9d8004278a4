"""Does ``ampwise run --race`` find what ``ampwise bench`` finds, on the same model and data?

Each script below `observed` trains by a loop of its own, and has a Task of the same model beside
it. Race and bench take turns, several times; both give bf16 over float32 with an interval. The
script of Hugging Face's Trainer needs transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import save

SCRIPTS = {"gpt": ["--max-grad-norm", "1"], "mnist": [], "bert": ["--max-grad-norm", "1"]}
"""And what bench is told that the script does by itself."""
HERE = Path(__file__).parent / "observed"


def command(folder: str, *words: str) -> dict[str, Any]:
    """The JSON of an ampwise command."""
    file = Path(folder) / "found.json"
    line = [sys.executable, "-m", "ampwise", *words[:1], "--quiet", "--json", str(file), *words[1:]]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    if not file.exists():
        raise SystemExit(f"{' '.join(line)}: {done.stderr}")
    found = json.loads(file.read_text())
    file.unlink()
    return found


def raced(script: str, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--race", "bf16", "--steps", str(steps), str(HERE / f"{script}.py")]
        return command(folder, "run", *words)["race"]["bf16"]["speed"]


def benched(script: str, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--precisions", "bf16", "--seeds", "0", "--no-levers", "--steps", str(rounds)]
        found = command(folder, "bench", str(HERE / f"{script}.py"), *words, *SCRIPTS[script])
    return next(each["speedup"] for each in found["precisions"] if each["name"] == "bf16")


def shown(interval: dict[str, float]) -> str:
    return "{median:.3f}x [{low:.3f}, {high:.3f}]".format(**interval)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", choices=list(SCRIPTS))
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for script in [args.only] if args.only else SCRIPTS:
        both: dict[str, list[dict[str, float]]] = {"race": [], "bench": []}
        for _ in range(args.repetitions):
            both["race"].append(raced(script, 2 * args.rounds))
            both["bench"].append(benched(script, args.rounds))
            print(f"{script:6s} race {shown(both['race'][-1])}, bench {shown(both['bench'][-1])}")
        middle = {name: statistics.median(e["median"] for e in each) for name, each in both.items()}
        apart = middle["race"] / middle["bench"] - 1
        print(f"{script:6s} medians {middle['race']:.3f}x and {middle['bench']:.3f}x: {apart:+.1%}")
        results[script] = {**both, "apart": apart}
    if args.save:
        save("observe-race-cpu", {"rounds": args.rounds, "scripts": results})


if __name__ == "__main__":
    main()
