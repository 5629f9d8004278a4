"""Figure 4: what each precision buys on charlm ``base`` (19 million parameters).

The same as ``ampwise bench charlm --set size=base``, for a stated number of rounds; the report is
stored as it is. Speed depends on the units of the machine (see `machine.isa`), and so do temporary
buffers of its kernels; the rest of the peak is the same on every CPU. Results of further machines
are kept under names of their own.
"""

from __future__ import annotations

import argparse

import torch

from _common import save
from ampwise import Policy, load_task
from ampwise.bench.config import BenchConfig
from ampwise.bench.race import Race
from ampwise.bench.run import run_bench

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISIONS = ("bf16", "bf16-master")


class Progress:
    def stage(self, what: str) -> None:
        print(what, flush=True)

    def round(self, race: Race) -> None:
        print(f"  round {race.rounds}", flush=True)

    def seed(self, name: str, seed: int, planned: int) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--size", default="base")
    parser.add_argument("--batch", default="", help="windows a batch, for slow machines")
    options = parser.parse_args()
    config = BenchConfig(
        DEVICE,
        precisions=[Policy.parse(each) for each in PRECISIONS],
        max_rounds=options.rounds,
        budget_s=600.0,
        max_seeds=0,
    )
    settings = {"size": options.size, **({"batch": options.batch} if options.batch else {})}
    report = run_bench(load_task("charlm", settings), config, Progress())
    for each in report.precisions:
        saved = f"{each.memory_reduction or 0:+.1%}"
        print(f"{each.name:12s} {each.speedup or '1.00x'!s:22s} memory saved {saved} {each.memory}")
    save(f"charlm-{options.size}-{DEVICE.type}", {"report": report.to_json()})


if __name__ == "__main__":
    main()
