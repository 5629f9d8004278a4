"""Training on two ranks in which one goes wrong at step 5, in a way that has a name."""

from __future__ import annotations

import pdb
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ampwise.distributed.watchdog import Watchdog
from tests.distributed.processes import LIMIT_S

AT = 5
STEPS = 8


def sleep_in_loader() -> None:
    time.sleep(3600)


class EndlessForward(nn.Linear):
    endless = False

    def forward(self, inputs: Any) -> Any:
        while self.endless:
            pass
        return super().forward(inputs)


def go_wrong(what: str, model: EndlessForward, folder: Path) -> None:
    if what == "loader":
        sleep_in_loader()
    elif what == "forward":
        model.endless = True
    elif what == "raises":
        raise ValueError("the image is broken")
    elif what == "killed":
        (folder / "ready").touch()
        time.sleep(3600)
    elif what == "breakpoint":
        break_here()
    elif what == "branch":
        dist.barrier()


def train(what: str, rank: int, spread: Any, folder: Path, watchdog: Watchdog) -> None:
    for step in range(1, STEPS + 1):
        (folder / f"step-{rank}-{step}").touch()
        watchdog.beat(step, "data")
        if step == AT and rank == 1:
            if what == "short":
                return
            go_wrong(what, spread.module, folder)
        elif step == AT and what == "evaluation":
            with watchdog.paused(60):  # the other one is in the next collective meanwhile
                time.sleep(2 * LIMIT_S)
        watchdog.beat(step, "step")
        spread(torch.ones(2, 4)).sum().backward()


def main(what: str, limit_s: float, store: Any, rank: int, folder: Path) -> None:
    words = folder / f"words-{rank}"
    spread = nn.parallel.DistributedDataParallel(EndlessForward(4, 1))
    spread(torch.ones(2, 4)).sum().backward()  # the first one takes seconds on a busy machine
    with Watchdog(store, rank, 2, limit_s, words.write_text) as watchdog:
        try:
            train(what, rank, spread, folder, watchdog)
        except RuntimeError as error:
            found = watchdog.explain(error)
            if found is None:
                raise
            print(f"ampwise: {found}", file=sys.stderr)
            raise SystemExit(found.exit_code) from None


def break_here() -> None:
    """What a breakpoint is to whoever looks at the stack: a frame of pdb's."""
    exec(compile("import time; time.sleep(6)", pdb.__file__, "exec"))
