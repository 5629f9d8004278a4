"""Two networks, two optimizers, after pytorch/examples' dcgan/main.py."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
parser.add_argument("--at-step", type=int, default=3)
parser.add_argument("--once", action="store_true")
parser.add_argument("--dump")
opt = parser.parse_args()

torch.manual_seed(999)
nz, nx, batch = 8, 12, 16
dtype = torch.float16 if opt.precision == "fp16" else torch.bfloat16


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.direction = nn.Parameter(torch.ones(nz))
        self.main = nn.Sequential(nn.Linear(nz, 32), nn.ReLU(), nn.Linear(32, nx), nn.Tanh())

    def forward(self, z):
        z = z * self.direction
        z = z / (0.1 + z.pow(2).sum(1, keepdim=True).sqrt())  # PLANTED backward: at z = 0
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2 * nx, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        energy = x.pow(2)  # PLANTED forward: of samples far away
        return self.main(torch.cat([x, energy], 1)).view(-1)


def noise(bad):
    z = torch.randn(batch, nz)
    return z * 0 if bad and opt.fault == "backward" else z


def real_samples(bad):
    x = torch.sin(torch.rand(batch, 1) * 6 + torch.arange(nx) / 2)
    return x * 1e20 if bad and opt.fault == "forward" else x


netG, netD = Generator(), Discriminator()
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler(
    "cpu",
    init_scale=2.0**30 if opt.fault == "skip" else 2.0**10,
    enabled=opt.precision == "fp16",
)
autocast = torch.autocast("cpu", dtype, enabled=opt.precision != "fp32")
ones, zeros = torch.ones(batch), torch.zeros(batch)
losses = []
for step in range(1, opt.steps + 1):
    bad = step == opt.at_step if opt.once else step >= opt.at_step
    # Update D: maximize log(D(x)) + log(1 - D(G(z))).
    netD.zero_grad()
    with autocast:
        errD_real = criterion(netD(real_samples(bad)), ones)
    scaler.scale(errD_real).backward()
    with autocast:
        fake = netG(noise(bad))
        errD_fake = criterion(netD(fake.detach()), zeros)
    scaler.scale(errD_fake).backward()
    scaler.step(optimizerD)
    # Update G: maximize log(D(G(z))).
    netG.zero_grad()
    with autocast:
        errG = criterion(netD(fake), ones)
    scaler.scale(errG).backward()
    scaler.step(optimizerG)
    scaler.update()
    losses.append((errD_real + errD_fake).item())
    losses.append(errG.item())
print(f"Loss_D: {losses[-2]:.4f} Loss_G: {losses[-1]:.4f}")
if opt.dump:
    state = {f"{name}.{key}": value for name, net in (("G", netG), ("D", netD))
             for key, value in net.state_dict().items()}  # fmt: skip
    torch.save({"losses": losses, "model": state}, opt.dump)
