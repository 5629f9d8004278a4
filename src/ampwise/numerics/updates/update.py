"""A parameter that an update made inf or NaN: by which operation of the optimizer, and why.

It shows one step later, when parameters are bad already. Whoever can make that update once more
gives it as an `Update`: `of_task` trains as far as that, `of_state` goes by what the
optimizer keeps. Here it is made under watch; and once more beside a float64 shadow, which says
whether its numbers were too large, too small, or wrong in any precision. In 16-bit parameters and
state the smallest things are lost first: the second moment of Adam holds squares, and its eps of
1e-8 is 0 in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ampwise import formats
from ampwise.numerics.explain.cause import Explanation
from ampwise.numerics.explain.causes import damaged, of_itself
from ampwise.numerics.observe.ancestry import Ancestor, back_from
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.shadow import Shadow, ShadowRun, shadowed
from ampwise.numerics.observe.trace import watch_update
from ampwise.numerics.observe.values import broken, origin_of, passed
from ampwise.numerics.result import Diagnosis, Fix
from ampwise.places import placing
from ampwise.step.recorder import Stash, finite
from ampwise.step.replayable import Replayed
from ampwise_lint.base.words import figure

IN_FLOAT32 = (
    "float32 parameters and optimizer state",
    "model.float() before the optimizer is made; autocast computes in 16 bits anyway",
)
"""What mends most of them, and how."""


LEAST_ALIKE = 0.9
"""Cosine between an update and the one that float64 makes, from which on they are alike."""


class Update(Protocol):
    """An update that is still to be made, once."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """Whose parameters it changes."""
        ...

    @property
    def named(self) -> Mapping[str, Tensor]:
        """What it changes, by name."""
        ...

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """Groups of the optimizers that make it."""
        ...

    def make(self, around: AbstractContextManager[Any] = nullcontext()) -> None:  # noqa: B008
        """Make it, inside of a context; what comes before it is outside."""
        ...


def last_update(stash: Stash, made: int) -> int:
    """The step whose update left a window's parameters bad: itself, where they were not before.

    Parameters
    ----------
    made
        Steps that were made before it.
    """
    began_well = bool(stash.before) and all(map(finite, stash.before.values()))
    return made + 1 if began_well else made


def one_by_one(groups: Sequence[dict[str, Any]]) -> None:
    """Have torch's optimizers update each parameter by itself, unless they are fused.

    Operations on lists of tensors (`foreach`) compute the same, and have no float64 shadow.
    """
    for each in groups:
        if "foreach" in each and not each.get("fused"):
            each["foreach"] = False


def lost_in(update: Update) -> tuple[Root, str] | None:
    """The operation of an update that makes a parameter non-finite, and which one; None if none."""
    root, name = watch_update(update.models, update.named, update.make)
    return None if root is None else (root, name)


def explain(found: Diagnosis, before: Callable[[], Update], root: Root, name: str) -> None:
    """Say in a diagnosis that an update made a parameter so, by which operation, and why."""
    cause = of_itself(root) or _by_shadow(before(), root)
    found.phase = "optimizer"
    found.origin = replace(origin_of(root), module=name.rpartition(".")[0])
    found.extent, found.history, found.measured_scale = broken(root), passed(root.history), None
    found.cause = cause.cause
    found.explanation = (
        f"{cause.words} {root.name} turned finite gradients and state into values of {name} that "
        "are not."
    )


def is_narrow(root: Root) -> bool:
    """Whether an operation computed in 16 bits."""
    return any(each.dtype in (torch.float16, torch.bfloat16) for each in root.outputs)


def alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Cosine between two updates."""
    a, b = (torch.cat([each.flatten() for each in several]) for several in (some, others))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0, eps=0.0))


def restored() -> Fix:
    """What to do about an update that went wrong in any precision."""
    how = "load the last checkpoint whose parameters are finite, and mend the optimizer"
    return Fix("restore the parameters", how, verified=False, cost="not tried automatically")


def larger_eps(dtype: torch.dtype) -> tuple[float, str, str]:
    """An eps that a 16-bit format holds; what that mends, and how."""
    fmt = formats.lookup(dtype)
    eps = 2 * fmt.min_normal if dtype == torch.float16 else 1e-6
    return eps, "a larger eps in the optimizer", f"eps={eps:.2g}, which {fmt} holds"


def _by_shadow(update: Update, root: Root) -> Explanation:
    """The cause, from what the operation's inputs would be if the update rounded nothing."""
    place = replace(root.place, phase="forward")
    with placing(update.models) as places:
        mode = Shadow(places, errors=False, at=(root.name, place, root.occurrence))
        shadowed(mode, update.make)
    run = mode.seen(Replayed())
    return _lost_eps(root, run) or damaged(root, run)


def _lost_eps(root: Root, run: ShadowRun) -> Explanation | None:
    """A denominator of 0, whose eps is 0 in its format."""
    lost = next(
        (pair for maker in run.makers for each in back_from(maker) for pair in _added(each)), None
    )
    if lost is None or not any(bool((each == 0).any()) for each in _floats(root)):
        return None
    eps, by = lost
    fmt = formats.lookup(by.dtype)
    zeros = sum(int((each == 0).sum()) for each in _floats(root)[-1:])
    state = f" The state that it is added to is kept in {fmt}, too." if fmt.bits < 32 else ""
    return Explanation(
        "EPS_UNDERFLOW",
        f"{zeros} denominators of the optimizer are 0: its eps of {figure(eps)} is lost in {fmt}, "
        f"whose smallest number is {fmt.min_subnormal:.2g}.{state}",
    )


def _added(each: Ancestor) -> list[tuple[float, Ancestor]]:
    return [(constant, each) for constant in each.lost if constant < 1e-2]


def _floats(root: Root) -> list[Tensor]:
    return [each for each in root.args if isinstance(each, Tensor) and each.is_floating_point()]
