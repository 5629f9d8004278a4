"""Ways to compute in a precision, a file each; `precision_of` puts a policy's together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ampwise.policy import Policy
from ampwise.step.members import Members
from ampwise.step.precision.base import Part, Precision
from ampwise.step.precision.cast_weights import CastWeights
from ampwise.step.precision.float8 import Float8, by_reason
from ampwise.step.precision.float32_mode import Float32Mode
from ampwise.step.precision.functions import CallMode, Calls, FunctionIslands, functions_named
from ampwise.step.precision.islands import Found, Islands, islands_in, islands_of, raised
from ampwise.step.precision.pure import PureBFloat16, lower, settle

__all__ = [
    "CallMode", "Calls", "Float32Mode", "Islands", "Part", "Precision", "by_reason",
    "check_islands", "islands_in", "islands_of", "lower", "precision_of", "raised", "settle",
]  # fmt: skip


def check_islands(policy: Policy | None, model: nn.Module) -> None:
    """Look whether a model and torch have what a policy keeps in float32.

    Raises
    ------
    PolicyError
        When they do not: a typo would otherwise protect nothing, silently.
    """
    if policy is not None:
        islands_of(model, policy.island_modules)
        functions_named(policy.island_functions)


def precision_of(
    policy: Policy,
    device_type: str,
    members: Members,
    *,
    casts: bool = True,
    agreed: Callable[[int], int] = int,
) -> Precision:
    """A policy in force.

    Parameters
    ----------
    device_type
        Kind of device of the models.
    members
        What is trained.
    casts
        Whether weights are cast here, if the policy has them cast; FSDP2 does it by itself.
    agreed
        What all ranks take, of a number of each.

    Raises
    ------
    PolicyError
        When one of the policy's islands is no module or function there is, or no layer can multiply
        in float8 where that is the policy.
    MissingExtraError
        For ``fp8`` without torchao.
    """
    parts: list[Part] = [Float32Mode(policy, device_type)]
    if not policy.autocast:
        return Precision(policy, device_type, parts)
    dtype = policy.compute_dtype
    islands = Found(policy.island_modules, device_type, dtype, members)
    islands()
    parts.append(Islands(islands, device_type))
    if policy.island_functions:
        parts.append(FunctionIslands(policy.island_functions, device_type))
    if policy.master_weights and casts:
        parts.append(CastWeights(getattr(torch, policy.param_dtype), members, islands))
    if policy.pure:
        parts.append(PureBFloat16(policy, members, islands, agreed))
    if policy.float8:
        parts.append(Float8(policy, members, islands))
    return Precision(policy, device_type, parts)
