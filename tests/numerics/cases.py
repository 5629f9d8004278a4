"""Public failing cases as small tasks, and look-alikes in which nothing is wrong.

A line that breaks ends in ``# <- here``; the cases come from bug reports of the field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwise.tasks import Task


@dataclass(frozen=True)
class Case:
    """What a diagnosis must say."""

    make: Callable[[], Task]
    status: str
    cause: str | None
    module: str = ""
    phase: str = "forward"
    fix: str = ""  # in the text of a verified fix; "" where none can be
    precision: str = "fp16"
    line_of: object = None  # class or function whose marked line is the origin


def line_of(code: object) -> int:
    lines, start = inspect.getsourcelines(code)
    return next(start + i for i, line in enumerate(lines) if "# <- here" in line)


def task(model, loss, batch, lr=1e-3) -> Task:
    return Task(
        model=model,
        batches=lambda: [batch] * 8,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr),
        name="case",
    )


def square(model, batch):
    return model(batch).float().pow(2).mean()


def apart(model, batch):
    return (model(batch).float() - 0.5).pow(2).mean()


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class FeedForward(nn.Module):  # T5's wo
    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(16, 1024)
        self.wo = nn.Linear(1024, 512, bias=False)
        nn.init.constant_(self.wo.weight, 0.5)

    def forward(self, x):
        h = self.wi(x) * 0 + 130
        return self.wo(h)  # <- here


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = FeedForward()

    def forward(self, x):
        return 1e-5 * self.block(x).float()


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64)

    def forward(self, x):
        q = k = self.project(x) * 0 + 40
        scores = q @ k.transpose(-1, -2)  # <- here
        return torch.softmax(scores / 8, dim=-1) @ k


class Checkpointed(Scores):
    """Computed a second time in backward."""

    def inner(self, q):
        scores = q @ q.transpose(-1, -2)  # <- here
        return torch.softmax(scores / 512, dim=-1)

    def forward(self, x):
        q = self.project(x) + 40
        return checkpoint(self.inner, q, use_reentrant=False) @ q


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        scores = self.project(x)
        scores = scores.masked_fill(torch.eye(8, dtype=torch.bool), -1e9)  # <- here
        return torch.softmax(scores, dim=-1)


class MaskedByProduct(Masked):
    def forward(self, x):
        scores = self.project(x)
        padding = torch.eye(8, dtype=scores.dtype)
        padding[0] = 1  # a row of nothing else: with a finite constant its softmax is even
        mask = padding * -1e9  # <- here
        return torch.softmax(scores + mask, dim=-1)


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        h = self.project(x) * 1e5  # <- here
        return h / h.norm(dim=-1, keepdim=True)


class SquaredNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)  # <- here
        return x * torch.rsqrt(variance + 1e-6) * self.weight


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.norm = SquaredNorm()

    def forward(self, x):
        return self.norm(self.project(x) + 300)


class Variance(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 1)
        nn.init.ones_(self.scale.weight)
        nn.init.zeros_(self.scale.bias)

    def forward(self, x):
        h = self.scale(x).squeeze(-1)
        mean, mean_square = h.mean(-1, keepdim=True), (h * h).mean(-1, keepdim=True)
        return (h - mean) / torch.sqrt(mean_square - mean * mean)  # <- here


class ChannelNorm(nn.Module):
    """Mean of squares less square of the mean: 0 where 0.01 should be."""

    def __init__(self):
        super().__init__()
        self.act = nn.LeakyReLU(0.0015)  # by chance the size of a variance
        self.lin = nn.Linear(16, 16, bias=False)
        nn.init.eye_(self.lin.weight)

    def forward(self, x):
        x = self.act(self.lin(x)) + 20.0
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean  # <- here
        return (x - mean) / torch.sqrt(variance)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 50)
        nn.init.normal_(self.head.weight)

    def forward(self, x):
        return self.head(x)


def summed(model, batch):
    logits = model(batch)
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy(logits, torch.ones(8192).long(), reduction="sum")  # <- here


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return F.normalize(self.project(x), dim=-1)  # <- here


class Length(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return torch.sqrt((self.project(x) ** 2).sum(-1))  # <- here


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        h = self.project(x)
        return torch.where(h > 2, torch.log2(h), 2 * h)  # <- here


def zero_row() -> torch.Tensor:
    batch = data(4, 4)
    batch[1] = 0
    return batch


class LogOfSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(2, 2, bias=False)
        self.project.weight.data = torch.eye(2)

    def forward(self, x):
        p = torch.softmax(self.project(x), dim=-1, dtype=torch.float16)
        return torch.log(p)  # <- here


class Attention(nn.Module):
    def __init__(self, masked: int = 6):
        super().__init__()
        self.masked = masked
        self.embed = nn.Linear(8, 16)
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        h, mask = self.embed(x), torch.zeros(2, 6, dtype=torch.bool)
        mask[0, : self.masked] = True
        out, _ = self.attn(h, h, h, key_padding_mask=mask, need_weights=True)  # <- here
        return out[1]


class ConvNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x))  # <- here


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))

    def forward(self, x):
        return (self.w * x).sum()


class Plain(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x):
        return self.lin(x)  # <- here


def tiny(model, batch):
    return square(model, batch) * 1e-6


def bad_loss(model, batch):
    return square(model, batch) + torch.log(torch.tensor(-1.0))  # <- here


def inf_row() -> torch.Tensor:
    batch = data(8, 32)
    batch[3, 5] = float("nan")
    return batch


class Asserting(Plain):
    def forward(self, x):
        h = 300 * self.lin(x)
        h = h * h  # <- here
        assert torch.isfinite(h).all(), "activations explode"
        return h.float() / 9e4


class LogSpectrum(nn.Module):
    """Takes the log of silence for data; -inf is no mask to a convolution."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)

    def forward(self, x):
        return self.conv(x.unsqueeze(1) / 2)


