"""Bench under torchrun: what several processes make of a step that one of them makes alone.

In each round, in an order that is shuffled and the same on all ranks, on the same batch:

    alone      rank 0 makes a step with a model of its own; the others sleep in a socket
    apart      every rank makes that step, at the same time; nothing is communicated
    together   the same with the model spread over the ranks, as DDP or FSDP2 do

A turn takes as long as its slowest rank. Every process has a batch of its own size, so R processes
train R times the samples (weak scaling), and the paired ratios of the turns mean

    efficiency      alone / together: the rate of R processes over R times the rate of one
    apart           alone / apart: what it would be if nothing had to be communicated; the rest is
                    what processes take from each other (cores, memory bandwidth, power)
    communication   1 - apart / together: share of the step in which something is communicated and
                    backward does not hide it (exposed communication)

FSDP2 cannot leave out its gathers, and without its sums there is no gradient to step on. So its
share, too, is against whole models apart: sums and gathers, less what its optimizer saves that has
1/R of the parameters to step on. It may fall below zero.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.config import BASELINE, MEMORY_STEPS, Progress, choose
from ampwise.bench.contamination import Watch
from ampwise.bench.memory import held_bytes, peak_bytes
from ampwise.bench.race import (
    FAILURES,
    GPU_BLOCK,
    MAX_WARM_UP,
    Race,
    decided,
    steady,
    why_it_fell_out,
)
from ampwise.bench.scaling_report import Scaled, ScalingReport
from ampwise.capability import probe
from ampwise.clock import done_at
from ampwise.distributed.host_group import everyone
from ampwise.distributed.launch import Launch
from ampwise.distributed.wrap import Parallel, spread
from ampwise.policy import Policy
from ampwise.stats import Interval, paired_speedup, typical
from ampwise.tasks import Task
from ampwise.tasks.checks import first_batch, samples_in, trained_on
from ampwise.tasks.seeding import seed_all
from ampwise.telemetry.environment import environment
from ampwise_lint.base.words import counted

ALONE, APART = "alone", "apart"
_BATCHES = 8
"""Steps of a turn on a GPU, whose launches run ahead of it."""


@dataclass(frozen=True)
class ScalingConfig:
    """What to measure.

    Attributes
    ----------
    parallel
        How to spread the model over all processes; each is an arm of its own.
    max_rounds, budget_s
        Rounds of each precision's race, and seconds after which no further one starts.
    """

    settings: Settings
    policies: Sequence[Policy]
    parallel: Sequence[Parallel]
    max_rounds: int
    budget_s: float


def native(asked: Sequence[Policy] | None, device: str) -> tuple[list[Policy], dict[str, str]]:
    """The policies to measure, and those left out with the reason.

    Default: fp32, and what gains over it on this device.
    """
    capability = probe(device)
    policies, left_out = choose(asked, capability)
    if asked is None:
        for policy in policies[1:]:
            support = capability.formats[policy.compute_format]
            if not support.gains:
                left_out[policy.text] = support.reason
    return [each for each in policies if each.text not in left_out], left_out


def begun(task: Task, config: ScalingConfig, me: Launch) -> ScalingReport:
    """A report in which nothing is measured yet."""
    device = config.settings.device
    threads = everyone().all(torch.get_num_threads)
    report = ScalingReport(
        task=task.name or "task",
        device=str(device),
        environment=environment(device),
        task_info=dict(task.info),
        unit=str(task.info.get("samples", "samples")),
        processes=me.size,
        threads=threads,
        cores=_cores(),
    )
    report.notes = _notes(report, me, config.parallel)
    return report


def run_scaling(
    task: Task, config: ScalingConfig, me: Launch, report: ScalingReport, progress: Progress
) -> None:
    """Fill `report`; all ranks call this, and what it holds stays valid when an error ends it."""
    settings = config.settings
    first_batch(task)
    seed_all(settings.seed)
    batches = _same_size(task, itertools.islice(trained_on(task.batches), _BATCHES))
    report.samples_per_process = samples_in(task, batches[0]) * settings.accumulate
    for policy in config.policies:
        _measure(task, policy, config, batches, me, report, progress)


def compare(times_ms: Mapping[str, Sequence[float]], found: Sequence[Scaled], samples: int) -> None:
    """Fill in rates and ratios, from the times of `ALONE`, `APART` and each way together.

    Parameters
    ----------
    times_ms
        Of each round, the milliseconds of a step on its slowest rank.
    found
        One process first, then the ways of spreading the model.
    samples
        Samples in a step of one process.
    """
    alone, apart = times_ms[ALONE], times_ms[APART]
    for each in found:
        together = times_ms[each.parallel or ALONE]
        each.rounds = len(together)
        each.step_ms = typical(together)
        each.samples_per_s = samples * each.processes / each.step_ms.median * 1e3
        if each.parallel:
            each.efficiency = paired_speedup(alone, together)
            each.apart = paired_speedup(alone, apart)
            kept = paired_speedup(apart, together)
            each.communication = Interval(1 - kept.median, 1 - kept.high, 1 - kept.low)


def _measure(
    task: Task,
    policy: Policy,
    config: ScalingConfig,
    batches: Sequence[Any],
    me: Launch,
    report: ScalingReport,
    progress: Progress,
) -> None:
    """Memory and the race of one precision, added to the report as they become known."""
    settings = config.settings
    makers = {ALONE: lambda: Arm(task, policy, settings)}
    for kind in config.parallel:
        makers[kind] = _maker(task, policy, settings, kind)
    found = {kind: Scaled(policy.text, me.size, kind) for kind in config.parallel}
    found = {ALONE: Scaled(policy.text, 1), **found}
    report.results += found.values()

    progress.stage(f"{policy.text}: first step")
    # Without communication, so that a rank that cannot make it keeps no other one waiting.
    mine = _first_step(makers[ALONE], batches[0], policy)
    if why := next(filter(None, everyone().all(lambda: mine)), ""):
        for each in found.values():
            each.reason = f"{policy.text}: {why}"
        return
    for kind, make in makers.items():
        progress.stage(f"{policy.text}, {kind}: peak memory")
        found[kind].peak_memory_bytes = _peaks(make, batches, settings)[: found[kind].processes]

    arms = {kind: make() for kind, make in makers.items()}
    arms[APART] = arms[ALONE]
    race, others = Race(baseline=ALONE), _Others()
    progress.stage(f"{policy.text}, taking turns")
    try:
        _race(arms, itertools.cycle(batches), race, config, me, progress)
    finally:
        if race.rounds:
            rounds = {kind: times[: race.rounds] for kind, times in race.times_ms.items()}
            compare(rounds, list(found.values()), report.samples_per_process)
    report.notes += [f"while {policy.text} ran, {each}" for each in others.complaints(me)]
    for kind, each in found.items():
        held = everyone().all(lambda kind=kind: held_bytes(arms[kind]))
        each.held_bytes = held[: each.processes]


def _race(
    arms: Mapping[str, Arm],
    batches: Iterator[Any],
    race: Race,
    config: ScalingConfig,
    me: Launch,
    progress: Progress,
) -> None:
    """Fill `race`. All ranks take the same turns and see the same times, so they agree on all."""
    turn = _Turns(arms, config.settings, me)
    kinds = [ALONE, APART, *config.parallel]
    _warm_up(turn, kinds, batches)
    race.times_ms = {kind: [] for kind in kinds}
    race.planned, race.started = config.max_rounds, time.monotonic()
    race.deadline = race.started + config.budget_s
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        while race.rounds < config.max_rounds and not decided(race):
            batch = next(batches)
            for kind in order.sample(kinds, len(kinds)):
                race.times_ms[kind].append(turn(kind, batch))
            gc.collect(0)
            progress.round(race)
            if _largest(float(time.monotonic() > race.deadline)):
                return
    finally:
        gc.enable()


class _Turns:
    """Makes the turns of this rank.

    The ranks meet before and after each. The numbers they meet by are on the host, where gloo
    waits without burning the core that another rank may need.
    """

    def __init__(self, arms: Mapping[str, Arm], settings: Settings, me: Launch) -> None:
        self._arms, self._me = arms, me
        self._device = settings.device
        self._steps = GPU_BLOCK if settings.device.type == "cuda" else 1
        self._micro_batches = self._steps * settings.accumulate

    def __call__(self, kind: str, batch: Any) -> float:
        """Milliseconds of a whole step, on the slowest of the ranks that make one."""
        _largest(0.0)
        elapsed_ms = 0.0
        if kind != ALONE or self._me.leads:
            elapsed_ms = self._run(self._arms[kind], batch)
        return _largest(elapsed_ms)

    def _run(self, arm: Arm, batch: Any) -> float:
        start = time.perf_counter()
        for _ in range(self._micro_batches):
            arm.run(batch)
        return (done_at(self._device) - start) * 1e3 / self._steps


class _Others:
    """What others than the ranks take of this machine, from its making to `complaints`."""

    def __init__(self) -> None:
        self._watch = Watch(torch.device("cpu"))
        self._began, self._own_s = time.monotonic(), _own_s()

    def complaints(self, me: Launch) -> list[str]:
        """What is beyond its limit, and what to do about it."""
        found, wall_s = self._watch.read(), time.monotonic() - self._began
        spent_s = everyone().all(lambda: _own_s() - self._own_s)
        if found.others is None:
            return []
        # The watch knows of its own process only. Nor does it know that what waits for a processor
        # are the ranks themselves, where there are more of them than processors.
        siblings = sum(spent_s[: me.local_size]) - spent_s[0]
        others = max(0.0, found.others - siblings / wall_s)
        return replace(found, others=others, pressure=None).complaints()


def _own_s() -> float:
    """Seconds of processor time that this process has used."""
    times = os.times()
    return times.user + times.system


def _warm_up(turn: _Turns, kinds: Sequence[str], batches: Iterator[Any]) -> None:
    """Take turns until the last three of each lie within 10 % of each other, or long enough."""
    recent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(MAX_WARM_UP):
        batch = next(batches)
        for kind, times in recent.items():
            times.append(turn(kind, batch))
        if all(map(steady, recent.values())):
            return


def _largest(value: float) -> float:
    """The largest of all ranks' values; they leave here at the same time."""
    row = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(row, op=dist.ReduceOp.MAX)
    return row.item()


