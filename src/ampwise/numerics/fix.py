"""What mends a fault: candidates for its cause, each tried on the failing step itself.

A fix is *verified* when the step, replayed with it, ran to its end with every loss and gradient
finite, and stayed close to the reference: loss within 5 %, and a cosine of at least 0.9 between the
true gradients. Where the loss is scaled, the scale may settle first, as it would in training.

The reference is the float64 shadow of the step, run in float32. A reference that is not finite
itself asks only for a clean replay: a fix then changes what is computed, and says so.
The cost is the time of that replay over one without the fix, taking turns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampwise import formats
from ampwise.data.move import changed, leaves
from ampwise.numerics import interventions as change
from ampwise.numerics.interventions import Scope, on
from ampwise.numerics.places import Place
from ampwise.numerics.result import Fix
from ampwise.numerics.shadow import ShadowRun, missing_gradients, shadow
from ampwise.policy import PRESETS, Policy
from ampwise.step.recorder import Replayed, Stash, finite, replay
from ampwise.step.train_step import TrainStep

_LOSS_WITHIN = 0.05
_LEAST_COSINE = 0.9
_NO_GRADIENT = 1e-9
_ROUNDS = 3
_TIME_LIMIT_S = 1.0
"""Seconds of timing, for each fix, above which the replay that verified it has to do."""

_FLOAT32_CAUSES = ("RANGE_OVERFLOW", "EPS_UNDERFLOW", "UNDERFLOW", "CANCELLATION", "PRECISION_LOSS",
                   "MASK_CONSTANT", "DTYPE_ERROR")  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A fix that can be tried, or (`tried` False) only be told."""

    what: str
    how: str
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    policy: Policy | None = None
    scale: float | None = None
    change: Callable[[Any], Any] | None = None
    tried: bool = True
    function_mode: bool = False


@dataclass(frozen=True)
class Reference:
    """What the step should have given: losses and true gradients in high precision."""

    losses: list[float]
    gradients: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        """Whether it can be compared with."""
        return all(map(math.isfinite, self.losses)) and all(
            bool(torch.isfinite(each).all()) for each in self.gradients.values()
        )


def reference(step: TrainStep, stash: Stash) -> Reference:
    """Losses and true gradients of a window in float64."""
    # Beside a float32 run: where branches follow the actual values, they follow sound ones.
    run = shadow(step, stash, errors=False, policy=PRESETS["fp32"], scale=1.0)
    if run.replayed.error is None:
        return reference_from(replace(stash, scale=torch.ones(())), run)
    return reference_from(stash, shadow(step, stash, errors=False))  # 16-bit parameters


def reference_from(stash: Stash, run: ShadowRun) -> Reference:
    """Losses and true gradients of a shadow run that came to its end."""
    gradients = {name: each / float(stash.scale) for name, each in run.gradients.items()}
    return Reference([float(each) for each in run.losses], gradients)


def candidates(step: TrainStep, stash: Stash, cause: str, place: Place) -> list[Candidate]:
    """What may mend a cause at a place, the least first."""
    found: list[Candidate] = []
    if cause in _OF_CAUSE:
        found += _OF_CAUSE[cause](step, stash, place)
    if cause in _FLOAT32_CAUSES or (cause == "BACKWARD_SINGULARITY" and step.policy.autocast):
        found += _float32(step, place)
    if step.policy.compute_dtype == "float16" and not cause.startswith("BAD_"):
        found.append(
            Candidate(
                "bfloat16, which has float32's range",
                "--precision bf16, or TrainStep(policy='bf16'); no loss scale is needed then",
                policy=PRESETS["bf16"],
                scale=1.0,
            )
        )
    return found


def _finite_constant(step: TrainStep, _: Stash, place: Place) -> list[Candidate]:
    most = formats.lookup(step.policy.compute_dtype).max
    return [
        Candidate(
            "mask with a number that the format has",
            f"line {place.line}: write torch.finfo(x.dtype).min, or float('-inf'), for the "
            "constant",
            on(Scope(place.file, place.line), change.constants(0.0, most)),
            function_mode=True,
        )
    ]


def _finite_scores(_: TrainStep, __: Stash, place: Place) -> list[Candidate]:
    return [
        Candidate(
            "mask with the most negative finite number",
            f"line {place.line}: use torch.finfo(scores.dtype).min instead of -inf, or merge the "
            "masks first and keep at least one position of each row",
            change.FiniteScores,
        )
    ]