def log_of_zero() -> torch.Tensor:
    batch = data(8, 32).abs()
    batch[3, 5] = 0
    return batch.log()


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        h = self.lin(x)
        chosen = h[h > 1e4]
        return chosen.mean() + h  # <- here


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.register_buffer("rates", 0.5 ** torch.arange(8))

    def forward(self, x):
        positions = torch.arange(x.shape[1], dtype=torch.bfloat16)  # <- here
        angles = positions[:, None] * self.rates
        return self.out(x * torch.cos(angles.float()))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(704, 8), nn.Linear(8, 8)

    def forward(self, x):
        positions = torch.arange(x.shape[1]).to(torch.bfloat16)  # <- here
        return self.out(x + self.table(positions.long()))


class Flushed(Plain):
    def forward(self, x):
        h = self.lin(x).half()
        h = h * 1e-5 * 1e-4  # <- here
        return h.float() * 1e3


class Shifted(Plain):
    def forward(self, x):
        h = 0.1 * self.lin(x).half()
        return (h + 2000) - 2000  # <- here


class Branch(nn.Module):
    """A small branch whose gradient is noise; that of the rest is right."""

    def __init__(self):
        super().__init__()
        self.main, self.branch = nn.Linear(8, 16), nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        b = self.branch(x) + 30.0
        mean = b.mean(-1, keepdim=True)
        variance = (b * b).mean(-1, keepdim=True) - mean * mean  # <- here
        normed = (b - mean) / (variance.abs() + 1e-2).sqrt()
        return self.head(self.main(x) + 0.01 * normed)


class BranchAndOverflow(Branch):
    def forward(self, x):
        h = self.main(x) * 6e4 * 4  # <- here
        return super().forward(x) + self.head(h / 2.4e5)


def fourth(model, batch):
    return F.cross_entropy(model(batch).float(), torch.arange(len(batch)) % 4)


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        room = torch.zeros(len(x), 8)
        chosen = torch.tensor([0, 2])
        room[chosen] = self.lin(x)[chosen]  # <- here
        return room


class Misplaced(Placed):
    """An error about dtypes, after an infinity that has nothing to do with it."""

    def forward(self, x):
        room = torch.zeros(len(x), 8)
        chosen = torch.tensor([0, 2])
        self.logged = self.lin(x).detach() * 1e5 * 1e5
        room[chosen] = self.lin(x)[chosen]  # <- here
        return room


class BadParameter(Plain):
    def __init__(self):
        super().__init__()
        self.lin.weight.data[0, 0] = float("inf")


class BadBuffer(ConvNorm):
    def __init__(self):
        super().__init__()
        self.norm.running_var.fill_(float("nan"))
        self.norm.eval()
        self.norm.train = lambda mode=True: self.norm


