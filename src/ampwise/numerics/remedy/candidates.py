"""What may mend each cause, as changes that a replay can try."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ampwise import formats
from ampwise.data.move import changed, leaves
from ampwise.numerics.explain.cause import VARIANCES
from ampwise.numerics.observe.domain import domain_of
from ampwise.numerics.observe.operations import FILLS
from ampwise.numerics.observe.places import Place
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.interventions import Scope, on
from ampwise.policy import PRESETS, Policy
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import figure, power

FLOAT32_CAUSES = ("RANGE_OVERFLOW", "EPS_UNDERFLOW", "UNDERFLOW", "CANCELLATION", "PRECISION_LOSS",
                  "MASK_CONSTANT", "DTYPE_ERROR")  # fmt: skip
"""Causes that float32 may mend."""

_TOO_LARGE = ("DOMAIN_ERROR", "RANGE_OVERFLOW")
"""Causes that an exponential gets from an argument that is too large."""

_WRONG_ANYWHERE = ("BAD_", "DOMAIN_ERROR")
"""Beginnings of causes that no precision mends."""


@dataclass(frozen=True)
class Candidate:
    """A fix that can be tried, or (`tried` False) only be told.

    Attributes
    ----------
    otherwise
        Tried only where none before it held.
    effective
        Asked after it was tried: whether there was anything that it changes.
    """

    what: str
    how: str
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    policy: Policy | None = None
    scale: float | None = None
    change: Callable[[Any], Any] | None = None
    tried: bool = True
    otherwise: bool = False
    effective: Callable[[], bool] = lambda: True


_UNIT = 256.0
"""What a value that overflows is divided by: it may then be as large as 1.6e7."""

_LARGE_INPUT = 256.0
"""Inputs above this may be the reason that something overflows."""

_EXPONENTIALS = {"exp": 1.0, "expm1": 1.0, "sinh": 1.0, "cosh": 1.0, "exp2": math.log2(math.e)}
"""Operations that overflow for arguments above log(max of the format), times a factor."""


def candidates(
    step: Replayable,
    stash: Stash,
    cause: str,
    place: Place,
    dtype: str = "",
    op: str = "",
    spans: Sequence[Place] = (),
) -> list[Candidate]:
    """What may mend a cause at a place, the least first.

    Parameters
    ----------
    dtype, op
        Format of the bad result, and the operation that made it, where they are known.
    spans
        Where operations of the step were, in order: what lies beside the place.
    """
    found: list[Candidate] = []
    exponential = op.removesuffix("_") in _EXPONENTIALS and cause in _TOO_LARGE
    if exponential:
        found += _smaller_exponent(place, dtype, op.removesuffix("_"))
    if cause in _OF_CAUSE and not (exponential and cause == "DOMAIN_ERROR"):
        found += _of_operation(step, place, cause, op) or _OF_CAUSE[cause](step, stash, place)
    singular = cause == "BACKWARD_SINGULARITY" and step.policy.autocast
    narrow = step.policy.autocast or dtype != "float32"
    if (cause in FLOAT32_CAUSES and narrow) or singular:
        found += _float32(step, place, spans)
    if cause == "RANGE_OVERFLOW" and step.policy.compute_dtype == "float16":
        found += _other_unit(place) + _smaller_input(stash)
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


def _of_operation(step: Replayable, place: Place, cause: str, op: str) -> list[Candidate]:
    """What mends a cause in this operation, and in no other."""
    scope, bounded = Scope(place.file, place.line), domain_of(op)
    if cause == "BACKWARD_SINGULARITY" and op in FILLS:
        return _finite_constant(step, None, place)
    if cause == "EMPTY_REDUCTION" and op in VARIANCES:
        how = f"line {place.line}: {op}(..., correction=0)"
        return [Candidate("the spread of one sample is 0", how, on(scope, change.uncorrected))]
    if cause == "DOMAIN_ERROR" and bounded is not None:
        low, high = bounded.bounds(torch.float32)
        ends = [f"{end}={value:.9g}" for end, value in (("min", low), ("max", high))
                if value is not None]  # fmt: skip
        how = (
            f"line {place.line}: clamp the argument into the function's domain: "
            f"x.clamp({', '.join(ends)}), for float32; or mend what makes it. No precision helps"
        )
        return [Candidate(f"keep the argument of {op} inside", how,
                          on(scope, change.inside_domain))]  # fmt: skip
    if cause == "EPS_UNDERFLOW" and op.removesuffix("_") in ("clamp", "clamp_max"):
        return _bounds_that_hold(step, scope)
    return []


def _bounds_that_hold(step: Replayable, scope: Scope) -> list[Candidate]:
    """Both bounds as numbers that the format has, next to 0 and to 1."""
    fmt = formats.lookup(step.policy.compute_dtype)
    least = 2 * fmt.min_normal if fmt.name == "float16" else 1e-6
    return [
        Candidate(
            f"bounds that {fmt} holds",
            f"line {scope.lines[0]}: clamp to {least:.2g} from 0 and to {fmt.eps:.2g} from 1",
            on(scope, change.constants(least, math.inf, 1 - fmt.eps)),
        )
    ]


def _finite_constant(step: Replayable, _: Stash | None, place: Place) -> list[Candidate]:
    most = formats.lookup(step.policy.compute_dtype).max
    return [
        Candidate(
            "mask with a number that the format has",
            f"line {place.line}: write torch.finfo(x.dtype).min for the constant",
            on(Scope(place.file, place.line), change.constants(0.0, most)),
        )
    ]


def _finite_scores(_: Replayable, __: Stash, place: Place) -> list[Candidate]:
    return [
        Candidate(
            "mask with the most negative finite number",
            f"line {place.line}: use torch.finfo(scores.dtype).min instead of -inf",
            change.FiniteScores,
        )
    ]


def _larger_eps(step: Replayable, _: Stash, place: Place) -> list[Candidate]:
    """An eps that the format holds; and where that does not do, one whose square it holds."""
    fmt = formats.lookup(step.policy.compute_dtype)
    first = 2 * fmt.min_normal if fmt.name == "float16" else 1e-6
    second = 1e-2 if fmt.name == "float16" else 1e-3
    with_default = ("normalize", "cosine_similarity", "layer_norm", "rms_norm")
    scope = Scope(place.file, place.line)
    return [
        Candidate(
            f"an eps that {fmt} holds{again}",
            f"line {place.line}: use eps={eps:.2g}",
            on(scope, change.small_constants(eps, with_default)),
            otherwise=bool(again),
        )
        for eps, again in ((first, ""), (second, ", larger"))
    ]


def _difference_first(step: Replayable, _: Stash, place: Place) -> list[Candidate]:
    scope = Scope(place.file, place.line, function=True)
    return [
        Candidate(
            f"the function around line {place.line} in float64",
            ".double() on its inputs, and .float() on what it returns. Cheaper, but not tried: "
            f"take the difference on line {place.line} before anything is rounded or squared, as "
            "torch.var does, or sigmoid(-x) for 1 - sigmoid(x)",
            on(scope, change.Raised(step.device.type, torch.float64), change.lowered),
        )
    ]


def _safe_argument(_: Replayable, __: Stash, place: Place) -> list[Candidate]:
    return [
        Candidate(
            "keep the argument away from the singularity",
            f"line {place.line}: give the function a safe argument, torch.where(bad, 0.5, x), "
            "and put what it gave for the bad ones back after it, without a gradient",
            on(Scope(place.file, place.line), change.away_from_singularities()),
        )
    ]


def _zero_for_nothing(_: Replayable, __: Stash, place: Place) -> list[Candidate]:
    return [
        Candidate(
            "nothing to reduce gives 0",
            f"line {place.line}: torch.nan_to_num(...) of the result, or divide by "
            "count.clamp(min=1), which gives the same 0",
            on(Scope(place.file, place.line), change.zero_for_nothing()),
        )
    ]


def _fresh_buffers(step: Replayable, stash: Stash, __: Place) -> list[Candidate]:
    """Running statistics begin anew; another buffer has to be right where it is made."""
    found: list[Candidate] = []
    if modules := change.with_bad_statistics(step.models):
        names = ", ".join(f"{name}.reset_running_stats()" for name in list(modules)[:4])
        found.append(
            Candidate("restore the buffers", f"call {names}",
                      partial(change.fresh_statistics, list(modules.values())))
        )  # fmt: skip
    bad = change.bad_buffers(step.models)
    if named := "; ".join(f"{name}: {where}" for name, where in list(bad.items())[:4]):
        made = "its constructor or a checkpoint" if stash.step == 1 else "an update of it"
        found.append(
            Candidate("make the buffer finite where it is made", f"{named}; look at {made}",
                      tried=False)
        )  # fmt: skip
    return found


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


def _float32(step: Replayable, place: Place, spans: Sequence[Place]) -> list[Candidate]:
    """Islands around a place: the line, its function, its module; then what lies beside them."""
    found: list[Candidate] = []
    if place.file:
        found.append(_raised(step, f"line {place.line}", Scope(place.file, place.line)))
        around = Scope(place.file, place.line, function=True)
        found.append(_raised(step, f"the function around line {place.line}", around))
    modules = dict(
        each for model in step.models for each in model.named_modules(remove_duplicate=False)
    )
    if place.module in modules and place.module:
        found.append(_islands(step, modules, [place.module]))
    for several in adjacent([each for each in spans if each.file == place.file], place):
        where = ", ".join(str(each.line) for each in several)
        scope = Scope(place.file, *(each.line for each in several), function=True)
        found.append(_raised(step, f"the functions around lines {where}", scope, otherwise=True))
    inner = [each for each in spans if each.module in modules and each.module]
    for several in adjacent(inner, place, by=lambda each: each.module):
        names = [each.module for each in several]
        found.append(replace(_islands(step, modules, names), otherwise=True))
    return found


def _raised(step: Replayable, what: str, scope: Scope, *, otherwise: bool = False) -> Candidate:
    device = step.device.type
    raised = change.Raised(device)
    return Candidate(
        f"{what} in float32",
        f'with torch.autocast("{device}", enabled=False): and .float() on its 16-bit inputs',
        on(scope, raised),
        otherwise=otherwise,
        effective=lambda: raised.effective,
    )


def _islands(step: Replayable, modules: Mapping[str, nn.Module], names: Sequence[str]) -> Candidate:
    kept = [modules[name] for name in names]
    return Candidate(
        f"module{'s' if len(names) > 1 else ''} {', '.join(names)} in float32",
        step.how_in_float32(*names),
        partial(change.in_float32, kept, step.device.type),
    )


def adjacent(
    spans: Sequence[Place],
    place: Place,
    by: Callable[[Place], object] = lambda each: (each.file, each.function),
) -> list[list[Place]]:
    """Runs of two to five spans, in the order of execution, with that of `place` among them.

    Parameters
    ----------
    spans
        Where operations were, in order.
    by
        What makes places one span: functions, unless said otherwise.
    """
    order = list({by(each): each for each in reversed(spans)}.values())[::-1]
    at = next((i for i, each in enumerate(order) if by(each) == by(place)), None)
    if at is None:
        return []
    order[at] = place
    found: list[list[Place]] = []
    for before, after in ((0, 1), (1, 0), (1, 1), (0, 2), (2, 2)):
        several = order[max(0, at - before) : at + after + 1]
        if len(several) > 1 and several not in found:
            found.append(several)
    return found


def _other_unit(place: Place) -> list[Candidate]:
    """Where the value is divided later anyway: divide before, and carry it in a larger unit."""
    if not place.file or place.phase != "forward":
        return []
    scope = Scope(place.file, place.line)

    def around() -> AbstractContextManager[Any]:
        carried = change.OtherUnit(_UNIT)
        return change.InScope(scope, carried.inside, carried.outside)

    return [
        Candidate(
            "carry the value in a larger unit",
            f"line {place.line}: divide the first factor by {_UNIT:g}, and multiply by it again "
            "where the value is scaled down, or in float32 before it is used otherwise",
            around,
            otherwise=True,
        )
    ]


def _smaller_input(stash: Stash) -> list[Candidate]:
    """Inputs that are large numbers themselves, in a unit in which they are about 1."""
    peaks: dict[str, float] = {}
    for each in stash.micro_batches:
        for path, tensor in leaves(each.batch):
            if tensor.is_floating_point() and tensor.numel():
                peaks[path] = max(peaks.get(path, 0.0), float(tensor.detach().abs().max()))
    large = {path: 2.0 ** math.ceil(math.log2(peak)) for path, peak in peaks.items()
             if _LARGE_INPUT < peak < math.inf}  # fmt: skip
    if not large:
        return []
    unit = max(large.values())

    def smaller(tensor: Any) -> Any:
        shrinks = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel()
        return tensor / unit if shrinks and float(tensor.abs().max()) > _LARGE_INPUT else tensor

    named = ", ".join(f"{path} (up to {figure(peaks[path])})" for path in large)
    return [
        Candidate(
            "a smaller input",
            f"divide {named} by {power(unit)} where the data is made; the model then trains on "
            "these numbers",
            change=lambda batch: changed(batch, smaller),
            otherwise=True,
        )
    ]


def _lower_scale(step: Replayable, stash: Stash, _: Place) -> list[Candidate]:
    """The largest power of two below the scale at which the step is clean."""
    scale = float(stash.scale)
    while scale > 1.0:
        scale /= 2
        if step.replay(stash, scale=scale).clean:
            break
    return [
        Candidate(
            "a lower initial loss scale",
            f"{step.how_scaled(scale)}; left alone it settles by itself",
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
