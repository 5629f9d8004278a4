"""Faults in loops of other shapes: two optimizers, losses inside of models, data made on the way."""

from __future__ import annotations

import pytest

from tests.observe.inside import line_of, observe

GAN = """
import sys, torch
from torch import nn

kind, scaled = sys.argv[1], sys.argv[2] == "scaled"
torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.out, self.n = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 8), 0

    def forward(self, z):
        self.n += 1
        h = torch.relu(self.norm(self.lin(z)))
        if kind == "generator" and self.n == 6:
            u = h - h.detach()
            h = h + torch.where(u > 0, torch.sqrt(u), u)  # generator
        return self.out(h)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.out, self.n = nn.Linear(8, 16), nn.Linear(16, 1), 0

    def forward(self, x):
        self.n += 1
        h = torch.relu(self.lin(x))
        if kind == "critic" and self.n == 14:
            h = h * 1e30 * 1e30  # critic
        return self.out(h).squeeze(1)


dtype = torch.float16 if scaled else torch.bfloat16
g, d = Generator(), Critic()
opt_g = torch.optim.Adam(g.parameters(), 1e-3)
opt_d = torch.optim.Adam(d.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
loss_fn = nn.BCEWithLogitsLoss()
for i in range(8):
    real, z = torch.randn(6, 8), torch.randn(6, 4)
    opt_d.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss_real = loss_fn(d(real), torch.ones(6))
    scaler.scale(loss_real).backward()  # real
    with torch.autocast("cpu", dtype=dtype):
        fake = g(z)
        loss_fake = loss_fn(d(fake.detach()), torch.zeros(6))
    scaler.scale(loss_fake).backward()
    scaler.step(opt_d)
    opt_g.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss_g = loss_fn(d(fake), torch.ones(6))
        if kind == "loss" and i == 1:
            loss_g = (loss_g * 1e30 * 1e30)  # huge
    scaler.scale(loss_g).backward()
    scaler.step(opt_g)
    scaler.update()
"""

