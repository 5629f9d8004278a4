"""Checkpoints of two real processes (gloo): what is saved, by whom it can be read, what may fail."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import random
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampwise import TrainStep
from ampwise.distributed.host_group import beside
from ampwise.errors import CheckpointError, UsageError
from ampwise.step import LossScale
from ampwise.training import checkpoint
from ampwise.training.checkpoint import Trained
from ampwise.training.epochs import Position
from ampwise.training.random_state import random_state
from tests.distributed import small
from tests.distributed.ranks import Ranks
from tests.distributed.small import Spread

SPREADS: tuple[Spread, ...] = ("alone", "ddp", "fsdp")
CONFIG = {"task": "small", "precision": "fp32", "seed": 3}


def made(
    spread: Spread, precision: str = "fp32", *, seed: int = 0, noisy: bool = False, **settings: Any
) -> Trained:
    """A model to train; a noisy one has dropout and batch statistics, which differ on each rank."""
    model = _noisy(spread, seed) if noisy else small.network(spread, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = TrainStep(
        model,
        optimizer,
        policy=precision,
        accumulate=2 if spread == "alone" else 1,
        scheduler=scheduler,
        loss_scale=LossScale(init_scale=2.0**10, growth_interval=4),
        **settings,
    )
    return Trained(model, optimizer, step, scheduler)


def _noisy(spread: Spread, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(small.FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
    )
    return small.spread_out(model, spread)


def train(trained: Trained, begin: int, end: int, bad: int | None = None) -> None:
    """Steps from one to another, each over two batches: one on each rank, or both alone."""
    alone = trained.step.group is None
    for index in range(begin, end):
        pair = small.batches(2 * end)[2 * index : 2 * index + 2]
        for inputs, labels in pair if alone else pair[small.me() : small.me() + 1]:
            trained.step(small.loss, (inputs / 0 if index == bad else inputs, labels))


def state(trained: Trained) -> dict[str, Any]:
    """Everything that makes a run go on as it does; tensors whole."""
    content = {
        "model": checkpoint.unwrapped(trained.model).state_dict(),
        "optimizer": trained.optimizer.state_dict(),
        "scheduler": trained.scheduler.state_dict(),
        "step": trained.step.state_dict(),
        "rng": random_state(),
    }
    return checkpoint.mapped(content, lambda _, tensor: small.whole(tensor).clone(), "")


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two states are not equal to the last bit."""
    if isinstance(one, Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{path}: {one.keys() ^ other.keys()}"]
        return [d for key in one for d in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [path]
        pairs = enumerate(zip(one, other, strict=True))
        return [d for index, pair in pairs for d in differences(*pair, f"{path}/{index}")]
    return [] if one == other else [f"{path}: {one} {other}"]


def save(folder: Path, trained: Trained, *, wait: bool = True) -> checkpoint.Saving:
    position = Position(1, trained.step.steps, random_state())
    return checkpoint.save(folder, trained, position, CONFIG, wait=wait)


def resumed(folder: Path, trained: Trained) -> tuple[Position, list[str]]:
    """Go on from the newest; what was said about it."""
    said: list[str] = []
    path = checkpoint.newest(folder)
    assert path is not None
    content = checkpoint.load(path, trained, said.append)
    return checkpoint.restore(content, trained), said


# -- as many ranks as before -----------------------------------------------------------------------


def _uninterrupted(folder: Path, spread: Spread, precision: str) -> tuple[Any, Any, Any]:
    trained = made(spread, precision, noisy=True)
    torch.manual_seed(10 + small.me())
    train(trained, 0, 6, bad=2 if precision == "fp16" else None)
    epoch = random_state()
    checkpoint.save(folder, trained, Position(1, 6, epoch), CONFIG)
    at_save = state(trained)
    train(trained, 6, 10)
    return at_save, state(trained), epoch


def _interrupted(folder: Path, spread: Spread, precision: str) -> tuple[Any, Any, Any]:
    trained = made(spread, precision, noisy=True, seed=7)
    position, said = resumed(folder, trained)
    assert (position.epoch, position.batch, said) == (1, 6, [])
    at_load = state(trained)
    train(trained, 6, 10)
    return at_load, state(trained), position.epoch_rng


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_two_ranks_go_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, spread: Spread, precision: str
) -> None:
    whole = ranks(_uninterrupted, tmp_path, spread, precision)
    parts = ranks(_interrupted, tmp_path, spread, precision)
    for rank in range(2):
        assert differences(whole[rank], parts[rank]) == []
    assert [path.name for path in checkpoint.finished(tmp_path)] == ["step-00000006"]
    if precision == "fp16":
        step = whole[0][0]["step"]
        assert step["skipped"] == 1
        assert step["loss_scale"]["_growth_tracker"] == 3  # in the middle of a growth interval
        assert step["loss_scale"]["scale"] == 2.0**9
    random_states = [each[0]["rng"]["torch"] for each in whole]
    assert not torch.equal(*random_states)


# -- another number of ranks, spread another way ---------------------------------------------------


def _saved_midway(folder: Path, spread: Spread, precision: str) -> tuple[Any, Tensor]:
    trained = made(spread, precision)
    train(trained, 0, 5)
    save(folder, trained)
    at_save = state(trained)
    train(trained, 5, 9)
    return at_save, small.parameters(trained.model).float()


def _gone_on(folder: Path, spread: Spread, precision: str) -> tuple[Any, Tensor, list[str]]:
    trained = made(spread, precision, seed=7)
    position, said = resumed(folder, trained)
    assert (position.epoch, position.batch) == (1, 5)
    at_load = state(trained)
    train(trained, 5, 9)
    return at_load, small.parameters(trained.model).float(), said


def on(spread: Spread, ranks: Ranks, function: Any, *args: Any) -> list[Any]:
    """Run on both ranks, or alone in this process."""
    with threads(1):
        return [function(*args)] if spread == "alone" else ranks(function, *args)


@contextlib.contextmanager
def threads(count: int) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("after", SPREADS)
@pytest.mark.parametrize("before", SPREADS)
def test_another_number_of_ranks_or_another_spread(
    ranks: Ranks, tmp_path: Path, before: Spread, after: Spread, precision: str
) -> None:
    # The state is the same to the last bit; what is trained from it differs as sums over ranks do.
    saved, end = on(before, ranks, _saved_midway, tmp_path, before, precision)[0]
    bound = 1e-6 if precision == "fp32" else 10 * 1e-2 * 2**-11
    for loaded, parameters, said in on(after, ranks, _gone_on, tmp_path, after, precision):
        same_size = (before == "alone") == (after == "alone")
        if not same_size:  # what shares are relative to means something over ranks only
            for state_of in (saved, loaded):
                state_of["step"].pop("unit", None)
        for part in ("model", "optimizer", "scheduler", "step"):
            assert differences(saved[part], loaded[part], part) == []
        torch.testing.assert_close(parameters, end, rtol=0, atol=bound)
        if same_size:
            assert said == []
        else:
            assert "random numbers are drawn anew, from seed 3, step 5 and rank" in said[0]


def _masters(folder: Path, spread: Spread, precision: str) -> Any:
    trained = made(spread, precision, seed=7)
    resumed(folder, trained)
    return state(trained)


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16-master"), ("bf16-master", "fp32")])
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_masters_are_what_is_saved(
    ranks: Ranks, tmp_path: Path, spread: Spread, before: str, after: str
) -> None:
    spreads: list[Spread] = ["alone", spread] if before == "bf16-master" else [spread, "alone"]
    saved, _ = on(spreads[0], ranks, _saved_midway, tmp_path, spreads[0], before)[0]
    for loaded in on(spreads[1], ranks, _masters, tmp_path, spreads[1], after):
        assert differences(saved["model"], loaded["model"]) == []
        assert differences(saved["optimizer"], loaded["optimizer"]) == []


class Rows(torch.optim.SGD):
    """Keeps a state of another shape than the parameter, as Adafactor does."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim == 2:
                self.state[parameter]["rows"] = parameter.detach().abs().sum(dim=1)


def _mixed(kind: Any) -> Trained:
    """Layers that are spread differently, one so small that a rank holds nothing of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(small.FEATURES, 16), nn.Linear(16, 3), nn.Linear(3, 1))
    if dist.is_initialized():
        for layer, shape in zip(model, ((2,), (2, 1), (1, 2)), strict=True):
            names = ("copies", "parts")[-len(shape) :]
            fully_shard(layer, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = kind(model.parameters(), lr=1e-2)
    return Trained(model, optimizer, TrainStep(model, optimizer, policy="fp32"))


def _mixed_state(trained: Trained) -> Any:
    content = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}
    return checkpoint.mapped(content, lambda _, tensor: small.whole(tensor).clone(), "")


