"""Batches: what is in them, and getting them to the device in time."""

from __future__ import annotations

from ampwise.data.feed import Feed
from ampwise.data.move import leaves, tensors, to_device

__all__ = ["Feed", "leaves", "tensors", "to_device"]
