"""The random state of a process, as plain values and tensors that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ampwise.tasks.seeding import seed_all


def random_state() -> dict[str, Any]:
    """State of every generator a training loop may draw from."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "python": _python_state(),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": int(numpy_state["state"]["pos"]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back to a `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, state["numpy_position"], 0, 0.0))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def seeded_state(*words: int) -> dict[str, Any]:
    """A `random_state` drawn from a few integers; the generators stay as they are."""
    before = random_state()
    seed = int(np.random.SeedSequence([word % 2**64 for word in words]).generate_state(1)[0])
    seed_all(seed)
    state = random_state()
    set_random_state(before)
    return state


def _python_state() -> tuple[int, list[int], float | None]:
    version, internal, gauss = random.getstate()
    return version, list(internal), gauss
