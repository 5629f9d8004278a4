"""RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::Half != float."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ampwise import Task


class Memory(nn.Module):
    """Keeps a state in float32, and writes a product into it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) to the same."""
        state = torch.zeros(8, 16)
        state[torch.arange(8)] = self.project(x)
        return state


def task() -> Task:
    """One layer, whose output is put into a tensor of another dtype."""

    def batches() -> Iterator[Tensor]:
        yield from torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    return Task(Memory, batches, loss, name="memory")
