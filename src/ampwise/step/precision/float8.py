"""Linear layers that multiply in float8 (`fp8`), by torchao; the rest of a model is in bfloat16.

Of each product that a linear layer makes, both operands are scaled so that their largest magnitude
is the format's, and rounded to 8 bits; sums and results are as under `bf16`. Scales follow from the
tensors themselves, in every product anew:

    recipe               output          gradient of input      gradient of weight
    tensorwise           e4m3 x e4m3     e5m2 x e4m3            e5m2 x e4m3
    rowwise              e4m3 x e4m3     e4m3 x e4m3            e4m3 x e4m3
    rowwise_with_gw_hp   e4m3 x e4m3     e4m3 x e4m3            bfloat16

A tensor has one scale in the first, a row one in the others, rounded down to a power of 2.

torchao swaps modules for others. Here they stay: each has a counterpart of torchao's, which reads
the parameters of the module itself, and runs in place of the module's forward (`placed`). So
parameters are float32 and the user's own, also where FSDP2 has gathered them, and no weight is
rounded to bfloat16 on its way to float8, unless FSDP2 gathers it so.

What cannot be multiplied so stays in bfloat16, with the reason (`Layers.left_out`). Products need
sides that are multiples of 16; the number of rows is padded where it is none. An empty batch has no
largest magnitude, and takes the layer's own forward, as does a region without autocast.

Where no unit multiplies float8, torchao multiplies what was rounded in float32: the same numbers,
up to the order of sums, but neither the speed nor the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ampwise.capability import multiplies_float8
from ampwise.errors import MissingExtraError, PolicyError
from ampwise.installation import extra_command
from ampwise.policy import Policy
from ampwise.step.members import Members
from ampwise.step.modules import modules_of
from ampwise.step.precision.islands import is_island
from ampwise.step.precision.placed import Forward, Placed

_SIDE = 16
"""What sides of matrices are multiples of, in units for float8."""


class Float8(Placed):
    """Runs linear layers in float8.

    Parameters
    ----------
    policy
        Names the recipe.
    members
        What is trained.
    kept
        Gives the islands.
    """

    def __init__(
        self, policy: Policy, members: Members, kept: Callable[[], Sequence[nn.Module]]
    ) -> None:
        layers = Layers(policy, members, kept)
        super().__init__(layers)
        self._layers, self._recipe = layers, policy.recipe
        self._convert, self._config = _torchao()
        layers()

    def instead(self, module: Any, forward: Forward) -> Forward:
        """A linear layer's forward in float8; an island that a replay has made of it stays one."""
        if is_island(forward):
            return forward
        config = replace(
            self._config.from_recipe_name(self._recipe),
            emulate=not multiplies_float8(module.weight.device),
        )
        counterpart = self._counterpart(module, config)
        padded = self._counterpart(module, replace(config, pad_inner_dim=True))

        def in_float8(input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear calls it
            device_type = input.device.type
            fits = input.numel() and input.shape[-1] == module.in_features
            if not fits or not torch.is_autocast_enabled(device_type):
                return forward(input)  # which has its own words for what does not fit
            lowered = input.to(torch.get_autocast_dtype(device_type))
            whole = input.shape[:-1].numel() % _SIDE == 0  # the inner side of the weight's gradient
            # torchao asks for CUDA's autocast alone, so it is left out of that.
            with torch.autocast(device_type, enabled=False):
                return (counterpart if whole else padded).forward(lowered)

        return in_float8

    @property
    def left_out(self) -> dict[str, str]:
        """Linear layers that stay in bfloat16, with the reason."""
        self._layers()
        return self._layers.left_out

    def _counterpart(self, module: nn.Linear, config: Any) -> nn.Module:
        """What torchao makes of a layer, computing with whatever parameters that has."""
        made = self._convert(module, config=config)
        made._parameters = module._parameters
        return made


class Layers:
    """The linear layers of models that multiply in float8; looked for anew when models change.

    Parameters
    ----------
    policy, members, kept
        As of `Float8`.

    Attributes
    ----------
    left_out
        The others, by name, with the reason.
    """

    def __init__(
        self, policy: Policy, members: Members, kept: Callable[[], Sequence[nn.Module]]
    ) -> None:
        self._text, self._members, self._kept = policy.text, members, kept
        self._version = -1
        self._found: list[nn.Module] = []
        self.left_out: dict[str, str] = {}

    def __call__(self) -> list[nn.Module]:
        """The layers.

        Raises
        ------
        PolicyError
            When there is none: the policy would carry the wrong name.
        """
        if self._version != self._members.version:
            self._look()
            self._version = self._members.version
        return self._found

    def _look(self) -> None:
        islands = set(modules_of(self._kept()))
        named = self._members.modules_by_name().items()
        linear = {
            name.replace("_orig_mod.", ""): each
            for name, each in named
            if isinstance(each, nn.Linear)
        }
        why_not = {
            name: "an island" if each in islands else _why_not(each)
            for name, each in linear.items()
        }
        self.left_out = {name: why for name, why in why_not.items() if why}
        self._found = [each for name, each in linear.items() if not why_not[name]]
        if not self._found:
            raise PolicyError(
                f"precision {self._text}: no layer of the model can multiply in float8 "
                f"({by_reason(self.left_out) or 'it has no nn.Linear'}); expected an nn.Linear "
                f"whose sides are multiples of {_SIDE}: take bf16"
            )


def by_reason(left_out: Mapping[str, str]) -> str:
    """Layers that are left out, in words: three for each reason, and how many more."""
    names: dict[str, list[str]] = {}
    for name, why in left_out.items():
        names.setdefault(why, []).append(name or "the model itself")
    said = (
        f"{', '.join(each[:3])}{f' and {len(each) - 3} more' * (len(each) > 3)} ({why})"
        for why, each in names.items()
    )
    return "; ".join(said)


def _why_not(layer: nn.Linear) -> str:
    """Why a layer cannot multiply in float8; empty if it can."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "MultiheadAttention multiplies with its weight by itself"
    if type(layer).forward is not nn.Linear.forward:
        return f"{type(layer).__name__} has a forward of its own"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is computed in forward"
    if weight.dtype == torch.float64:
        return "its weight is float64"
    for side in ("in_features", "out_features"):
        if getattr(layer, side) % _SIDE:
            return f"{side} of {getattr(layer, side)} is no multiple of {_SIDE}"
    return ""


def _torchao() -> tuple[Callable[..., nn.Module], Any]:
    """What converts a layer, and the class of its configurations.

    Raises
    ------
    MissingExtraError
        Where torchao is not installed.
    """
    try:
        with _silenced():
            from torchao.float8 import (  # pyright: ignore[reportMissingImports]
                Float8LinearConfig,
                convert_to_float8_training,
            )
    except ImportError as error:
        raise MissingExtraError(
            f"precision fp8: torchao is not installed ({error}): {extra_command('fp8')}"
        ) from error
    return convert_to_float8_training, Float8LinearConfig


@contextmanager
def _silenced() -> Generator[None]:
    """Context without warnings in the log: torchao tells of kernels that are not needed here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
