"""What is known of torch's names: what makes a scaler, which operations autocast casts, and how.

The cast lists are those of CUDA autocast (torch/csrc ``autocast_mode.h``, torch 2.9 to 2.13); an
operation on neither list runs in the widest type of its inputs.
"""

from __future__ import annotations

import re
from functools import lru_cache

SCALERS = {
    "torch.cuda.amp.GradScaler",
    "torch.cpu.amp.GradScaler",
    "torch.amp.GradScaler",
    "torch.GradScaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    "torch.distributed.fsdp.ShardedGradScaler",
}
AUTOCASTS = {
    "torch.cuda.amp.autocast",
    "torch.cpu.amp.autocast",
    "torch.amp.autocast",
    "torch.autocast",
}
MOVED = (
    ("torch.cuda.amp.grad_scaler.", "torch.cuda.amp."),
    ("torch.cuda.amp.autocast_mode.", "torch.cuda.amp."),
    ("torch.cpu.amp.autocast_mode.", "torch.cpu.amp."),
    ("torch.cpu.amp.grad_scaler.", "torch.cpu.amp."),
    ("torch.amp.autocast_mode.", "torch.amp."),
    ("torch.amp.grad_scaler.", "torch.amp."),
)
CAST_ON_HOST = "cast on the host"
"""The operation of a batch that was cast before it was moved."""

HALVES = {"half": "float16", "bfloat16": "bfloat16"}
"""Methods that make something half, and in which dtype."""

FULL_PRECISION = {
    "fp32", "float32", "f32", "32", "32-true", "64", "64-true",
    "float", "full", "no", "none", "false", "single",
}  # fmt: skip
"""What a precision that is not lower is called, in small letters."""

NO_GRAD = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad"}
ENABLE_GRAD = {"torch.enable_grad", "torch.autograd.enable_grad"}
NULL = {"contextlib.nullcontext", "contextlib.suppress"}

CLIP = {
    "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad_value_",
    "torch.nn.utils.clip_grad_norm",
    "torch.nn.utils.clip_grads_with_norm_",
    "torch.nn.utils.clip_grad.clip_grad_norm_",
    "torch.nn.utils.clip_grad.clip_grad_value_",
    "timm.utils.dispatch_clip_grad",
    "timm.utils.clip_grad.dispatch_clip_grad",
    "timm.utils.agc.adaptive_clip_grad",
    "timm.utils.adaptive_clip_grad",
}
CLIP_NAME = re.compile(
    r"^(dispatch_|adaptive_|unitwise_)?(clip_grad(ient)?s?(_norm|_value)?_?|agc_?)$"
)

OPTIMIZER = re.compile(
    r"^(Fused)?(Adam\w*|SGD\w*|LAMB|Lamb|Lion|RAdam|RMSprop|Adafactor|NAdam|Ranger\w*|AdaBelief"
    r"|Novograd|Muon|LBFGS|LARS)$"
)
SCHEDULER = re.compile(r"(LR|Scheduler|Restarts|OnPlateau)$|^get_\w*schedule\w*$|^get_scheduler$")
WRAPPERS = re.compile(
    r"^(accelerate\.|lightning\.|pytorch_lightning\.|lightning_fabric\.|deepspeed\.|timm\.utils"
    r"\.(cuda\.)?(NativeScaler|ApexScaler)|fairscale\.|colossalai\.|composer\.|ignite\.|ampwise\.|"
    r"transformers\.(Trainer|Seq2SeqTrainer|TrainingArguments)|mmengine\.|mmcv\.|fastai\.|"
    r"detectron2\.engine|trl\.)"
)
ACCUMULATES = ("gradient_accumulation_steps", "gradient_accumulation_plugin")
"""Parameters of Accelerator that tell a window; with them it divides the loss itself."""
LIGHTNING = re.compile(r"^(lightning|pytorch_lightning|lightning_fabric)\.")
SIDE_BY_SIDE = {
    "cat",
    "concat",
    "stack",
    "_flatten_dense_tensors",
    "_unflatten_dense_tensors",
}
"""Operations that put tensors into one, or take them out again, as they are."""
WAITS = re.compile(r"torch\.\w+\.(synchronize|empty_cache)$")
"""Of each backend: torch.cuda, torch.xpu, torch.npu, torch.mps, torch.accelerator."""
CLOCKS = {
    "time.time",
    "time.time_ns",
    "time.perf_counter",
    "time.perf_counter_ns",
    "time.monotonic",
    "timeit.default_timer",
    "datetime.datetime.now",
}