def _larger_eps(step: TrainStep, _: Stash, place: Place) -> list[Candidate]:
    fmt = formats.lookup(step.policy.compute_dtype)
    larger = 2 * fmt.min_normal if fmt.name == "float16" else 1e-6
    with_default = ("normalize", "cosine_similarity", "layer_norm", "rms_norm")
    return [
        Candidate(
            f"an eps that {fmt} holds",
            f"line {place.line}: use eps={larger:.2g}, or finfo(x.dtype).tiny",
            on(Scope(place.file, place.line), change.small_constants(larger, with_default)),
            function_mode=True,
        )
    ]


def _difference_first(step: TrainStep, _: Stash, place: Place) -> list[Candidate]:
    scope = Scope(place.file, place.line, function=True)
    return [
        Candidate(
            "subtract before squaring, or compute in float64",
            f"line {place.line}: take the difference first, as (x - x.mean()).square().mean() or "
            "torch.var does, in float32; tried as float64 throughout the function",
            on(scope, change.raised(step.device.type, torch.float64)),
            function_mode=True,
        )
    ]


def _safe_argument(_: TrainStep, __: Stash, place: Place) -> list[Candidate]:
    return [
        Candidate(
            "keep the argument away from the singularity",
            f"line {place.line}: give the function a safe argument, such as torch.where(bad, 1.0, "
            "x) before it and where(bad, 0.0, ...) after it, or x + eps under the root",
            on(Scope(place.file, place.line), change.away_from_singularities()),
            function_mode=True,
        )
    ]


def _zero_for_nothing(_: TrainStep, __: Stash, place: Place) -> list[Candidate]:
    return [
        Candidate(
            "nothing to reduce gives 0",
            f"line {place.line}: divide by count.clamp(min=1), or skip the batch",
            on(Scope(place.file, place.line), change.zero_for_nothing()),
            function_mode=True,
        )
    ]


def _fresh_buffers(step: TrainStep, _: Stash, __: Place) -> list[Candidate]:
    return [
        Candidate(
            "restore the buffers",
            "reset the running statistics (reset_running_stats()) or load them from a checkpoint "
            "of before",
            partial(change.fresh_statistics, step._models),
        )
    ]


def _old_parameters(_: TrainStep, __: Stash, ___: Place) -> list[Candidate]:
    how = "load the last checkpoint whose parameters are finite"
    return [Candidate("restore the parameters", how, tried=False)]


def _inside_domain(_: TrainStep, __: Stash, place: Place) -> list[Candidate]:
    how = f"line {place.line}: clamp the argument into the function's domain; no precision helps"
    return [Candidate("mend the model or loss", how, tried=False)]


def _float32(step: TrainStep, place: Place) -> list[Candidate]:
    """Islands around a place: the line, its function, its module."""
    device = step.device.type
    cast = f'with torch.autocast("{device}", enabled=False):'
    found: list[Candidate] = []
    if place.file:
        for function in (False, True):
            scope = Scope(place.file, place.line, function=function)
            where = f"the function around line {place.line}" if function else f"line {place.line}"
            found.append(
                Candidate(
                    f"{where} in float32",
                    f"{cast} and .float() on its 16-bit inputs",
                    on(scope, change.raised(device)),
                    function_mode=True,
                )
            )
    modules = dict(
        each for model in step._models for each in model.named_modules(remove_duplicate=False)
    )
    if place.module in modules and place.module:
        pattern = "+".join((*step.policy.islands, place.module))
        text = replace(step.policy, islands=tuple(pattern.split("+"))).text if (
            step.policy.autocast
        ) else step.policy.text  # fmt: skip
        found.append(
            Candidate(
                f"module {place.module} in float32",
                f"--precision {text}, or TrainStep(policy='{text}')",
                partial(change.islands, [modules[place.module]], device),
            )
        )
    return found


def _lower_scale(step: TrainStep, stash: Stash, _: Place) -> list[Candidate]:
    """The largest power of two below the scale at which the step is clean."""
    scale = float(stash.scale)
    while scale > 1.0:
        scale /= 2
        if replay(step, stash, scale=scale).clean:
            break
    return [
        Candidate(
            "a lower initial loss scale, or none: it settles by itself",
            f"TrainStep(loss_scale=LossScale(init_scale={scale:g}))",
            scale=scale,
        )
    ]