CASES = {
    "t5 feed-forward": Case(lambda: task(T5, apart, data(4, 16)), "fault", "RANGE_OVERFLOW",
        "block.wo", fix="module block.wo in float32", line_of=FeedForward),
    "scores before scaling": Case(lambda: task(Scores, square, data(2, 5, 64)), "fault",
        "RANGE_OVERFLOW", fix="in float32", line_of=Scores),
    "mask constant": Case(lambda: task(Masked, square, data(8, 8)), "fault", "MASK_CONSTANT",
        fix="a number that the format has", line_of=Masked),
    "rms norm in half": Case(lambda: task(Normed, square, 9 * data(4, 16)), "fault",
        "RANGE_OVERFLOW", "norm", fix="module norm in float32", line_of=SquaredNorm),
    "mean of squares": Case(lambda: task(Variance, square, 29.9 + 0.005 * data(16, 64, 1)),
        "fault", "CANCELLATION", fix="in float64", line_of=Variance),
    "summed cross-entropy": Case(lambda: task(Head, summed, 3 * data(8192, 8)), "fault",
        "RANGE_OVERFLOW", fix="in float32", line_of=summed),
    "normalize a zero row": Case(lambda: task(Unit, apart, zero_row()), "fault", "EPS_UNDERFLOW",
        fix="an eps that float16 holds", line_of=Unit),
    "length of zero": Case(lambda: task(Length, square, zero_row()), "fault",
        "BACKWARD_SINGULARITY", phase="backward", fix="away from the singularity",
        line_of=Length),
    "branch not taken": Case(lambda: task(Branches, square, zero_row()), "fault",
        "BACKWARD_SINGULARITY", phase="backward", fix="away from the singularity",
        line_of=Branches),
    "log of softmax": Case(lambda: task(LogOfSoftmax, lambda m, b: -m(b).float().mean(),
        torch.tensor([[-20.0, 0.0]] * 3)), "fault", "UNDERFLOW", fix="in float32",
        line_of=LogOfSoftmax),
    "fully masked row": Case(lambda: task(Attention, square, data(2, 6, 8)), "fault",
        "FULLY_MASKED_ROW", "attn", fix="most negative finite number", line_of=Attention),
    "batch norm of large values": Case(lambda: task(ConvNorm, square, 3e5 + 1e3 * data(2, 1, 8, 8)),
        "fault", "RANGE_OVERFLOW", "conv", fix="module conv in float32", line_of=ConvNorm),
    "bfloat16 weights": Case(lambda: task(Half, lambda m, b: m(b).float(),
        torch.ones(64, dtype=torch.bfloat16)), "fault", "STAGNATION", phase="optimizer",
        fix="master weights", precision="bf16"),
    "gradients underflow": Case(lambda: task(Plain, tiny, data(8, 32)), "fault", "UNDERFLOW",
        "lin", phase="backward", fix="a loss scale of", precision="fp16:scaling=off",
        line_of=Plain),
    "loss stays NaN": Case(lambda: task(Plain, bad_loss, data(8, 32)), "fault", "DOMAIN_ERROR",
        line_of=bad_loss),
    "scale too high": Case(lambda: task(lambda: Plain(4), lambda m, b: m(b).sum(),
        torch.full((4, 4), 0.75)), "benign", "SCALE_TOO_HIGH", "lin", phase="backward",
        fix="a lower initial loss scale"),
    "rounded positions": Case(lambda: task(Positions, square, data(2, 700, 8)), "fault",
        "PRECISION_LOSS", fix="in float32", precision="bf16", line_of=Positions),
    "flushed to zero": Case(lambda: task(Flushed, apart, data(8, 32)), "fault", "UNDERFLOW",
        fix="in float32", precision="fp16:scaling=off", line_of=Flushed),
    "digits shifted out": Case(lambda: task(Shifted, square, data(8, 32)), "fault",
        "CANCELLATION", fix="in float", line_of=Shifted),
    "half into float": Case(lambda: task(Placed, square, data(8, 8)), "fault", "DTYPE_ERROR",
        fix="in float32", line_of=Placed),
    "bad data": Case(lambda: task(Plain, square, inf_row()), "fault", "BAD_INPUT", phase="data",
        fix="drop the bad data"),
    "nothing selected": Case(lambda: task(Averaged, square, data(4, 8)), "fault",
        "EMPTY_REDUCTION", fix="nothing to reduce gives 0", line_of=Averaged),
    "bad parameter": Case(lambda: task(BadParameter, square, data(8, 32)), "fault",
        "BAD_PARAMETER"),
    "bad buffer": Case(lambda: task(BadBuffer, square, data(2, 1, 8, 8)), "fault", "BAD_BUFFER",
        fix="restore the buffers"),
}  # fmt: skip

