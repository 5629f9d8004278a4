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

Where none of these mends it, what `calls` gives to helpers is in float32, and `islands_in` has
several functions in float32.

Nothing is known here of whether a change helps: each is tried (`remedy.trial`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampwise.numerics.remedy.patches import (
    attention,
    calls,
    constants,
    domain,
    dtypes,
    island,
    primitives,
)
from ampwise.numerics.remedy.patches.edit import Edit
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import UNREADABLE, SourceFile
from ampwise_lint.base.words import joined

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
        The whole file of the fault with the change made.
    beside
        Other files that change, too, or in its place.
    """

    what: str
    why: str
    data: bytes
    beside: Mapping[Path, bytes] = field(default_factory=dict[Path, bytes])


def proposals(site: Site) -> list[Proposal]:
    """Every change that fits, in order, each text once; formulas in a float32 function, too."""
    found = [each for kind in KINDS for each in _made(site, kind)]
    formulas = [each for kind in FORMULAS for each in _made(site, kind)]
    found += [more for each in formulas for more in _also_float32(site, each)]
    by_text = {each.data: each for each in reversed(found) if each.data != site.source.data}
    return [each for each in found if by_text.get(each.data) is each]


def around(
    site: Site, callers: Sequence[calls.CallSite], chains: Sequence[Sequence[Site]]
) -> Iterator[Proposal]:
    """Changes that reach beyond the function of a fault.

    What helpers are given where they are called, the nearest call first; then islands: a caller
    that runs no layers, several functions, a caller whose layers are in float32, too.

    Parameters
    ----------
    chains
        Runs of functions with that of the fault among them.
    """
    for caller in callers:
        for each in _made(caller.site, lambda _, caller=caller: calls.edits(caller)):
            yield _of_files(each.what, each.why, site, {caller.site: each.data})
    for among_layers in (False, True):
        for caller in (each.site for each in callers if each.among_layers is among_layers):
            what = f"the calling function, line {caller.line}, in float32, outside of autocast"
            for each in _made(caller, island.function):
                yield _of_files(what, each.why, site, {caller: each.data})
        if not among_layers:
            islands = (islands_in(each, site) for each in chains)
            yield from (each for each in islands if each is not None)


def islands_in(several: Sequence[Site], site: Site) -> Proposal | None:
    """Functions of a chain in float32, each by itself; None where one of them cannot be.

    They may be in several files. In a file the last one is changed first: lines above it stay.
    """
    files: dict[Path, tuple[Site, bytes]] = {}
    for each in sorted(several, key=lambda one: one.line, reverse=True):
        path = each.source.path
        now = each if path not in files else each.of(files[path][1])
        if now is None or (made := next(_made(now, island.function), None)) is None:
            return None
        files[path] = each, made.data
    lines = joined(f"{each.source.path.name}:{each.line}" for each in several)
    what = f"the functions at {lines} in float32, outside of autocast"
    return _of_files(what, island.WHY, site, dict(files.values()))


def _of_files(what: str, why: str, site: Site, changed: Mapping[Site, bytes]) -> Proposal:
    """A proposal of files that may be others than that of the fault."""
    files = {each.source.path: data for each, data in changed.items()}
    own = files.pop(site.source.path, site.source.data)
    return Proposal(what, why, own, files)


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
