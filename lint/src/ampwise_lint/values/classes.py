"""What a class of the project is, by what it derives from and what it holds."""

from __future__ import annotations

import re

from ampwise_lint.source import library
from ampwise_lint.source.roles import SCALER
from ampwise_lint.values.abstract import Class


def is_network(class_: Class) -> bool:
    """Whether a class is a module of torch."""
    names = class_.ancestors()
    if any(
        each.endswith((".Module", "nn.Module", "LightningModule", "PreTrainedModel", "Sequential"))
        or each in ("Module", "torch.nn.Module")
        for each in names
    ):
        return True
    return "forward" in class_.attributes and bool(class_.bases)


def is_autograd_function(class_: Class) -> bool:
    """Whether a class is an ``autograd.Function``."""
    return any(
        each in ("torch.autograd.Function", "torch.autograd.function.Function", "Function")
        or each.endswith("autograd.Function")
        for each in class_.ancestors()
    )


SETS_RATE = re.compile(r"\['lr'\] [*/+-]?= ")
STEPS = re.compile(r"(?i:opt|optim|optimi[sz]er)\w*\.step\(|scaler\.")


def is_schedule(class_: Class) -> bool:
    """Whether objects of a class set the learning rate of an optimizer that others step.

    By themselves, or, where its name says so, by functions that they hand the optimizer to.
    """
    texts = [each.module.unparsed(each.node) for each in class_.lineage()]
    is_named = library.is_scheduler(class_.node.name) and "optimizer" in " ".join(texts)
    sets = is_named or any(map(SETS_RATE.search, texts))
    return sets and not any(map(STEPS.search, texts))


def is_step_wrapper(class_: Class) -> bool:
    """Whether a class implements a scaler, or runs the step for its users."""
    if any(each.rpartition(".")[2].endswith("GradScaler") for each in class_.ancestors()):
        return True
    names = class_.attributes.keys()
    if {"scale", "update"} <= names or {"scale", "unscale_"} <= names:
        return True
    if "__call__" not in names:
        return False
    inside = class_.module.unparsed(class_.node)
    return "backward" in inside and bool(SCALER.search(inside) or SCALER.search(class_.node.name))
