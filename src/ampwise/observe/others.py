"""What other ranks found, by way of the store that they met in: no collective, so none can hang."""

from __future__ import annotations

import json
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ampwise.distributed.layout import is_up
from ampwise.numerics.result import Diagnosis

_WAIT = timedelta(seconds=30)
"""How long another rank may take longer than this one."""
_KNOWN, _UNKNOWN = "known", "unknown"


class Others:
    """Exchanges diagnoses of one bad step after the other."""

    def __init__(self) -> None:
        self._met = 0

    def first(self, mine: Diagnosis | None) -> Diagnosis | None:
        """The first rank's fault; where none has one, nothing if a rank knows what it is.

        None is the answer of a rank whose fault is known, or whose loss scale settles.
        """
        if not is_up():
            return mine
        store, me, self._met = distributed_c10d._get_default_store(), dist.get_rank(), self._met + 1
        key = f"ampwise/fault/{self._met}"
        if mine is not None:
            mine.rank = me
        is_fault = mine is not None and mine.status == "fault"
        told = json.dumps(mine.to_json()) if mine and is_fault else _UNKNOWN if mine else _KNOWN
        store.set(f"{key}/{me}", told)
        known = False
        for rank in range(dist.get_world_size()):
            if rank == me and is_fault:
                return mine
            try:
                store.wait([f"{key}/{rank}"], _WAIT)
            except RuntimeError:  # it is elsewhere
                continue
            text = store.get(f"{key}/{rank}").decode()
            if text not in (_KNOWN, _UNKNOWN):
                return Diagnosis.from_json(json.loads(text))
            known |= text == _KNOWN
        return None if known else mine