def _mixed_saved(folder: Path, kind: Any) -> Any:
    trained = _mixed(kind)
    for inputs, _ in small.batches(2):
        trained.step(lambda model, batch: model(batch).square().mean(), inputs)
    save(folder, trained)
    return _mixed_state(trained)


def _mixed_loaded(folder: Path, kind: Any) -> Any:
    trained = _mixed(kind)
    resumed(folder, trained)
    loaded = _mixed_state(trained)
    trained.step(lambda model, batch: model(batch).square().mean(), small.batches(1)[0][0])
    return loaded


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Rows])
def test_layers_that_are_spread_differently(ranks: Ranks, tmp_path: Path, kind: Any) -> None:
    for name in ("folder", "file"):
        (tmp_path / name).mkdir()
    for saved in ranks(_mixed_saved, tmp_path / "folder", kind):
        for loaded in ranks(_mixed_loaded, tmp_path / "folder", kind):
            assert differences(saved, loaded) == []
        assert differences(saved, _mixed_loaded(tmp_path / "folder", kind)) == []
    saved = _mixed_saved(tmp_path / "file", kind)
    for loaded in ranks(_mixed_loaded, tmp_path / "file", kind):
        assert differences(saved, loaded) == []


def _draws(folder: Path) -> Tensor:
    trained = made("ddp")
    resumed(folder, trained)
    return torch.rand(3)


