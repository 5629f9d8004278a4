"""The folder form of a checkpoint: what several ranks write together, and any number can read.

    step-00000010/
        __0_0.distcp, ...   tensors of model and optimizer, by `torch.distributed.checkpoint` (DCP):
        .metadata           each rank the parts it holds, and what all hold, once
        common.pt           everything else, by rank 0; tensors are there as shape and dtype
        rank-0.pt, ...      what is a rank's own: random state, position in its data, buffers

Buffers are a rank's own because they may differ: FSDP2 never makes batch statistics equal, and DDP
takes rank 0's only at the next forward.

A folder is written as ``.step-00000010.partial``, every file synced, and renamed by rank 0 when all
ranks are done, so that it is whole or not there; it is renamed again before it is removed. What a
kill leaves behind has a dot in front, is never taken for a checkpoint, and goes at the next save.

Nothing is unpickled freely. DCP would do so twice: its ``.metadata`` is a pickle, read here by an
unpickler that knows only the classes of metadata; and values that are no tensors are pickles, so
only tensors are given to it, and a folder in which it finds anything else is refused.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from ampwise.distributed.host_group import HostGroup, RankError
from ampwise.distributed.layout import empty_for, on_host
from ampwise.errors import in_one_line
from ampwise.training.content import SPREAD, DamageError, Like, load_file, mapped
from ampwise_lint.base.files import atomic_write, sync_folder

COMMON = "common.pt"

# -- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """A moment of training, in host memory and shared with nothing: training may go on."""

    tensors: dict[str, Tensor]
    common: bytes
    own: bytes


def snapshot(common: Mapping[str, Any], own: Mapping[str, Any]) -> Snapshot:
    """Copy what all ranks have in common, as far as this rank holds it, and what is its own."""
    tensors: dict[str, Tensor] = {}

    def aside(name: str, tensor: Tensor) -> Tensor:
        tensors[name] = on_host(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    spread = {part: mapped(common[part], aside, part) for part in SPREAD}
    return Snapshot(tensors, _saved({**common, **spread}), _saved(own))


def write(path: Path, moment: Snapshot, host: HostGroup) -> None:
    """Write a folder, all ranks together; it is there as a whole, or not at all.

    Raises
    ------
    RankError
        On all ranks, when any of them cannot write its part.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        host.first(lambda: _make(partial))
        host.agree(lambda: _find(partial))
        host.agree(lambda: _write_own(partial, moment, host.rank))
        host.agree(lambda: _write_tensors(partial, moment.tensors, host))
        host.first(lambda: _publish(partial, path))
    except RankError:
        if host.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _make(partial: Path) -> None:
    """Make room: what earlier kills left goes, and an empty folder is there."""
    for kind in ("partial", "removed"):
        for left in partial.parent.glob(f".step-*.{kind}"):
            shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()


def _find(partial: Path) -> None:
    if not partial.is_dir():
        raise FileNotFoundError(
            f"{partial.parent} is not the folder that rank 0 sees; --out must name a folder in a "
            "file system that all ranks share"
        )


def _write_own(partial: Path, moment: Snapshot, rank: int) -> None:
    atomic_write(partial / f"rank-{rank}.pt", lambda file: file.write(moment.own))
    if rank == 0:
        atomic_write(partial / COMMON, lambda file: file.write(moment.common))


def _write_tensors(partial: Path, tensors: dict[str, Tensor], host: HostGroup) -> None:
    # Nothing is copied ahead: it would be from devices, where none of these tensors is.
    writer = _Writer(partial, sync_files=True, per_thread_copy_ahead=0)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=host.process_group)
    except CheckpointException as error:  # the same on all ranks
        rank, failure = next(iter(error.failures.items()))
        raise RankError(f"rank {rank}: {in_one_line(failure[0])}") from error


def _publish(partial: Path, path: Path) -> None:
    sync_folder(partial)
    partial.rename(path)
    sync_folder(path.parent)


def _saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Nothing: the path and the class of paths would tie the files to this machine."""
        return StorageMeta()


# -- reading ---------------------------------------------------------------------------------------


def complete(path: Path, common: Mapping[str, Any], host: HostGroup, like: Like) -> dict[str, Any]:
    """Everything in a folder, whose ``common.pt`` is read, for this rank of however many.

    Tensors come as `like` says, each rank reading its parts. What is a rank's own comes from this
    rank's file if as many ranks wrote it, and from rank 0's otherwise.

    Raises
    ------
    DamageError
        When a file is missing or damaged.
    """
    rooms: dict[str, Tensor] = {}

    def room(name: str, shape: Tensor) -> Tensor:
        rooms[name] = empty_for(shape.shape, shape.dtype, like(name))
        return rooms[name]

    spread = {part: mapped(common[part], room, part) for part in SPREAD}
    rank = host.rank if common["world_size"] == host.size else 0
    own = load_file(path / f"rank-{rank}.pt")
    reader = _Reader(path, read_metadata(path / ".metadata"))
    try:
        with warnings.catch_warnings():  # that there is no process group: none is needed
            warnings.simplefilter("ignore")
            dcp.load(rooms, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, DamageError):
            raise cause from None
        raise DamageError(f".metadata: {in_one_line(cause)}") from None
    spread["model"].update(own.pop("buffers"))
    return {**common, **spread, **own}


_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata, and nothing that could do anything."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no metadata")


def read_metadata(path: Path) -> Metadata:
    """DCP's description of a folder, without running what a forged one would have run.

    Raises
    ------
    DamageError
        When it is missing or damaged, or describes anything but tensors in files of its folder.
    """
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        entries = metadata.state_dict_metadata.values()
        files = [each.relative_path for each in metadata.storage_data.values()]
    except FileNotFoundError:
        raise DamageError(f"{path.name}: missing") from None
    except Exception as error:  # noqa: BLE001 - unpickling damage raises anything
        raise DamageError(f"{path.name}: {in_one_line(error)}") from None
    if any(type(each) is not TensorStorageMetadata for each in entries):
        raise DamageError(f"{path.name}: it holds something that is no tensor")
    if any(Path(each).name != each for each in files):
        raise DamageError(f"{path.name}: it names a file outside its folder")
    return metadata


class _Reader(dcp.FileSystemReader):
    """Reads one file after the other, and names the one that cannot be read."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            files.setdefault(name, []).append(item)
        for name, items in files.items():
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner)
            except FileNotFoundError:
                raise DamageError(f"{name}: missing") from None
            except Exception as error:  # noqa: BLE001 - damage raises anything
                raise DamageError(f"{name}: {type(error).__name__}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done
