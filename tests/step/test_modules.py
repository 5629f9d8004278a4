"""Every module class of `torch.nn` trains a step under every policy, or is refused by name.

Each class stands between a linear layer, which has a gradient whatever the class does, and a loss
that weighs every element of its output differently. The reference is the loop by hand under the
same precision: equal bit for bit, or within a bound under ``tf32`` and ``bf16-master``. Where torch
itself cannot (autocast hands a kernel what it does not have), float32 is the reference.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampwise import LossScale, TrainStep, UsageError

from .helpers import parameters
from .idioms import (
    POLICIES,
    ByHand,
    buffers,
    nothing_left_open,  # noqa: F401 - a fixture
    one_line,
    same,
    values,
)

CLASSES = {
    name: each
    for name, each in vars(nn).items()
    if inspect.isclass(each) and issubclass(each, nn.Module) and not name.startswith("_")
}
SCALE = 2.0**10  # low enough for the first step of all of them


@dataclass(frozen=True)
class Recipe:
    """How to make a module, the shape it takes, and how to call it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    call: Callable[[Any, Tensor], Any] = lambda module, x: module(x)


class Host(nn.Module):
    """The module under test behind a linear layer."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        last = recipe.shape[-1]
        self.entry = nn.Linear(last, last)
        self.subject = recipe.make()
        self.call = recipe.call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.subject, self.entry(x))


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Each element of the output by a weight of its own, so that no gradient cancels."""
    total = torch.zeros(())
    for out in tensors(model(x)):
        if out.is_floating_point():
            weights = torch.cos(torch.arange(out.numel(), dtype=torch.float32)).view(out.shape)
            total = total + (out.float() * weights).mean()
    return total


def classes(count: int, shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) % count


def signs(*shape: int) -> Tensor:
    return classes(2, shape).float() * 2 - 1


def against(target: Callable[[Tensor], Tensor], squash: Any = None) -> Callable[[Any, Tensor], Any]:
    """Call a loss with a target made for its input."""
    return lambda m, x: m(squash(x) if squash else x, target(x))


def other(x: Tensor) -> Tensor:
    return x.detach().flip(0) + 0.3


def container() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Container(inner=nn.Linear(8, 8))


def nll_loss_2d() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.NLLLoss2d()


