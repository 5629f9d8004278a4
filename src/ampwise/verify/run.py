"""Runs every check on a task; one that breaks is reported, and the others go on.

Checks that take seconds come before the bench, so that an interruption finds something to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from ampwise.bench.arm import Arm, Settings
from ampwise.bench.config import BenchConfig, Progress
from ampwise.bench.requirements import NOT_ASKED
from ampwise.bench.run import run_bench
from ampwise.bench.trial import limit_from, reference_step, try_first_step
from ampwise.capability import probe
from ampwise.errors import AmpwiseError, UsageError, kind_and_words
from ampwise.policy import PRESETS, Policy, decide
from ampwise.tasks import Task
from ampwise.tasks.checks import first_batch
from ampwise.telemetry.environment import environment
from ampwise.verify.checks import CHECKS, NO_BENCH, Check, Subject
from ampwise.verify.result import Finding, Verification


@dataclass(frozen=True)
class VerifyConfig:
    """What to verify.

    Attributes
    ----------
    policy
        The precision; None for what the device is best at, or bf16 where nothing gains.
    track
        Trackers whose logs are read back.
    bench
        How to measure speed, memory and accuracy; None leaves them out.
    """

    settings: Settings
    policy: Policy | None = None
    track: tuple[str, ...] = ("csv",)
    bench: BenchConfig | None = field(default=None)


def verify(task: Task, config: VerifyConfig, progress: Progress) -> Verification:
    """Check everything; interrupting (Ctrl-C) ends it with what there is.

    Raises
    ------
    UsageError
        When the precision is float32: there is nothing to verify.
    """
    batch = first_batch(task)
    policy = config.policy or _best(config.settings.device)
    if not policy.autocast:
        raise UsageError(f"precision {policy.text}: expected a 16-bit one, such as bf16 or fp16")
    progress.stage("which precision can scale its loss here")
    scaled = _scaled(task, config.settings, batch)
    found = Verification(
        task.name or "task",
        str(config.settings.device),
        policy.text,
        scaled.text,
        environment(config.settings.device),
    )
    subject = Subject(task, config.settings, policy, scaled, config.track)
    done: dict[str, Finding] = {}
    try:
        for check in sorted(CHECKS, key=lambda each: each.by_bench):
            if check.by_bench and config.bench is not None and subject.bench is None:
                _bench(subject, config.bench, progress)
            progress.stage(check.requirement)
            done[check.id] = _finding(check, subject)
    except KeyboardInterrupt:
        found.interrupted = True
    if subject.bench is not None:
        found.interrupted |= subject.bench.interrupted
    found.findings = [done.get(check.id) or _unchecked(check) for check in CHECKS]
    return found


def _bench(subject: Subject, config: BenchConfig, progress: Progress) -> None:
    """Measure; of a bench that an error ends, what there was, and why there is no more."""
    if subject.no_bench != NO_BENCH:  # it failed before
        return
    try:
        keep = partial(setattr, subject, "bench")
        subject.bench = run_bench(subject.task, config, progress, keep)
    except Exception as error:  # noqa: BLE001 - all other checks are done, and are not lost for it
        subject.no_bench = f"the bench failed: {kind_and_words(error)}"


def _unchecked(check: Check) -> Finding:
    why = "interrupted before it was checked"
    return Finding(check.id, check.requirement, check.how, "not measured", why, check.critical)


def _finding(check: Check, subject: Subject) -> Finding:
    with torch.random.fork_rng():
        try:
            status, evidence = check.run(subject)
        except (AmpwiseError, RuntimeError, OSError) as error:
            status, evidence = "fail", f"{type(error).__name__}: {' '.join(str(error).split())}"
    left_out = evidence in (NO_BENCH, NOT_ASKED)
    return Finding(
        check.id, check.requirement, check.how, status, evidence, check.critical, left_out
    )


def _best(device: torch.device) -> Policy:
    """What `auto` takes, or bf16 where that is float32: it can be verified all the same."""
    policy, _ = decide(None, probe(device))
    return policy if policy.autocast else PRESETS["bf16"]


def _scaled(task: Task, settings: Settings, batch: object) -> Policy:
    """fp16, or where that is hopeless bf16 with its loss scaled."""
    if settings.device.type != "cpu":
        return PRESETS["fp16"]

    def maker(policy: Policy) -> Callable[[], Arm]:
        return lambda: Arm(task, policy, settings)

    reference = reference_step(maker(PRESETS["fp32"]), batch)
    trial = try_first_step(maker(PRESETS["fp16"]), batch, limit_from(reference))
    works = trial.finished and not trial.hopeless(reference)
    return PRESETS["fp16"] if works else Policy.parse("bf16:scaling=on")
