"""Figure 10: what grows with the number of ranks, from 8 to 4,096; estimated, and simulated.

Nobody has run this on several GPUs. The collectives of a step are simulated message by message on
fabrics whose latencies and bandwidths are assumptions with a source; the same simulation is checked
against real processes over gloo on loopback. ``python scale.py --tables`` prints the tables of
docs/scale.md from the stored results; with ``--gloo`` the real processes are measured anew first.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from _collectives import (
    Disturbance,
    Fabric,
    Link,
    doubling_sizes,
    exchanges_s,
    gather_s,
    gather_sizes,
    halving_sizes,
    ring_s,
    simulate_exchanges,
    simulate_gather,
    simulate_ring,
)
from _common import RESULTS, save
from _gloo import check, checkpoint_entries
from _growth import (
    GPT,
    balance,
    balanced_scale,
    elements,
    fullest_shard,
    lost_share,
    memory_bytes,
    simulate_failures,
    simulate_loss_scale,
    simulate_slowest,
    skip_probability,
    slowest,
    sum_errors,
    young_daly_s,
)

RANKS = (8, 64, 512, 4096)
MODEL = GPT()
BUCKET_BYTES = 25 * 2**20
SUM_BYTES = 5 * 8

# Latencies: NVIDIA's own, from NCCL's src/graph/tuning.cc (commit 01afd20a): ring and Simple for
# large messages, tree and LL (times 1.8 on NVLink with several nodes) for small ones. Bandwidths:
# NVLink 4, 450 GB/s each way for a GPU, taken as 80 %; eight ports of 400 Gb/s a node, 90 %.
NVLINK, PORTS = 0.8 * 450e9, 0.9 * 8 * 50e9
LARGE = Fabric(Link(3.4e-6, NVLINK), Link(9.6e-6, PORTS), start_s=8.4e-6)
SMALL = Fabric(Link(1.8 * 0.52e-6, NVLINK), Link(5.0e-6, PORTS), start_s=4.4e-6)
# The same nodes behind one port of 100 Gb/s; TCP, 30 us, a round guess.
ETHERNET = Fabric(LARGE.inside, Link(30e-6, 0.9 * 12.5e9), start_s=LARGE.start_s)

JITTER = Disturbance(jitter_s=1e-6)
SLOW = Disturbance(slow=2.0)
DISTURBED = {"jitter": JITTER, "slow": SLOW}

GROWTH_INTERVAL = 2000
OVERFLOWS_AT, POWER = 2.0**20, 2.0
"""One rank's probability of an overflow in a step is (scale / 2^20)^2, in the simulation."""
BAD_BATCH = 1e-6
GPU_DAYS_PER_FAILURE = 16_384 * 54 / 419
CHECKPOINT_S, RESTART_S = 30.0, 300.0

Estimate = Callable[[int], float]
Simulation = Callable[[int, Disturbance], float]


# -- collectives -----------------------------------------------------------------------------------


def ring(fabric: Fabric, n_bytes: float, rounds: int = 2) -> tuple[Estimate, Simulation]:
    return (
        lambda ranks: ring_s(fabric, ranks, n_bytes, rounds),
        lambda ranks, by: simulate_ring(fabric, ranks, n_bytes, rounds, by),
    )


def exchanges(
    fabric: Fabric, n_bytes: float, sizes: Callable[[int, float], list[float]]
) -> tuple[Estimate, Simulation]:
    return (
        lambda ranks: exchanges_s(fabric, ranks, sizes(ranks, n_bytes)),
        lambda ranks, by: simulate_exchanges(fabric, ranks, sizes(ranks, n_bytes), by),
    )


def times(count: int, one: tuple[Estimate, Simulation]) -> tuple[Estimate, Simulation]:
    """One after another, as on a stream."""
    return lambda ranks: count * one[0](ranks), lambda ranks, by: count * one[1](ranks, by)


def together(*parts: tuple[Estimate, Simulation]) -> tuple[Estimate, Simulation]:
    return (
        lambda ranks: sum(estimate(ranks) for estimate, _ in parts),
        lambda ranks, by: sum(simulation(ranks, by) for _, simulation in parts),
    )


def sharded(fabric: Fabric) -> tuple[Estimate, Simulation]:
    """FSDP2: parameters gathered twice in 2 bytes, gradients scattered in 4; block by block."""
    block, rest = elements(MODEL.block), elements(MODEL.rest)

    def unit(count: int) -> tuple[Estimate, Simulation]:
        return together(times(2, ring(fabric, 2 * count, 1)), ring(fabric, 4 * count, 1))

    return together(times(MODEL.layers, unit(block)), unit(rest))