LAYERS_LOW = re.compile(
    r"^torch\.nn\.(modules\.\w+\.)?(Lazy)?(Linear|Bilinear|Conv\w*|LSTM|GRU|RNN|LSTMCell|GRUCell"
    r"|RNNCell|MultiheadAttention|Transformer\w*|PReLU)$"
)
LAYERS_FLOAT32 = re.compile(
    r"^torch\.nn\.(modules\.\w+\.)?(LayerNorm|GroupNorm|Softmax|LogSoftmax|Softmin|Softplus"
    r"|CosineSimilarity|PairwiseDistance)$"
)
LOSS_LAYERS = re.compile(r"^torch\.nn\.(modules\.loss\.)?\w*Loss(2d)?$")
LOSS_FUNCTIONS = {
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss",
    "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "poisson_nll_loss", "soft_margin_loss", "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
}  # fmt: skip
OF_COUNTS = {"ctc_loss": 1}
"""Operations that compute with their first inputs alone, and how many: others are lengths."""
OPS_LOW = {
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm",
    "einsum", "chain_matmul", "scaled_dot_product_attention", "multi_head_attention_forward",
    "prelu", "linalg.multi_dot", "linalg.vecdot", "multi_dot", "tensordot",
}  # fmt: skip
OPS_FLOAT32 = {
    "acos", "asin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1", "log", "log10", "log2",
    "log1p", "reciprocal", "rsqrt", "pow", "rdiv", "norm", "nuclear_norm", "softplus", "softmax",
    "log_softmax", "softmin", "layer_norm", "group_norm", "normalize", "cosine_similarity",
    "cdist", "pdist", "dist", "renorm", "logsumexp", "cumprod", "cumsum", "prod", "sum",
    "embedding_bag", "frobenius_norm", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
    "upsample_bicubic2d", "rms_norm", "stft", "cosine_embedding_loss", "interpolate",
} | (LOSS_FUNCTIONS - {"binary_cross_entropy"})  # fmt: skip
PLAIN = {
    "relu", "sigmoid", "tanh", "gelu", "silu", "leaky_relu", "elu", "dropout", "sqrt", "abs", "neg",
    "mean", "max", "min", "amax", "amin", "clamp", "clip", "clamp_min", "clamp_max", "add", "sub",
    "mul", "div", "true_divide", "square", "var", "std", "std_mean", "var_mean", "view", "reshape",
    "permute", "transpose", "contiguous", "flatten", "squeeze", "unsqueeze", "expand", "expand_as",
    "cat", "stack", "concat", "where", "masked_fill", "masked_fill_", "repeat", "chunk", "split",
    "t", "clone", "roll", "pad", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "gather",
    "index_select", "narrow", "select", "unfold", "type_as", "logsigmoid", "batch_norm", "sub_",
    "add_", "mul_", "div_", "relu_", "sigmoid_", "exp_", "log_", "clamp_", "pow_", "sqrt_",
    "square_", "hardtanh", "swapaxes", "movedim", "tril", "triu", "masked_select", "nan_to_num",
}  # fmt: skip
MOVES = {
    "view", "reshape", "permute", "transpose", "contiguous", "flatten", "squeeze", "unsqueeze",
    "expand", "expand_as", "cat", "stack", "concat", "repeat", "chunk", "split", "t", "clone",
    "roll", "pad", "gather", "index_select", "narrow", "select", "swapaxes", "movedim",
}  # fmt: skip
"""Of these, those that only put values elsewhere."""
FACTORIES = {
    "zeros", "ones", "full", "empty", "rand", "randn", "arange", "tensor", "as_tensor", "eye",
    "linspace", "from_numpy", "randint", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like", "randperm",
}  # fmt: skip
HOST_TENSORS = {
    f"torch.{kind}Tensor"
    for kind in ("", "Float", "Double", "Long", "Int", "Short", "Byte", "Bool", "Half")
}
"""Classes of tensors that are made on the host, of numbers or of a shape."""
ON_HOST = ("numpy.", "scipy.", "sklearn.", "pandas.")
"""Libraries whose functions compute on the host."""
PACKED_SIZES = "batch_sizes"
"""The second part of a PackedSequence, on the host wherever the data is."""
INTEGER = {
    "argmax", "argmin", "argsort", "eq", "ne", "lt", "gt", "le", "ge", "long", "int", "bool",
    "isnan", "isinf", "isfinite", "topk", "numel",
}  # fmt: skip

