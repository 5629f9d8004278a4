"""What makes a task faster or smaller beside precision: levers, each a change of the task.

=================  ===================================================================
fused-optimizer    one kernel updates all parameters; PyTorch's Adam, AdamW, SGD, Adagrad
channels-last      images and the weights of convolutions have their channels innermost
unfused-attention  attention by matrix products and a softmax, not by PyTorch's one kernel
checkpointing      repeated blocks keep their inputs only and are computed again in backward
compile            `torch.compile`
batch=N            N of the task's batches are joined into one
=================  ===================================================================

Beside them stand a task's own (`Task.levers`), such as a chunked loss. A lever gives a task that
trains the same but for rounding, with the same names of modules and parameters, so that
checkpoints, islands and reports fit with and without it. ``batch`` is the exception: it makes
fewer, larger steps.

Blocks are children of a `nn.Sequential` or `nn.ModuleList` that have modules of their own, and
siblings of the same class: the layers of a transformer, the blocks of a stage of a ResNet. Where
one lies in another, the outer one counts.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from ampwise.data.move import changed, joined
from ampwise.errors import LeverError, UsageError, nearest
from ampwise.step.modules import as_one, in_form, several
from ampwise.tasks.attention import calls_attention, unfused
from ampwise.tasks.task import Task

COMPILE, BATCH = "compile", "batch"
"""Levers that others ask for by name: what takes long to try, and what changes the steps."""

_FUSED = (Adam, AdamW, SGD, Adagrad)
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def spelled(text: str) -> tuple[str, ...]:
    """The levers of a comma-separated list, in the order in which they are pulled.

    Raises
    ------
    UsageError
        For one given twice, and for a batch that is no whole number above 1.
    """
    words = [each.strip() for each in text.split(",") if each.strip()]
    kinds = [each.partition("=")[0] for each in words]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise UsageError(f"levers: {kind} is given twice; expected each lever once")
    for word in words:
        times_in(word)
    order = [BATCH, *LEVERS]
    return tuple(sorted(words, key=lambda each: _place(each.partition("=")[0], order)))


def _place(kind: str, order: Sequence[str]) -> int:
    """A task's own levers come first: they replace the task."""
    return order.index(kind) if kind in order else -1


def times_in(lever: str) -> int:
    """How many batches a lever joins into one: 1 for every one but ``batch``.

    Raises
    ------
    UsageError
        For a batch that is no whole number above 1.
    """
    kind, _, value = lever.partition("=")
    if kind != BATCH:
        return 1
    if not value.isdecimal() or int(value) < 2:
        raise UsageError(
            f"levers: {lever}: expected {BATCH}=N, with N of the task's batches joined into one "
            "(2 or more)"
        )
    return int(value)


def pulled(task: Task, levers: Iterable[str]) -> Task:
    """A task with levers pulled.

    Raises
    ------
    UsageError
        For a lever that does not exist. One that does not fit the task raises `LeverError`, when
        the task's model, optimizer or batches are made.
    """
    for lever in spelled(",".join(levers)):
        task = _pulled(task, lever)
    return task


def _pulled(task: Task, lever: str) -> Task:
    if lever in task.levers:
        # Whatever else was replaced came after: a task's own levers are pulled first.
        return replace(task.levers[lever](), levers=task.levers, name=task.name)
    if lever in LEVERS:
        return LEVERS[lever](task)
    if (times := times_in(lever)) > 1:
        return _larger_batch(task, times)
    legal = [*task.levers, f"{BATCH}=N", *LEVERS]
    raise UsageError(
        f"levers: expected some of {', '.join(legal)}, got {lever!r}{nearest(lever, legal)}"
    )


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # the outer ones first
        inside = any(name == block or name.startswith(f"{block}.") for block in found)
        if inside or not isinstance(module, nn.Sequential | nn.ModuleList):
            continue
        kinds = Counter(type(child) for child in module)
        for child_name, child in module.named_children():
            if kinds[type(child)] > 1 and _is_block(child):
                found[f"{name}.{child_name}" if name else child_name] = child
    return found


def _is_block(module: nn.Module) -> bool:
    """Whether there is something in it to compute again."""
    called = not isinstance(module, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule)
    composed = next(module.children(), None) is not None
    return called and composed and next(module.parameters(), None) is not None


# -- each lever ------------------------------------------------------------------------------------


def _larger_batch(task: Task, times: int) -> Task:
    def batches() -> Iterator[Any]:
        each = iter(task.batches())
        while group := list(islice(each, times)):
            try:
                yield joined(group)
            except TypeError as error:
                raise LeverError(f"{BATCH}={times}", str(error)) from None

    return replace(task, batches=batches)