VARIANTS = {
    "scores, recomputed in backward": Case(lambda: task(Checkpointed, square, data(2, 5, 64)),
        "fault", "RANGE_OVERFLOW", fix="line", line_of=Checkpointed),
    "mask constant as a factor": Case(lambda: task(MaskedByProduct, square, data(8, 8)), "fault",
        "MASK_CONSTANT", fix="a number that the format has", line_of=MaskedByProduct),
    "gain": Case(lambda: task(Gain, apart, data(8, 8)), "fault", "RANGE_OVERFLOW",
        fix="in float32", line_of=Gain),
    "variance becomes zero": Case(lambda: task(ChannelNorm, square, 0.11 * data(64, 16).abs()),
        "fault", "CANCELLATION", fix="in float64", line_of=ChannelNorm),
    "variance becomes zero in bfloat16": Case(lambda: task(ChannelNorm, square,
        0.11 * data(64, 16).abs()), "fault", "CANCELLATION", precision="bf16",
        line_of=ChannelNorm),
    "variance becomes zero in float32": Case(lambda: task(ChannelNorm, square,
        1e-4 * data(64, 16).abs()), "fault", "CANCELLATION", fix="in float64",
        precision="fp32", line_of=ChannelNorm),
    "rounded indices": Case(lambda: task(Embedded, square, data(2, 700, 8)), "fault",
        "PRECISION_LOSS", precision="bf16", line_of=Embedded),  # the reference has the same indices
    "a branch on noise": Case(lambda: task(Branch, fourth, data(64, 8)), "fault", "CANCELLATION",
        fix="in float64", line_of=Branch),
    "half into float beside an infinity": Case(lambda: task(Misplaced, square, data(8, 8)),
        "fault", "DTYPE_ERROR", fix="in float32", line_of=Misplaced),
    "an assertion": Case(lambda: task(Asserting, square, data(8, 32)), "fault",
        "RANGE_OVERFLOW", fix="the function around line", line_of=Asserting),
    "log of zero in the data": Case(lambda: task(LogSpectrum, square, log_of_zero()), "fault",
        "BAD_INPUT", phase="data", fix="drop the bad data"),
}  # fmt: skip
"""Further cases, that `benchmarks/origins.py` does not count: the same causes in other guises."""


# -- nothing is wrong ------------------------------------------------------------------------------


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))

    def forward(self, x):
        h = self.project(x)
        return torch.softmax(h @ h.transpose(-1, -2) / 4 + self.mask, dim=-1) @ h


class CausalSdpa(Causal):
    def forward(self, x):
        h = self.project(x).unsqueeze(1)
        return F.scaled_dot_product_attention(h, h, h, attn_mask=self.mask.to(h.dtype))


class MaskedRowInSdpa(Causal):
    """A row of -inf is zeros in the fused kernel, which knows what is meant."""

    def forward(self, x):
        h = self.project(x).unsqueeze(1)
        mask = torch.zeros(6, 6, dtype=h.dtype)
        mask[2] = float("-inf")
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask)


class FinfoMask(Masked):
    def forward(self, x):
        scores = self.project(x)
        least = torch.finfo(scores.dtype).min
        return torch.softmax(scores.masked_fill(torch.eye(8, dtype=torch.bool), least), dim=-1)


class UpcastNorm(SquaredNorm):
    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + 1e-6)).to(x.dtype) * self.weight


class NormedWell(Normed):
    def __init__(self):
        super().__init__()
        self.norm = UpcastNorm()


class SafeLength(Length):
    def forward(self, x):
        return torch.sqrt((self.project(x).float() ** 2).sum(-1) + 1e-6)


class DoubleWhere(Branches):
    def forward(self, x):
        h = self.project(x)
        safe = torch.where(h > 2, h, torch.ones_like(h))
        return torch.where(h > 2, torch.log2(safe), 2 * h)


class LogSoftmax(LogOfSoftmax):
    def forward(self, x):
        return F.log_softmax(self.project(x), dim=-1)


