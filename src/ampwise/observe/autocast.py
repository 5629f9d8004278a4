"""Autocast: every region that is entered, with its line, and every one that torch switched off.

While `override` is set, regions run in another dtype, or not at all: that is how a replay or a race
gets at autocast that a script or its trainer enters by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from ampwise.formats import HALF, dtype_name
from ampwise.lines import Line, users_line
from ampwise.observe.patches import Patches
from ampwise.observe.result import Asked, Region
from ampwise.observe.session import Session

_ENABLED = 2
"""Place of ``enabled`` among autocast's arguments."""


@dataclass(frozen=True, slots=True)
class Override:
    """What regions become that are on: this dtype, or float32 for None."""

    dtype: torch.dtype | None


class Autocasts:
    """The regions of a script.

    Attributes
    ----------
    override
        What enabled regions become; None to leave them.
    """

    what = "autocast regions"

    def __init__(self, session: Session) -> None:
        self.override: Override | None = None
        self._session = session
        self._entered: Counter[tuple[str, str, bool, Line]] = Counter()
        self._refused: dict[tuple[str, Line], None] = {}

    def install(self, patches: Patches) -> None:
        """Put it in place."""

        def made(real: Any, region: Any, *args: Any, **kwargs: Any) -> None:
            real(region, *args, **kwargs)
            if region._enabled or not self._session.active:
                return
            if kwargs.get("enabled", args[_ENABLED] if len(args) > _ENABLED else True):
                self._refused[dtype_name(region.fast_dtype), users_line()] = None

        patches.wrap(autocast, "__init__", made)
        patches.wrap(autocast, "__enter__", self._enter)

    def regions(self) -> list[Region]:
        """All that were entered, in order."""
        return [
            Region(device, dtype, enabled, line.file, line.line, times)
            for (device, dtype, enabled, line), times in self._entered.items()
        ]

    def asked(self) -> list[Asked]:
        """16-bit formats that regions asked for, whether torch then switched them on or not."""
        on = ((dtype, line) for _, dtype, enabled, line in self._entered if enabled)
        found = dict.fromkeys((*on, *self._refused))
        return [Asked(dtype, *line) for dtype, line in found if dtype in HALF]

    @contextmanager
    def overridden(self, dtype: torch.dtype | None) -> Generator[None]:
        """Inside, regions that are on compute in `dtype`; None: in float32."""
        before, self.override = self.override, Override(dtype)
        try:
            yield
        finally:
            self.override = before

    @contextmanager
    def within(self, device_type: str, dtype: torch.dtype | None) -> Generator[None]:
        """Inside, autocast is on in `dtype`, or off for None, and no region of the script's."""
        with self._session.aside():
            region = autocast(device_type, dtype, enabled=dtype is not None).__enter__()
        try:
            yield
        finally:
            region.__exit__(None, None, None)

    def _enter(self, real: Any, region: Any) -> Any:
        if self._session.active:
            self._note(region)
        if self.override is None or not region._enabled:
            return real(region)
        own = region.fast_dtype
        if self.override.dtype is None:
            region._enabled = False
        else:
            region.fast_dtype = self.override.dtype
        try:
            return real(region)
        finally:
            region._enabled, region.fast_dtype = True, own

    def _note(self, region: Any) -> None:
        """Count a region, and tell; those that checkpointing enters again in backward are not."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return
        line, on = users_line(), region._enabled
        self._entered[region.device, dtype_name(region.fast_dtype), on, line] += 1
        self._session.tell("autocast_entered", region.device, region.fast_dtype, line, enabled=on)