def _without_bad_rows(_: TrainStep, stash: Stash, __: Place) -> list[Candidate]:
    """The batch without the rows that hold inf or NaN."""
    rows: dict[int, set[int]] = {}
    named: list[str] = []
    for index, each in enumerate(stash.micro_batches):
        for path, tensor in leaves(each.batch):
            if not tensor.is_floating_point() or not tensor.dim():
                continue
            bad = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
            if bool(bad.any()):
                found = bad.nonzero().flatten().tolist()
                rows.setdefault(index, set()).update(found)
                shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
                named.append(f"{path} rows {shown}")
    batches = {id(each.batch): rows.get(index, set())
               for index, each in enumerate(stash.micro_batches)}  # fmt: skip

    def drop(batch: Any) -> Any:
        bad = batches.get(id(batch), set())
        sizes = {len(tensor) for _, tensor in leaves(batch) if tensor.dim()}
        size = max(sizes, default=0)
        keep = torch.tensor([row for row in range(size) if row not in bad])

        def without(tensor: Any) -> Any:
            fits = isinstance(tensor, Tensor) and tensor.dim() and len(tensor) == size
            return tensor[keep.to(tensor.device)] if fits and len(keep) else tensor

        return changed(batch, without)

    what = "; ".join(named) or "the batch"
    return [
        Candidate(
            "drop the bad data",
            f"leave out {what}, or mend them where the data is made (torch.nan_to_num hides it)",
            change=drop,
        )
    ]


_OF_CAUSE: Mapping[str, Callable[[TrainStep, Stash, Place], list[Candidate]]] = {
    "MASK_CONSTANT": _finite_constant,
    "FULLY_MASKED_ROW": _finite_scores,
    "EPS_UNDERFLOW": _larger_eps,
    "CANCELLATION": _difference_first,
    "BACKWARD_SINGULARITY": _safe_argument,
    "EMPTY_REDUCTION": _zero_for_nothing,
    "BAD_INPUT": _without_bad_rows,
    "BAD_BUFFER": _fresh_buffers,
    "BAD_PARAMETER": _old_parameters,
    "DOMAIN_ERROR": _inside_domain,
    "SCALE_TOO_HIGH": _lower_scale,
}


def tried(
    step: TrainStep,
    stash: Stash,
    found: Sequence[Candidate],
    wanted: Reference | None,
    step_s: float,
) -> list[Fix]:
    """Each candidate as a fix, tried on the step; the verified first, in the order given.

    Parameters
    ----------
    wanted
        What a fix must stay close to; None to ask only for a clean replay.
    step_s
        About how long a replay takes: long ones are timed once.
    """
    fixes = [_try(step, stash, each, wanted, step_s) for each in found]
    return sorted(fixes, key=lambda fix: not fix.verified)


def complaint(
    step: TrainStep, stash: Stash, candidate: Candidate, wanted: Reference, least_db: float
) -> str:
    """Why a step replayed with a candidate is not right; empty if it is.

    Parameters
    ----------
    least_db
        SQNR that the gradients must keep against the reference.
    """
    settled, result = _with_settled_scale(step, stash, candidate, _replayed(step, stash, candidate))
    if wrong := _complaint(stash, settled, result, wanted):
        return wrong
    scale = float(stash.scale) if settled.scale is None else settled.scale
    kept = gradient_sqnr_db(result, wanted, scale)
    return "" if kept >= least_db else f"its gradients keep {kept:.0f} dB, of {least_db:g} asked"


def gradient_sqnr_db(result: Replayed, wanted: Reference, scale: float) -> float:
    """SQNR of the true gradients of a replay as one vector, in dB."""
    signal = noise = 0.0
    for name, ideal in wanted.gradients.items():
        actual = result.gradients.get(name)
        if actual is not None and not actual.is_sparse:
            signal += float(ideal.square().sum())
            noise += float((actual.double() / scale - ideal).square().sum())
    if not math.isfinite(noise) or not math.isfinite(signal):
        return -math.inf
    return math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


