"""Whose error an error is: the operation's own rounding, or that of each of its arguments.

An operation is made in float64 with one argument as it is and the others without rounding; how far
that is from the result without rounding is what this argument brings. Errors are Euclidean norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ampwise.numerics.observe.ancestry import Ancestor
from ampwise.numerics.observe.exact import FLOATS, UnsupportedError, exact
from ampwise.places import Place

_MOST = 4
"""Arguments that are tried one by one; of more, as in ``cat``, each brings the error it has."""
_ABOUT = 10 ** (-10 / 20)
"""Share of the largest, 10 dB below it, that is about as much."""
_NOTHING = 1e-3
"""Share of an error that is not followed any further."""


def distance(actual: Tensor, wanted: Tensor) -> float:
    """Norm of an error; infinities that are meant are none, and what is not finite is left out."""
    error = torch.where(actual == wanted, 0.0, actual.detach().double() - wanted)
    return float(torch.linalg.vector_norm(error.nan_to_num(0.0, 0.0, 0.0)))


def own_error(func: Any, given: tuple[Any, Any], result: Tensor, made: Any) -> float:
    """What an operation rounds away by itself; nothing in float32, or where it is not known.

    Parameters
    ----------
    given
        Its arguments, as they were.
    result, made
        The first tensor that it wrote; and what it returned.
    """
    if result.element_size() > 2:
        return 0.0
    try:
        local = exact(func, *given, made)[0]
    except UnsupportedError:
        return 0.0
    return distance(result, local) if local.shape == result.shape else 0.0


def brought(
    func: Any, given: tuple[Any, Any], raised: tuple[Any, Any], made_by: Sequence[Ancestor | None],
    wanted: Tensor | None = None, made: Any = None,
) -> list[float]:  # fmt: skip
    """The error that each floating-point argument of an operation brings into its result.

    Parameters
    ----------
    given, raised
        Its arguments, as they were and without rounding.
    made_by
        What made each of the floating-point tensors among them; those from outside are exact.
    wanted
        Its result without rounding; computed where it is not known.
    """
    known = [each.error if each is not None else 0.0 for each in made_by]
    wrong = [index for index, error in enumerate(known) if error]
    if len(wrong) > _MOST:
        return known
    actual, _ = tree_flatten(given)
    ideal, spec = tree_flatten(raised)
    at = [index for index, each in enumerate(actual)
          if isinstance(each, Tensor) and each.dtype in FLOATS]  # fmt: skip
    shares = [0.0] * len(known)
    try:
        if wanted is None and wrong:
            wanted = exact(func, *raised, made)[0]
        for index in wrong:
            leaves = list(ideal)
            leaves[at[index]] = actual[at[index]]
            args, kwargs = tree_unflatten(leaves, spec)
            assert wanted is not None
            shares[index] = distance(exact(func, args, kwargs, made)[0], wanted)
    except UnsupportedError:
        return known
    return shares


def roundings(starts: Sequence[tuple[float, Ancestor]]) -> list[Ancestor]:
    """The roundings that bring about as much of an error as any other does, in order.

    Followed back are all arguments; a rounding counts as far as it comes through. Of one line that
    rounds again and again, it is the one with the largest numbers. None if nothing rounds.

    Parameters
    ----------
    starts
        What made the arguments of the operation with that error, and what each of these brings.
    """
    shares = _followed(starts)
    most = max(shares.values(), default=0.0)
    largest: dict[tuple[str, Place], Ancestor] = {}
    for each in sorted(shares, key=lambda each: abs(each.extreme)):
        largest[each.name, each.place] = each
    enough = (each for each, share in shares.items() if most and share >= _ABOUT * most)
    first = dict.fromkeys((each.name, each.place) for each in sorted(enough, key=lambda e: e.index))
    return [largest[at] for at in first]


def _followed(starts: Sequence[tuple[float, Ancestor]]) -> dict[Ancestor, float]:
    """Every rounding before an operation, and how much of it comes through, the largest first."""
    found: dict[Ancestor, float] = {}
    met: set[Ancestor] = set()
    least = _NOTHING * max((share for share, _ in starts), default=0.0)
    queue = [(-share, each.index, each) for share, each in starts if share]
    heapify(queue)
    while queue:
        reaches, _, each = heappop(queue)
        if each in met or not each.error:
            continue
        met.add(each)
        if each.own:
            found[each] = -reaches * min(1.0, each.own / each.error)
        for share, parent in zip(each.brought, each.parents, strict=True):
            through = -reaches * min(1.0, share / each.error)
            if through > least:
                heappush(queue, (-through, parent.index, parent))
    return found
