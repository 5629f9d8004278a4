"""What names stand for by the way a file uses them, for values nobody constructs in sight.

A parameter ``scaler`` on which ``unscale_`` or ``scale(...).backward()`` is called is a gradient
scaler, whatever it is called; one that is fitted to data is not. The same for optimizers, networks
and losses. Names decide only where use alone cannot.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from ampwise_lint.source.nodes import Index
from ampwise_lint.triggers import TRAINERS

SCALER = re.compile(r"scaler", re.IGNORECASE)
OPTIMIZER = re.compile(
    r"(^|[_.])(opt|optim|optimi[sz]er)s?(?=$|[_.\d\[]|(?-i:[A-Z]))|optimi[sz]er", re.IGNORECASE
)
SCHEDULER = re.compile(r"sched|warm_?up|lr_?decay", re.IGNORECASE)
NETWORK = re.compile(
    r"(^|[_.])(model|net|network|encoder|decoder|generator|discriminator|critic|student|teacher"
    r"|backbone|unet|gen|disc|module|net_?[GD]|actor|policy|vae|gpt|transformer)"
    r"(s|_\w+|\d+|[A-Z]\w*)?$|(^|[_.])[GD](_\w+|\d+)?$|model$|Net$"
)
NO_NETWORK = re.compile(
    r"(builder|factory|fn|func|names?|class|cls|config|cfg|path|dir|file|args|types?|params|output|outputs|id)$"
)
MAKER = re.compile(
    r"(build|create|get|make|load|init|setup|set_up|prepare|define|new|compile|wrap|unwrap|convert"
    r"|freeze|unfreeze|copy|clone|save|update|parallelize|distribute)_"
)
"""Beginnings of functions that make networks, and are none."""
LOSS = re.compile(
    r"(criteri(on|a)|loss|(^|_)crit(_|$)|objective|(^|_)(bce|ce|mse|nll|l1|kl)(_|$))", re.IGNORECASE
)
RUNS = re.compile(
    r"(^|_)(forward|infer|inference|predict|encode|decode|extract|extractor|features|generate"
    r"|sample|logits|embed|(train|training|val|valid|validation|eval|test|shared)_step)(_|$)"
)
"""Methods that run a network."""
HANDLES = re.compile(r"(reduce|log|record|print|update|scale|gather|add|write|plot|mean|sum)")
"""Beginnings of functions that do something with losses, and compute none."""
LOADER = re.compile(
    r"load(er)?s?(_|$|\d)|dataload|(^|_)(dl|dataset|batches|data)(_|$)|train_(iter|gen|data)",
    re.IGNORECASE,
)
WRAPPER = re.compile(
    r"(^|[_.])(accelerator|fabric|engine|model_engine|trainer|strategy)$", re.IGNORECASE
)
EVALUATION = re.compile(
    r"(^|_)(val|valid|validate|validation|eval|evaluate|evaluation|test|infer\w*|predict\w*"
    r"|sample)(_|$)|^(test|val|valid|eval)_?(data)?_?(loader|dl|dataloader|set|gen)",
    re.IGNORECASE,
)

NETWORK_METHODS = {"train", "eval", "parameters", "named_parameters", "modules", "forward", "cuda"}
DATA_SCALER = {"fit", "transform", "fit_transform", "inverse_transform"}

STEP_METHODS = {
    "backward", "unscale_", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "clip_grad_norm",
    "autocast", "scale_loss", "no_sync", "half", "bfloat16", "manual_backward", "get_scale",
}  # fmt: skip
STEP_NAMES = {
    "GradScaler", "ShardedGradScaler", "autocast", "clip_grad_norm_", "clip_grad_value_",
    "nullcontext", "clip_grad_norm", "FSDP", "FullyShardedDataParallel",
}  # fmt: skip

PRECISIONS = {"precision", "mixed_precision", "fp16", "bf16"}
"""How trainers are told in which precision.

