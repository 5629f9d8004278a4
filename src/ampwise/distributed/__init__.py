"""Everything that talks to `torch.distributed`: who is there, what is summed, who differs.

`TrainStep` finds DDP and FSDP2 by itself. `replicate` and `shard` make them as a policy says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampwise.distributed.wrap import replicate, shard

__all__ = ["replicate", "shard"]


def __getattr__(name: str) -> Any:
    # Above the step, whose other parts are below it.
    if name in __all__:
        from ampwise.distributed import wrap

        return getattr(wrap, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
