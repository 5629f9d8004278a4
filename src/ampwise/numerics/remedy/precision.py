"""Another precision for a part of the step, or for all of it, as candidates.

Islands in float32 around a place: its line, its function, its module; then what lies beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import nn

from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.interventions import Scope, on
from ampwise.numerics.result import INNER_SCALE
from ampwise.places import Place
from ampwise.policy import PRESETS, RECIPES
from ampwise.step.replayable import Replayable
from ampwise_lint.base.words import joined

T = TypeVar("T")

_SCALED = {
    "rowwise": "a scale for each row",
    "rowwise_with_gw_hp": "a scale for each row, and weight gradients in bfloat16",
}


def scaled_otherwise(step: Replayable) -> list[Candidate]:
    """The more exact recipes of float8."""
    if not step.policy.float8:
        return []
    others = RECIPES[RECIPES.index(step.policy.recipe) + 1 :]
    policies = [replace(step.policy, recipe=each) for each in others]
    return [Candidate(_SCALED[each.recipe], step.how(each), policy=each) for each in policies]


def in_bfloat16(step: Replayable) -> list[Candidate]:
    """The whole step in bfloat16, where it is in float16 or float8."""
    if step.policy.float8:
        wider = replace(PRESETS["bf16"], islands=step.policy.islands)
        return [Candidate("bfloat16, which needs no scales", step.how(wider), policy=wider)]
    if step.policy.compute_dtype != "float16":
        return []
    return [
        Candidate(
            "bfloat16, which has float32's range",
            f"{step.how(PRESETS['bf16'])}; no loss scale is needed then",
            policy=PRESETS["bf16"],
            scale=1.0,
        )
    ]


def in_float32(step: Replayable, place: Place, spans: Sequence[Place]) -> list[Candidate]:
    """Islands around a place, the smallest first.

    Parameters
    ----------
    spans
        Where operations of the step were, in order: what lies beside the place.
    """
    found: list[Candidate] = []
    if place.inner:
        found.append(_scaled_inside(place))
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


def _scaled_inside(place: Place) -> Candidate:
    return Candidate(
        f"the gradient that line {place.line} asks for, of {INNER_SCALE} times the value",
        f"torch.autograd.grad({INNER_SCALE} * value, ...), and what it gives divided by that",
        on(Scope(place.file, place.line), change.scaled_inside(INNER_SCALE)),
    )


def lines_in_float32(step: Replayable, places: Sequence[Place]) -> list[Candidate]:
    """The lines of some places together, for each file that has more than one of them."""
    files: dict[str, set[int]] = {}
    for each in places:
        files.setdefault(each.file, set()).add(each.line)
    return [
        _raised(step, f"lines {joined(map(str, sorted(lines)))}", Scope(file, *lines))
        for file, lines in files.items()
        if len(lines) > 1
    ]


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
    return runs_with(order, at)


def runs_with(order: Sequence[T], at: int) -> list[list[T]]:
    """Runs of two to five of some things, with the one at an index among them."""
    found: list[list[T]] = []
    for before, after in ((0, 1), (1, 0), (1, 1), (0, 2), (2, 2)):
        several = list(order[max(0, at - before) : at + after + 1])
        if len(several) > 1 and several not in found:
            found.append(several)
    return found
