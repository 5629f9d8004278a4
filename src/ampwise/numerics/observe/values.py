"""Tensors as the figures that a diagnosis shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampwise import formats
from ampwise.data import leaves
from ampwise.formats import dtype_name
from ampwise.numerics.observe.ancestry import Ancestor
from ampwise.numerics.observe.extent import CHANNELS_SECOND, extent_of, samples_in
from ampwise.numerics.observe.operations import held_by
from ampwise.numerics.observe.roots import Flow, Root
from ampwise.numerics.result import Extent, Origin, Passed, Values
from ampwise.places import Place
from ampwise.step.recorder import Stash

_SAMPLE = 20_000
"""Values of a tensor that its histogram is made of, at least, where there are more."""


def origin_of(root: Root) -> Origin:
    """A root as plain values."""
    place = root.place
    inputs = [
        values_of(name, each)
        for name, value in _named(root)
        for each in ([value] if isinstance(value, Tensor) else value)
    ]
    return Origin(
        op=root.name if root.func is not None else root.source,
        module=place.module,
        file=place.file,
        line=place.line,
        source=place.source,
        dtype=dtype_name(root.outputs[0].dtype) if root.outputs else "",
        call=place.call,
        library=place.library,
        inputs=inputs[:8],
        outputs=[values_of("result", each) for each in root.outputs[:4]],
    )


def broken(root: Root, stash: Stash | None = None) -> Extent | None:
    """Which part of a root's result is not finite; None where its result was not kept."""
    if not root.outputs:
        return None
    result = held_by(root.outputs[0])
    seen = [] if stash is None else stash.micro_batches
    batches = [each for batch in seen for _, each in leaves(batch.batch)]
    return extent_of(
        ~torch.isfinite(result),
        samples_in(batches),
        channels_second=root.name in CHANNELS_SECOND,
    )


def passed(operations: Iterable[Flow | Ancestor]) -> list[Passed]:
    """Operations that a value came through as plain values."""
    return [
        Passed(each.name, each.place.module, each.place.file, each.place.line, each.place.phase,
               each.dtype, each.extreme)
        for each in operations
    ]  # fmt: skip


def at(place: Place, op: str, dtype: str = "") -> Origin:
    """An origin of which only the place is known."""
    return Origin(op, place.module, place.file, place.line, place.source, dtype, place.call,
                  place.library)  # fmt: skip


def _named(root: Root) -> list[tuple[str, Any]]:
    """Tensor arguments with their schema names."""
    if root.func is None:
        return []
    names = [each.name for each in root.func._schema.arguments]
    pairs = [*zip(names, root.args, strict=False), *root.kwargs.items()]
    return [
        (name, value)
        for name, value in pairs
        if _floating(value)
        or (isinstance(value, list | tuple) and value and all(map(_floating, value)))
    ]


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def values_of(name: str, tensor: Tensor) -> Values:
    """Range and shares of a floating-point tensor."""
    tensor = held_by(tensor.detach())
    fmt = formats.lookup(tensor.dtype)
    flat = tensor.double().abs().flatten()
    count = max(1, flat.numel())
    finite = flat[torch.isfinite(flat)]
    nonzero = finite[finite > 0]
    signed = tensor.double().flatten()[torch.isfinite(flat)]
    return Values(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=list(tensor.shape),
        amax=float(finite.max()) if finite.numel() else None,
        min_nonzero=float(nonzero.min()) if nonzero.numel() else None,
        zero=float((flat == 0).sum()) / count,
        subnormal=float((nonzero < fmt.min_normal).sum()) / count,
        non_finite=1 - finite.numel() / count if flat.numel() else 0.0,
        low=float(signed.min()) if signed.numel() else None,
        high=float(signed.max()) if signed.numel() else None,
    )


def exponents(tensor: Tensor) -> dict[str, float]:
    """Share of the non-zero finite values in each binade, by its exponent; "inf" beside them.

    Of large tensors every n-th value.
    """
    flat = tensor.detach().flatten()
    flat = flat[:: max(1, flat.numel() // _SAMPLE)].double().abs()
    bad = ~torch.isfinite(flat)
    held = flat[~bad]
    held = held[held > 0]
    counts: Counter[str] = Counter()
    if held.numel():
        powers = torch.floor(torch.log2(held)).to(torch.int64)
        values, times = torch.unique(powers, return_counts=True)
        counts.update(dict(zip(map(str, values.tolist()), times.tolist(), strict=True)))
    if bool(bad.any()):
        counts["inf"] = int(bad.sum())
    total = sum(counts.values())
    return {power: count / total for power, count in counts.items()} if total else {}


def which_loss(index: int, count: int) -> str:
    """A loss of a window in words: it may have several, of micro-batches or of an iteration."""
    return "the loss" if count == 1 else f"loss {index + 1} of {count}"


def loss_of(losses: list[Tensor]) -> float | None:
    """Mean loss of the micro-batches; None where it is not finite or there is none."""
    values = [float(each) for each in losses]
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None
