"""Precision policies: values with a text spelling (`preset`), and what a device makes of a request
(`resolution`). Importing this does not import torch.
"""

from __future__ import annotations

from ampwise.policy.preset import DTYPES, PRESETS, RECIPES, Policy
from ampwise.policy.resolution import (
    FP16_ON_CPU,
    Resolution,
    candidates,
    choose_device,
    decide,
    resolve,
)

__all__ = [
    "DTYPES",
    "FP16_ON_CPU",
    "PRESETS",
    "RECIPES",
    "Policy",
    "Resolution",
    "candidates",
    "choose_device",
    "decide",
    "resolve",
]
