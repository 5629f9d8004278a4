"""Everything that talks to `torch.distributed`: who is there, what is summed, who differs.

`TrainStep` finds DDP and FSDP2 by itself. `replicate` and `shard` make them as a policy says, and
`in_step` gives all ranks the same number of batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampwise.distributed.even import in_step

if TYPE_CHECKING:
    from ampwise.distributed.wrap import replicate, shard

__all__ = ["in_step", "replicate", "shard"]


def __getattr__(name: str) -> Any:
    # Above the step, whose other parts are below it.
    if name in ("replicate", "shard"):
        from ampwise.distributed import wrap

        return getattr(wrap, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