An Accelerator need not be told: its launch does that, too.
"""

Role = Literal["scaler", "wrapper", "optimizer", "scheduler", "network", ""]

LOW = {"float16", "half", "bfloat16"}
HALF = {f"torch.{each}" for each in LOW}
CORE = {"backward", "autocast", "GradScaler", "ShardedGradScaler", "unscale_", "scale_loss"}


PARTS = 50
"""Names in a path; whoever writes more writes no path."""


def dotted(node: ast.AST) -> str:
    """``self.scaler``, ``opts['d']`` as text; empty for anything that is no such path."""
    text = ""
    for _ in range(PARTS):
        match node:
            case ast.Attribute(value=value, attr=attr):
                text, node = f".{attr}{text}", value
            case ast.Name(id=name):
                return name + text
            case ast.Subscript(value=value, slice=ast.Constant(value=index)):
                text, node = f"[{index!r}]{text}", value
            case _:
                return ""
    return ""


def leaves(body: list[ast.stmt]) -> bool:
    """Whether a block ends by leaving what is around it."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Return | ast.Raise | ast.Break | ast.Continue):
        return True
    return (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Call)
        and (dotted(last.value.func) in ("exit", "quit", "sys.exit", "os._exit"))
    )


def _half_sums(index: Index) -> Iterator[ast.Assign]:
    """Where tensors of 16 bits are made to which something is added."""
    grown = {
        dotted(each.target) for each in index.of(ast.AugAssign) if isinstance(each.op, ast.Add)
    }
    for node in index.of(ast.Assign):
        if not isinstance(node.value, ast.Call) or dotted(node.targets[0]) not in grown:
            continue
        given = {dotted(each.value) for each in node.value.keywords if each.arg == "dtype"}
        if given & HALF:
            yield node


