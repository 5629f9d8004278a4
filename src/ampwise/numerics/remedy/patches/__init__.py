r"""What may be changed in a user's source at the line of a fault, the gentlest first.

Each kind of change is a file with a function from a `Site` to `Edit`\ s, and a row in `KINDS`:

==============  =================================================================================
primitives      a function of torch's in place of a formula (`log_softmax`, `rms_norm`, `var`, ...)
attention       scores scaled before the product, masks after it, the fused kernel
constants       a mask, or an eps, that the format holds
domain          a second `where`, a clamp into the domain
dtypes          float32 for an operand; a cast that is left out, or put in
island          the statement outside of autocast; then the function
domain          at last a clamp, where the formula is right and only the format is not
==============  =================================================================================

Nothing is known here of whether a change helps: each is tried (`remedy.trial`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ampwise.numerics.remedy.patches import (
    attention,
    constants,
    domain,
    dtypes,
    island,
    primitives,
)
from ampwise.numerics.remedy.patches.edit import Edit
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import UNREADABLE, SourceFile

Kind = Callable[[Site], Iterator[Edit]]

KINDS: tuple[Kind, ...] = (
    primitives.edits,
    attention.edits,
    constants.edits,
    domain.edits,
    dtypes.edits,
    island.statement,
    island.function,
    domain.clamps,
)

FORMULAS: tuple[Kind, ...] = (primitives.edits, domain.edits, domain.clamps)
"""What may also be needed in a function that is in float32 altogether."""


@dataclass(frozen=True)
class Proposal:
    """A changed file.

    Attributes
    ----------
    what, why
        What is done, in a few words, and a sentence about why.
    data
        The whole file with the change made.
    """

    what: str
    why: str
    data: bytes


def proposals(site: Site) -> list[Proposal]:
    """Every change that fits, in order, each text once; formulas in a float32 function, too."""
    found = [each for kind in KINDS for each in _made(site, kind)]
    formulas = [each for kind in FORMULAS for each in _made(site, kind)]
    found += [more for each in formulas for more in _also_float32(site, each)]
    by_text = {each.data: each for each in reversed(found) if each.data != site.source.data}
    return [each for each in found if by_text.get(each.data) is each]


def islands_around(caller: Site) -> list[Proposal]:
    """The function that calls the one of a fault in float32, where that alone does not do."""
    made = _made(caller, island.function)
    return [replace(each, what=f"the calling function, line {caller.line}, in float32, outside of "
                    "autocast") for each in made]  # fmt: skip


def _made(site: Site, kind: Kind) -> Iterator[Proposal]:
    for edit in kind(site):
        try:
            data = site.source.edited(edit.changes)
            ast.parse(data)
        except UNREADABLE:
            continue
        yield Proposal(edit.what, edit.why, data)


def _also_float32(site: Site, first: Proposal) -> Iterator[Proposal]:
    """A change, and its function in float32 on top."""
    if site.function is None:
        return
    line = site.source.start(site.function)[0]
    inner = replace(site, source=SourceFile.of(site.source.path, first.data, line), line=line)
    for each in _made(inner, island.function):
        yield Proposal(f"{first.what}, {each.what}", f"{first.why} {each.why}", each.data)
