"""Collectives of real processes over gloo on loopback: latency and bandwidth, and a check of them.

Rounds: in each, every collective in every size comes once, in a random order that is the same on
all ranks. Two processes calibrate: the smallest message gives the latency of a step, the largest
the bandwidth, for each kind of collective, since gloo copies more for some than for others. The
other sizes, and all of four processes, are predictions.

Four processes on two cores share them: half the bandwidth each, and a step waits for a core. What
it waits depends on who else runs, so a figure is the fastest round (which nobody disturbed) beside
median and 90th percentile, and the load of the machine is kept with it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from _collectives import Fabric, Link, ring_s, simulate_ring

SIZES = (40, 65_536, 2**20, 4 * 2**20, 25 * 2**20)
KINDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Collectives, and the rounds their ring takes; sizes are those of the whole."""


def measure(ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by kind and size on rank 0, one for each round."""
    return run(_time_collectives, ranks, rounds)


def run(work: Callable[..., Any], ranks: int, *args: Any, limit_s: float = 300) -> Any:
    """What `work(rank, ranks, *args)` returns on rank 0 of real processes over gloo."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        group = [
            context.Process(target=_serve, args=(work, rank, ranks, store, there, args))
            for rank in range(ranks)
        ]
        for each in group:
            each.start()
        found = here.recv() if here.poll(limit_s) else None
        for each in group:
            each.join(30)
            each.kill()
    if found is None:
        raise RuntimeError(f"{ranks} ranks did not answer in {limit_s:g} s")
    return found


def _serve(work: Any, rank: int, ranks: int, store: str, pipe: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = work(rank, ranks, *args)
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def _time_collectives(_rank: int, ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    arms = {(kind, size): _collective(kind, size, ranks) for kind in KINDS for size in SIZES}
    samples: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    order, shuffle = list(arms), random.Random(0).shuffle
    for index in range(rounds + 2):
        shuffle(order)
        for kind, size in order:
            dist.barrier()
            start = time.perf_counter()
            arms[kind, size]()
            spent = (time.perf_counter() - start) * 1e3
            if index >= 2:  # after two rounds of warming up
                samples[kind].setdefault(str(size), []).append(spent)
    return samples


def _collective(kind: str, size: int, ranks: int) -> Callable[[], object]:
    whole = torch.zeros(-(-size // 4 // ranks) * ranks)
    part = torch.zeros(whole.numel() // ranks)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_gather":
        return lambda: dist.all_gather_single(whole, part)
    return lambda: dist.reduce_scatter_single(part, whole)


def calibrate(samples: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Latency and bandwidth of a step by kind, from the smallest and the largest of two ranks."""
    found = {}
    for kind, by_size in samples.items():
        steps = KINDS[kind]
        small, large = (min(by_size[str(size)]) / steps for size in (SIZES[0], SIZES[-1]))
        found[kind] = {
            "latency_us": small * 1e3,
            "gb_per_s": SIZES[-1] / 2 / (large - small) * 1e-6,
        }
    return found


def fabric_of(link: dict[str, float], ranks: int, cores: int) -> Fabric:
    """One node of gloo processes that share its cores."""
    share = max(1.0, ranks / cores)
    way = Link(link["latency_us"] * 1e-6 * share, link["gb_per_s"] * 1e9 / share)
    return Fabric(inside=way, between=way, per_node=ranks)


def check() -> dict[str, Any]:
    """Calibrate with two processes, predict the rest, and compare."""
    cores = os.cpu_count() or 1
    measured = {ranks: measure(ranks, rounds) for ranks, rounds in ((2, 60), (4, 30))}
    links = calibrate(measured[2])
    rows = []
    for ranks, by_kind in measured.items():
        for kind, by_size in by_kind.items():
            fabric = fabric_of(links[kind], ranks, cores)
            for size, values in by_size.items():
                low, middle, high = (float(np.quantile(values, q)) for q in (0, 0.5, 0.9))
                simulated = simulate_ring(fabric, ranks, int(size), KINDS[kind]) * 1e3
                rows.append(
                    {
                        "ranks": ranks,
                        "kind": kind,
                        "bytes": int(size),
                        "used_to_calibrate": ranks == 2 and int(size) in (SIZES[0], SIZES[-1]),
                        "measured_ms": {"fastest": low, "median": middle, "high": high},
                        "estimate_ms": ring_s(fabric, ranks, int(size), KINDS[kind]) * 1e3,
                        "simulated_ms": simulated,
                        "simulated_over_fastest": simulated / low,
                        "simulated_over_median": simulated / middle,
                    }
                )
    predicted = [row for row in rows if not row["used_to_calibrate"]]
    return {
        "cores": cores,
        "load_average": os.getloadavg()[1],
        "links": links,
        "rows": rows,
        "error_against_fastest": _factors([row["simulated_over_fastest"] for row in predicted]),
        "error_against_median": _factors([row["simulated_over_median"] for row in predicted]),
    }


def _factors(ratios: list[float]) -> dict[str, float]:
    """How far off, as factors: exp |log ratio|, the median and the worst."""
    off = np.exp(np.abs(np.log(ratios)))
    return {"median_factor": float(np.median(off)), "worst_factor": float(off.max())}


# -- what a checkpoint and a shard are made of -----------------------------------------------------


def checkpoint_entries() -> dict[str, Any]:
    """What planning a distributed checkpoint costs for each tensor of each rank, measured."""
    return run(_plan_a_checkpoint, 2)


def _plan_a_checkpoint(rank: int, ranks: int) -> dict[str, Any] | None:
    from torch.distributed.checkpoint.default_planner import (
        DefaultSavePlanner,
        create_default_global_save_plan,
    )
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    sizes = [16 + index % 2 for index in range(9)]  # odd ones: two ranks hold 9 and 8 rows
    model = torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in pairwise(sizes)])
    shapes = [tuple(each.shape) for each in model.parameters()]
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"model": weights, "optimizer": moments}, is_coordinator=rank == 0)
    plans: list[Any] = [None] * ranks
    dist.all_gather_object(plans, planner.create_local_plan())
    if rank:
        return None
    # Further ranks would send what the second does: shards only, the rest is the first one's.
    first, second = plans
    second = replace(second, items=[each for each in second.items if each.type.name == "SHARD"])
    count = len(second.items)
    found = {}
    for many in (8, 64, 512):
        sent = [pickle.dumps(each) for each in [first] + [second] * (many - 1)]
        spent = []
        for _ in range(5):
            begun = time.perf_counter()
            read = [pickle.loads(each) for each in sent]
            _, metadata = create_default_global_save_plan(read)
            spent.append((time.perf_counter() - begun) * 1e6 / many / count)
        found[str(many)] = {
            "coordinator_us": {"low": min(spent), "median": sorted(spent)[2], "high": max(spent)},
            "metadata_bytes": len(pickle.dumps(metadata)) / many / count,
        }
    held = [each.to_local().numel() for each in model.parameters()]
    return {
        "entries": count,
        "sent_bytes": len(pickle.dumps(second)) / count,
        "by_ranks": found,
        "shapes": shapes,
        "elements_on_rank_0": sum(held),
    }
