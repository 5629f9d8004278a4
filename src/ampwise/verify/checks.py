"""The requirements, each with the experiment that checks it, on the user's own task.

Each check is a function of the `Subject` that returns a status and its evidence; `CHECKS` lists
them with what they stand for. Loss scaling is exercised in float16 where float16 runs, and in
bfloat16 with scaling switched on where float16 is emulated and would take hours: the scale, the
skip and the unscaling are the same code.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampwise.capability import present_devices
from ampwise.data.move import changed
from ampwise.errors import SkippedStepsError
from ampwise.formats import dtype_name
from ampwise.policy import PRESETS, Policy, Resolution, resolve
from ampwise.step import LossScale, StepRecord
from ampwise.step.modules import as_one, held_by
from ampwise.tasks.checks import build
from ampwise.telemetry.names import LOSS_SCALE
from ampwise.telemetry.run import read_steps
from ampwise.training import checkpoint
from ampwise.training.config import TrainConfig
from ampwise.training.loop import train
from ampwise.verify.logs import READERS, own_stores
from ampwise.verify.result import Status
from ampwise.verify.subject import Plain, Subject
from ampwise_lint.base.words import counted, joined

Outcome = tuple[Status, str]

_NORM_TOLERANCE = {"float16": 2e-2, "bfloat16": 6e-2, "float32": 1e-4}
"""Relative: some ten times the format's eps, for what rounding adds up to."""


def loss_scaling_adapts(subject: Subject) -> Outcome:
    """Good steps, one overflow, good steps: the scale halves once and grows back."""
    step = subject.step(subject.scaled, loss_scale=LossScale(1024.0, growth_interval=3))
    batches = subject.batches()
    for index in range(9):
        step.factor = math.inf if index == 2 else 1.0
        subject.iteration(step, next(batches))
    step.flush()
    records = step.history
    scales = [record.loss_scale for record in records]
    said = f"{subject.scaled.text}: scale {', '.join(f'{each:g}' for each in scales)}"
    good = (
        [record.skipped for record in records] == [index == 2 for index in range(9)]
        and scales[2] == 1024.0
        and scales[3] == 512.0
        and scales[6] == 1024.0
    )
    return ("pass" if good else "fail"), f"{said}; the step with inf was skipped" * good or said


def forward_runs_in_autocast(subject: Subject) -> Outcome:
    """The dtypes that matrix products of forward and loss really ran in."""
    step = subject.step(subject.policy)
    subject.iteration(step, next(subject.batches()))
    seen = step.activity
    assert seen is not None
    counts = ", ".join(f"{count} in {dtype}" for dtype, count in seen.matmul_dtypes.items())
    said = f"matrix products and convolutions: {counts}"
    if not seen.matmul_dtypes:
        return "not measured", "the first forward made no matrix product or convolution"
    return ("pass" if seen.matmul_dtypes.get(subject.policy.compute_dtype) else "fail"), said


def gradients_are_unscaled_before_clipping(subject: Subject) -> Outcome:
    """The norm that clipping used, against that of float64 (or else float32) gradients."""
    batch = next(subject.batches())
    reference = "float64"
    try:
        expected = _expected_norm(subject, batch, torch.float64)
    except Exception:  # noqa: BLE001 - a task may fix its dtypes
        reference = "float32"
        expected = _expected_norm(subject, batch, torch.float32)
    step = subject.step(subject.scaled, max_grad_norm=1.0)
    torch.manual_seed(0)
    subject.iteration(step, batch)
    record = step.history[-1]
    error = abs(record.grad_norm / expected - 1) if expected else math.inf
    said = (
        f"norm {record.grad_norm:.5g} under a scale of {record.loss_scale:g}, in "
        f"{reference} {expected:.5g}"
    )
    if record.skipped:
        return "not measured", f"{said}; the step was skipped"
    tolerance = _NORM_TOLERANCE[subject.scaled.compute_dtype]
    return ("pass" if error <= tolerance else "fail"), f"{said}: {error:.2%} apart"


def parameters_are_float32(subject: Subject) -> Outcome:
    """What the optimizer holds."""
    step = subject.step(subject.policy)
    held = [each for each in held_by(step.optimizers) if each.is_floating_point()]
    dtypes = sorted({dtype_name(each.dtype) for each in held})
    whole = dtypes == ["float32"]
    return ("pass" if whole else "fail"), f"{len(held)} tensors in {joined(dtypes)}"