def _fused_optimizer(task: Task) -> Task:
    def optimizer(model: Any) -> Any:
        plain = None if task.optimizer is None else task.optimizer(model)
        # Without an optimizer of its own, a task gets a fused one.
        if plain is None or not any(map(_could_be_fused, several(plain))):
            raise LeverError(
                "fused-optimizer", "there is no optimizer that has it and is not fused yet"
            )
        return in_form(plain, _fused)

    return replace(task, optimizer=optimizer)


def _could_be_fused(optimizer: Any) -> bool:
    return type(optimizer) in _FUSED and not any(each["fused"] for each in optimizer.param_groups)


def _fused(plain: Optimizer) -> Optimizer:
    """The same optimizer over the same parameters with the same settings, fused."""
    if not _could_be_fused(plain):
        return plain
    switched = {"fused": True, "foreach": None}
    groups = [{**group, **switched} for group in plain.param_groups]
    kind: Any = type(plain)
    accepted = inspect.signature(kind).parameters  # defaults hold more than the constructor takes
    settings = {k: v for k, v in {**plain.defaults, **switched}.items() if k in accepted}
    return kind(groups, **settings)


def _channels_last(task: Task) -> Task:
    """The model's weights once, and each batch in the step, where it costs what it costs."""

    def model() -> Any:
        built = task.model()
        if not any(isinstance(each, _CONVOLUTIONS) for each in as_one(built).modules()):
            raise LeverError("channels-last", "the model has no 2d convolution")
        as_one(built).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return built

    def with_innermost(function: Callable[[Any, Any], Tensor] | None) -> Any:
        return function and (lambda subject, batch: function(subject, changed(batch, _innermost)))

    return replace(
        task,
        model=model,
        loss=with_innermost(task.loss),
        iteration=with_innermost(task.iteration),
    )


def _innermost(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.dim() == 4:
        return leaf.contiguous(memory_format=torch.channels_last)
    return leaf


def _checkpointing(task: Task) -> Task:
    return _of_class(
        task,
        "checkpointing",
        lambda model: list(blocks_of(model).values()),
        _checkpointed,
        "the model has no repeated blocks",
    )


def _unfused_attention(task: Task) -> Task:
    return _of_class(
        task,
        "unfused-attention",
        lambda model: [each for each in model.modules() if calls_attention(each)],
        unfused,
        "no module's own code calls torch.nn.functional.scaled_dot_product_attention",
    )


def _of_class(
    task: Task,
    lever: str,
    find: Callable[[nn.Module], list[nn.Module]],
    changed_class: Callable[[type[nn.Module]], type[nn.Module]],
    why_not: str,
) -> Task:
    """A task some of whose modules are of another class; `why_not` is said where none is found."""

    def model() -> Any:
        built = task.model()
        found = find(as_one(built))
        if not found:
            raise LeverError(lever, why_not)
        for each in found:
            each.__class__ = changed_class(type(each))
        return built

    return replace(task, model=model)


@cache
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of modules whose forward is computed again in backward.

    A class, as FSDP2 makes one: copies of a module and islands in it work as before, and no name
    changes.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _compiled(task: Task) -> Task:
    """A task whose models are compiled in place, and their blocks for losses that call those.

    As `Module.compile`, which does nothing for classes of PyTorch's own (`Sequential`). What is
    compiled is shared by all models that this task builds, and by the blocks of a list: they differ
    in nothing that the compiler sees.
    """
    compiled: dict[str, Callable[..., Any]] = {}

    def in_place(model: nn.Module) -> nn.Module:
        for name, module in {"": model, **blocks_of(model)}.items():
            place = name.rpartition(".")[0] + "." if name else ""
            if place not in compiled:
                compiled[place] = torch.compile(_a_call())
            module._compiled_call_impl = partial(compiled[place], module)
        return model

    return replace(task, model=lambda: in_form(task.model(), in_place))


def _a_call() -> Callable[..., Any]:
    """What calls a module, with code of its own.

    By its code the compiler counts how often it has compiled something, and gives up after some
    times: beside other tasks it would.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), globals(), call.__name__)


LEVERS: Mapping[str, Callable[[Task], Task]] = {
    "fused-optimizer": _fused_optimizer,
    "channels-last": _channels_last,
    "unfused-attention": _unfused_attention,
    "checkpointing": _checkpointing,
    COMPILE: _compiled,
}
"""By the word on the command line, in the order in which they are pulled."""