class OwnModule(nn.Module):
    """What `nn.Module` is for: parameters, buffers and a forward of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.weight


def recurrent_cell(m: nn.RNNCellBase, x: Tensor) -> Tensor:
    """`RNNCellBase` has the parameters, and leaves forward to its subclasses."""
    return (F.linear(x, m.weight_ih, m.bias_ih) + F.linear(x, m.weight_hh, m.bias_hh)).tanh()


def recurrent_base(m: nn.RNNBase, x: Tensor) -> Tensor:
    """The same of `RNNBase`."""
    hidden = F.linear(x, m.weight_ih_l0, m.bias_ih_l0)
    return F.linear(hidden.tanh(), m.weight_hh_l0, m.bias_hh_l0)


LINE, ROWS, PLANE, SPACE = (3, 8), (2, 4, 8), (2, 4, 6, 6), (2, 4, 4, 4, 4)
SMALL: dict[str, Any] = {"nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}


def plain(name: str, *args: Any, shape: tuple[int, ...] = LINE, **kwargs: Any) -> Recipe:
    """A module that is called with one tensor."""
    return Recipe(lambda: CLASSES[name](*args, **kwargs), shape)


def by_dimension(name: str, *args: Any, **kwargs: Any) -> dict[str, Recipe]:
    """The 1d, 2d and 3d classes of one kind."""
    shapes = {1: ROWS, 2: PLANE, 3: SPACE}
    return {f"{name}{d}d": plain(f"{name}{d}d", *args, shape=shapes[d], **kwargs) for d in shapes}


def unpooling(dimension: int, shape: tuple[int, ...]) -> Recipe:
    pool = getattr(F, f"max_pool{dimension}d")
    return Recipe(
        lambda: CLASSES[f"MaxUnpool{dimension}d"](2),
        shape,
        lambda m, x: m(*pool(x, 2, return_indices=True)),
    )


ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
    "LogSigmoid", "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
    "Softsign", "Tanh", "Tanhshrink", "GLU", "Dropout", "AlphaDropout", "Flatten",
)  # fmt: skip

RECIPES: dict[str, Recipe] = {
    **{name: plain(name) for name in ACTIVATIONS},
    **{name: plain(name, 0.05) for name in ("Hardshrink", "Softshrink")},
    "Threshold": plain("Threshold", 0.0, 0.1),
    **{name: plain(name, -1) for name in ("Softmax", "LogSoftmax", "Softmin")},
    "Softmax2d": plain("Softmax2d", shape=PLANE),
    "FeatureAlphaDropout": plain("FeatureAlphaDropout", shape=PLANE),
    **by_dimension("Dropout"),
    # convolutions and pooling
    **by_dimension("Conv", 4, 4, 3),
    **by_dimension("ConvTranspose", 4, 4, 3),
    **by_dimension("LazyConv", 4, 3),
    **by_dimension("LazyConvTranspose", 4, 3),
    **by_dimension("AvgPool", 2),
    **by_dimension("MaxPool", 2),
    **by_dimension("AdaptiveAvgPool", 2),
    **by_dimension("AdaptiveMaxPool", 2),
    **by_dimension("LPPool", 2, 2),
    "FractionalMaxPool2d": plain("FractionalMaxPool2d", 2, output_size=3, shape=PLANE),
    "FractionalMaxPool3d": plain("FractionalMaxPool3d", 2, output_size=2, shape=SPACE),
    "MaxUnpool1d": unpooling(1, ROWS),
    "MaxUnpool2d": unpooling(2, PLANE),
    "MaxUnpool3d": unpooling(3, SPACE),
    **by_dimension("CircularPad", 1),
    **by_dimension("ConstantPad", 1, 0.5),
    **by_dimension("ReflectionPad", 1),
    **by_dimension("ReplicationPad", 1),
    **by_dimension("ZeroPad", 1),
    # normalisation
    **by_dimension("BatchNorm", 4),
    **by_dimension("LazyBatchNorm"),
    **by_dimension("InstanceNorm", 4, affine=True, track_running_stats=True),
    **by_dimension("LazyInstanceNorm", affine=True),
    "SyncBatchNorm": plain("SyncBatchNorm", 4, shape=PLANE),
    "GroupNorm": plain("GroupNorm", 2, 4, shape=ROWS),
    "LayerNorm": plain("LayerNorm", 8),
    "RMSNorm": plain("RMSNorm", 8),
    "LocalResponseNorm": plain("LocalResponseNorm", 2, shape=PLANE),
    "CrossMapLRN2d": plain("CrossMapLRN2d", 2, shape=PLANE),
    # linear, embedding, shape
    "Linear": plain("Linear", 8, 5),
    "LazyLinear": plain("LazyLinear", 5),
    "Bilinear": Recipe(lambda: nn.Bilinear(8, 8, 4), LINE, lambda m, x: m(x, x)),
    "Embedding": Recipe(
        lambda: nn.Embedding(5, 8), LINE, lambda m, x: m(classes(5, (3,))) * x
    ),
    "EmbeddingBag": Recipe(
        lambda: nn.EmbeddingBag(5, 8), LINE, lambda m, x: m(classes(5, (3, 2))) * x
    ),
    "ChannelShuffle": plain("ChannelShuffle", 2, shape=PLANE),
    "PixelShuffle": plain("PixelShuffle", 2, shape=PLANE),
    "PixelUnshuffle": plain("PixelUnshuffle", 2, shape=PLANE),
    "Fold": plain("Fold", 4, 2, stride=2, shape=(2, 12, 4)),
    "Unfold": plain("Unfold", 2, shape=PLANE),
    "Unflatten": plain("Unflatten", 1, (2, 4)),
    "Upsample": plain("Upsample", scale_factor=2, shape=PLANE),
    "UpsamplingBilinear2d": plain("UpsamplingBilinear2d", scale_factor=2, shape=PLANE),
    "UpsamplingNearest2d": plain("UpsamplingNearest2d", scale_factor=2, shape=PLANE),
    # recurrent and attention
    **{name: plain(name, 8, 8, batch_first=True, shape=ROWS) for name in ("RNN", "GRU", "LSTM")},
    "RNNBase": Recipe(lambda: nn.RNNBase("RNN_TANH", 8, 8), LINE, recurrent_base),
    **{name: plain(name, 8, 8) for name in ("RNNCell", "GRUCell", "LSTMCell")},
    "RNNCellBase": Recipe(
        lambda: nn.RNNCellBase(8, 8, bias=True, num_chunks=1), LINE, recurrent_cell
    ),
    "MultiheadAttention": Recipe(
        lambda: nn.MultiheadAttention(8, 2, batch_first=True), ROWS, lambda m, x: m(x, x, x)
    ),
    "Transformer": Recipe(
        lambda: nn.Transformer(8, num_encoder_layers=1, num_decoder_layers=1, **SMALL),
        ROWS,
        lambda m, x: m(x, x),
    ),
    "TransformerEncoderLayer": plain("TransformerEncoderLayer", 8, **SMALL, shape=ROWS),
    "TransformerDecoderLayer": Recipe(
        lambda: nn.TransformerDecoderLayer(8, **SMALL), ROWS, lambda m, x: m(x, x)
    ),
    "TransformerEncoder": Recipe(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, **SMALL), 2), ROWS
    ),
    "TransformerDecoder": Recipe(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, **SMALL), 2),
        ROWS,
        lambda m, x: m(x, x),
    ),
    # containers
    "Module": Recipe(OwnModule, LINE),
    "Container": Recipe(container, LINE, lambda m, x: m.inner(x)),
    "Sequential": Recipe(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), LINE),
    "ModuleList": Recipe(
        lambda: nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)]), LINE, lambda m, x: m[1](m[0](x))
    ),
    "ModuleDict": Recipe(
        lambda: nn.ModuleDict({"a": nn.Linear(8, 8)}), LINE, lambda m, x: m["a"](x)
    ),
    "ParameterList": Recipe(
        lambda: nn.ParameterList([torch.randn(8, 8), torch.randn(8)]),
        LINE,
        lambda m, x: x @ m[0] + m[1],
    ),
    "ParameterDict": Recipe(
        lambda: nn.ParameterDict({"a": torch.randn(8, 8)}), LINE, lambda m, x: x @ m["a"]
    ),
    "DataParallel": Recipe(lambda: nn.DataParallel(nn.Linear(8, 8)), LINE),
    # losses and distances
    **{
        name: Recipe(CLASSES[name], LINE, against(other))
        for name in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "CosineSimilarity",
                     "PairwiseDistance", "PoissonNLLLoss")
    },
    "BCELoss": Recipe(nn.BCELoss, LINE, against(lambda x: (other(x) > 0).float(), torch.sigmoid)),
    "BCEWithLogitsLoss": Recipe(nn.BCEWithLogitsLoss, LINE, against(lambda x: (other(x) > 0).float())),
    "CrossEntropyLoss": Recipe(nn.CrossEntropyLoss, LINE, against(lambda x: classes(8, (3,)))),
    "LinearCrossEntropyLoss": Recipe(
        lambda: nn.LinearCrossEntropyLoss(8, 5), LINE, against(lambda x: classes(5, (3,)))
    ),
    "NLLLoss": Recipe(
        nn.NLLLoss, LINE, against(lambda x: classes(8, (3,)), lambda x: x.log_softmax(-1))
    ),
    "NLLLoss2d": Recipe(
        nll_loss_2d, PLANE, against(lambda x: classes(4, (2, 6, 6)), lambda x: x.log_softmax(1))
    ),
    "CTCLoss": Recipe(
        nn.CTCLoss,
        (6, 2, 8),
        lambda m, x: m(
            x.log_softmax(-1), classes(7, (2, 3)) + 1, torch.full((2,), 6), torch.full((2,), 3)
        ),
    ),
    "KLDivLoss": Recipe(
        lambda: nn.KLDivLoss(reduction="batchmean"),
        LINE,
        against(lambda x: other(x).float().softmax(-1), lambda x: x.log_softmax(-1)),
    ),
    "GaussianNLLLoss": Recipe(
        nn.GaussianNLLLoss, LINE, lambda m, x: m(x.float(), other(x).float(), x.float().exp())
    ),
    "CosineEmbeddingLoss": Recipe(
        nn.CosineEmbeddingLoss, LINE, lambda m, x: m(x, other(x), signs(3))
    ),
    "HingeEmbeddingLoss": Recipe(nn.HingeEmbeddingLoss, LINE, against(lambda x: signs(3, 8))),
    "MarginRankingLoss": Recipe(
        lambda: nn.MarginRankingLoss(2.0), LINE, lambda m, x: m(x, other(x), signs(3, 8))
    ),
    "MultiLabelMarginLoss": Recipe(
        nn.MultiLabelMarginLoss,
        LINE,
        against(lambda x: torch.tensor([[1, 3, -1, 0, 0, 0, 0, 0]] * 3)),
    ),
    "MultiLabelSoftMarginLoss": Recipe(
        nn.MultiLabelSoftMarginLoss, LINE, against(lambda x: (other(x) > 0).float())
    ),
    "MultiMarginLoss": Recipe(nn.MultiMarginLoss, LINE, against(lambda x: classes(8, (3,)))),
    "SoftMarginLoss": Recipe(nn.SoftMarginLoss, LINE, against(lambda x: signs(3, 8))),
    "TripletMarginLoss": Recipe(
        lambda: nn.TripletMarginLoss(5.0), LINE, lambda m, x: m(x, other(x), other(x) * 2)
    ),
    "TripletMarginWithDistanceLoss": Recipe(
        lambda: nn.TripletMarginWithDistanceLoss(margin=5.0),
        LINE,
        lambda m, x: m(x, other(x), other(x) * 2),
    ),
    "AdaptiveLogSoftmaxWithLoss": Recipe(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8]),
        LINE,
        lambda m, x: tuple(m(x, torch.tensor([1, 5, 9]))),
    ),
}  # fmt: skip


SINCE_TORCH_2_11 = {"LinearCrossEntropyLoss"}


def test_every_class_of_torch_nn_has_a_recipe():
    """A new one in a new version of torch is to be tried, not overlooked."""
    assert set(RECIPES) - SINCE_TORCH_2_11 <= set(CLASSES) <= set(RECIPES)


def made(name: str) -> tuple[Host, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    recipe = RECIPES[name]
    host, x = Host(recipe), torch.randn(recipe.shape)
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1)
    torch.manual_seed(1)
    return host, optimizer, x


def by_hand(name: str, policy: str) -> Host:
    """One step by hand."""
    host, optimizer, x = made(name)
    loop = ByHand(host, optimizer, policy)
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=policy == "fp16")
    loop(loss_of, x)
    return host


def refusal_is_due(name: str, policy: str) -> bool:
    """Where torch refuses as well, or a module needs more than float32's own path gives it."""
    if policy == "bf16-master" or name.startswith("Lazy"):
        return True
    try:
        by_hand(name, policy)
    except (RuntimeError, ValueError, NotImplementedError):
        return True
    return False


