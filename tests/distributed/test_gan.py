"""A GAN: two models, two optimizers, the parts of the step, and ranks of unequal batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ampwise import TrainStep
from ampwise.step import LossScale
from tests.distributed import small
from tests.distributed.ranks import Ranks
from tests.distributed.small import Spread

SIZES = (6, 2)
"""Samples of a rank."""


def _made(spread: Spread, sizes: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return small.spread_out(nn.Sequential(*map(nn.Linear, sizes, sizes[1:])), spread)


def _draw(source: torch.Generator, mine: slice) -> Tensor:
    """Samples of all ranks are drawn, and this rank's are taken."""
    return torch.randn(sum(SIZES), small.FEATURES, generator=source)[mine]


def _trained(spread: Spread, precision: str) -> tuple[Tensor, Tensor]:
    """A critic makes two steps for one of the generator; parameters, and the history of figures."""
    start = SIZES[0] * small.me()
    mine = slice(None) if spread == "alone" else slice(start, start + SIZES[small.me()])
    generator, critic = _made(spread, (8, 16, 8)), _made(spread, (8, 16, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
    of_generator, of_critic = optimizers
    scale = LossScale(init_scale=1024.0, growth_interval=2)
    step = TrainStep([generator, critic], optimizers, policy=precision, loss_scale=scale)
    source = torch.Generator().manual_seed(1)
    for _ in range(4):
        for _ in range(2):
            real, noise = _draw(source, mine), _draw(source, mine)
            with step.autocast():
                fake = generator(noise)
                loss = (critic(fake.detach()) - critic(real)).float().mean()
                loss = loss + critic(real).float().square().mean()
            step.backward(loss, optimizers=[of_critic], weight=len(real))
            step.update([of_critic], update_scale=False)
        with step.autocast():
            loss = -critic(fake).float().tanh().mean()
        step.backward(loss, optimizers=[of_generator], weight=len(real))
        step.update([of_generator])
    figures = [(e.loss, e.grad_norm, e.loss_scale, float(e.skipped)) for e in step.history]
    parameters = torch.cat([small.parameters(each) for each in (generator, critic)])
    return parameters, torch.tensor(figures)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_a_gan_trains_as_one_process_with_all_samples(
    ranks: Ranks, spread: Spread, precision: str
) -> None:
    # Half an ULP of a sum of products, 12 steps of at most a few tenths; float16 rounds products.
    bound = {"fp32": 1e-6, "fp16": 12 * 0.1 * 2**-11}[precision]
    alone, expected = ranks(_trained, "alone", precision)[0]
    for found, figures in ranks(_trained, spread, precision):
        assert len(figures) == 4
        torch.testing.assert_close(found, alone, rtol=0, atol=bound)
        torch.testing.assert_close(figures, expected, rtol=1e-3, atol=bound)
