"""One seed for every generator that a task may draw from."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of devices included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
