"""Two models that train against each other: a GAN on scikit-learn's handwritten digits.

ampwise bench examples/gan.py
ampwise train examples/gan.py --precision bf16 --steps 400
ampwise train examples/gan.py --set penalty=true
ampwise diagnose examples/gan.py --precision fp16 --set fault=true

A task whose loop is more than one loss and one optimizer gives an `iteration` instead of a `loss`:
it gets the step, and uses its parts. `step.model` and `step.optimizer` are what `model()` and
`optimizer(model)` returned.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus

from ampwise import Task, TrainStep

HELD_OUT = 360
LATENT = 32

Models = dict[str, nn.Module]


class Discriminator(nn.Module):
    """How real an image looks, as a logit.

    With `fault`, features are normalised by hand in a unit that makes them large: in float16 their
    squares overflow.
    """

    def __init__(self, width: int, fault: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)
        )
        self.head = nn.Linear(width, 1)
        self.fault = fault

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, 1) of images (batch, 64)."""
        features = self.features(images)
        if self.fault:
            large = 2000 * features
            energy = (large * large).mean(1, keepdim=True)
            features = large / energy.sqrt()
        return self.head(features)


def generator(width: int) -> nn.Module:
    """From noise (batch, LATENT) to images (batch, 64) in -1 to 1."""
    return nn.Sequential(
        nn.Linear(LATENT, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 64),
        nn.Tanh(),
    )


def task(
    width: int = 128, batch: int = 64, lr: float = 5e-4, penalty: bool = False, fault: bool = False
) -> Task:
    """What ampwise calls; `penalty` adds a gradient penalty, `fault` breaks the discriminator."""
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    training, held_out = images[:-HELD_OUT], images[-HELD_OUT:]

    def models() -> Models:
        return {
            "generator": generator(width),
            "discriminator": Discriminator(width, fault),
        }

    def optimizers(models: Models) -> dict[str, torch.optim.Optimizer]:
        return {
            name: torch.optim.Adam(each.parameters(), lr=lr, betas=(0.5, 0.99), fused=True)
            for name, each in models.items()
        }

    def batches() -> Iterator[Tensor]:
        for chosen in torch.randperm(len(training)).split(batch):
            if len(chosen) == batch:
                yield training[chosen]

    def iteration(step: TrainStep, real: Tensor) -> Tensor:
        generator, discriminator = step.model["generator"], step.model["discriminator"]
        of_generator, of_discriminator = (step.optimizer[name] for name in step.model)

        with step.autocast():
            fake = generator(torch.randn(len(real), LATENT, device=real.device))
            right, wrong = discriminator(real), discriminator(fake.detach())
            loss = softplus(-right.float()).mean() + softplus(wrong.float()).mean()
            if penalty:
                loss = loss + 0.1 * steepness(discriminator, real)
        step.backward(loss, optimizers=[of_discriminator])
        step.update([of_discriminator])

        with step.autocast():
            fooled = softplus(-discriminator(fake).float()).mean()
        step.backward(fooled, optimizers=[of_generator])
        step.update([of_generator])
        return loss  # the loss to report; an iteration may have any number of them

    @torch.no_grad()
    def evaluate(models: Models) -> dict[str, float]:
        source = torch.Generator().manual_seed(1)
        noise = torch.randn(HELD_OUT, LATENT, generator=source)
        device = next(models["generator"].parameters()).device
        made = models["generator"](noise.to(device)).float().cpu()
        return {"distance": distance(made, held_out)}

    return Task(
        model=models,
        batches=batches,
        iteration=iteration,
        optimizer=optimizers,
        evaluate=evaluate,
        name="gan",
        samples=len,
        higher_is_better={"distance": False},
        info={"images": len(images), "held_out": HELD_OUT, "samples": "images"},
    )


def steepness(discriminator: nn.Module, images: Tensor) -> Tensor:
    """Mean squared gradient of the discriminator at real images (R1, Mescheder et al. 2018)."""
    images = images.detach().requires_grad_()
    logits = discriminator(images).float()
    (slopes,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return slopes.square().sum(1).mean()


def distance(made: Tensor, real: Tensor) -> float:
    """Energy distance of two samples: 0 where they are alike (Szekely and Rizzo 2013)."""
    between = torch.cdist(made, real).mean()
    within = torch.cdist(made, made).mean() + torch.cdist(real, real).mean()
    return float(2 * between - within)
