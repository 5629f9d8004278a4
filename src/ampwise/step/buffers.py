"""Module buffers that forward writes, put back when the step is skipped or an error ends it.

BatchNorm updates its running statistics in forward, before anyone knows that the step will be
skipped: one inf in a batch leaves NaN in them for good, and only evaluation shows it. So the
buffers that forward writes are copied at the start of a window and, if its step is skipped,
written back; on an accelerator without asking the host.

Which buffers those are is observed: normalisation layers that track statistics (their kernel
writes without counting a version), any other whose version counter has moved or, on the CPU, whose
values differ from their copy, and those made in inference mode, which have no version. In the first
window of a buffer, when nothing has been observed yet, it is copied. A buffer may be assigned anew
instead: then the old one is put back. What cannot be put back (a first write after windows without
one; on accelerators also a buffer that appears or changes its shape) is named
(`BufferGuard.missed`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ampwise.step.host import HostFlag
from ampwise.step.members import Members

_Place = tuple[nn.Module, str]
"""A module, and a name among its buffers."""


@dataclass(slots=True)
class _Kept:
    """A buffer as it was.

    Attributes
    ----------
    owner, name
        Where it hangs.
    tensor
        The buffer; None where the name held none.
    copy
        Its values; None where forward only reads it.
    version
        Its version counter; None where it has none.
    """

    owner: nn.Module
    name: str
    tensor: Tensor | None
    copy: Tensor | None
    version: int | None

    @property
    def now(self) -> Tensor | None:
        """What hangs there now."""
        held = self.owner._buffers
        return held[self.name] if self.name in held else None  # noqa: SIM401 - not always a dict

    @property
    def written(self) -> bool:
        """Whether it was written to, or assigned anew.

        A write through ``.data`` shows only beside a copy, and where that costs no host sync.
        """
        if self.now is not self.tensor:
            return True
        if self.tensor is None:
            return False
        if _version(self.tensor) != self.version:
            return True
        on_host = self.tensor.device.type == "cpu"
        return on_host and self.copy is not None and not torch.equal(self.tensor, self.copy)

    @torch.no_grad()
    def put_back(self) -> None:
        """Be as it was."""
        if self.copy is not None and self.tensor is not None:
            with torch.inference_mode(self.tensor.is_inference()):
                if self.tensor.shape != self.copy.shape:
                    self.tensor.resize_(self.copy.shape)
                self.tensor.copy_(self.copy)
        if self.now is not self.tensor:
            self.owner._buffers[self.name] = self.tensor

    @torch.no_grad()
    def put_back_if(self, skipped: Tensor) -> None:
        """Be as it was where a bool on a device says so; what cannot be is left."""
        now = self.now
        if now is None or self.copy is None or not _fits(now, self.copy):
            return
        chosen = torch.where(skipped.to(now.device), self.copy, now)
        if now is not self.tensor:
            self.owner._buffers[self.name] = chosen
            return
        with torch.inference_mode(now.is_inference()):
            now.copy_(chosen)


class Snapshot:
    """The buffers of some modules at a moment.

    Parameters
    ----------
    only_read
        Names of those that forward is known only to read, by module; they are not copied.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        only_read: Mapping[nn.Module, set[str]] | None = None,
    ) -> None:
        self._modules = modules
        self.kept: list[_Kept] = []
        self._left: list[int | None] = []
        for owner in [each for each in modules if each._buffers]:
            skip = () if only_read is None else only_read.get(owner, ())
            for name, tensor in owner._buffers.items():
                self.kept.append(_keep(owner, name, tensor, read=name in skip))

    def put_back(self) -> None:
        """Have all of them be as they were; those that came since are gone."""
        for each in self.kept:
            each.put_back()
        for owner, name in self.late():
            del owner._buffers[name]

    def leave(self) -> None:
        """A forward is over; what is written from now on is an edit of somebody's."""
        self._left = [_version_now(each) for each in self.kept]

    def take_over_edits(self) -> None:
        """Have what was edited since `leave` be as it is now."""
        for index, (each, version) in enumerate(zip(self.kept, self._left, strict=False)):
            if each.now is not None and _version_now(each) != version:
                self.kept[index] = _keep(each.owner, each.name, each.now, read=False)

    def late(self) -> list[_Place]:
        """Buffers that came since."""
        owners = [each for each in self._modules if each._buffers]
        known = {(id(each.owner), each.name) for each in self.kept} if owners else set()
        return [
            (owner, name)
            for owner in owners
            for name in owner._buffers.keys()  # noqa: SIM118 - a scripted module's are no dict
            if (id(owner), name) not in known
        ]


