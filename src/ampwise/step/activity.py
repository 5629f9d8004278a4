"""Proof of activity: what the first forward really did, as opposed to what was asked.

A policy can be inactive without an error: a nested ``autocast(enabled=False)``, a model that casts
by hand, autocast for another device. So the first forward runs under a dispatch mode that notes the
dtype of every matrix product and convolution; later ones are not watched and cost nothing.

Under `torch.compile` a dispatch mode would switch compilation off, so a compiled model is not
watched, and the result says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampwise.errors import InactivePolicyError
from ampwise.policy import Policy
from ampwise.step.compiled import is_compiled
from ampwise.step.warn import warn_user

_MATMULS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addmv",
        "mv",
        "convolution",
        "_convolution",
        "linear",
        "mkldnn_linear",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_mm",
        "_scaled_grouped_mm",
        "_grouped_mm",
    ]
)


@dataclass(frozen=True)
class Activity:
    """What the first forward of a `TrainStep` did.

    Attributes
    ----------
    matmul_dtypes
        Number of matrix products, convolutions and attention calls by dtype name.
    parameter_dtypes
        Number of parameter tensors by the dtype the optimizer updates them in.
    loss_scale_live
        Whether the loss is scaled dynamically.
    watched
        False when the model is compiled, and `matmul_dtypes` is therefore empty.
    """

    matmul_dtypes: Mapping[str, int]
    parameter_dtypes: Mapping[str, int]
    loss_scale_live: bool
    watched: bool

    def complaint(self, policy: Policy) -> str:
        """Why the policy was not active; empty when it was, or could not be watched."""
        if not self.watched or not policy.autocast:
            return ""
        ran = self.matmul_dtypes
        if not ran:
            return f"the model ran no matrix product, so {policy.compute_dtype} had nothing to do"
        if policy.compute_dtype not in ran:
            return (
                f"no matrix product ran in {policy.compute_dtype}, but "
                f"{', '.join(f'{count} in {name}' for name, count in ran.items())}: look for a "
                "nested autocast(enabled=False) or casts by hand in the model or loss"
            )
        return ""

    def demand(self, policy: Policy, *, strict: bool) -> None:
        """Warn, or with `strict` raise `InactivePolicyError`, if the policy was not active."""
        if complaint := self.complaint(policy):
            message = f"precision {policy.text} was not active: {complaint}"
            if strict:
                raise InactivePolicyError(message)
            warn_user(message)

    def __str__(self) -> str:
        ran = ", ".join(f"{count} in {name}" for name, count in self.matmul_dtypes.items())
        held = ", ".join(f"{count} in {name}" for name, count in self.parameter_dtypes.items())
        matmuls = ran or ("none" if self.watched else "not watched (compiled model)")
        scale = "live" if self.loss_scale_live else "not used"
        return f"matrix products: {matmuls}; parameters: {held}; loss scale: {scale}"


class _Watch(TorchDispatchMode):
    """Counts matrix products by dtype while it is entered."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func._overloadpacket.__name__ in _MATMULS:
            operand = next(each for each in args if isinstance(each, Tensor))
            self._counts[_name(operand.dtype)] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Seen:
    """What `watched` has seen."""

    watched: bool
    matmul_dtypes: Counter[str] = field(default_factory=Counter)

    def activity(self, held: Iterable[Tensor], *, loss_scale_live: bool) -> Activity:
        """The finding; `held` are the tensors that the optimizers update."""
        parameters = dict(Counter(_name(tensor.dtype) for tensor in held))
        return Activity(dict(self.matmul_dtypes), parameters, loss_scale_live, self.watched)


@contextmanager
def watched(modules: Iterable[nn.Module]) -> Generator[Seen]:
    """Note the matrix products of a forward, unless a part of the modules is compiled."""
    seen = Seen(watched=not is_compiled(modules))
    with _Watch(seen.matmul_dtypes) if seen.watched else nullcontext():
        yield seen


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