COUNTS = {"sum", "prod", "cumsum", "cumprod"}
"""Operations that give whole numbers of whole numbers."""

DTYPES = {
    "torch.float16": "float16",
    "torch.half": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
    "torch.float": "float32",
    "torch.float64": "float64",
    "torch.double": "float64",
}
for _type, _dtype in (("HalfTensor", "float16"), ("BFloat16Tensor", "bfloat16")):
    DTYPES[f"torch.cuda.{_type}"] = DTYPES[f"torch.{_type}"] = _dtype

TYPES = {
    "float16", "half", "bfloat16", "float32", "float", "float64", "double", "int8", "int16",
    "short", "int32", "int", "int64", "long", "uint8", "bool", "complex64", "complex128",
}  # fmt: skip
"""Names of dtypes."""

CONVERT_TO_FLOAT8 = {
    "torchao.float8.convert_to_float8_training",
    "torchao.float8.float8_linear_utils.convert_to_float8_training",
}
SAME_NETWORK = {
    *CONVERT_TO_FLOAT8, "torch.compile", "torch.jit.script", "torch.jit.trace",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm",
    "torch.nn.utils.parametrizations.spectral_norm",
    "torch.nn.utils.parametrizations.weight_norm",
    "torch.nn.utils.parametrizations.orthogonal",
    *(
        f"torch.{home}.{each}"
        for home in ("quantization", "ao.quantization")
        for each in ("prepare", "prepare_qat", "convert", "fuse_modules", "quantize_dynamic")
    ),
}  # fmt: skip
"""Functions that give back the network they are given, changed inside."""

DDP = re.compile(r"(^|\.)(DistributedDataParallel|DDP)$")
DP = re.compile(r"(^|\.)DataParallel$")
FSDP = re.compile(r"(^|\.)(FullyShardedDataParallel|FSDP)$")
FULLY_SHARD = {
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed._composable.fsdp.fully_shard.fully_shard",
}
FSDP_POLICY = re.compile(r"torch\.distributed\.[\w.]*\.MixedPrecision(Policy)?$")


@lru_cache(maxsize=4096)
def canonical(path: str) -> str:
    """A full name with torch's private homes of public names undone."""
    for old, new in MOVED:
        if path.startswith(old):
            return new + path[len(old) :]
    return path


def operation(path: str) -> str:
    """``torch.nn.functional.softmax``, ``torch.softmax``: ``softmax``; empty outside torch."""
    for prefix in (
        "torch.nn.functional.",
        "torch.special.",
        "torch.Tensor.",
        "torch._utils.",
        "torch.",
    ):
        if path.startswith(prefix):
            return path[len(prefix) :]
    return ""


NO_OPERATIONS = (
    "torch.cuda.", "torch.distributed.", "torch.backends.", "torch.utils.", "torch.optim.",
    "torch.hub.", "torch.nn.modules.utils.",
)  # fmt: skip


def is_operation(path: str) -> bool:
    """Whether a function computes with tensors."""
    return bool(operation(path)) and not path.startswith(NO_OPERATIONS) and path != "torch.load"


def is_optimizer(path: str) -> bool:
    """Whether a class is an optimizer."""
    if path.startswith("torch.optim.") and "lr_scheduler" not in path and "swa_utils" not in path:
        return path.rpartition(".")[2][:1].isupper()
    return bool(OPTIMIZER.search(path.rpartition(".")[2]))


def is_scheduler(path: str) -> bool:
    """Whether a class or function makes a learning-rate scheduler."""
    return "lr_scheduler" in path or bool(SCHEDULER.search(path.rpartition(".")[2]))