INSIDE = """
import sys, torch
from torch import nn
import torch.nn.functional as F

kind, dtype = sys.argv[1], getattr(torch, sys.argv[2])
scaled = dtype == torch.float16
torch.manual_seed(0)
text = torch.randint(0, 32, (4096,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        h = F.gelu(self.up(self.norm(x)))
        if kind == "forward":
            h = h * 1e30 * 1e30  # overflow
        return x + self.down(h)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(32, 16), Block(), nn.Linear(16, 32)
        self.step = 0

    def forward(self, tokens, targets=None):
        x = self.block(self.embed(tokens))
        self.step += 1
        if kind == "backward" and self.step == 9:
            u = x - x.detach()
            x = x + torch.where(u > 0, torch.sqrt(u), u)  # root
        logits = self.head(x)
        if kind == "loss" and self.step == 5:
            logits = logits * 1e30 * 1e30  # logits
        loss = F.cross_entropy(logits.view(-1, 32), targets.view(-1))
        return logits, loss


def get_batch():
    at = torch.randint(0, 4000, (8,))
    x = torch.stack([text[i : i + 16] for i in at])
    y = torch.stack([text[i + 1 : i + 17] for i in at])
    return x, y


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=256.0)
x, y = get_batch()
for i in range(6):
    for micro in range(2):
        with torch.autocast("cpu", dtype=dtype):
            logits, loss = model(x, y)
            loss = loss / 2
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""

DRAWN = """
import sys, torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for i in range(60):
    x, y = torch.randn(16, 8), torch.rand(16, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    out = F.dropout(out, 0.1)
    noise = torch.randn_like(out) * 0.01
    loss = ((out.float() + noise - y) ** 2).mean() + (y - 0.004).log().mean() * 0.01  # log
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not torch.isfinite(loss):
        open(sys.argv[1], "w").write(str(i + 1))
        break
"""


def found_in(tmp_path, text, *args):
    path = tmp_path / "train.py"
    path.write_text(text)
    seen = observe(path, *args)
    return path, seen.report.faults


@pytest.mark.parametrize("scaled", ["scaled", "plain"])
@pytest.mark.parametrize(
    ("kind", "text", "cause", "step"),
    [
        ("generator", "# generator", "BACKWARD_SINGULARITY", 6),
        ("critic", "# critic", "RANGE_OVERFLOW", 5),
        ("loss", "# huge", "RANGE_OVERFLOW", 2),
    ],
)
def test_a_gan_s_fault_is_that_of_the_update_it_breaks(tmp_path, kind, text, cause, step, scaled):
    path, faults = found_in(tmp_path, GAN, kind, scaled)
    found = faults[0]
    assert (found.status, found.cause, found.step) == ("fault", cause, step), found.explanation
    assert found.origin is not None
    assert found.origin.line == line_of(path, text)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "text", "cause", "step"),
    [
        ("forward", "# overflow", "RANGE_OVERFLOW", 1),
        ("backward", "# root", "BACKWARD_SINGULARITY", 5),
        ("loss", "# logits", "RANGE_OVERFLOW", 3),
    ],
)
def test_a_loss_inside_of_the_model(tmp_path, kind, text, cause, step, dtype):
    path, faults = found_in(tmp_path, INSIDE, kind, dtype)
    found = faults[0]
    assert (found.status, found.cause, found.step) == ("fault", cause, step), found.explanation
    assert found.origin is not None
    assert found.origin.line == line_of(path, text)
    assert found.origin.module in ("", "block")


def test_data_and_noise_that_are_drawn_on_the_way(tmp_path):
    first = tmp_path / "first"
    path, (found,) = found_in(tmp_path, DRAWN, str(first))
    assert (found.status, found.cause) == ("fault", "DOMAIN_ERROR"), found.explanation
    assert found.step == int(first.read_text()) > 4  # later than any step that was looked at
    assert found.origin is not None
    assert found.origin.line == line_of(path, "# log")


PLAIN = """
import sys, torch, weakref
from torch import nn
import torch.nn.functional as F

kind = sys.argv[1]
torch.manual_seed(0)

def compute(out, y):
    return F.cross_entropy(out * 1e30 * 1e30 if kind == "compiled" else out, y)  # loss

compute = torch.compile(compute, backend="aot_eager") if kind == "compiled" else compute
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
kept = []
for i in range(5):
    x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
    if kind == "in place" and i == 3:
        x[0, 0] = float("inf")
    if kind == "vmap":
        def loss_of(parameters, x, y):
            return F.cross_entropy(torch.func.functional_call(net, parameters, (x[None],)), y[None])
        torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(dict(net.named_parameters()), x, y)
        torch.jit.trace(net, x)
    out = net(x)
    loss = compute(out, y)
    loss.backward()
    if kind == "in place":
        x.zero_()
    kept += [weakref.ref(out), weakref.ref(x)]
    optimizer.step()
    optimizer.zero_grad()
    if i < 4:
        del out, x, loss
if kind == "memory":
    open(sys.argv[2], "w").write(str([each() is not None for each in kept]))
"""


def test_a_compiled_loss_is_not_looked_into(tmp_path):
    _, (found,) = found_in(tmp_path, PLAIN, "compiled")
    assert found.status == "not_reproduced"
    assert "What Sequential returns is finite" in found.explanation
    assert "code outside of modules is compiled" in found.explanation


def test_a_batch_that_is_changed_in_place_is_said_to_be(tmp_path):
    _, (found,) = found_in(tmp_path, PLAIN, "in place")
    assert found.status == "not_reproduced"
    assert "an argument of a module was changed in place afterwards" in found.explanation


def test_traces_and_transforms_are_no_steps(tmp_path):
    assert found_in(tmp_path, PLAIN, "vmap")[1] == []


def test_nothing_is_held_after_a_step(tmp_path):
    """Outputs and batches go with the step that they are of, also where it was looked at."""
    found_in(tmp_path, PLAIN, "memory", str(tmp_path / "held"))
    assert (tmp_path / "held").read_text() == str([False] * 8 + [True] * 2)


AHEAD = """
import sys, torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head, self.calls = nn.Linear(8, 16), nn.Linear(16, 4), 0

    def forward(self, x):
        self.calls += 1
        h = torch.relu(self.first(x))
        if self.calls == 6:
            h = h + (h - h.detach()).pow(2).sum(1, keepdim=True).sqrt()  # singular
        return self.head(h)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
following = torch.randn(16, 8), torch.randint(0, 4, (16,))
for i in range(8):
    x, y = following
    following = torch.randn(16, 8), torch.randint(0, 4, (16,))  # fetched while this one is used
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_targets_that_were_there_before_are_no_part_of_a_loss_that_is_known(tmp_path):
    path, faults = found_in(tmp_path, AHEAD)
    found = faults[0]
    assert (found.status, found.cause) == ("fault", "BACKWARD_SINGULARITY"), found.explanation
    assert (found.step, found.origin.line) == (6, line_of(path, "# singular"))