class BufferGuard:
    """Remembers what forward is about to overwrite in some models.

    Parameters
    ----------
    members
        What is trained.

    Attributes
    ----------
    missed
        Names of buffers that the last `settle` could not have put back.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._window: Snapshot | None = None
        self._only_read: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        self.missed: list[str] = []

    @property
    def open(self) -> bool:
        """Whether a window's buffers are remembered."""
        return self._window is not None

    @contextmanager
    def kept(self) -> Generator[None]:
        """Context: what forward writes inside does not stay."""
        before = Snapshot(self._members.modules)
        try:
            yield
        finally:
            before.put_back()

    def before(self, *, begins: bool) -> Callable[[], None]:
        """What puts the buffers back to this moment, in or at the start of a window.

        A window `begins` anew as long as no backward has followed its forwards.
        """
        if self._window is None:
            self._window = Snapshot(self._members.modules, self._only_read)
            return self.discard
        if begins:
            self._window.take_over_edits()
        return Snapshot(self._members.modules, self._only_read).put_back

    def leave(self) -> None:
        """A forward is over, and a backward has yet to follow."""
        if self._window is not None:
            self._window.leave()

    def undo(self) -> None:
        """Put the buffers back where the window began, and leave it open."""
        if self._window is not None:
            self._window.put_back()

    def forget(self) -> None:
        """Have no window open; the buffers stay as they are."""
        self._window = None

    def discard(self) -> None:
        """Put the buffers back where the window began, and forget it."""
        self.undo()
        self.forget()

    def settle(self, found_inf: HostFlag) -> None:
        """End the window: where `found_inf` is 1, put the buffers back."""
        window, self._window = self._window, None
        self.missed = []
        if window is None:
            return
        missed = self._observe(window, on_host=found_inf.on_host)
        if not found_inf.on_host:
            missed += window.late()
            for each in window.kept:
                each.put_back_if(found_inf.tensor > 0)
        elif found_inf.read():
            window.put_back()
        if missed:
            self._name(missed)

    def _observe(self, window: Snapshot, *, on_host: bool) -> list[_Place]:
        """Learn which buffers forward writes, and which of these could not be put back."""
        missed: list[_Place] = []
        for each in window.kept:
            if each.written:
                self._only_read.get(each.owner, set[str]()).discard(each.name)
            elif not _always_copied(each.owner, each.tensor):
                self._only_read.setdefault(each.owner, set()).add(each.name)
            if not _covered(each, on_host=on_host):
                missed.append((each.owner, each.name))
        return missed

    def _name(self, missed: Sequence[_Place]) -> None:
        names = {id(module): name for name, module in self._members.modules_by_name().items()}
        self.missed = [
            ".".join(part for part in (names.get(id(owner), ""), name) if part)
            for owner, name in missed
        ]

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The copies of an open window, by the buffer's FQN."""
        if self._window is None:
            return {}
        names = {id(module): name for name, module in self._members.modules_by_name().items()}
        return {
            ".".join(part for part in (names[id(each.owner)], each.name) if part): each.copy
            for each in self._window.kept
            if each.copy is not None and id(each.owner) in names
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue a window whose buffers were these when it began."""
        modules = self._members.modules_by_name()
        before = {
            (id(modules[path]), name): copy
            for path, name, copy in ((*_split(fqn), copy) for fqn, copy in state.items())
            if path in modules
        }
        self._window = Snapshot(self._members.modules, self._only_read)
        for each in self._window.kept:
            copy = before.get((id(each.owner), each.name))
            if copy is not None and each.tensor is not None:
                each.copy = copy.to(each.tensor.device, copy=True)


def _keep(owner: nn.Module, name: str, tensor: Tensor | None, *, read: bool) -> _Kept:
    if tensor is None or is_lazy(tensor):  # without values so far, and without a version
        return _Kept(owner, name, tensor, None, None)
    copy = None if read or _is_expanded(tensor) else tensor.clone()
    return _Kept(owner, name, tensor, copy, _version(tensor))


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() or is_lazy(tensor) else tensor._version


def _version_now(kept: _Kept) -> int | None:
    now = kept.now
    return None if now is None else _version(now)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory: nothing can be written to them in place."""
    return tensor.layout == torch.strided and 0 in tensor.stride() and tensor.numel() > 1


def _always_copied(owner: nn.Module, tensor: Tensor | None) -> bool:
    """Whether a write does not show in the version counter."""
    if isinstance(owner, _NormBase) and owner.track_running_stats:
        return True
    return tensor is not None and tensor.is_inference()


def _covered(kept: _Kept, *, on_host: bool) -> bool:
    """Whether a skip of this window puts a buffer back."""
    now = kept.now
    if now is kept.tensor:
        return kept.copy is not None or not kept.written
    if on_host:
        return True  # the host knows, and assigns the old one
    return now is not None and kept.copy is not None and _fits(now, kept.copy)


def _fits(now: Tensor, copy: Tensor) -> bool:
    alike = now.shape == copy.shape and now.dtype == copy.dtype and now.device == copy.device
    return alike and now.layout == copy.layout == torch.strided


def _split(fqn: str) -> tuple[str, str]:
    path, _, name = fqn.rpartition(".")
    return path, name
