"""Peak memory of a run in progress, at no cost."""

from __future__ import annotations

import sys

import torch


def peak_bytes(device: torch.device) -> int | None:
    """The allocator's peak on CUDA; elsewhere the process's resident peak, None if unknown.

    The resident peak holds Python, libraries and what the C allocator keeps: it says whether a run
    fits, not what a precision saves (that is what ``ampwise bench`` measures).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