def in_nodes(fabric: Fabric) -> tuple[Estimate, Simulation]:
    """Sharded inside a node, copied between nodes: an all-reduce of each rank's eighth is added."""
    alone = replace(fabric, between=fabric.inside)
    one_each = replace(fabric.shared(), per_node=1)
    inside, between = sharded(alone), [elements(MODEL.block)] * MODEL.layers
    copied = [ring(one_each, 4 * n / fabric.per_node) for n in [*between, elements(MODEL.rest)]]
    # All blocks are alike: one of them, times their number.
    across = together(times(MODEL.layers, copied[0]), copied[-1])

    def nodes(ranks: int) -> int:
        return ranks // fabric.per_node

    return (
        lambda r: inside[0](fabric.per_node) + (across[0](nodes(r)) if nodes(r) > 1 else 0),
        lambda r, by: (
            inside[1](fabric.per_node, by) + (across[1](nodes(r), by) if nodes(r) > 1 else 0)
        ),
    )


def collectives(plan_bytes: float) -> dict[str, tuple[Estimate, Simulation]]:
    """What ranks say to each other, by the name it has in the tables."""
    gradients = 4 * elements(MODEL.shapes)
    buckets = math.ceil(gradients / BUCKET_BYTES)
    return {
        "DDP, one piece, ring": ring(LARGE, gradients),
        f"DDP, {buckets} buckets of 25 MiB, ring": times(buckets, ring(LARGE, BUCKET_BYTES)),
        f"DDP, {buckets} buckets, halving and doubling": times(
            buckets, exchanges(LARGE, BUCKET_BYTES, halving_sizes)
        ),
        "FSDP2 over all ranks, ring": sharded(LARGE),
        "FSDP2 in each node, copies between": in_nodes(LARGE),
        "the sum of 40 bytes": exchanges(SMALL, SUM_BYTES, doubling_sizes),
        "the watch, every 50 steps": exchanges(SMALL, SUM_BYTES, gather_sizes),
        "a checkpoint's plans, gathered": (
            lambda ranks: gather_s(LARGE, ranks, plan_bytes),
            lambda ranks, by: simulate_gather(LARGE, ranks, plan_bytes, by),
        ),
        "DDP, one piece, ring; one 100 Gb/s port a node": ring(ETHERNET, gradients),
        "FSDP2 over all ranks, ring; one 100 Gb/s port a node": sharded(ETHERNET),
    }


def simulate_collectives(plan_bytes: float, ranks: Sequence[int] = RANKS) -> list[dict[str, Any]]:
    """Estimate and simulation of each, in milliseconds; undisturbed, with jitter, one slow rank."""
    rows = []
    for name, (estimate, simulation) in collectives(plan_bytes).items():
        for many in ranks:
            expected = estimate(many) * 1e3
            still = simulation(many, Disturbance()) * 1e3
            row = {"name": name, "ranks": many, "estimate_ms": expected, "simulated_ms": still}
            row["estimate_error"] = expected / still - 1
            for kind, by in DISTURBED.items():
                row[f"{kind}_ms"] = simulation(many, by) * 1e3
            rows.append(row)
    return rows


# -- all else --------------------------------------------------------------------------------------