class Roles:
    """What the names of one file are used for."""

    def __init__(self, index: Index) -> None:
        self.methods: dict[str, set[str]] = defaultdict(set)
        self.steps: set[int] = set()
        """``id`` of every node inside which something of a training step happens."""
        self.core: set[int] = set()
        """Of those, the ones with something only training or lower precision has."""
        self._stepped: set[str] = set()
        self._trained: set[str] = set()
        self._scales_backward: set[str] = set()
        self._roles: dict[str, Role] = {}
        self._parents = index.parents
        for node in index.of(ast.Attribute):
            if base := dotted(node.value):
                self.methods[base].add(node.attr)
        for call in index.of(ast.Call):
            self._see(call)
        self._mark(index)

    def _see(self, call: ast.Call) -> None:
        match call.func:
            case ast.Attribute(value=receiver, attr="step" | "unscale_") if call.args:
                if self.is_scaler(dotted(receiver)):
                    self._stepped.add(dotted(call.args[0]))
            case ast.Attribute(
                value=ast.Call(func=ast.Attribute(value=receiver, attr="scale")), attr="backward"
            ):
                self._scales_backward.add(dotted(receiver))
            case ast.Attribute(value=receiver, attr="parameters" | "named_parameters"):
                self._trained.add(dotted(receiver))
            case _:
                pass

    def of(self, text: str) -> Role:
        """What a path is used as; empty where its use does not tell."""
        if text not in self._roles:
            self._roles[text] = self._role(text)
        return self._roles[text]

    def _role(self, text: str) -> Role:
        if self.is_scaler(text):
            return "scaler"
        used = self.methods.get(text, set())
        if WRAPPER.search(text) and used & {"backward", "prepare", "step"}:
            return "wrapper"
        if self.is_optimizer(text):
            return "optimizer"
        if self.is_scheduler(text):
            return "scheduler"
        return "network" if self.is_network(text) else ""

    def is_scaler(self, text: str) -> bool:
        """Whether a path is used as a gradient scaler is."""
        used = self.methods.get(text, set())
        if not text or used & DATA_SCALER:
            return False
        if "unscale_" in used or text in self._scales_backward:
            return True
        if {"scale", "step", "update"} <= used:
            return True
        return bool(SCALER.search(text.rpartition(".")[2])) and bool(
            used & {"scale", "step", "update"}
        )

    def is_optimizer(self, text: str) -> bool:
        """Whether a path is used as an optimizer is."""
        if text in self._stepped and text:
            return True
        used = self.methods.get(text, set())
        if {"step", "zero_grad"} <= used or {"step", "param_groups"} <= used:
            return True
        if {"first_step", "second_step"} <= used:  # SAM
            return True
        return bool(OPTIMIZER.search(text)) and bool(
            used & {"step", "zero_grad", "param_groups", "state_dict"}
        )

    def is_scheduler(self, text: str) -> bool:
        """Whether a path is used as a learning-rate scheduler is."""
        used = self.methods.get(text, set())
        is_named = bool(SCHEDULER.search(text.rpartition(".")[2])) and "step" in used
        return is_named or "step_update" in used  # which nothing else has

    def is_network(self, text: str) -> bool:
        """Whether a path is used as a network is."""
        last = text.rpartition(".")[2].partition("[")[0]
        if LOSS.search(last) or NO_NETWORK.search(last) or MAKER.match(last):
            return False
        used = self.methods.get(text, set())
        has_modes = bool({"train", "eval"} & used and used & NETWORK_METHODS)
        return has_modes or text in self._trained or bool(NETWORK.search(last))

    def _mark(self, index: Index) -> None:
        """Fill `steps` and `core`: what is inside a step, directly and through functions called."""
        sites: dict[str, list[ast.AST]] = defaultdict(list)
        own: dict[str, list[ast.AST]] = defaultdict(list)
        calls, attributes = index.of(ast.Call), index.of(ast.Attribute)
        for call in calls:
            match call.func:
                case ast.Name(id=name):
                    sites[name].append(call)
                    own[name].append(call)
                case ast.Attribute(value=receiver, attr=name):
                    sites[name].append(call)
                    if isinstance(receiver, ast.Name) and receiver.id == "self":
                        own[name].append(call)
                case _:
                    pass
        told: list[ast.AST] = [e for e in attributes if e.attr == "grad" or self._is_chosen(e)]
        told += filter(self._drops_scaler, index.of(ast.Assign))
        self._spread([*told, *filter(self._is_step, calls)], self.steps, sites)
        special = [e for e in (*attributes, *index.of(ast.Name)) if self._is_used(e)]
        core: list[ast.AST] = [*special, *filter(self._is_core, calls), *_half_sums(index)]
        self._spread(core, self.core, own)

    def _is_chosen(self, name: ast.Attribute) -> bool:
        """Whether it is a dtype of 16 bits that a branch chooses."""
        around = self._parents[id(name)]
        return name.attr in LOW and isinstance(around, ast.Assign | ast.AnnAssign | ast.Return)

    def _drops_scaler(self, node: ast.Assign) -> bool:
        """``scaler = None``, in a branch for a precision that needs none."""
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        return is_none and any(self.is_scaler(dotted(each)) for each in node.targets)

    def _is_used(self, name: ast.Attribute | ast.Name) -> bool:
        """Whether one of the names in `CORE` is called, or decorates a function."""
        if (name.attr if isinstance(name, ast.Attribute) else name.id) not in CORE:
            return False
        around = self._parents[id(name)]
        if isinstance(around, ast.Call):
            return around.func is name
        return isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef)

    def _spread(
        self, seeds: list[ast.AST], inside: set[int], sites: dict[str, list[ast.AST]]
    ) -> None:
        """Mark nodes, all that is around them, and calls of the functions that are marked so."""
        waiting = list(seeds)
        while waiting:
            node: ast.AST | None = waiting.pop()
            while node is not None and id(node) not in inside:
                inside.add(id(node))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    waiting += sites.get(node.name, [])
                # A class that is defined inside a branch does not make the branch part of a step.
                node = None if isinstance(node, ast.ClassDef) else self._parents.get(id(node))

    def _is_core(self, call: ast.Call) -> bool:
        match call.func:
            case ast.Attribute(attr="half"):
                return not call.args
            case ast.Attribute(attr=name) | ast.Name(id=name) if name.endswith(TRAINERS):
                return name == "Accelerator" or any(
                    each.arg in PRECISIONS for each in call.keywords
                )
            case ast.Attribute(value=receiver, attr="scale"):
                return self.is_scaler(dotted(receiver))
            case ast.Attribute(value=receiver, attr="step"):
                text = dotted(receiver)
                return self.is_scaler(text) or self.is_optimizer(text)
            case _:
                return False

    def _is_step(self, call: ast.Call) -> bool:
        match call.func:
            case ast.Attribute(value=receiver, attr=attr):
                if attr in STEP_METHODS or attr in STEP_NAMES:
                    return True
                text = dotted(receiver)
                if attr in ("step", "update", "scale", "state_dict", "load_state_dict"):
                    return self.is_scaler(text) or (
                        attr == "step" and (self.is_optimizer(text) or self.is_scheduler(text))
                    )
                return False
            case ast.Name(id=name):
                return name in STEP_NAMES
            case _:
                return False