def loss_scale_is_logged(subject: Subject) -> Outcome:
    """Each tracker's log of a short run, read back."""
    steps = 4
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        with own_stores():
            records = _trained(subject, subject.scaled, folder, steps, subject.track)
        expected = [record.loss_scale for record in records]
        lines = read_steps(folder)
        found = {"steps.jsonl": [each[LOSS_SCALE] for each in lines if LOSS_SCALE in each]}
        found |= {name: READERS[name](folder) for name in subject.track}
    wrong = [name for name, scales in found.items() if scales != expected]
    said = f"{counted(steps, 'step')} read back from {', '.join(found)}"
    if wrong:
        return "fail", f"{said}; missing or different in {', '.join(wrong)}"
    return "pass", said


def off_is_plain_float32(subject: Subject) -> Outcome:
    """Ten steps with precision fp32, and the loop without ampwise."""
    steps = 10
    step = subject.step(PRESETS["fp32"], max_grad_norm=None)
    for batch in itertools.islice(subject.batches(), steps):
        subject.iteration(step, batch)
    step.flush()
    model, optimizer = build(subject.task, subject.settings.device, subject.settings.seed)
    plain: Any = Plain(model, optimizer)
    for batch in itertools.islice(subject.batches(), steps):
        subject.iteration(plain, batch)
    states = [as_one(each).state_dict().values() for each in (step.model, model)]
    pairs = zip(*states, strict=True)
    different = sum(not torch.equal(a, b) for a, b in pairs)
    if different:
        return "fail", f"{counted(different, 'tensor')} not equal after {counted(steps, 'step')}"
    return "pass", f"all tensors equal bit for bit after {counted(steps, 'step')}"


def absent_gpu_falls_back(subject: Subject) -> Outcome:  # noqa: ARG001
    """What becomes of a request for CUDA."""
    resolution = resolve("fp32", "cuda")
    if any(each.startswith("cuda") for each in present_devices()):
        return "not applicable", f"a GPU is present: {resolution}"
    good = resolution.device == "cpu" and resolution.changed and resolution.reasons
    return (
        "pass" if good else "fail"
    ), f"{resolution.policy} on cpu: {'; '.join(resolution.reasons)}"


def every_accelerator_has_an_answer(subject: Subject) -> Outcome:  # noqa: ARG001
    """What is said of devices of other makes."""
    answers = {kind: resolve("fp32", kind) for kind in ("cuda", "mps", "xpu")}
    silent = [kind for kind, each in answers.items() if each.changed and not each.reasons]
    said = "; ".join(
        each.reasons[0] if each.reasons else f"{kind} is used" for kind, each in answers.items()
    )
    return ("fail" if silent else "pass"), said


def a_bad_loss_changes_nothing(subject: Subject) -> Outcome:
    """NaN and inf losses until training gives up: what became of the parameters."""
    found: list[str] = []
    for policy in (subject.scaled, PRESETS["fp32"]):
        for factor in (math.nan, math.inf):
            step = subject.step(policy, max_skips=5)
            step.factor = factor
            model = as_one(step.model)
            before = {name: each.clone() for name, each in model.state_dict().items()}
            try:
                for batch in itertools.islice(subject.batches(), 6):
                    subject.iteration(step, batch)
            except SkippedStepsError:
                pass
            else:
                found.append(f"{policy.text}: 5 skipped steps did not end training")
            after = model.state_dict()
            found += [
                f"{policy.text}, loss {factor}: {name} changed"
                for name, each in before.items()
                if not torch.equal(each, after[name]) and "num_batches" not in name
            ]
    if found:
        return "fail", "; ".join(found[:3])
    return "pass", "nothing changed under NaN and inf; training gave up after 5 skipped steps"


def a_resumed_run_is_the_run(subject: Subject) -> Outcome:
    """Two steps, a checkpoint, two more steps from it; and four steps at once."""
    with tempfile.TemporaryDirectory() as parent:
        whole, parts = Path(parent) / "whole", Path(parent) / "parts"
        _trained(subject, subject.scaled, whole, 4)
        _trained(subject, subject.scaled, parts, 2)
        _trained(subject, subject.scaled, parts, 4, resume=True)
        states = []
        for folder in (whole, parts):
            newest = checkpoint.newest(folder / "checkpoints")
            assert newest is not None
            content = checkpoint.load(newest)
            states.append({key: content[key] for key in ("model", "optimizer", "step")})
    same = _equal(states[0], states[1])
    said = "model, optimizer, loss scale and counters"
    return ("pass" if same else "fail"), f"{said} {'equal bit for bit' if same else 'differ'}"