class Uninitialised(Plain):
    def forward(self, x):
        room = torch.empty(x.shape, dtype=torch.float16).fill_(float("nan"))
        room = torch.empty_like(room)
        room.copy_(self.lin(x))
        return room


class Recomputed(Plain):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return checkpoint(lambda h: self.drop(torch.relu(self.lin(h))), x, use_reentrant=False)


class TiedTwice(Plain):
    def forward(self, x):
        return self.lin(torch.tanh(self.lin(x)))


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(32, 4),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)


def penalty(model, batch):
    """A gradient penalty: derivatives of derivatives."""
    batch = batch.detach().requires_grad_()
    out = model(batch).float().square().mean()
    (grad,) = torch.autograd.grad(out, batch, create_graph=True)
    return out + grad.float().square().mean()


class Pooled(Plain):
    """The mean over as many positions as each row has: lengths that bfloat16 rounds."""

    def forward(self, x):
        lengths = torch.tensor([259, 301, 517, 599])
        inside = torch.arange(x.shape[1])[None] < lengths[:, None]
        h = self.lin(x)
        return (h * inside[..., None]).sum(1) / lengths.to(h.dtype)[:, None]


ADVANTAGES = F.normalize(data(64) - data(64).mean(), dim=0) * 8  # about 1, and 0 in sum


def log_policy(model, batch):
    return F.log_softmax(model(batch).float(), dim=-1)[:, 0]


def policy_gradient(model, batch):
    """A loss that is 0 but for rounding, with a gradient that is not."""
    chosen = log_policy(model, batch)
    return -(torch.exp(chosen - chosen.detach()) * ADVANTAGES).mean()


class Clipped:
    """The clipped loss of PPO, beside the policy that the first call saw."""

    old = None

    def __call__(self, model, batch):
        chosen = log_policy(model, batch)
        if self.old is None:
            with torch.autocast("cpu", enabled=False):
                self.old = log_policy(model, batch).detach()
        ratio = torch.exp(chosen - self.old)
        return -torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES).mean()


def critic(model, batch):
    return model(batch).float().mean() - model(batch + 0.01).float().mean()


class MaskInBatch(nn.Module):
    """An additive mask that comes with the data, and is carried along before it is used."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        values, mask = x
        return torch.softmax(self.project(values) + 2 * mask, dim=-1)


def masked_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return data(6, 8), torch.full((6, 8), float("-inf")).triu(3)


LOOK_ALIKES = {
    "mask in the batch": lambda: task(MaskInBatch, square, masked_batch()),
    "mean over lengths": lambda: task(Pooled, apart, data(4, 600, 32)),
    "policy gradient": lambda: task(Plain, policy_gradient, data(64, 32), lr=1e-5),
    "clipped policy ratio": lambda: task(Plain, Clipped(), data(64, 32), lr=1e-5),
    "critic": lambda: task(Plain, critic, data(64, 32), lr=1e-6),
    "causal mask": lambda: task(Causal, square, data(2, 6, 16)),
    "causal mask in sdpa": lambda: task(CausalSdpa, square, data(2, 6, 16)),
    "masked row in sdpa": lambda: task(MaskedRowInSdpa, square, data(2, 6, 16)),
    "finfo mask": lambda: task(FinfoMask, square, data(8, 8)),
    "rms norm upcast": lambda: task(NormedWell, apart, 9 * data(4, 16)),
    "length with eps": lambda: task(SafeLength, square, zero_row()),
    "double where": lambda: task(DoubleWhere, square, zero_row()),
    "log softmax": lambda: task(
        LogSoftmax, lambda m, b: -m(b).float().mean(), torch.tensor([[-20.0, 0.0]] * 3)
    ),
    "row partly masked": lambda: task(lambda: Attention(4), square, data(2, 6, 8)),
    "batch norm": lambda: task(Picture, square, data(4, 1, 8, 8)),
    "uninitialised memory": lambda: task(Uninitialised, square, data(8, 32)),
    "recomputed with dropout": lambda: task(Recomputed, square, data(8, 32)),
    "shared module": lambda: task(TiedTwice, square, data(8, 32)),
    "gradient penalty": lambda: task(TiedTwice, penalty, data(8, 32)),
    "small loss, scaled": lambda: task(Plain, tiny, data(8, 32)),
}