def _maker(task: Task, policy: Policy, settings: Settings, kind: Parallel) -> Callable[[], Arm]:
    return lambda: Arm(task, policy, settings, lambda model: spread(model, kind, policy))


def _first_step(make: Callable[[], Arm], batch: Any, policy: Policy) -> str:
    """Why a step cannot be made in this precision; empty if it can."""
    try:
        make().run(batch)
    except FAILURES as error:
        if policy.text == BASELINE:
            raise
        return why_it_fell_out(error)
    return ""


def _peaks(make: Callable[[], Arm], batches: Sequence[Any], settings: Settings) -> list[int]:
    """Peak memory of each rank over a few whole steps."""
    micro_batches = itertools.islice(itertools.cycle(batches), MEMORY_STEPS * settings.accumulate)
    # Outside of `all`: a rank that fails in here leaves, and so tells those that wait for it.
    peak = peak_bytes(make, list(micro_batches), settings.device)
    return everyone().all(lambda: peak)


def _same_size(task: Task, batches: Iterator[Any]) -> list[Any]:
    """Batches with as many samples as the first, so that every step is as much work."""
    first, *rest = batches
    samples = samples_in(task, first)
    return [first, *(each for each in rest if samples_in(task, each) == samples)]


def _cores() -> int:
    # Containers and `taskset` leave a process fewer than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _notes(report: ScalingReport, me: Launch, parallel: Sequence[Parallel]) -> list[str]:
    """What a reader should know about the figures."""
    one = "accuracy parity, levers and requirements are for one process, and were not measured"
    hidden = "communication: share of the step that gradient sums take and backward does not hide"
    said = [
        f"{one}: ampwise bench without torchrun",
        f"{hidden}, against the same steps on models that are apart, at the same time",
    ]
    if "fsdp" in parallel:
        said.append(
            "FSDP2 cannot leave out its gathers: its communication is sums and gathers, less what "
            f"an optimizer saves that steps on 1/{me.size} of the parameters"
        )
    if report.device == "cpu":
        said.append(_on_shared_cores(report, me))
    return said


def _on_shared_cores(report: ScalingReport, me: Launch) -> str:
    threads = max(report.threads)
    here = f"{counted(me.local_size, 'process', 'processes')} of {counted(threads, 'thread')}"
    cores = counted(report.cores, "core")
    if me.local_size * threads > report.cores:
        return (
            f"{here} share {cores}: the figures show how they contend for them, not "
            "how training scales over machines or GPUs"
        )
    return f"{here} on {cores}: enough of them, but the memory's bandwidth is shared"
