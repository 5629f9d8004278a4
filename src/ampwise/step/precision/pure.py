"""BFloat16 throughout (`bf16-pure`): parameters, gradients and optimizer state in 2 bytes each.

It is the one policy that changes what a model holds: its float32 parameters become bfloat16, in
place, when the step is made (`lower`), and stay so. What `bf16-master` keeps in float32 stays it
here, too (`cast_weights`): normalisation layers, islands, RNNs.

A bfloat16 number is 2**-8 apart from the next, so an update below half of that is lost if results
are rounded to nearest, and a moving average with a factor of 0.999 never moves. So the optimizer
computes in float32, on a few parameters at a time, and its results are rounded otherwise:

    widen    float32 copies of parameters, gradients and state stand in for them in the optimizer
    step     its own, whichever it is
    narrow   stochastic   up or down to bfloat16 with probabilities that make the mean exact:
                          16 random bits are added below the bits that stay, and those cut off
             kahan        parameters to nearest; what that leaves, in 8 bits more, is kept beside
                          them as ``state["kahan"]`` and added the next time. State as above

Both leave numbers alone that are bfloat16 already, so a step that a kernel skips changes nothing.
Random bits are of the step's own generator, seeded anew for each parameter from the run's seed, the
number of the update and the position of the parameter: nobody else's random state moves, ranks that
hold the same parameter round it alike, and a resumed run goes on bit for bit.

Optimizers of `torch.optim` update each parameter by itself: they step on `_CHUNK` elements at a
time, or one larger parameter, and need memory for so many. Others may look at all parameters in one
step, and are given all of them, which takes float32 copies of everything while they step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampwise.distributed.layout import is_sharded
from ampwise.errors import UsageError
from ampwise.policy import Policy
from ampwise.step.members import Members
from ampwise.step.modules import modules_of
from ampwise.step.precision.base import Part
from ampwise.step.precision.cast_weights import keeps_float32

COMPENSATION = "kahan"
"""Name of what rounding left, in an optimizer's state."""

_CHUNK = {"cpu": 2**18}
"""Elements that are stepped on at a time: on CPUs they stay in the cache."""
_CHUNK_ELSEWHERE = 2**22

_UPPER = -(2**16)
"""The bits of a float32 that a bfloat16 has, as an int32."""

_MASK = 2**64 - 1


def lower(models: Iterable[nn.Module], kept: Iterable[nn.Module]) -> None:
    """Make float32 parameters bfloat16, in place, but those of `kept`."""
    for parameter in _to_lower(models, kept):
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(torch.bfloat16)
        if gradient is not None:
            parameter.grad = gradient.to(torch.bfloat16)


@torch.no_grad()
def settle(optimizer: Optimizer) -> None:
    """Add what Kahan rounding kept to parameters that are float32 by now, and forget it."""
    for parameter, state in optimizer.state.items():
        if parameter.dtype == torch.float32 and COMPENSATION in state:
            parameter.add_(state.pop(COMPENSATION))


def _to_lower(models: Iterable[nn.Module], kept: Iterable[nn.Module]) -> list[nn.Parameter]:
    modules = modules_of(models)
    inside = set(modules_of(kept))
    stays = [each for each in modules if each in inside or keeps_float32(each)]
    shared = {id(each) for module in stays for each in module._parameters.values()}
    found = {
        id(each): each
        for module in modules
        for each in module._parameters.values()
        if type(each) is nn.Parameter and each.dtype == torch.float32 and id(each) not in shared
    }
    return list(found.values())


