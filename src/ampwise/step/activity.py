"""Proof of activity: what the first forward really did, as opposed to what was asked.

A policy can be inactive without an error: a nested ``autocast(enabled=False)``, a model that casts
by hand, autocast for another device. And float32 can be: somebody else's autocast in the model. So
the autograd graph of the first loss is read: its nodes are the operations of forward, and each
knows the dtype of its result. Nothing is hooked in, so nothing runs otherwise than without it;
compiled code stays compiled.

Not seen are products that no gradient goes through, and what is inside a node of its own: compiled
code, reentrant checkpoints, custom autograd functions. Where these leave it open, nothing is said;
custom functions do only where nothing else was seen, since most are activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ampwise.errors import InactivePolicyError
from ampwise.formats import FLOAT8_E4M3FN, HALF, dtype_name
from ampwise.policy import Policy
from ampwise.step.warn import warn_user

_PRODUCTS = frozenset(
    f"{each}Backward0"
    for each in (
        "Mm", "Addmm", "Bmm", "Baddbmm", "Addmv", "Mv", "Addbmm", "Linear", "MkldnnLinear",
        "Trilinear", "Convolution", "ConvolutionOverrideable",
        "ScaledDotProductFlashAttention", "ScaledDotProductFlashAttentionForCpu",
        "ScaledDotProductEfficientAttention", "ScaledDotProductCudnnAttention",
        "ScaledDotProductFusedAttentionOverrideable", "GroupedMm",
        "CudnnRnn", "MiopenRnn", "MkldnnRnnLayer",
    )
)  # fmt: skip
"""Autograd nodes of matrix products, convolutions, attention and RNN layers."""

_FLOAT8 = "matmul_with_hp_or_float8_argsBackward"
"""Autograd node of a linear layer in float8, of torchao's."""

_WHOLE_PARTS = ("CompiledFunctionBackward", "CheckpointFunctionBackward")


@dataclass(frozen=True)
class Activity:
    """What the first forward of a `TrainStep` did.

    Attributes
    ----------
    matmul_dtypes
        Number of matrix products, convolutions, attention calls and RNN layers by dtype name.
    parameter_dtypes
        Number of parameter tensors by the dtype the optimizer updates them in.
    loss_scale_live
        Whether the loss is scaled.
    watched
        Whether anything was seen; not where all of forward is compiled, say. `matmul_dtypes` is
        then empty.
    """

    matmul_dtypes: Mapping[str, int]
    parameter_dtypes: Mapping[str, int]
    loss_scale_live: bool
    watched: bool
    hidden: bool = False
    """Whether parts of forward could not be looked into."""

    @classmethod
    def of(cls, loss: Tensor, held: Iterable[Tensor], *, loss_scale_live: bool) -> Activity:
        """What the forward of a loss did; `held` are the tensors that the optimizers update."""
        ran: Counter[str] = Counter()
        custom = hidden = False
        for node in _graph(loss):
            name = node.name()
            if name in _PRODUCTS:
                result = next(each for each in node._input_metadata if each is not None)
                ran[dtype_name(result.dtype)] += 1
            elif name == _FLOAT8:
                ran[FLOAT8_E4M3FN.name] += 1
            elif isinstance(node, BackwardCFunction):
                hidden |= name in _WHOLE_PARTS
                custom = True
        hidden |= custom and not ran
        parameters = Counter(dtype_name(each.dtype) for each in held)
        watched = bool(ran) or not hidden
        return cls(dict(ran), dict(parameters), loss_scale_live, watched, hidden)

    def __add__(self, other: Activity) -> Activity:
        """What two forwards of one step did."""
        ran = Counter(self.matmul_dtypes) + Counter(other.matmul_dtypes)
        return replace(
            self,
            matmul_dtypes=dict(ran),
            watched=self.watched or other.watched,
            hidden=self.hidden or other.hidden,
        )

    def mismatch(self, policy: Policy) -> str:
        """How what ran differs from what was asked; empty where it does not, or may not."""
        ran = self.matmul_dtypes
        lowered = {name: count for name, count in ran.items() if name in HALF}
        if not policy.autocast:
            return (
                f"{_counted(lowered)} of {sum(ran.values())} matrix products: the model, or the "
                "trainer that prepared it, enters autocast by itself, or its parameters are 16-bit"
                if lowered
                else ""
            )
        wanted = policy.compute_format
        if wanted in ran or self.hidden:
            return ""
        if not ran:
            return f"the model ran no matrix product, so {wanted} had nothing to do"
        return (
            f"no matrix product ran in {wanted}, but {_counted(ran)}: look for a "
            "nested autocast(enabled=False) or casts by hand in the model or loss"
        )

    def demand(self, policy: Policy, *, strict: bool) -> None:
        """Warn, or with `strict` raise `InactivePolicyError`, if the policy was not active."""
        if mismatch := self.mismatch(policy):
            message = f"precision {policy.text} was not active: {mismatch}"
            if strict:
                raise InactivePolicyError(message)
            warn_user(message)

    def __str__(self) -> str:
        ran = _counted(self.matmul_dtypes) or "none"
        if self.hidden:
            seen = f"{ran}, beside those in compiled code or custom functions"
            ran = seen if self.watched else "not watched (compiled, or in custom functions)"
        scale = "live" if self.loss_scale_live else "not used"
        held = _counted(self.parameter_dtypes)
        return f"matrix products: {ran}; parameters: {held}; loss scale: {scale}"


def _graph(loss: Tensor) -> Iterator[Any]:
    """The nodes of a loss's autograd graph."""
    seen: set[Any] = set()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        ahead += [each for each, _ in node.next_functions]


def _counted(by_dtype: Mapping[str, int]) -> str:
    return ", ".join(f"{count} in {name}" for name, count in by_dtype.items())