def growth(entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By ranks: memory, metadata, skips, the loss scale, the slowest rank, failures."""
    found: dict[str, dict[str, Any]] = {}
    for ranks in RANKS:
        entries = 3 * len(MODEL.shapes) * ranks
        found[str(ranks)] = {
            "memory_bytes": memory_bytes(MODEL, ranks),
            "checkpoint": {
                "files": ranks,
                "entries": entries,
                "sent_bytes": entries * entry["sent_bytes"],
                "metadata_bytes": entries * entry["by_ranks"]["512"]["metadata_bytes"],
                "coordinator_s": entries * entry["by_ranks"]["512"]["coordinator_us"]["low"] * 1e-6,
            },
            "skip_probability": skip_probability(BAD_BATCH, ranks),
            "bad_batches": simulate_loss_scale(lambda _: BAD_BATCH, ranks, 100_000),
            "estimated_log2_scale": math.log2(
                balanced_scale(OVERFLOWS_AT, POWER, ranks, GROWTH_INTERVAL)
            ),
            "overflows": simulate_loss_scale(
                lambda scale: min((scale / OVERFLOWS_AT) ** POWER, 0.999),
                ranks,
                120_000,
                warm_up=20_000,
            ),
            "slowest_estimate": slowest(ranks),
            "slowest_simulated": simulate_slowest(ranks),
            "failures": failures(ranks),
        }
    return found


def failures(ranks: int) -> dict[str, float]:
    days = GPU_DAYS_PER_FAILURE / ranks
    mtbf = days * 86_400
    interval = young_daly_s(CHECKPOINT_S, mtbf)
    return {
        "mtbf_h": days * 24,
        "per_day": -math.expm1(-1 / days),
        "checkpoint_every_s": interval,
        "lost_estimate": lost_share(interval, CHECKPOINT_S, RESTART_S, mtbf),
        "lost_simulated": simulate_failures(interval, CHECKPOINT_S, RESTART_S, mtbf),
        "lost_at_half": simulate_failures(interval / 2, CHECKPOINT_S, RESTART_S, mtbf),
        "lost_at_double": simulate_failures(interval * 2, CHECKPOINT_S, RESTART_S, mtbf),
    }


def assumptions() -> dict[str, Any]:
    return {
        "model": {**asdict(MODEL), "parameters": elements(MODEL.shapes)},
        "bucket_bytes": BUCKET_BYTES,
        "fabrics": {
            "large messages": asdict(LARGE),
            "small messages": asdict(SMALL),
            "one port a node": asdict(ETHERNET),
        },
        "disturbances": {kind: asdict(by) for kind, by in DISTURBED.items()},
        "loss_scale": {
            "growth_interval": GROWTH_INTERVAL,
            "overflows_at": OVERFLOWS_AT,
            "power": POWER,
            "bad_batch": BAD_BATCH,
            "balance": balance(GROWTH_INTERVAL),
        },
        "failures": {
            "gpu_days_per_failure": GPU_DAYS_PER_FAILURE,
            "checkpoint_s": CHECKPOINT_S,
            "restart_s": RESTART_S,
        },
    }


# -- tables of docs/scale.md -----------------------------------------------------------------------


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The tables of docs/scale.md, in Markdown, and sentences with figures."""
    return {
        "collectives": _collectives_table(results),
        "collectives-error": _collectives_error(results),
        "disturbed": _disturbed_table(results),
        "gloo": _gloo_table(results),
        "gloo-error": _gloo_error(results),
        "growth": _growth_table(results),
        "failures": _failures(results),
        "sums": _sums_table(results),
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    align = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows])


