"""What the watch over ranks costs a step: watched every 50 steps, against not watched.

Two processes on this machine's cores (gloo, one thread each) train under DDP, a small MLP and one
of 20 M parameters. Both arms are on the same ranks and take turns; a sample is 50 steps, and so
holds one comparison. Beside that ratio, which is no finer than the machine is quiet, stands what
the end of a window takes in the watch itself, as a part of the watched steps: checksum, gather, and
the wait for the other rank. Rank 0's times.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from _common import paired_ratio, save, show, take_turns
from ampwise.step import TrainStep

EVERY = 50
WIDTHS = {"mlp, 5 k parameters": (64, 64, 10), "mlp, 20 M parameters": (2048, *[2048] * 5, 10)}
ROWS = 32


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def arm(widths: tuple[int, ...], every: int, closes_ms: list[float]):
    """`EVERY` steps, watched once or not at all; the watch's own time a step is noted."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = TrainStep(model, optimizer, policy="fp32", max_grad_norm=1.0, watch_every=every)
    watch = step._parallel._watch
    close = watch.close

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        close(*args)
        closes_ms.append((time.perf_counter() - start) * 1e3)

    watch.close = timed
    batch = (torch.randn(ROWS, widths[0]), torch.randint(0, widths[-1], (ROWS,)))

    def run() -> None:
        for _ in range(EVERY):
            step(classify, batch)
        step.poll()

    return run


def rank_main(rank: int, folder: str, rounds: dict[str, int], out: Any) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for name, widths in WIDTHS.items():
        closes: list[float] = []
        arms = {"watched": arm(widths, EVERY, closes), "unwatched": arm(widths, 0, [])}
        samples = take_turns(arms, rounds[name], warm_up=1)
        if rank == 0:
            per_step = {each: [ms / EVERY for ms in samples[each]] for each in samples}
            out.put((name, (per_step, closes[EVERY:])))  # without the warm-up
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs=2, default=(60, 10), help="small and large")
    rounds = dict(zip(WIDTHS, parser.parse_args().rounds, strict=True))
    out = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            rank_main, (str(Path(folder)), rounds, out), nprocs=2, join=False
        )
        assert context is not None
        found = dict(out.get() for _ in WIDTHS)
        while not context.join():
            pass
    results: dict[str, Any] = {}
    for name, (samples, closes) in found.items():
        comparison_ms = statistics.median(closes[EVERY - 1 :: EVERY])
        share = statistics.mean(closes) / statistics.mean(samples["watched"])
        ratio = paired_ratio(samples["watched"], samples["unwatched"])
        medians = {arm: statistics.median(values) for arm, values in samples.items()}
        print(show(f"{name}: watched / unwatched", ratio), f"of {medians['unwatched']:.2f} ms")
        print(f"  a comparison takes {comparison_ms:.2f} ms; the watch, {share:.2%} of all steps")
        results[name] = {
            "step_ms": medians,
            "watched_time_relative_to_unwatched": ratio,
            "comparison_ms": comparison_ms,
            "share_of_steps": share,
        }
    setting = {"every": EVERY, "ranks": 2, "threads_per_rank": 1, "load_average": os.getloadavg()}
    save("watch-cpu", {**setting, "models": results})


if __name__ == "__main__":
    main()