def check_refusal(refusal: UsageError, name: str, policy: str, now: str) -> None:
    """It is due, one line, and names the module by its class (lazy ones change it) or its name."""
    text = str(refusal)
    assert refusal_is_due(name, policy), f"refused, and torch does it: {text}"
    one_line(refusal)
    assert any(each in text for each in ("subject", name, now)), text


def start_of(name: str) -> Tensor:
    """Parameters before the step; of lazy modules as their first forward makes them."""
    host, _, x = made(name)
    with torch.no_grad():
        host(x)
    return parameters(host)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:.*RNN.*")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", sorted(set(RECIPES) & set(CLASSES)))
def test_a_step_of_every_module(name, policy):
    host, optimizer, x = made(name)
    settings = {"loss_scale": LossScale(SCALE)} if policy == "fp16" else {}
    try:
        step = TrainStep(host, optimizer, policy=policy, **settings)
        step(loss_of, x)
    except UsageError as refusal:
        check_refusal(refusal, name, policy, type(host.subject).__name__)
        return
    assert not step.history[0].skipped
    assert all(each.dtype is torch.float32 for each in host.parameters())
    ours, start = parameters(host), start_of(name)
    try:
        reference, bound = parameters(by_hand(name, policy)), 0.05
    except (RuntimeError, ValueError, NotImplementedError):
        reference, bound = parameters(by_hand(name, "fp32")), 0.2
    else:
        if policy in ("fp32", "bf16", "fp16"):
            assert torch.equal(ours, reference)
    way = (reference - start).norm()
    assert way > 0, "the recipe trains nothing"
    assert (ours - reference).norm() <= bound * way

    before, stats, state = values(host), buffers(host), copy.deepcopy(optimizer.state_dict())
    step(lambda m, batch: loss_of(m, batch) * torch.inf, x)
    assert step.history[-1].skipped
    assert same(before, values(host))
    assert same(stats, buffers(host))
    assert same(state["state"], optimizer.state_dict()["state"])
