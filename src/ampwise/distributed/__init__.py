"""Everything that talks to `torch.distributed`: who is there, what is summed, who differs.

`TrainStep` finds DDP and FSDP2 by itself. `replicate` and `shard` make them as a policy says, and
`in_step` gives all ranks the same number of batches.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampwise.distributed.even import in_step
    from ampwise.distributed.wrap import replicate, shard

__all__ = ["in_step", "replicate", "shard"]

_HOMES = {"in_step": "even", "replicate": "wrap", "shard": "wrap"}


def __getattr__(name: str) -> Any:
    # Loaded when used: the command line asks who it is before it knows that torch is needed.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
