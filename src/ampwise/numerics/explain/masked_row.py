"""FULLY_MASKED_ROW: softmax of a row of -inf, which is 0/0 in any precision."""

from __future__ import annotations

import torch

from ampwise.numerics.explain.cause import Cause, Explanation, Fault
from ampwise.numerics.observe.attention import is_attention, mask_of
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy import interventions as change
from ampwise.numerics.remedy.candidate import Candidate

_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")


def _by_itself(root: Root) -> Explanation | None:
    if is_attention(root.name):
        scores, dim = mask_of(root.func, root.args, root.kwargs), -1
    elif root.name in _SOFTMAX and isinstance(root.args[0], torch.Tensor):
        scores, dim = root.args[0], int(root.args[1])
    else:
        return None
    if scores is None:
        return None
    rows = torch.isneginf(scores).all(dim=dim) if scores.is_floating_point() else ~scores.any(dim)
    count = int(rows.sum())
    if not count:
        return None
    return Explanation(
        "FULLY_MASKED_ROW",
        f"{count} of {rows.numel()} rows of the softmax are masked completely: every score is "
        "-inf. Their softmax is 0/0 in any precision.",
    )


def _remedies(fault: Fault) -> list[Candidate]:
    return [
        Candidate(
            "mask with the most negative finite number",
            f"line {fault.place.line}: use torch.finfo(scores.dtype).min instead of -inf",
            change.FiniteScores,
        ),
        *fault.in_bfloat16(),
    ]


CAUSE = Cause("FULLY_MASKED_ROW", _remedies, by_itself=_by_itself)