def speedup(subject: Subject) -> Outcome:
    """Whole steps against fp32's, taking turns, with an interval."""
    return _from_bench(subject, "speedup")


def memory_reduction(subject: Subject) -> Outcome:
    """Exact peak of live tensors over whole steps, against fp32's."""
    return _from_bench(subject, "memory_reduction")


def accuracy_difference(subject: Subject) -> Outcome:
    """Training under paired seeds, and an equivalence test against fp32."""
    return _from_bench(subject, "accuracy_difference")


def _from_bench(subject: Subject, name: str) -> Outcome:
    if subject.bench is None:
        return "not measured", subject.no_bench
    for each in subject.bench.precisions:
        if each.name == subject.policy.text and name in each.requirements:
            requirement = each.requirements[name]
            if requirement.status == "not measured" and subject.bench.failed:
                return "not measured", f"the bench failed: {subject.bench.failed}"
            return requirement.status, requirement.reason
    return "not measured", "the bench ended before it"


def _trained(
    subject: Subject,
    policy: Policy,
    folder: Path,
    steps: int,
    track: tuple[str, ...] = (),
    *,
    resume: bool = False,
) -> list[StepRecord]:
    """A short run of `ampwise train`; the records of its steps."""
    resolution = Resolution(policy.text, policy, str(subject.settings.device), (), changed=False)
    config = TrainConfig(
        resolution,
        steps=steps,
        evaluate_every=10_000,
        seed=subject.settings.seed,
        out=folder,
        track=track,
        resume=resume,
    )
    collected = _Silent()
    train(subject.task, config, collected)
    return collected.records


class _Silent:
    """Collects records, and shows nothing."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord, samples_per_s: float, planned: int | None) -> None:  # noqa: ARG002
        self.records.append(record)

    def evaluated(self, step: int, metrics: dict[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...


def _expected_norm(subject: Subject, batch: Any, dtype: torch.dtype) -> float:
    """Norm of the gradients of the first step, without ampwise."""
    model, optimizer = build(subject.task, subject.settings.device, subject.settings.seed)
    as_one(model).to(dtype)
    plain: Any = Plain(model, optimizer)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        subject.iteration(plain, changed(batch, lambda leaf: _as(dtype, leaf)))
    return math.sqrt(plain.squares)


def _as(dtype: torch.dtype, leaf: Tensor) -> Tensor:
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def _equal(a: Any, b: Any) -> bool:
    """Whether two states are equal, tensors bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


@dataclass(frozen=True)
class Check:
    """A requirement and the function that checks it."""

    requirement: str
    run: Callable[[Subject], Outcome]
    critical: bool = True
    by_bench: bool = False

    @property
    def id(self) -> str:
        """Its name in JSON."""
        return self.run.__name__

    @property
    def how(self) -> str:
        """How it is checked: the first line of the function's documentation."""
        return (self.run.__doc__ or "").strip().splitlines()[0]


CHECKS = (
    Check("loss scaling is explicit, live, and adapts", loss_scaling_adapts),
    Check("forward and loss run in autocast", forward_runs_in_autocast),
    Check("gradients are unscaled before they are clipped", gradients_are_unscaled_before_clipping),
    Check("the optimizer's parameters are float32", parameters_are_float32),
    Check("the loss scale is logged every step", loss_scale_is_logged),
    Check("speedup as asked", speedup, critical=False, by_bench=True),
    Check("memory reduction as asked", memory_reduction, critical=False, by_bench=True),
    Check("accuracy as asked", accuracy_difference, by_bench=True),
    Check("switched off, it is plain float32", off_is_plain_float32),
    Check("without a GPU it falls back and says why", absent_gpu_falls_back, critical=False),
    Check("other accelerators have an answer", every_accelerator_has_an_answer, critical=False),
    Check("a bad loss changes nothing and ends training", a_bad_loss_changes_nothing),
    Check("a resumed run is the uninterrupted run", a_resumed_run_is_the_run),
)