def _try(
    step: TrainStep, stash: Stash, candidate: Candidate, wanted: Reference | None, step_s: float
) -> Fix:
    what, how = candidate.what, candidate.how
    if not candidate.tried:
        return Fix(what, how, verified=False, cost="not tried automatically")
    start = time.perf_counter()
    result = _replayed(step, stash, candidate)
    took_s = time.perf_counter() - start
    settled, result = _with_settled_scale(step, stash, candidate, result)
    if complaint := _complaint(stash, settled, result, wanted):
        return Fix(what, how, verified=False, cost=f"tried: {complaint}")
    once = step_s * _ROUNDS > _TIME_LIMIT_S
    ratio = took_s / step_s if once else time_ratio(step, stash, settled)
    cost = f"{'about ' if once else ''}{ratio:.2f}x the time of the step"
    if settled.scale is not None and settled.scale < float(stash.scale) and not settled.policy:
        cost += f", under a loss scale of {settled.scale:g}"
    return Fix(what, how, verified=True, cost=cost, step_time_ratio=ratio)


def _replayed(step: TrainStep, stash: Stash, candidate: Candidate) -> Replayed:
    return replay(
        step,
        stash,
        around=candidate.around,
        policy=candidate.policy,
        scale=candidate.scale,
        change=candidate.change,
    )


def _with_settled_scale(
    step: TrainStep, stash: Stash, candidate: Candidate, result: Replayed
) -> tuple[Candidate, Replayed]:
    """The same candidate under the loss scale that training would come to."""
    settles = step.loss_scale.enabled and candidate.scale is None
    scale = float(stash.scale)
    while settles and scale > 1 and not result.clean and result.error is None:
        if not all(map(finite, result.losses)):
            break
        scale = max(1.0, scale / 16)
        candidate = replace(candidate, scale=scale)
        result = _replayed(step, stash, candidate)
    return candidate, result


def _complaint(
    stash: Stash, candidate: Candidate, result: Replayed, wanted: Reference | None
) -> str:
    """Why a replay with a fix does not count as mended; empty if it does."""
    if result.error is not None:
        return f"raises {type(result.error).__name__}"
    if not result.clean:
        return "still not finite"
    if wanted is None or not wanted.finite or candidate.change is not None:
        return ""
    for loss, ideal in zip(result.losses, wanted.losses, strict=True):
        if abs(float(loss) - ideal) > _LOSS_WITHIN * max(abs(ideal), 1e-3):
            return f"finite, but the loss is {float(loss):.4g} and should be {ideal:.4g}"
    scale = float(stash.scale) if candidate.scale is None else candidate.scale
    size = math.sqrt(sum(float(each.square().sum()) for each in wanted.gradients.values()))
    if size < _NO_GRADIENT * max(1.0, max(map(abs, wanted.losses), default=0.0)):
        return ""  # zero in exact arithmetic: what is there is rounding
    cosine = _cosine(result.gradients, wanted.gradients, scale)
    if cosine < _LEAST_COSINE:
        return f"finite, but its gradients are off (cosine {cosine:.2f})"
    wrong = list(missing_gradients(result.gradients, wanted.gradients, scale))
    if wrong:
        more = f" and {len(wrong) - 2} more" if len(wrong) > 2 else ""
        return f"finite, but most of the gradient of {', '.join(wrong[:2])}{more} is missing"
    return ""


def _cosine(gradients: dict[str, Tensor], wanted: dict[str, Tensor], scale: float) -> float:
    """Between all true gradients as one vector, and the reference's; 1 where both are zero."""
    dot = own = other = 0.0
    for name, ideal in wanted.items():
        actual = gradients.get(name)
        if actual is None or actual.is_sparse:
            continue
        actual = actual.double() / scale
        dot += float((actual * ideal).sum())
        own += float(actual.square().sum())
        other += float(ideal.square().sum())
    if other == 0 or own == 0:
        return 1.0 if own == other or other < 1e-30 else 0.0
    return dot / math.sqrt(own * other)


def time_ratio(step: TrainStep, stash: Stash, candidate: Candidate) -> float:
    """Time of a replay with the fix over one without, in turns, medians."""
    # A function mode costs time that the fix in the code would not: give it to both.
    nowhere = on(Scope("", 0), lambda func, args, kwargs: func(*args, **kwargs))
    plain = replace(candidate, around=nowhere if candidate.function_mode else nullcontext,
                    policy=None, scale=None, change=None)  # fmt: skip
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_ROUNDS):
        for fixed in (False, True):
            start = time.perf_counter()
            _replayed(step, stash, candidate if fixed else plain)
            times[fixed].append(time.perf_counter() - start)
    return statistics.median(times[True]) / statistics.median(times[False])
