"""16-bit copies of float32 parameters while forward and backward run (`bf16-master`).

The parameters stay what the user made, float32, and are themselves the masters: the optimizer holds
them, checkpoints save them, edits of them count. Each that is cast has a bfloat16 buffer. From the
start of forward to the end of backward ``module._parameters[name]`` is a differentiable view of it:

    buffer    refreshed from the parameters by one `_foreach_copy_`, once a window and wherever
              a parameter's version says that it has changed
    view      what ``copy_`` of the parameter gives: an autograd node without saved tensors, so it
              serves any number of forwards and backwards; its backward raises the 16-bit gradient
              to float32 and hands it to the parameter

So gradients, hooks and DDP's buckets are the float32 parameter's own, and accumulate in float32.
The buffer costs 2 bytes a parameter; autocast's own copy of a weight would cost the same, and be
made in every forward.

Cast is what optimizers hold, in float32, wherever a module reads it through its own attribute.
These stay float32, as under the policy ``bf16``:

    normalisation layers and islands        16 bits cost accuracy there and save nothing
    RNNs                                    they keep lists of their weights beside the attributes
    weight_norm, spectral_norm, pruning     the weight is computed from the parameters in forward
    Embedding with max_norm                 forward changes the weight
    Embedding with sparse gradients         no cast has a sparse derivative
    DTensors (FSDP2 lowers what it gathers), scripted modules, tensor subclasses
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ampwise.errors import UsageError
from ampwise.step.members import Members
from ampwise.step.modules import modules_of
from ampwise.step.precision.base import Part

_KEPT = (
    _NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.RNNBase, nn.RNNCellBase,
    ParametrizationList, torch.jit.ScriptModule,
)  # fmt: skip
_COMPUTED = (WeightNorm, SpectralNorm, BasePruningMethod)
_STALE = -1


@dataclass(slots=True)
class _Copy:
    """The 16-bit copy of a parameter.

    Attributes
    ----------
    seen
        Version of the parameter that the buffer holds.
    version
        Version that the buffer then had: another one means that forward has written to it.
    proven
        Whether a forward has left the buffer's values alone: writes through ``.data`` show nowhere
        else.
    """

    parameter: nn.Parameter
    buffer: Tensor
    view: Tensor
    stream: int
    seen: int = _STALE
    version: int = 0
    proven: bool = False

    def written(self) -> bool:
        """Whether forward has changed the weight, which is lost."""
        if self.buffer._version != self.version or self.view.data_ptr() != self.buffer.data_ptr():
            return True
        if self.proven or self.parameter._version != self.seen:
            return False
        self.proven = True
        return not torch.equal(_bits(self.buffer), _bits(self.parameter.to(self.buffer.dtype)))


_Place = tuple[nn.Module, dict[str, Any], str, _Copy]
"""A module, its ``_parameters``, a name there, and what is put under it."""


class CastWeights(Part):
    """Lets modules compute with 16-bit copies of their parameters.

    Parameters
    ----------
    dtype
        Of the copies.
    members
        What is trained.
    kept
        Gives the modules that stay in float32, as all inside them.
    """

    def __init__(
        self, dtype: torch.dtype, members: Members, kept: Callable[[], Sequence[nn.Module]]
    ) -> None:
        self._dtype = dtype
        self._members = members
        self._kept = kept
        self._version = -1
        self._trained: list[bool] = []
        self._copies: dict[int, _Copy] = {}
        self._places: list[_Place] = []
        self._stale = True

    def begin_window(self, *, anew: bool) -> None:
        """Read all parameters again: those changed through ``.data`` do not show it.

        With `anew` into new copies: backward refuses to go through one that was written to.
        """
        if anew:
            self.close()
        self._stale = True

    def moved(self, parameters: Iterable[Tensor]) -> None:
        """Read these again."""
        for parameter in parameters:
            if copy := self._copies.get(id(parameter)):
                copy.seen = _STALE

    def enter(self) -> None:
        """Put copies, with the values of now, where modules read their parameters."""
        if not self._are_places_of_now():
            self._find_places()
        self._refresh()
        for _, table, name, copy in self._places:
            table[name] = copy.view

    def leave(self) -> None:
        """Put the parameters back."""
        for module, table, name, copy in self._places:
            if name not in table and vars(module).get(name) is copy.view:
                # Taken out and set again by a hook: what is no Parameter is filed elsewhere.
                del vars(module)[name]
                table[name] = copy.view
            if table.get(name) is copy.view:  # forward may have put something else there
                table[name] = copy.parameter
        if written := [each for each in self._copies.values() if each.written()]:
            raise self._lost(written)

    @property
    def held_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(each.buffer.nbytes for each in self._copies.values())

    def close(self) -> None:
        """Let go of copies and parameters."""
        self._places, self._copies, self._version = [], {}, -1

    def _are_places_of_now(self) -> bool:
        """Whether nothing has changed that decides what is cast, and where."""
        if self._version != self._members.version or self._trained != self._trained_now():
            return False
        return all(
            table.get(name) is copy.parameter
            and copy.buffer.shape == copy.parameter.shape
            and copy.stream == _stream_of(copy.parameter)
            for _, table, name, copy in self._places
        )

    def _trained_now(self) -> list[bool]:
        """Which parameters are not frozen."""
        return [each.requires_grad for each in self._members.held]

    def _find_places(self) -> None:
        """See where modules read parameters that are to be cast; make the copies."""
        trained = {id(each) for each in self._members.held}
        kept = set(modules_of(self._kept()))
        found = [
            (module, name, parameter)
            for module in self._members.modules
            if module._parameters and module not in kept and not keeps_float32(module)
            for name, parameter in module._parameters.items()
            if id(parameter) in trained and _can_be_cast(parameter)
        ]
        copies = {id(parameter): self._copy_of(parameter) for *_, parameter in found}
        self._copies = copies  # those of parameters that are gone are let go
        self._places = [
            (module, module._parameters, name, copies[id(parameter)])
            for module, name, parameter in found
        ]
        self._version, self._trained = self._members.version, self._trained_now()

    def _copy_of(self, parameter: Any) -> _Copy:
        copy, stream = self._copies.get(id(parameter)), _stream_of(parameter)
        if copy is None or not _fits(copy.buffer, parameter):
            return _make(parameter, self._dtype, stream)
        if copy.stream != stream:
            copy.view, copy.stream, copy.seen = _view_of(parameter, copy.buffer), stream, _STALE
        return copy

    @torch.no_grad()
    def _refresh(self) -> None:
        """Round the parameters into the buffers that do not hold their values of now."""
        copies = self._copies.values()
        if not self._stale:
            copies = [each for each in copies if each.seen != each.parameter._version]
        self._stale = False
        if not copies:
            return
        torch._foreach_copy_([each.buffer for each in copies], [each.parameter for each in copies])
        for each in copies:
            each.seen, each.version = each.parameter._version, each.buffer._version

    def _lost(self, written: Sequence[_Copy]) -> UsageError:
        """The error of forwards that write to weights."""
        gone = {id(each.parameter) for each in written}
        self.close()  # views that were written to are no longer views
        names = [
            (name, own)
            for name, module in self._members.modules_by_name().items()
            for own, parameter in module._parameters.items()
            if id(parameter) in gone
        ]
        module, own = names[0] if names else ("", "a parameter")
        return UsageError(
            f"bf16-master: forward changes {own} of {module or 'the model'} in place, which would "
            "be lost: it computes with a bfloat16 copy; keep the module in float32 with "
            f"bf16-master:islands={module or 'NAME'}, or change the parameter between steps"
        )


def keeps_float32(module: nn.Module) -> bool:
    """Whether the module's own parameters stay float32 where others become bfloat16."""
    if isinstance(module, _KEPT) or getattr(module, "max_norm", None) is not None:
        return True
    if getattr(module, "sparse", False) is True:
        return True
    return any(isinstance(each, _COMPUTED) for each in module._forward_pre_hooks.values())


def _can_be_cast(parameter: nn.Parameter | None) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.dtype == torch.float32
        and parameter.requires_grad
    )


def _fits(buffer: Tensor, parameter: Tensor) -> bool:
    return buffer.shape == parameter.shape and buffer.device == parameter.device


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.int16)


def _make(parameter: nn.Parameter, dtype: torch.dtype, stream: int) -> _Copy:
    with torch.inference_mode(mode=False):  # an evaluation may come first, and training after it
        buffer = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return _Copy(parameter, buffer, _view_of(parameter, buffer), stream)


def _view_of(parameter: nn.Parameter, buffer: Tensor) -> Tensor:
    """A tensor of the buffer's memory, whose gradient autograd hands to the parameter."""
    with torch.enable_grad():
        view = buffer.detach().copy_(parameter)
    vars(view).update(vars(parameter))  # marks that frameworks put on parameters
    return view


def _stream_of(parameter: Tensor) -> int:
    """The stream that backward adds the parameter's gradients up on: that of the view's making.

    A view is made anew for another one, as a CUDA graph's capture needs.
    """
    if parameter.device.type != "cuda":
        return 0
    return torch.cuda.current_stream(parameter.device).stream_id