class PureBFloat16(Part):
    """Lowers parameters, and steps with optimizers on float32 copies.

    Parameters
    ----------
    policy
        Says how updates are rounded.
    members
        What is trained.
    kept
        Gives the modules that stay in float32, as all inside them.
    agreed
        What all ranks take, of a number of each.
    """

    def __init__(
        self,
        policy: Policy,
        members: Members,
        kept: Callable[[], Sequence[nn.Module]],
        agreed: Callable[[int], int],
    ) -> None:
        self._policy, self._compensates = policy, policy.rounding == "kahan"
        self._members, self._kept, self._agreed = members, kept, agreed
        self._run_seed = torch.initial_seed()
        self._version = -1
        self._bits: dict[torch.device, _Bits] = {}
        self.load_state_dict({})
        self._lower()

    def enter(self) -> None:
        """Lower what has come since."""
        self._lower()

    def _lower(self) -> None:
        members = self._members
        if self._version == members.version:
            return
        if any(map(is_sharded, members.parameters().values())):
            raise UsageError(
                f"policy {self._policy.text}: expected one process or DDP; shards of FSDP2 have "
                "not been tried, take bf16-master there"
            )
        wrapped = any(a is not b for a, b in zip(members.wrapped, members.models, strict=True))
        if wrapped and _to_lower(members.models, self._kept()):
            raise UsageError(
                f"policy {self._policy.text}: DDP was given float32 parameters and has set itself "
                f"up for them; expected ampwise.distributed.replicate(model, {self._policy.text!r})"
            )
        lower(members.models, self._kept())
        self._version = members.version

    def stepping(self, optimizer: Optimizer, make: Callable[[], object]) -> Callable[[], object]:
        """An optimizer's step on float32 copies."""
        return partial(self._step, optimizer, make)

    def state_dict(self) -> dict[str, int]:
        """Seed of the random bits, and updates so far."""
        return {} if self._seed is None else {"seed": self._seed, "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; from the beginning without a state."""
        self._seed: int | None = state.get("seed")
        self._updates: int = state.get("updates", 0)

    # -- an optimizer's step -----------------------------------------------------------------------

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, make: Callable[[], object]) -> None:
        if self._seed is None:
            self._seed = self._agreed(self._run_seed)
        number = self._members.optimizers.index(optimizer)
        held = [each for group in optimizer.param_groups for each in group["params"]]
        places = {id(each): place for place, each in enumerate(held)}
        with _without_hooks(optimizer):
            for chunk in _chunks(optimizer):
                wide = [self._widened(each, optimizer) for _, each in chunk]
                with _in_place_of(optimizer, chunk, [each.stand_in for each in wide]):
                    make()
                    for each in wide:
                        each.take(optimizer)
                for each in wide:
                    if each.stand_in is not each.parameter:
                        self._narrow(each, optimizer, (number, places[id(each.parameter)]))
        self._updates += 1

    def _widened(self, parameter: Tensor, optimizer: Optimizer) -> _Wide:
        """A parameter with its gradient and state, in float32."""
        if parameter.dtype != torch.bfloat16:
            return _Wide(parameter, parameter, {}, {})
        assert parameter.grad is not None
        state = dict(optimizer.state.get(parameter, {}))
        left = state.pop(COMPENSATION, None)
        narrow = {name: each for name, each in state.items() if _is_narrow(each)}
        stand_in = nn.Parameter(_wide(parameter))
        stand_in.grad = _wide(parameter.grad)
        if left is not None and self._compensates:
            stand_in.add_(left)
            narrow[COMPENSATION] = left
        if state:
            wide = {name: _wide(each) if name in narrow else each for name, each in state.items()}
            optimizer.state[stand_in] = wide
        return _Wide(parameter, stand_in, narrow, state)

    def _narrow(self, wide: _Wide, optimizer: Optimizer, place: tuple[int, int]) -> None:
        """Round what a step has made, into the tensors that were there."""
        parameter, state, narrow = wide.parameter, wide.state, wide.narrow
        rounded = {name: each for name, each in state.items() if _is_wide(each)}
        into = {
            name: narrow[name] if name in narrow else torch.empty_like(each, dtype=torch.bfloat16)
            for name, each in rounded.items()
        }
        sources, targets = list(rounded.values()), list(into.values())
        if self._compensates:
            into[COMPENSATION] = narrow.get(COMPENSATION, torch.empty_like(parameter))
            round_and_keep_(wide.stand_in.data, parameter, into[COMPENSATION])
        else:
            sources, targets = [wide.stand_in.data, *sources], [parameter, *targets]
        if sources:
            device = parameter.device
            bits = self._bits.setdefault(device, _Bits(device))
            assert self._seed is not None
            bits.begin(self._seed, self._updates, *place)
            for source, target in zip(sources, targets, strict=True):
                round_(source, target, bits.draw(source.shape))
        if state or into or parameter in optimizer.state:
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update({**state, **into})


@dataclass
class _Wide:
    """A parameter in an optimizer's step.

    Attributes
    ----------
    parameter
        Itself.
    stand_in
        What stands in for it: a float32 copy, or itself where it is float32.
    narrow
        Tensors of its state that are bfloat16.
    state
        What the optimizer keeps of it, after the step in float32.
    """

    parameter: Tensor
    stand_in: Tensor
    narrow: dict[str, Tensor]
    state: dict[str, Any]

    def take(self, optimizer: Optimizer) -> None:
        """Take the state that a step has left."""
        if self.stand_in is not self.parameter:
            self.state = optimizer.state.pop(self.stand_in, {})