def _by_name(results: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in results["collectives"]:
        found.setdefault(row["name"], []).append(row)
    return found


def _collectives_table(results: Mapping[str, Any]) -> str:
    rows = [
        [name, *[f"{_ms(e['estimate_ms'])} / {_ms(e['simulated_ms'])}" for e in cells]]
        for name, cells in _by_name(results).items()
    ]
    return _table(["ms: estimate / simulated", *map(_count, RANKS)], rows)


def _disturbed_table(results: Mapping[str, Any]) -> str:
    rows = [
        [name, *[f"{_ms(e['jitter_ms'])} / {_ms(e['slow_ms'])}" for e in cells]]
        for name, cells in _by_name(results).items()
    ]
    return _table(["ms: jitter / one slow rank", *map(_count, RANKS)], rows)


def _gloo_table(results: Mapping[str, Any]) -> str:
    rows = []
    for row in results["gloo"]["rows"]:
        measured = row["measured_ms"]
        rows.append(
            [
                f"{row['kind']}, {row['ranks']} processes",
                f"{row['bytes']:,}",
                f"{_ms(measured['fastest'])} / {_ms(measured['median'])} / {_ms(measured['high'])}",
                "calibrates" if row["used_to_calibrate"] else _ms(row["simulated_ms"]),
            ]
        )
    rows.sort(key=lambda row: (row[0].rpartition(", ")[::-1], int(row[1].replace(",", ""))))
    head = ["collective", "bytes", "measured ms: fastest / median / 90 %", "simulated ms"]
    return _table(head, rows)


def _growth_table(results: Mapping[str, Any]) -> str:
    cells = [results["growth"][str(ranks)] for ranks in RANKS]

    def row(name: str, said: Callable[[Any], str]) -> list[str]:
        return [name, *[said(each) for each in cells]]

    return _table(
        ["", *map(_count, RANKS)],
        [
            row("memory of a rank, DDP, GB", lambda c: f"{c['memory_bytes']['ddp'] / 1e9:.1f}"),
            row(
                "FSDP2: the fullest rank's shard / the largest unit whole, GB",
                lambda c: (
                    f"{c['memory_bytes']['fsdp'] / 1e9:.3f} / "
                    f"{c['memory_bytes']['fsdp_unsharded'] / 1e9:.2f}"
                ),
            ),
            row("checkpoint: files", lambda c: f"{c['checkpoint']['files']:,}"),
            row(
                "checkpoint: index, MB / planning on rank 0, s",
                lambda c: (
                    f"{c['checkpoint']['metadata_bytes'] / 1e6:.1f} / "
                    f"{c['checkpoint']['coordinator_s']:.1f}"
                ),
            ),
            row(
                "log2 of the loss scale at balance: estimate / simulated",
                lambda c: f"{c['estimated_log2_scale']:.1f} / {c['overflows']['log2_scale']:.0f}",
            ),
            row("steps skipped at balance, simulated", lambda c: _part(c["overflows"]["skipped"])),
            row(
                "steps skipped, a bad batch in 1e6 on each rank: estimate / simulated",
                lambda c: f"{_part(c['skip_probability'])} / {_part(c['bad_batches']['skipped'])}",
            ),
            row(
                "log2 of the loss scale after 100,000 such steps, simulated",
                lambda c: f"{c['bad_batches']['last_log2_scale']:.0f}",
            ),
            row(
                "the slowest rank, in standard deviations: estimate / simulated",
                lambda c: f"{c['slowest_estimate']:.2f} / {c['slowest_simulated']:.2f}",
            ),
            row(
                "hours between failures / one within a day",
                lambda c: f"{c['failures']['mtbf_h']:,.0f} / {_part(c['failures']['per_day'])}",
            ),
            row(
                "checkpoint every ... minutes",
                lambda c: f"{c['failures']['checkpoint_every_s'] / 60:.0f}",
            ),
            row(
                "time lost: estimate / simulated",
                lambda c: (
                    f"{_part(c['failures']['lost_estimate'])} / "
                    f"{_part(c['failures']['lost_simulated'])}"
                ),
            ),
        ],
    )


def _sums_table(results: Mapping[str, Any]) -> str:
    rows = []
    for ranks in results["sums"]["noise"]:
        noise, signal = results["sums"]["noise"][ranks], results["sums"]["signal"][ranks]
        rows.append(
            [
                f"{int(ranks):,}",
                *[f"{noise[name]:.1e}" for name in ("float32", "float16", "bfloat16")],
                *[f"{signal[name]:.1e}" for name in ("float32", "float16", "bfloat16")],
            ]
        )
    kinds = ["float32", "float16", "bfloat16"]
    return _table(["ranks", *kinds, *[f"{kind}, agreeing" for kind in kinds]], rows)


def _collectives_error(results: Mapping[str, Any]) -> str:
    worst = max(abs(row["estimate_error"]) for row in results["collectives"])
    return (
        f"Estimate and simulation differ by {worst:.2%} at most: the formulas follow from the "
        "model. Whether the model is your machine, only the machine can tell."
    )


def _gloo_error(results: Mapping[str, Any]) -> str:
    found, by_kind = results["gloo"], dict[str, float]()
    for row in found["rows"]:
        if not row["used_to_calibrate"]:
            off = math.exp(abs(math.log(row["simulated_over_fastest"])))
            by_kind[row["kind"]] = max(off, by_kind.get(row["kind"], 1.0))
    fastest, middle = (found[f"error_against_{name}"] for name in ("fastest", "median"))
    return (
        f"Against the fastest round the predictions are off by a factor of "
        f"{fastest['median_factor']:.2f} in the median; at worst, all_reduce "
        f"{by_kind['all_reduce']:.2f}, all_gather {by_kind['all_gather']:.2f}, reduce_scatter "
        f"{by_kind['reduce_scatter']:.2f}. Against the median of all rounds, on two cores with a "
        f"load of {found['load_average']:.0f}, it is {middle['median_factor']:.1f} and at worst "
        f"{middle['worst_factor']:.1f}."
    )


def _failures(results: Mapping[str, Any]) -> str:
    most = results["growth"][str(RANKS[-1])]["failures"]
    return (
        f"simulated with random failures {most['lost_simulated']:.1%}, with half the interval "
        f"{most['lost_at_half']:.1%}, with twice {most['lost_at_double']:.1%}."
    )


def _ms(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _part(value: float) -> str:
    return f"{value:.1%}" if value >= 0.01 else f"{value:.2g}"


def _count(value: int) -> str:
    return f"{value:,}"


def main() -> None:
    if "--tables" in sys.argv:
        stored = json.loads((RESULTS / "scale-cpu.json").read_text())
        if "--gloo" in sys.argv:
            stored["gloo"] = check()
            save("scale-cpu", {key: value for key, value in stored.items() if key != "machine"})
        print("\n\n".join(tables(stored).values()))
        return
    entry = checkpoint_entries()
    assert fullest_shard(entry["shapes"], 2) == entry["elements_on_rank_0"]
    gloo = check()
    begun = time.perf_counter()
    sent = 3 * len(MODEL.shapes) * entry["sent_bytes"]
    results = {
        "assumptions": assumptions(),
        "collectives": simulate_collectives(sent),
        "simulating_collectives_s": time.perf_counter() - begun,
        "gloo": gloo,
        "checkpoint_entry": {key: value for key, value in entry.items() if key != "shapes"},
        "growth": growth(entry),
        "sums": {
            name: {str(ranks): errors for ranks, errors in sum_errors(RANKS[-1], size).items()}
            for name, size in (("noise", 0.1), ("signal", 1.0))
        },
    }
    print("\n\n".join(tables(results).values()))
    save("scale-cpu", results)


if __name__ == "__main__":
    main()
