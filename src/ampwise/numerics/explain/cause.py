"""What a cause is: how it is told from others, what is said of it, and what may mend it.

Three results of one operation are compared: the actual one, the *local* one (float64 on the actual
inputs) and the *shadow's* (float64 on what the inputs would be without rounding).

    actual  local           shadow
    bad     finite          any       beyond the format's range          by_itself
    bad     bad             finite    the inputs were damaged            by_argument
    bad     bad             bad       wrong in any precision             in_any_precision

Each cause is a file with these experiments, as far as it has them, and a `Cause`; `causes` lists
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ampwise import formats
from ampwise.numerics.observe import domain
from ampwise.numerics.observe.ancestry import Ancestor
from ampwise.numerics.observe.exact import UnsupportedError, exact
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.numerics.remedy.precision import in_bfloat16, in_float32, scaled_otherwise
from ampwise.numerics.result import CauseName
from ampwise.places import Place
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable


@dataclass(frozen=True, slots=True)
class Explanation:
    """A cause, and the two sentences that explain it.

    Attributes
    ----------
    made_by
        The operation, or tensor from outside, where it began, where that is not the root itself.
    inside
        The operation inside a fused one that broke.
    """

    cause: CauseName
    words: str
    made_by: Ancestor | Root | None = None
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a root that rounding damaged.

    Attributes
    ----------
    fmt
        Its own format: of a root with arguments in several, each has another.
    maker
        What made it; None where it comes from outside.
    what
        Some elements are ``zero`` and should be numbers; are negative and should not be
        (``outside``); or lie at the ``edge`` of the function's domain.
    actual, wanted
        These elements, as they are and as they should be.
    """

    root: Root
    fmt: formats.FloatFormat
    maker: Ancestor | None
    what: Literal["zero", "outside", "edge"]
    actual: Tensor
    wanted: Tensor

    @classmethod
    def of(
        cls, root: Root, fmt: formats.FloatFormat, actual: Tensor, wanted: Tensor,
        maker: Ancestor | None,
    ) -> Argument | None:  # fmt: skip
        """How an argument was damaged, if it was in one of these ways."""
        masks: tuple[tuple[Literal["zero", "outside", "edge"], Tensor], ...] = (
            ("zero", (actual == 0) & (wanted != 0)),
            ("outside", (actual < 0) & (wanted >= 0)),
            ("edge", _at_the_edge(root.name, actual, wanted)),
        )
        for what, mask in masks:
            if bool(mask.any()):
                return cls(root, fmt, maker, what, actual[mask], wanted[mask])
        return None


def _at_the_edge(name: str, actual: Tensor, wanted: Tensor) -> Tensor:
    """Which arguments lie at the end of a function's domain, or outside, and should not."""
    known = domain.domain_of(name)
    if known is None:
        return torch.zeros_like(actual, dtype=torch.bool)
    below, above = known.outside(actual)
    low, high = known.outside(wanted)
    return (below | above) & ~(low | high)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault whose cause is known: the step that shows it, and where.

    Attributes
    ----------
    dtype, op
        Format of the bad result, and the operation that made it, where they are known.
    spans
        Where operations of the step were, in order: what lies beside the place.
    """

    step: Replayable
    stash: Stash
    place: Place
    dtype: str = ""
    op: str = ""
    spans: Sequence[Place] = ()

    def in_float32(self) -> list[Candidate]:
        """Islands around its place, unless all is in float32 there."""
        if not self.step.policy.autocast and self.dtype == "float32":
            return []
        return in_float32(self.step, self.place, self.spans)

    def in_bfloat16(self) -> list[Candidate]:
        """The step in bfloat16, where it is in float16 or float8."""
        return in_bfloat16(self.step)

    def in_another_precision(self) -> list[Candidate]:
        """Other scales of float8, islands in float32, or all of it in bfloat16."""
        return [*scaled_otherwise(self.step), *self.in_float32(), *self.in_bfloat16()]


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause, as it is registered.

    Attributes
    ----------
    remedies
        What may mend it, the least first.
    by_itself
        The experiment on the inputs that an operation had.
    by_argument
        That on an argument of it that was damaged, where float64 is finite throughout.
    in_any_precision
        That on an operation that is not finite in float64 either; given what made its tensors.
    of_precision
        Whether it is one of range or rounding: float32 has more of both.
    in_code
        Whether a change of a line of code may mend it.
    """

    name: CauseName
    remedies: Callable[[Fault], list[Candidate]]
    by_itself: Callable[[Root], Explanation | None] | None = None
    by_argument: Callable[[Argument], Explanation | None] | None = None
    in_any_precision: Callable[[Root, Sequence[Ancestor | None]], Explanation | None] | None = None
    of_precision: bool = False
    in_code: bool = True


def format_of(root: Root) -> formats.FloatFormat:
    """Format of a root's result."""
    return formats.lookup(root.outputs[0].dtype if root.outputs else torch.float32)


def in_float64(root: Root) -> list[Tensor] | None:
    """The operation in float64 on the actual inputs; None where it has no such form."""
    try:
        made: Any = exact(root.func, root.args, root.kwargs)
    except UnsupportedError:
        return None
    return made