def test_fresh_random_states_are_the_same_each_time_and_differ_by_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    _saved_midway(tmp_path, "alone", "fp32")
    first, second = ranks(_draws, tmp_path), ranks(_draws, tmp_path)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])


def test_a_folder_can_be_looked_into_without_a_model(ranks: Ranks, tmp_path: Path) -> None:
    saved, _ = ranks(_saved_midway, tmp_path, "fsdp", "fp32")[0]
    content = checkpoint.load(checkpoint.newest(tmp_path))
    assert differences(saved["model"], content["model"]) == []
    assert differences(saved["optimizer"], content["optimizer"]) == []
    assert content["world_size"] == 2
    assert content["config"] == CONFIG


def test_it_is_a_folder_of_dcp(ranks: Ranks, tmp_path: Path) -> None:
    """PyTorch's own tools read it, too; and nothing in it names this machine."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    saved, _ = ranks(_saved_midway, tmp_path, "fsdp", "fp32")[0]
    folder = tmp_path / "step-00000005"
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    content = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(content["model.0.weight"], saved["model"]["0.weight"])
    for file in folder.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


def _replicated(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.glob("*/*.distcp"))


def test_what_all_ranks_hold_is_written_once(ranks: Ranks, tmp_path: Path) -> None:
    for spread in ("ddp", "fsdp"):
        (tmp_path / spread).mkdir()
        ranks(_saved_midway, tmp_path / spread, spread, "fp32")
    written = _replicated(tmp_path / "ddp"), _replicated(tmp_path / "fsdp")
    assert written[0] < written[1]  # FSDP2 has more parts, and each has a header


# -- while training goes on ------------------------------------------------------------------------


def _in_the_background(folder: Path, spread: Spread) -> tuple[Any, list[str], bool]:
    from ampwise_lint.base import files

    trained = made(spread, "fp16")
    train(trained, 0, 5)
    release = threading.Event()
    sync = os.fsync

    def slow(handle: int) -> None:
        assert release.wait(30)
        sync(handle)

    files.os.fsync = slow  # type: ignore[assignment]
    try:
        saving = save(folder, trained, wait=False)
        at_save = state(trained)
        train(trained, 5, 9)
        unfinished = [path.name for path in checkpoint.finished(folder)]
        before = saving.done
        release.set()
        saving.wait()
    finally:
        files.os.fsync = sync
    assert saving.done
    assert not saving.failed
    return at_save, unfinished, before


@pytest.mark.parametrize("spread", SPREADS)
def test_training_goes_on_while_the_moment_is_written(
    ranks: Ranks, tmp_path: Path, spread: Spread
) -> None:
    for at_save, unfinished, done in on(spread, ranks, _in_the_background, tmp_path, spread):
        assert unfinished == []
        assert not done
        content = checkpoint.load(checkpoint.newest(tmp_path))
        for part in ("model", "optimizer", "step"):
            assert differences(at_save[part], content[part], part) == []


def _many(folder: Path) -> list[str]:
    trained = made("fsdp")
    for index in range(6):
        train(trained, index, index + 1)
        saving = save(folder, trained, wait=False)
    saving.wait()
    dist.barrier()
    return sorted(path.name for path in folder.iterdir())


def test_saves_in_the_background_come_one_after_the_other(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_many, tmp_path)[0] == [f"step-0000000{step}" for step in (4, 5, 6)]


def test_the_last_three_are_kept_of_both_forms(ranks: Ranks, tmp_path: Path) -> None:
    trained = made("alone")
    for index in range(2):
        train(trained, index, index + 1)
        save(tmp_path, trained)
    ranks(_saved_midway, tmp_path, "ddp", "fp32")
    ranks(_saved_midway, tmp_path, "fsdp", "fp32")  # of the same step: the first one stays
    names = [path.name for path in checkpoint.finished(tmp_path)]
    assert names == ["step-00000002.pt", "step-00000005", "step-00000005.1"]


def _mid_window(folder: Path) -> str:
    model = small.network("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, optimizer, policy="fp32", accumulate=2)
    step(small.loss, small.batches(1)[0])
    try:
        save(folder, Trained(model, optimizer, step))
    except UsageError as error:
        return str(error)
    return ""


def test_the_middle_of_a_window_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert all("step.boundary" in said for said in ranks(_mid_window, tmp_path))


# -- what may fail ---------------------------------------------------------------------------------


def _fails(folder: Path, how: str, bad: int, wait: bool) -> tuple[str, str, float]:
    """Save twice, the second time with a rank that cannot; and then a third time."""
    trained = made("fsdp")
    train(trained, 0, 1)
    save(folder, trained)
    train(trained, 1, 2)
    kept = _Writing(how if small.me() == bad else "none")
    begin = time.monotonic()
    said = ""
    with kept:
        try:
            saving = save(folder, trained, wait=wait)
            with contextlib.suppress(CheckpointError):
                saving.wait()
            assert saving.failed
            saving.wait()
        except CheckpointError as error:
            said = str(error)
    seconds = time.monotonic() - begin
    dist.barrier()  # rank 0 has cleared up
    after_failure = [path.name for path in sorted(folder.iterdir())]
    dist.barrier()
    train(trained, 2, 3)
    save(folder, trained)
    return said, " ".join(after_failure), seconds


class _Writing:
    """Makes this rank's writing fail in some way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __enter__(self) -> None:
        from ampwise.training import sharded

        self._undo: list[Any] = []

        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def put(owner: Any, name: str) -> None:
            self._undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, full)

        if self.how == "own file":
            put(sharded, "atomic_write")
        elif self.how == "tensors":
            put(sharded._Writer, "write_data")
        elif self.how == "copy":
            put(sharded, "on_host")
        elif self.how == "quota":
            self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, self._limit[1]))

    def __exit__(self, *_: object) -> None:
        for owner, name, value in self._undo:
            setattr(owner, name, value)
        if self.how == "quota":
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("how", ["own file", "tensors", "copy"])
def test_a_full_disk_on_one_rank_is_one_error_on_all(
    ranks: Ranks, tmp_path: Path, how: str, bad: int, wait: bool
) -> None:
    for said, there, seconds in ranks(_fails, tmp_path, how, bad, wait):
        assert f"rank {bad}: [Errno 28] No space left on device" in said
        assert f"the last finished one is {tmp_path / 'step-00000001'}" in said
        assert there == "step-00000001"
        assert seconds < 20
    names = [path.name for path in checkpoint.finished(tmp_path)]
    assert names == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_file_the_system_will_not_let_grow(ranks: Ranks, tmp_path: Path, bad: int) -> None:
    for said, there, _ in ranks(_fails, tmp_path, "quota", bad, True):
        assert f"rank {bad}: [Errno {errno.EFBIG}] File too large" in said
        assert there == "step-00000001"


