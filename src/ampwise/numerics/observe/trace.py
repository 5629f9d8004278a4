"""A watched replay: which operation first turned clean values into inf or NaN.

Every operation of forward and backward passes a dispatch mode (`watcher`). An operation whose
inputs are clean and whose output is not is a **root**. From a non-finite loss or gradient the bad
values are followed back through their producers to the roots they come from; the earliest is the
origin.

Not every infinity is a fault. One that the code writes on purpose (a fill or mask with inf) is
deliberate, and stays so while operations carry it along without making NaN of it; softmax turns it
into zeros and all is well. Uninitialised memory says nothing. Roots whose infinity some later
operation swallowed (``1 / inf``) are kept too: values may be silently wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ampwise.data import leaves
from ampwise.numerics.observe.bits import bad_bits
from ampwise.numerics.observe.roots import Root
from ampwise.numerics.observe.watcher import Watcher
from ampwise.places import Place, placing
from ampwise.step.recorder import Stash
from ampwise.step.replayable import Replayable, Replayed

BUFFER = "buffer "
"""What the name of a buffer follows in `Trace.target`."""


@dataclass(slots=True)
class Trace:
    """What a watched replay showed.

    Attributes
    ----------
    replayed
        Losses and gradients.
    operations
        Number of operations.
    roots
        By index, in order.
    origin
        The earliest root that the non-finite loss, gradient or buffer comes from; None without one.
    path
        Modules (or lines) that the first bad value went through.
    target
        What is not finite in the end: ``loss``, a parameter's name, or that of a buffer; empty
        when all is.
    failed
        The operation that raised, with its place.
    before_error
        Of a replay that raised: the root that it seems to be about, if there is one.
    spans
        Where the operations of forward were, in order; each run of the same place once.
    """

    replayed: Replayed
    operations: int = 0
    roots: dict[int, Root] = field(default_factory=dict[int, Root])
    origin: Root | None = None
    path: list[str] = field(default_factory=list[str])
    target: str = ""
    failed: Root | None = None
    before_error: Root | None = None
    spans: list[Place] = field(default_factory=list[Place])


def watch(
    step: Replayable,
    stash: Stash,
    *,
    scale: float | None = None,
    capture: int | None = None,
    backward: bool = True,
    once: bool = False,
    of_buffers: bool = False,
) -> Trace:
    """Replay a window under watch.

    Parameters
    ----------
    capture
        Index of a root whose inputs must be kept, beside the first ones.
    scale, backward
        As for `Replayable.replay`.
    once
        Do not replay again for the inputs of an origin that were not kept.
    of_buffers
        Go back from buffers that forward spoils, not from losses and gradients.
    """
    with placing(step.models) as places:
        watcher = Watcher(places, capture)
        for name, tensor, kind in sources(step.models, stash):
            watcher.source(name, tensor, kind)
        replayed = step.replay(stash, around=lambda: watcher, scale=scale, backward=backward)
    trace = _concluded(watcher, replayed, of_buffers=of_buffers)
    if once or trace.origin is None or trace.origin.func is not None or trace.origin.source:
        return trace
    index = trace.origin.index
    return watch(step, stash, scale=scale, capture=index, backward=backward, of_buffers=of_buffers)


def watch_update(
    models: Sequence[nn.Module],
    named: Mapping[str, Tensor],
    make: Callable[[AbstractContextManager[Any]], object],
) -> tuple[Root | None, str]:
    """Make an update under watch.

    Parameters
    ----------
    named
        What it changes.
    make
        Makes it inside of a context.

    Returns
    -------
    tuple
        The operation that first made a parameter non-finite (None if none did), and which one.
    """
    with placing(models) as places:
        watcher = Watcher(places, phase="optimizer")
        make(watcher)
    for name, parameter in named.items():
        roots = watcher.roots_of(parameter)
        if roots:
            return min(roots, key=lambda root: root.index), name
    return None, ""


def sources(models: Sequence[nn.Module], stash: Stash) -> Iterator[tuple[str, Tensor, str]]:
    """Tensors that come from outside, with their names and kinds."""
    for each in stash.micro_batches:
        for path, tensor in leaves(each.batch):
            yield path, tensor, "batch"
    for values in (stash.before, *stash.updates):
        for name, tensor in values.items():
            yield name, tensor, "parameter"
    for model in models:
        for name, tensor in model.named_parameters():
            yield name, tensor.detach(), "parameter"
        for name, tensor in model.named_buffers():
            yield name, tensor, "buffer"


def _concluded(watcher: Watcher, replayed: Replayed, *, of_buffers: bool) -> Trace:
    """What was seen: from what is not finite in the end, back to the earliest root."""
    trace = Trace(replayed, watcher.count, watcher.values.roots, failed=watcher.failed,
                  spans=watcher.spans)  # fmt: skip
    if replayed.error is not None:
        trace.before_error = watcher.before_error()
    if of_buffers:
        ends = [(f"{BUFFER}{name}", each) for name, each in replayed.poisoned.items()]
    else:
        every = [*(("loss", each) for each in replayed.losses), *replayed.gradients.items()]
        ends = [(name, each) for name, each in every if bad_bits(each)]
    bad = [(name, watcher.maker_of(each)) for name, each in ends]
    if bad:
        trace.target = bad[0][0]
        makers = [maker for name, maker in bad if name == "loss" or trace.target != "loss"]
        trace.origin, trace.path = watcher.values.earliest(makers)
    return trace
