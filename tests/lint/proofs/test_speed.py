"""AMP3xx: what can be counted without an accelerator: host syncs, passes, bytes exchanged.

Not here, for a CPU executes every operation before it returns: `synchronize` in the loop (AMP302),
pinned memory and asynchronous copies (AMP303), timing without a synchronize (AMP304), tensor-core
alignment (AMP306). Host syncs are counted as `_local_scalar_dense`, which is what blocks on CUDA.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from .helpers import WINDOW, OpCounter, batches, gradient, network, vector

STEPS = 50


def counted(optimizer_of, after_step=lambda loss, index, scaler: None):
    """Operations of `STEPS` steps under a scaler, and the parameters they end at."""
    model = network()
    optimizer = optimizer_of(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with OpCounter() as ops:
        for index, (x, y) in enumerate(batches(STEPS)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            after_step(loss, index, scaler)
    return ops, vector(model)


def fused_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("loss.item()", lambda loss, scaler: loss.item()),
        ("float(loss)", lambda loss, scaler: float(loss.detach())),
        ("if loss > 10", lambda loss, scaler: bool(loss > 10)),
        ("get_scale()", lambda loss, scaler: scaler.get_scale()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_amp301_sync_in_hot_loop(record_property, name, read):
    """Read every step: 50 host syncs in 50 steps; read every 25 steps: 2."""

    def every(period):
        def after_step(loss, index, scaler):
            if index % period == period - 1:
                read(loss, scaler)

        return after_step

    none, _ = counted(fused_sgd)
    wrong, _ = counted(fused_sgd, every(1))
    right, _ = counted(fused_sgd, every(25))
    record_property(
        f"host syncs in 50 steps, {name} every step", wrong.host_syncs - none.host_syncs
    )
    record_property(f"host syncs in 50 steps, {name} every 25", right.host_syncs - none.host_syncs)
    assert wrong.host_syncs - none.host_syncs == STEPS
    assert right.host_syncs - none.host_syncs == STEPS // 25


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_amp305_unfused_optimizer(record_property, kind):
    """Unfused, a step costs one host sync (found_inf), fused none; Adam: 86 operations against 52."""

    def optimizer_of(fused):
        return lambda parameters: kind(parameters, lr=1e-2, fused=fused, foreach=False)

    def syncs(ops):
        # Adam reads its own step counters too: on CUDA they are host tensors and block nothing.
        return ops.host_syncs - own

    own = 0 if kind is torch.optim.SGD else STEPS * 4
    wrong, wrong_end = counted(optimizer_of(fused=False))
    right, right_end = counted(optimizer_of(fused=True))
    record_property(f"host syncs a step, {kind.__name__}, unfused", syncs(wrong) / STEPS)
    record_property(f"host syncs a step, {kind.__name__}, fused", right.host_syncs / STEPS)
    record_property(f"operations a step, {kind.__name__}, unfused", len(wrong.calls) / STEPS)
    record_property(f"operations a step, {kind.__name__}, fused", len(right.calls) / STEPS)
    assert syncs(wrong) == STEPS
    assert right.host_syncs == 0
    assert len(wrong.calls) > len(right.calls)
    torch.testing.assert_close(wrong_end, right_end, rtol=1e-4, atol=1e-6)


@pytest.fixture
def _one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_amp307_no_sync_missing(record_property):
    """Without `no_sync()` a window of 4 micro-batches all-reduces 4 times the bytes, for the same gradient."""
    x, y = batches(1)[0]
    parts = list(zip(x.chunk(WINDOW), y.chunk(WINDOW), strict=True))

    def window(quiet: bool) -> tuple[int, torch.Tensor]:
        reduced = []

        def hook(state, bucket):
            reduced.append(bucket.buffer().nbytes)
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model = DistributedDataParallel(network())
        model.register_comm_hook(None, hook)
        for index, (inputs, labels) in enumerate(parts):
            inner = quiet and index < WINDOW - 1
            with model.no_sync() if inner else nullcontext():
                (F.cross_entropy(model(inputs), labels) / WINDOW).backward()
        return sum(reduced), gradient(model)

    wrong, wrong_gradient = window(quiet=False)
    right, right_gradient = window(quiet=True)
    record_property("bytes all-reduced per window, wrong", wrong)
    record_property("bytes all-reduced per window, right", right)
    assert wrong == WINDOW * right > 0
    assert torch.equal(wrong_gradient, right_gradient)
