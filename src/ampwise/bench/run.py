"""The main job: every precision side by side on one task; what each buys, and what to use.

1. `trial`: each precision but fp32 makes its first step in a process that can be killed
2. `memory`: peak memory of whole steps, each arm alone
3. `race`: all arms resident and in turns
4. `parity`: each precision trains to a stated budget, under several seeds
5. `levers`: what else helps, one at a time
6. `requirements` and `verdict`

The raced steps are real training steps on the task's batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ampwise.bench.config import BenchConfig, Progress, choose
from ampwise.bench.parity import ParityReport
from ampwise.bench.requirements import judge
from ampwise.bench.result import BenchReport, PrecisionResult
from ampwise.bench.stages import Stages
from ampwise.bench.verdict import verdict
from ampwise.capability import DeviceCapability, multiplies_float8, probe
from ampwise.errors import kind_and_words
from ampwise.policy import Policy
from ampwise.tasks import Task
from ampwise.tasks.checks import first_batch, samples_in
from ampwise.telemetry.environment import environment

_EMULATED = (
    "emulated: float8 is multiplied in float32 here, so speed says nothing, and the memory "
    "includes what that takes"
)


def run_bench(
    task: Task,
    config: BenchConfig,
    progress: Progress,
    failed: Callable[[BenchReport], object] = lambda _: None,
) -> BenchReport:
    """Measure a task in every precision.

    Interrupting (Ctrl-C) during the race ends it; the report then says so, with what there is.

    Parameters
    ----------
    failed
        Given the report so far when an error ends the run after something was measured; the error
        is raised afterwards.

    Raises
    ------
    TaskError
        When the task does not keep its contract.
    """
    capability = probe(config.device)
    policies, left_out = choose(config.precisions, capability)
    report = _begun(task, config, policies, capability)
    report.left_out = left_out
    with torch.random.fork_rng():
        batch = first_batch(task)
        try:
            Stages(task, config, policies, report, progress).run()
        except KeyboardInterrupt:
            report.interrupted = True
        except Exception as error:
            if report.precisions[0].memory:
                report.failed = kind_and_words(error)
                _conclude(report, config, samples_in(task, batch))
                failed(report)
            raise
        _conclude(report, config, samples_in(task, batch))
    return report


def _begun(
    task: Task, config: BenchConfig, policies: Sequence[Policy], capability: DeviceCapability
) -> BenchReport:
    """A report in which nothing is measured yet."""
    return BenchReport(
        task=task.name or "task",
        device=str(config.device),
        environment=environment(config.device),
        task_info=dict(task.info),
        unit=str(task.info.get("samples", "samples")),
        precisions=[
            PrecisionResult(
                policy.text,
                note=_note(policy, capability),
                emulated=_emulated(policy, config.device),
                matmul_speedup=_matmul_speedup(policy, capability),
            )
            for policy in policies
        ],
    )


def _conclude(report: BenchReport, config: BenchConfig, samples_per_step: int) -> None:
    """Ratios, requirements and verdict, of whatever was measured."""
    baseline = report.precisions[0]
    ended = report.ended if config.max_seeds else ""
    complaints = [] if report.contamination is None else report.contamination.complaints()
    for result in report.precisions[1:]:
        _compare(result, baseline)
        _note_parity(result, baseline, report.parity)
        result.requirements = judge(
            result,
            config.thresholds,
            report.parity,
            report.noise,
            ended,
            disturbed=bool(complaints),
        )
    for result in report.precisions:
        if result.step_ms is not None:
            result.samples_per_s = samples_per_step / result.step_ms.median * 1e3
    report.notes += [f"while the race ran, {complaint}" for complaint in complaints]
    if report.contamination is not None and report.contamination.gpu is not None:
        report.notes += report.contamination.gpu.gaps()
    report.verdict = verdict(report, config.thresholds)


def _matmul_speedup(policy: Policy, capability: DeviceCapability) -> float | None:
    support = capability.formats.get(policy.compute_format)
    return support.measured.speedup if support is not None and support.measured.steady else None


def _emulated(policy: Policy, device: torch.device) -> str:
    return _EMULATED if policy.float8 and not multiplies_float8(device) else ""


def _note(policy: Policy, capability: DeviceCapability) -> str:
    support = capability.formats.get(policy.compute_format)
    return "" if support is None or support.gains else support.reason


def _note_parity(
    result: PrecisionResult, baseline: PrecisionResult, parity: ParityReport | None
) -> None:
    """A precision's own part of the parity report."""
    found = None if parity is None else parity.arms.get(result.name)
    if parity is None or found is None:
        return
    finals = parity.finals[result.name]
    result.accuracy = {
        "metric": parity.metric,
        "mean": sum(finals) / len(finals),
        "difference": found.difference,
        "low": found.low,
        "high": found.high,
        "equivalent": {"equivalent": True, "different": False}.get(found.decision),
        "p": found.p_equivalent,
        "seeds": found.seeds,
    }
    finals = parity.finals[baseline.name]
    baseline.accuracy = {"metric": parity.metric, "mean": sum(finals) / len(finals)}
    if result.name in parity.losses:
        result.loss_difference = parity.losses[result.name].difference


def _compare(result: PrecisionResult, baseline: PrecisionResult) -> None:
    if result.peak_memory_bytes is not None and baseline.peak_memory_bytes:
        result.memory_reduction = 1 - result.peak_memory_bytes / baseline.peak_memory_bytes
    if result.loss_after is not None and baseline.loss_after is not None:
        result.loss_difference = result.loss_after - baseline.loss_after
