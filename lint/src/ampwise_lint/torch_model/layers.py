"""Layers of torch: made, and called."""

from __future__ import annotations

import ast
import re

from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.torch_model import tensors
from ampwise_lint.values.abstract import (
    FALSE,
    NONE,
    Const,
    ListValue,
    Model,
    Tensor,
    Value,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.events import (
    Made,
)


def layer(state: State, node: ast.Call, path: str, a: Arguments) -> Value:
    """A layer of torch, made."""
    arguments = dict(a.named)
    for index, value in enumerate(a.positional):
        arguments[f"#{index}"] = value
    inner = ListValue(a.positional) if path.endswith(("Sequential", "ModuleList")) else None
    key = state.made_here(node, path.rpartition(".")[2])
    layer = Model(key, path, node, arguments=arguments, inner=inner)
    state.emit(Made, node, layer)
    return layer


def apply_layer(state: State, node: ast.Call, layer: Model, a: Arguments) -> Value:
    """Call a layer of torch."""
    inputs = a.positional
    if library.LOSS_LAYERS.match(layer.path):
        name = LAYER_TO_FUNCTION.get(layer.path.rpartition(".")[2], "loss")
        result = tensors.apply(state, node, name, inputs, layer.arguments)
        result.loss = True
        return result
    if isinstance(layer.inner, ListValue) and layer.path.endswith("Sequential"):
        value: Value = inputs[0] if inputs else NONE
        for each in layer.inner.items:
            if isinstance(each, Model):
                value = apply_layer(state, node, each, Arguments([value]))
            else:
                value = Tensor(key=f"sequential@{node.lineno}", forward=True)
        return value
    name = layer.path.rpartition(".")[2]
    if _ends_in_norm(layer):
        operation = "layer_norm"
    elif library.LAYERS_LOW.match(layer.path):
        operation = "linear"
    elif library.LAYERS_FLOAT32.match(layer.path):
        operation = "layer_norm" if name != "Softmax" else "softmax"
        operation = {"LogSoftmax": "log_softmax", "Softplus": "softplus"}.get(name, operation)
    else:
        operation = name.lower()
    result = tensors.apply(state, node, operation, inputs)
    given = [each for each in inputs if isinstance(each, Tensor)]
    result.host = bool(given) and all(each.host for each in given)  # where its weights are
    if operation == "linear" and state.region is None and any(each.guessed for each in given):
        result.dtype = None  # weights in float32 take no other input, whatever was guessed
    return (
        ListValue([result, state.unknown(node)])
        if name in ("LSTM", "GRU", "RNN", "MultiheadAttention")
        else result
    )


OF_TRANSFORMERS = re.compile(r"\.Transformer(Encoder|Decoder)(Layer)?$")


def _ends_in_norm(layer: Value | None) -> bool:
    """Whether the last thing a part of a Transformer does is to normalize: that is in float32.

    A layer does unless it is told ``norm_first=True``, a stack that is given a norm, or whose
    layers do.
    """
    if not isinstance(layer, Model) or (kind := OF_TRANSFORMERS.search(layer.path)) is None:
        return False
    if kind.group(2):
        first = layer.arguments.get("norm_first", FALSE)
        return isinstance(first, Const) and not first.value
    norm = layer.arguments.get("norm", layer.arguments.get("#2", NONE))
    if isinstance(norm, Model):
        return bool(library.LAYERS_FLOAT32.match(norm.path))
    one = layer.arguments.get("#0", layer.arguments.get(f"{kind.group(1).lower()}layer"))
    return norm is NONE and _ends_in_norm(one)


LAYER_TO_FUNCTION = {
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "KLDivLoss": "kl_div",
    "CTCLoss": "ctc_loss",
    "CosineEmbeddingLoss": "cosine_embedding_loss",
    "GaussianNLLLoss": "gaussian_nll_loss",
    "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MarginRankingLoss": "margin_ranking_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
    "PoissonNLLLoss": "poisson_nll_loss",
    "SoftMarginLoss": "soft_margin_loss",
    "TripletMarginLoss": "triplet_margin_loss",
}