def _elsewhere(folder: Path) -> str:
    """One path, but not one folder, as on machines that share no file system."""
    trained = made("ddp")
    mine, before = folder / str(small.me()), Path.cwd()
    (mine / "checkpoints").mkdir(parents=True)
    os.chdir(mine)
    try:
        save(Path("checkpoints"), trained)
    except CheckpointError as error:
        return str(error)
    finally:
        os.chdir(before)
    return ""


def test_a_folder_that_is_not_shared(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(_elsewhere, tmp_path):
        assert "rank 1: " in said
        assert "file system that all ranks share" in said
    assert list(tmp_path.glob("*/checkpoints/*")) == []


def _refused(folder: Path, spread: Spread) -> str:
    trained = made(spread)
    before = state(trained)
    try:
        resumed(folder, trained)
    except CheckpointError as error:
        assert differences(before, state(trained)) == []
        return str(error)
    return ""


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("name", ["__1_0.distcp", "rank-1.pt", "common.pt", ".metadata"])
@pytest.mark.parametrize("how", [Path.unlink, damage])
def test_a_damaged_part_is_named_and_the_one_before_offered(
    ranks: Ranks, tmp_path: Path, name: str, how: Any
) -> None:
    ranks(_two_saves, tmp_path)
    how(tmp_path / "step-00000002" / name)
    for said in ranks(_refused, tmp_path, "fsdp"):
        assert f"checkpoint {tmp_path / 'step-00000002'} is damaged ({name}: " in said
        assert said.endswith(f"; try {tmp_path / 'step-00000001'}")


def _two_saves(folder: Path) -> None:
    trained = made("fsdp")
    for index in range(2):
        train(trained, index, index + 1)
        save(folder, trained)


def test_a_damaged_file_on_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    _saved_midway(tmp_path, "alone", "fp32")
    damage(tmp_path / "step-00000005.pt")
    for said in ranks(_refused, tmp_path, "ddp"):
        assert f"checkpoint {tmp_path / 'step-00000005.pt'} is damaged" in said


def _other_model(folder: Path, spread: Spread) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(small.FEATURES, 20), nn.Tanh(), nn.Linear(20, 3))
    model = small.spread_out(model, spread)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainStep(model, optimizer, policy="fp32")
    try:
        resumed(folder, Trained(model, optimizer, step))
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_a_checkpoint_of_another_model(ranks: Ranks, tmp_path: Path, spread: Spread) -> None:
    ranks(_saved_midway, tmp_path, "fsdp", "fp32")
    for said in ranks(_other_model, tmp_path, spread):
        assert "does not fit this task's model and optimizer" in said


