"""What Hugging Face's Accelerate was asked for; it is not imported, only looked at."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ampwise.errors import UsageError
from ampwise.policy import Policy
from ampwise.step.warn import warn_user

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
_ONCE = 'make the Accelerator with mixed_precision="no": the step enters autocast by itself'


def mixed_precision() -> str:
    """Its ``mixed_precision``, also where it came from the environment; ``no`` without one."""
    state = sys.modules.get("accelerate.state")
    if state is None:
        return "no"
    kept: Any = getattr(getattr(state, "AcceleratorState", None), "_shared_state", {})
    word = kept.get("_mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return str(word).lower()


def autocast_dtype() -> str | None:
    """The 16-bit format that its ``mixed_precision`` asks for."""
    return _DTYPES.get(mixed_precision())


def check_once(
    models: Iterable[nn.Module], optimizers: Sequence[Optimizer], policy: Policy
) -> None:
    """Whether a precision is set once: by the policy, or by what Accelerate has prepared.

    Raises
    ------
    UsageError
        When Accelerate's is another one, or it scales the loss itself.
    """
    if not any("_original_forward" in vars(each) for each in models):
        return
    asked = mixed_precision()
    twice = f'model: Accelerate has prepared it with mixed_precision="{asked}"'
    scales = any(getattr(each, "scaler", None) is not None for each in optimizers)
    if scales or autocast_dtype() != policy.compute_dtype:
        why = "and scales its loss" if scales else "and enters autocast in its forward"
        raise UsageError(f"{twice}, {why}, beside the policy {policy.text}; {_ONCE}")
    warn_user(f"{twice}, and the policy {policy.text} does the same again; {_ONCE}")
