"""Loaders: batches, and the time a script waited for them."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ampwise.data import tensors
from ampwise.observe.patches import Patches
from ampwise.observe.session import Session


class Loaders:
    """``DataLoader``s.

    Attributes
    ----------
    used
        Whether any gave a batch.
    """

    what = "loaders"

    def __init__(self, session: Session) -> None:
        self.used = False
        self._session = session

    def install(self, patches: Patches) -> None:
        """Put it in place."""
        patches.wrap(_BaseDataLoaderIter, "__next__", self._next)

    def _next(self, real: Any, loader: Any) -> Any:
        if not self._session.active:
            return real(loader)
        began = time.perf_counter()
        batch = real(loader)
        self.used = True
        segment = self._session.segment
        segment.waited_s += time.perf_counter() - began
        segment.samples += samples_of(batch)
        self._session.tell("batch", batch)
        return batch


def samples_of(batch: Any) -> int:
    """Length of the first tensor of a batch."""
    first = next((each for each in tensors(batch) if each.dim()), None)
    return 0 if first is None else len(first)
