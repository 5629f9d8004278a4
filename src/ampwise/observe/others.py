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


class Others:
    """Exchanges diagnoses of one bad step after the other."""

    def __init__(self) -> None:
        self._met = 0

    def first(self, mine: Diagnosis | None) -> Diagnosis | None:
        """The first rank's fault; this rank's answer where none has one."""
        if not is_up():
            return mine
        store, me, self._met = distributed_c10d._get_default_store(), dist.get_rank(), self._met + 1
        key = f"ampwise/fault/{self._met}"
        if mine is not None:
            mine.rank = me
        is_fault = mine is not None and mine.status == "fault"
        store.set(f"{key}/{me}", json.dumps(mine.to_json()) if mine and is_fault else "")
        for rank in range(dist.get_world_size()):
            if rank == me and is_fault:
                return mine
            try:
                store.wait([f"{key}/{rank}"], _WAIT)
            except RuntimeError:  # it is elsewhere
                continue
            if text := store.get(f"{key}/{rank}"):
                return Diagnosis.from_json(json.loads(text))
        return mine
