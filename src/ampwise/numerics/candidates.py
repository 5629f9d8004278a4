"""What may mend each cause, as changes that a replay can try."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ampwise import formats
from ampwise.data.move import changed, leaves
from ampwise.numerics import interventions as change
from ampwise.numerics.interventions import Scope, on
from ampwise.numerics.places import Place
from ampwise.policy import PRESETS, Policy
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable

FLOAT32_CAUSES = ("RANGE_OVERFLOW", "EPS_UNDERFLOW", "UNDERFLOW", "CANCELLATION", "PRECISION_LOSS",
                  "MASK_CONSTANT", "DTYPE_ERROR")  # fmt: skip
"""Causes that float32 may mend."""

_TOO_LARGE = ("DOMAIN_ERROR", "RANGE_OVERFLOW")
"""Causes that an exponential gets from an argument that is too large."""

_WRONG_ANYWHERE = ("BAD_", "DOMAIN_ERROR")
"""Beginnings of causes that no precision mends."""


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


_EXPONENTIALS = {"exp": 1.0, "expm1": 1.0, "sinh": 1.0, "cosh": 1.0, "exp2": math.log2(math.e)}
"""Operations that overflow for arguments above log(max of the format), times a factor."""


def candidates(
    step: Replayable, stash: Stash, cause: str, place: Place, dtype: str = "", op: str = ""
) -> list[Candidate]:
    """What may mend a cause at a place, the least first.

    Parameters
    ----------
    dtype, op
        Format of the bad result, and the operation that made it, where they are known.
    """
    found: list[Candidate] = []
    exponential = op.removesuffix("_") in _EXPONENTIALS and cause in _TOO_LARGE
    if exponential:
        found += _smaller_exponent(place, dtype, op.removesuffix("_"))
    if cause in _OF_CAUSE and not (exponential and cause == "DOMAIN_ERROR"):
        found += _OF_CAUSE[cause](step, stash, place)
    singular = cause == "BACKWARD_SINGULARITY" and step.policy.autocast
    narrow = step.policy.autocast or dtype != "float32"
    if (cause in FLOAT32_CAUSES and narrow) or singular:
        found += _float32(step, place)
    if step.policy.compute_dtype == "float16" and not cause.startswith(_WRONG_ANYWHERE):
        found.append(
            Candidate(
                "bfloat16, which has float32's range",
                f"{step.how(PRESETS['bf16'])}; no loss scale is needed then",
                policy=PRESETS["bf16"],
                scale=1.0,
            )
        )
    return found


def _finite_constant(step: Replayable, _: Stash, place: Place) -> list[Candidate]:
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


def _finite_scores(_: Replayable, __: Stash, place: Place) -> list[Candidate]:
    return [
        Candidate(
            "mask with the most negative finite number",
            f"line {place.line}: use torch.finfo(scores.dtype).min instead of -inf, or merge the "
            "masks first and keep at least one position of each row",
            change.FiniteScores,
        )
    ]


def _larger_eps(step: Replayable, _: Stash, place: Place) -> list[Candidate]:
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


def _difference_first(step: Replayable, _: Stash, place: Place) -> list[Candidate]:
    scope = Scope(place.file, place.line, function=True)
    return [
        Candidate(
            "subtract before squaring, or compute in float64",
            f"line {place.line}: take the difference first, as (x - x.mean()).square().mean() or "
            "torch.var does, in float32; tried as float64 throughout the function",
            on(scope, change.raised(step.device.type, torch.float64), change.lowered),
            function_mode=True,
        )
    ]


def _safe_argument(_: Replayable, __: Stash, place: Place) -> list[Candidate]:
    return [
        Candidate(
            "keep the argument away from the singularity",
            f"line {place.line}: give the function a safe argument, such as torch.where(bad, 1.0, "
            "x) before it and where(bad, 0.0, ...) after it, or x + eps under the root",
            on(Scope(place.file, place.line), change.away_from_singularities()),
            function_mode=True,
        )
    ]


def _zero_for_nothing(_: Replayable, __: Stash, place: Place) -> list[Candidate]:
    return [
        Candidate(
            "nothing to reduce gives 0",
            f"line {place.line}: divide by count.clamp(min=1), or skip the batch",
            on(Scope(place.file, place.line), change.zero_for_nothing()),
            function_mode=True,
        )
    ]


def _fresh_buffers(step: Replayable, _: Stash, __: Place) -> list[Candidate]:
    return [
        Candidate(
            "restore the buffers",
            "reset the running statistics (reset_running_stats()) or load them from a checkpoint "
            "of before",
            partial(change.fresh_statistics, step.models),
        )
    ]


def _old_parameters(_: Replayable, __: Stash, ___: Place) -> list[Candidate]:
    how = "load the last checkpoint whose parameters are finite"
    return [Candidate("restore the parameters", how, tried=False)]


def _inside_domain(_: Replayable, __: Stash, place: Place) -> list[Candidate]:
    how = f"line {place.line}: clamp the argument into the function's domain; no precision helps"
    return [Candidate("mend the model or loss", how, tried=False)]


def _smaller_exponent(place: Place, dtype: str, op: str) -> list[Candidate]:
    fmt = formats.lookup(dtype or "float32")
    most = math.log(fmt.max) * _EXPONENTIALS[op]
    how = (
        f"line {place.line}: subtract the maximum first (x - x.amax(dim, keepdim=True)); or stay "
        "in log-space (logsumexp, log_softmax, softplus); or clamp the argument below log(max of "
        f"{fmt}): x.clamp(max={math.floor(10 * most) / 10:g})"
    )
    return [Candidate(f"keep the argument of {op} small", how, tried=False)]


def _float32(step: Replayable, place: Place) -> list[Candidate]:
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
        each for model in step.models for each in model.named_modules(remove_duplicate=False)
    )
    if place.module in modules and place.module:
        found.append(
            Candidate(
                f"module {place.module} in float32",
                step.how_in_float32(place.module),
                partial(change.in_float32, [modules[place.module]], device),
            )
        )
    return found


def _lower_scale(step: Replayable, stash: Stash, _: Place) -> list[Candidate]:
    """The largest power of two below the scale at which the step is clean."""
    scale = float(stash.scale)
    while scale > 1.0:
        scale /= 2
        if step.replay(stash, scale=scale).clean:
            break
    return [
        Candidate(
            "a lower initial loss scale, or none: it settles by itself",
            step.how_scaled(scale),
            scale=scale,
        )
    ]


def _without_bad_rows(_: Replayable, stash: Stash, __: Place) -> list[Candidate]:
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


_OF_CAUSE: Mapping[str, Callable[[Replayable, Stash, Place], list[Candidate]]] = {
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
