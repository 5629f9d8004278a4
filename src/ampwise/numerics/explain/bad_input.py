"""BAD_INPUT: inf or NaN in the batch, or a -inf of it, taken for a mask, that is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampwise.data.move import changed, leaves
from ampwise.numerics.explain.cause import Cause, Explanation, Fault, in_float64
from ampwise.numerics.observe.bits import NAN, all_bits
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.remedy.candidate import Candidate
from ampwise.step.recorder import Stash

_SHOWN = 8


def _by_itself(root: Root) -> Explanation | None:
    return _fed(root) if root.func is not None else _as_it_came(root)


def _as_it_came(root: Root) -> Explanation | None:
    if root.name != "batch":
        return None
    what = "NaN" if root.bits & NAN else "inf"
    return Explanation(
        "BAD_INPUT",
        f"{root.source.removeprefix('batch ')} holds {what} before the model sees it. No "
        "precision can train on it.",
    )


def _fed(root: Root) -> Explanation | None:
    """Infinities of the batch (which may be a mask) that are no mask to this operation."""
    source = root.fed_by
    if source is None or source.name != "batch":
        return None
    local = in_float64(root)
    if local is None or root.bits & ~all_bits(local):
        return None
    made = "NaN" if root.bits & NAN else "inf"
    return Explanation(
        "BAD_INPUT",
        f"{source.source.removeprefix('batch ')} holds -inf before the model sees it, and "
        f"{root.name} on line {root.place.line} makes {made} of it. No precision can train on it.",
        source,
    )


def _without_bad_rows(fault: Fault) -> list[Candidate]:
    """The batch without the rows that hold inf or NaN."""
    rows, named = _bad_rows(fault.stash)
    batches = {id(each.batch): rows.get(index, set())
               for index, each in enumerate(fault.stash.micro_batches)}  # fmt: skip

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


def _bad_rows(stash: Stash) -> tuple[dict[int, set[int]], list[str]]:
    """Rows that hold inf or NaN by micro-batch, and in words."""
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
                more = ", ..." if len(found) > _SHOWN else ""
                named.append(f"{path} rows {', '.join(map(str, found[:_SHOWN]))}{more}")
    return rows, named


CAUSE = Cause("BAD_INPUT", _without_bad_rows, by_itself=_by_itself, in_code=False)
