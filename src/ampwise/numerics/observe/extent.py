"""Which part of a tensor broke: elements, and the samples, positions and channels they are in."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampwise.numerics.result import Extent, Span
from ampwise_lint.base.words import counted

_SHOWN = 8
CHANNELS_SECOND = frozenset(["convolution", "convolution_backward", "native_batch_norm",
                             "native_batch_norm_backward", "native_group_norm"])  # fmt: skip
"""Operations whose second dimension counts channels, and the last positions."""


def extent_of(bad: Tensor, samples: int = 0, *, channels_second: bool = False) -> Extent:
    """The extent of a mask of bad elements.

    Parameters
    ----------
    samples
        Samples in the batch: a first dimension of that size counts them.
    channels_second
        Whether the second dimension counts channels, and the last positions.
    """
    names = _names(bad.dim(), bad.dim() > 0 and len(bad) == samples, channels_second)
    spans: list[Span] = []
    for dim, name in enumerate(names):
        others = [each for each in range(bad.dim()) if each != dim]
        hit = (bad.any(dim=others) if others else bad).nonzero().flatten()
        spans.append(Span(name, bad.shape[dim], hit.numel(), hit[:_SHOWN].tolist()))
    return Extent(int(bad.sum()), bad.numel(), spans)


def _names(dims: int, has_samples: bool, channels_second: bool) -> list[str]:
    """What each dimension counts; ``axis 1`` where that is not known."""
    names = [f"axis {dim}" for dim in range(dims)] if dims > 1 else ["index"] * dims
    if channels_second:
        names[1:] = ["channel", *["position"] * (dims - 2)]
    return ["sample", *names[1:]] if has_samples else names


def which(bad: Tensor) -> str:
    """A mask of bad elements in words, where nothing is known of its dimensions."""
    return in_words(extent_of(bad))


def in_words(extent: Extent) -> str:
    """``3 of 640 elements: sample 1 of 8, 0, 4, 7 of 16 along axis 1``."""
    parts = [each for each in map(_span, extent.spans) if each]
    elements = counted(extent.of, "element")
    if extent.elements == extent.of:
        return f"all {elements}"
    said = f"{extent.elements:,} of {elements}"
    return f"{said}: {', '.join(parts)}" if parts else said


def _span(span: Span) -> str:
    if span.count in (0, span.size):
        return ""
    shown = ", ".join(map(str, span.first)) + (", ..." if span.count > len(span.first) else "")
    shown = f"{shown} of {span.size:,}"
    if span.name.startswith("axis"):
        return f"{shown} along {span.name}"
    plural = {"index": "indices"}.get(span.name, f"{span.name}s")
    return f"{span.name if span.count == 1 else plural} {shown}"


def samples_in(batches: Iterable[Tensor]) -> int:
    """Samples of a batch: how long its tensors are."""
    return max((len(each) for each in batches if each.dim()), default=0)


def lost_elements(actual: Tensor, wanted: Tensor) -> Tensor:
    """Which elements are not what they should be, by more than a third of it."""
    actual, wanted = actual.detach().double(), wanted.detach().double()
    return ~torch.isclose(actual, wanted, rtol=0.3, atol=0.0, equal_nan=True)