_Held = tuple[dict[str, Any], Tensor]
"""A parameter group, and a parameter of it."""


def _chunks(optimizer: Optimizer) -> Iterator[list[_Held]]:
    """The parameters that have gradients, as many at a time as can be stepped on together."""
    found = [
        (group, each)
        for group in optimizer.param_groups
        for each in group["params"]
        if each.grad is not None
    ]
    if not _is_one_by_one(type(optimizer)):
        yield found
        return
    chunk: list[_Held] = []
    elements = 0
    for held in found:
        group, parameter = held
        most = _CHUNK.get(parameter.device.type, _CHUNK_ELSEWHERE)
        if chunk and (elements + parameter.numel() > most or chunk[0][0] is not group):
            yield chunk
            chunk, elements = [], 0
        chunk.append(held)
        elements += parameter.numel()
    if chunk:
        yield chunk


def _is_one_by_one(kind: type[Optimizer]) -> bool:
    """Whether an optimizer updates each parameter by itself, as those of torch do."""
    return next(each for each in kind.__mro__ if "step" in vars(each)).__module__.startswith(
        "torch.optim."
    )


@contextmanager
def _in_place_of(
    optimizer: Optimizer, chunk: Sequence[_Held], stand_ins: Sequence[Tensor]
) -> Generator[None]:
    """Context: an optimizer holds these parameters alone, and others in their place."""
    groups = optimizer.param_groups
    whole = [(group, group["params"]) for group in groups]
    try:
        optimizer.param_groups = list({id(group): group for group, _ in chunk}.values())
        for group in optimizer.param_groups:
            pairs = zip(chunk, stand_ins, strict=True)
            group["params"] = [other for (of, _), other in pairs if of is group]
        yield
    finally:
        optimizer.param_groups = groups
        for group, parameters in whole:
            group["params"] = parameters
        for (_, parameter), other in zip(chunk, stand_ins, strict=True):
            if other is not parameter:
                optimizer.state.pop(other, None)


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Generator[None]:
    """Context of several steps that are one: its hooks are called before the first and after all.

    They see the parameters themselves.
    """
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in before.values():
        hook(optimizer, (), {})
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = before
        optimizer._optimizer_step_post_hooks = after
    for hook in after.values():
        hook(optimizer, (), {})


# -- rounding --------------------------------------------------------------------------------------


class _Bits:
    """Random bits that depend on the numbers they begin with, and on nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device)

    def begin(self, *numbers: int) -> None:
        """Have what is drawn next follow from these."""
        self._generator.manual_seed(_mixed(numbers))

    def draw(self, shape: torch.Size) -> Tensor:
        """Numbers from 0 to 65,535, as int32."""
        count = shape.numel()
        words = torch.empty(-(-count // 4), dtype=torch.int64, device=self._device)
        words.random_(-(2**63), None, generator=self._generator)  # 64 bits each
        return words.view(torch.uint16)[:count].to(torch.int32).view(shape)


def _mixed(numbers: Iterable[int]) -> int:
    """One number of several (SplitMix64's finalizer, Steele et al. 2014); all bits count."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def round_(source: Tensor, target: Tensor, bits: Tensor) -> None:
    """Round float32 into bfloat16 stochastically; `source` is used up.

    Parameters
    ----------
    bits
        int32 numbers from 0 to 65,535: added below bfloat16's last bit, they carry into it with the
        probability that the part beneath it is of one.
    """
    # A GPU's NaN has all bits set, and would overflow into -0.
    bad = None if source.device.type == "cpu" else source.isnan()
    source.view(torch.int32).add_(bits).bitwise_and_(_UPPER)
    target.copy_(source)
    if bad is not None:
        target.masked_fill_(bad, torch.nan)


def round_and_keep_(source: Tensor, target: Tensor, left: Tensor) -> None:
    """Round float32 into bfloat16 to nearest, and keep what is left, cut to bfloat16.

    `source` is used up. Their sum is exact in float32, and rounds to the same two numbers again.
    """
    target.copy_(source)
    source.sub_(target)
    source.view(torch.int32).bitwise_and_(_UPPER)
    left.copy_(source)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().float()


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16 and value.dim() > 0


def _is_wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 0
