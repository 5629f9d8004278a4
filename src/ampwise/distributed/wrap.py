"""Spreading a model over ranks as a precision policy says: `replicate` (DDP), `shard` (FSDP2).

A model that is wrapped already works too; what these two add is the policy:

===============  ==================================  ============================================
policy           ``replicate``: DDP                  ``shard``: FSDP2
===============  ==================================  ============================================
parameters       float32; the step casts them in     float32 shards; gathered as bfloat16 with
                 forward (``bf16-master``)           ``bf16-master``
``reduce=``      dtype gradients are sent and        the same, ``MixedPrecisionPolicy``'s
                 summed in                           ``reduce_dtype``
islands          float32, in forward                 units of their own, in float32
===============  ==================================  ============================================

Sums over ranks are in float32 unless the policy says ``reduce=bf16``: that halves what is sent, and
rounds each partial sum to 8 bits, an error that grows with the number of ranks (docs/scale.md has
the figures). float16 is refused as a dtype of sums: at the loss scales in use sums overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ampwise.errors import PolicyError, UsageError
from ampwise.policy import Policy
from ampwise.step.modules import as_one, in_form
from ampwise.step.precision import islands_in, islands_of, lower

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parallel = Literal["ddp", "fsdp"]


def replicate(
    model: nn.Module, policy: str | Policy = "fp32", **arguments: Any
) -> DistributedDataParallel:
    """Put a model in DDP, the sum of its gradients in the policy's dtype.

    Parameters
    ----------
    model
        On its device.
    arguments
        For `DistributedDataParallel`, such as ``find_unused_parameters=True``.

    Raises
    ------
    PolicyError
        For a policy that sums gradients in float16.
    """
    policy = _checked(policy)
    return _replicated(model, policy, _islands(model, policy), arguments)


def _replicated(
    model: nn.Module, policy: Policy, islands: Sequence[nn.Module], arguments: dict[str, Any]
) -> DistributedDataParallel:
    """A model in DDP; the islands may be several models'."""
    device = next(model.parameters()).device
    if policy.pure:
        lower([model], islands)
    if device.type == "cuda":
        arguments.setdefault("device_ids", [device.index])
    copied = DistributedDataParallel(model, **arguments)
    reduce_dtype = getattr(torch, policy.reduce_dtype)
    if any(each.dtype != reduce_dtype for each in model.parameters()):
        copied.register_comm_hook(dist.group.WORLD, _summed_in(reduce_dtype))
    return copied


def shard(
    model: nn.Module, policy: str | Policy = "fp32", mesh: DeviceMesh | None = None
) -> nn.Module:
    """Shard a model with FSDP2, in place, its gathered parameters and sums in the policy's dtypes.

    The blocks of a `nn.ModuleList` are units of their own, and so are islands; the rest is one.
    Build the optimizer afterwards, over the sharded parameters.

    Raises
    ------
    PolicyError
        For a policy that sums gradients in float16, and for ``bf16-pure``.
    UsageError
        For parameters that FSDP2 cannot split.
    """
    policy = _checked(policy)
    return _sharded(model, policy, islands_of(model, policy.island_modules), mesh)


def _sharded(
    model: nn.Module, policy: Policy, islands: Sequence[nn.Module], mesh: DeviceMesh | None
) -> nn.Module:
    """A model in FSDP2; of the islands, which may be several models', its own are kept."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if policy.pure:
        raise PolicyError(
            f"precision {policy.text} is for one process or DDP; FSDP2's shards have not been "
            "tried: take bf16-master"
        )
    _check_all_can_be_split(model)
    param_dtype = torch.bfloat16 if policy.master_weights else None
    lowered = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=getattr(torch, policy.reduce_dtype)
    )
    settings: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    own = set(model.modules())
    kept = [each for each in islands if each in own]
    if policy.master_weights:
        kept += [each for each in _with_statistics(model) if each not in kept]
    for each in kept:
        fully_shard(each, mp_policy=MixedPrecisionPolicy(), **settings)
    for block in _blocks(model):
        fully_shard(block, mp_policy=lowered, **settings)
    fully_shard(model, mp_policy=lowered, **settings)
    return model


def spread(given: Any, parallel: Parallel, policy: Policy) -> Any:
    """`replicate` or `shard` a model, or each of several, by their names."""
    policy, whole = _checked(policy), as_one(given)
    if parallel == "ddp":
        kept = _islands(whole, policy)
        return in_form(given, lambda model: _replicated(model, policy, kept, {}))
    kept = islands_of(whole, policy.island_modules)
    return in_form(given, lambda model: _sharded(model, policy, kept, None))


def _islands(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """What stays in float32 where others are computed in the policy's format."""
    device = next(model.parameters()).device
    return islands_in(model, policy.island_modules, device.type, policy.compute_dtype)


def _checked(policy: str | Policy) -> Policy:
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    if policy.reduce_dtype == "float16":
        raise PolicyError(
            f"precision {policy.text}: gradients summed over ranks in float16 overflow at the loss "
            "scales it needs; expected reduce=fp32 (the default) or reduce=bf16"
        )
    return policy


def _check_all_can_be_split(model: nn.Module) -> None:
    """FSDP2 deals out rows of contiguous memory; of one row, to the first rank only."""
    cannot = [
        f"{name} of shape {tuple(each.shape)}"
        for name, each in model.named_parameters()
        if not (each.dim() and each.numel() and each.is_contiguous())
    ]
    if cannot:
        raise UsageError(
            f"shard: {', '.join(cannot)}: FSDP2 splits no scalar, no empty and no non-contiguous "
            "parameter; make it one of shape (1,), leave it out, or call .contiguous() on it"
        )


def _with_statistics(model: nn.Module) -> list[nn.Module]:
    """BatchNorms: their statistics are float32, and kernels want weights of the same dtype."""
    return [each for each in model.modules() if isinstance(each, _NormBase) and _parameters(each)]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model, which are gathered one after the other; the inner ones first.

    Not those that share a parameter with the rest: it can be in one unit only.
    """
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    held = {id(block): block for each in lists for block in each}
    blocks = [each for each in held.values() if not isinstance(each, nn.ModuleList | nn.ModuleDict)]
    return [each for each in reversed(blocks) if _parameters(each) and not _shares(each, model)]


def _parameters(module: nn.Module) -> set[int]:
    return {id(each) for each in module.parameters()}


def _shares(block: nn.Module, model: nn.Module) -> bool:
    """Whether a module outside of it has one of its parameters."""
    inside, own = {id(each) for each in block.modules()}, _parameters(block)
    return any(
        id(parameter) in own
        for layer in model.modules()
        if id(layer) not in inside
        for parameter in layer.parameters(recurse=False)
    )


def _summed_in(dtype: torch.dtype) -> Any:
    """A communication hook of DDP: mean over ranks, sent and summed in a dtype.

    As `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook`, which wants
    NCCL; and the other way too, for bfloat16 gradients that are summed in float32.
    """

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        sent = buffer.to(dtype).div_(dist.get_world_size(group))

        def back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            return bucket.buffer().copy_(done.value()[0])

        work: Any = dist.all_reduce(sent, group=group, async_op=True)
        return work.get_future().then(back)

    # DDP looks at the types themselves, which here are text.
    hook.__annotations__ |= {
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    return hook
