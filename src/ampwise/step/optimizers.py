"""What the step must know of an optimizer: can its kernel divide by the scale and skip by itself?

The fused optimizers of `torch.optim` read two attributes, ``grad_scale`` and ``found_inf``, both
device tensors: they divide the gradients by the one and leave parameters and state alone if the
other is 1. So unscaling and clipping cost no pass of their own, and skipping costs no host sync.

Trusted are only the four classes whose kernels were read. Subclasses that override ``step`` and
third-party fused optimizers go the general path, even if they advertise the same attributes: some
ignore them, some divide twice.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, zeros_like
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ampwise.errors import UsageError

_TRUSTED = (Adam, AdamW, SGD, Adagrad)


def check(optimizer: Optimizer) -> None:
    """Refuse an optimizer that a guarded step cannot drive.

    Raises
    ------
    UsageError
        When its ``step`` needs a closure (as LBFGS does): it evaluates the loss several times
        inside one step, so there is no moment between backward and step to check gradients at.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"optimizer {type(optimizer).__name__} needs a closure: it evaluates the loss several "
            "times inside one step, which neither loss scaling nor a skipped step can follow; use "
            "an optimizer that steps once per backward"
        )


def folds(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own kernel unscales, clips and skips, on the device.

    Not while step hooks watch: they would see gradients that are still scaled.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks:
        return False
    if not _is_trusted(type(optimizer)):
        return False
    for group in optimizer.param_groups:
        if not group.get("fused") or (group.get("momentum", 0) and group.get("dampening", 0)):
            return False
    return True


@cache
def _is_trusted(kind: type[Optimizer]) -> bool:
    return next(cls for cls in kind.__mro__ if "step" in vars(cls)) in _TRUSTED


def step_folded(optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Step, dividing gradients by `grad_scale`, unless `found_inf` is 1; decided on the device.

    None divides by nothing, and skips never.
    """
    if isinstance(optimizer, SGD):
        _start_momentum(optimizer)
    state = vars(optimizer)
    state["grad_scale"], state["found_inf"] = grad_scale, found_inf
    try:
        _step(optimizer)
    finally:
        del state["grad_scale"], state["found_inf"]


_LABELLED = Optimizer.profile_hook_step(Optimizer.step).__code__
"""Of what PyTorch puts around the ``step`` of a class: a label for profilers, and hooks."""


def _step(optimizer: Optimizer) -> None:
    """Make a step, without its label for profilers where none is running.

    The label takes 35 us, a twentieth of a short step. It is left out only where PyTorch's own
    wrapper is the outermost thing that would be called, and would call no hook.
    """
    step: Any = type(optimizer).step
    if (
        getattr(step, "__code__", None) is not _LABELLED
        or "step" in vars(optimizer)
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()
    ):
        optimizer.step()
        return
    step.__wrapped__(optimizer)
    optimizer._optimizer_step_code()  # for those who patch it


def _start_momentum(optimizer: SGD) -> None:
    """Zero momentum buffers before the first fused step.

    `torch.optim.SGD` allocates them uninitialised and has its kernel fill them in the first step;
    if that step is skipped, what the allocator left there becomes momentum. From zeros the kernel
    computes the same first step (dampening, which would differ, is refused by `folds`).
    """
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for parameter in group["params"]:
            gradient: Tensor | None = parameter.grad
            state = optimizer.state[parameter]
            if gradient is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = zeros_like(gradient)
