"""The copy ahead on a side stream: values, memory reuse, and the device's own waiting."""

from __future__ import annotations

import time

import pytest
import torch

from ampwise.data import Feed

pytestmark = pytest.mark.gpu


def busy(matrix: torch.Tensor, products: int) -> None:
    for _ in range(products):
        matrix = matrix @ matrix * 1e-3


def test_values_survive_the_reuse_of_batch_memory():
    device = torch.device("cuda")
    matrix = torch.randn(2048, 2048, device=device)
    ranges = []
    for batch in Feed((torch.full((1 << 20,), float(i)) for i in range(50)), device):
        busy(matrix, 5)  # the batch is read late, when later copies are queued already
        ranges.append(torch.stack([batch.amin(), batch.amax()]))
    assert torch.stack(ranges).tolist() == [[i, i] for i in range(50)]


def test_only_idle_time_of_the_device_counts():
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)

    def loader(wait_s: float):
        for _ in range(20):
            time.sleep(wait_s)
            yield torch.ones(8)

    hidden = Feed(loader(0.001), device)
    for _ in hidden:
        busy(matrix, 20)
    torch.cuda.synchronize()
    starving = Feed(loader(0.05), device)
    for _ in starving:
        busy(matrix, 1)
    assert hidden.wait_fraction < 0.3
    assert starving.wait_fraction > 0.5