# -- nothing is run --------------------------------------------------------------------------------


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def evil_metadata(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))


def evil_inside(folder: Path, mark: Path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    metadata = Metadata({}, planner_data=Evil(mark))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_bytes(folder: Path, mark: Path) -> None:
    """An entry that DCP would unpickle freely, as it is no tensor."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    with (folder / ".metadata").open("rb") as file:
        metadata: Metadata = pickle.load(file)
    name = "model.0.weight"
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    (index,) = {each for each in metadata.storage_data if each.fqn == name and not each.index}
    stored = io.BytesIO()
    torch.save(Evil(mark), stored)
    (folder / "evil").write_bytes(stored.getvalue())
    info = metadata.storage_data[index]
    info.relative_path, info.offset, info.length = "evil", 0, len(stored.getvalue())
    for each in list(metadata.storage_data):
        if each.fqn == name:
            del metadata.storage_data[each]
    import dataclasses

    metadata.storage_data[dataclasses.replace(index, offset=None, index=None)] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_tensor(folder: Path, mark: Path) -> None:
    for file in folder.glob("*.distcp"):
        torch.save(Evil(mark), file)


def evil_common(folder: Path, mark: Path) -> None:
    torch.save({"ampwise_checkpoint": Evil(mark)}, folder / "common.pt")


def outside(folder: Path, mark: Path) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "forge", [evil_metadata, evil_inside, evil_bytes, evil_tensor, evil_common, outside]
)
def test_nothing_in_a_folder_is_run(ranks: Ranks, tmp_path: Path, forge: Any) -> None:
    ranks(_saved_midway, tmp_path, "fsdp", "fp32")
    mark = tmp_path / "was run"
    forge(tmp_path / "step-00000005", mark)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path / "step-00000005")
    assert not mark.exists()
    for said in ranks(_refused, tmp_path, "ddp"):
        assert "is damaged" in said
    assert not mark.exists()


# -- kills -----------------------------------------------------------------------------------------


def _endless(rank: int, folder: Path, store: Path, spread: Spread, wait: bool) -> None:
    """Go on from the newest, saving after every step, until killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    trained = made(spread)
    if checkpoint.newest(folder) is not None:
        resumed(folder, trained)
    beside(trained.step.group)  # who dies while it is made is waited for by PyTorch
    store.with_suffix(f".{rank}").touch()
    while True:
        train(trained, trained.step.steps, trained.step.steps + 1)
        save(folder, trained, wait=wait)


def _forked(*args: Any) -> int:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _endless(*args)
        os._exit(1)
    return child


def _wait(until: Any) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(("spread", "wait"), [("ddp", True), ("fsdp", True), ("fsdp", False)])
def test_kills_never_lose_or_fake_a_checkpoint(tmp_path: Path, spread: Spread, wait: bool) -> None:
    import torch.distributed.fsdp  # noqa: F401 - once, before forking

    from ampwise.training import sharded  # noqa: F401

    draw, folder, before = random.Random(f"{spread}{wait}"), tmp_path / "checkpoints", 0
    finished = 0
    folder.mkdir()
    for attempt in range(6):
        store = tmp_path / f"store-{attempt}"
        children = [_forked(rank, folder, store, spread, wait) for rank in range(2)]
        _wait(lambda: all(store.with_suffix(f".{rank}").exists() for rank in range(2)))
        for _ in range(draw.randint(0, 3)):
            last = checkpoint.newest(folder)
            _wait(lambda last=last: checkpoint.newest(folder) != last)
            finished += 1
        time.sleep(draw.uniform(0.0, 0.2))
        seen = checkpoint.newest(folder)
        draw.shuffle(children)
        os.kill(children[0], signal.SIGKILL)
        if attempt % 2:  # else the other one must notice, and end by itself
            time.sleep(draw.choice([0.0, 0.0, 0.05]))
            os.kill(children[1], signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert ends[0] == -signal.SIGKILL
        assert ends[1] in (-signal.SIGKILL, 1)  # or it noticed that the other is gone
        after = checkpoint.newest(folder)
        if seen is not None:
            assert after is not None
            assert after.name >= seen.name
        for path in checkpoint.finished(folder):
            steps = checkpoint.load(path)["step"]["steps"]
            assert path.name.startswith(f"step-{steps:08d}")
        if after is not None:
            steps = checkpoint.load(after)["step"]["steps"]
            assert steps >= before
            before = steps
    assert before >= finished > 3  # they did train in between


def test_what_kills_left_is_cleared(ranks: Ranks, tmp_path: Path) -> None:
    for name in (".step-00000003.partial", ".step-00000001.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "common.pt").touch()
    assert checkpoint.finished(tmp_path) == []
    ranks(_saved_midway, tmp_path, "fsdp", "fp32")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
