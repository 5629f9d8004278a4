"""Where a file computes in lower precision, and what stays in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampwise_lint.analysis import Analysis, Trace
from ampwise_lint.source.roles import EVALUATION, LOSS
from ampwise_lint.values.abstract import (
    Const,
    Optimizer,
    Scaler,
    Tensor,
    Unknown,
    Value,
    Wrapper,
    is_low,
    key_of,
)
from ampwise_lint.values.contents import flatten, origins
from ampwise_lint.values.events import (
    Backward,
    CastDown,
    CastUp,
    Enter,
    Event,
    Made,
    Managed,
    Op,
    OptimizerStep,
    ScalerStep,
)


def uses_amp(code: Analysis) -> bool:
    """Whether anything in the file runs in mixed precision."""
    return _has_amp(code, lambda e: e.region.enabled and not e.context.no_grad)


def trains_in_amp(code: Analysis) -> bool:
    """The same, but not in an evaluation alone, whose gradients may be off further in."""
    by_trainer = code.any(Made, lambda e: isinstance(e.value, Wrapper))
    trains = by_trainer or any(map(code.any, (Backward, ScalerStep, OptimizerStep, Managed)))
    return trains and _has_amp(code, lambda e: e.region.enabled and not evaluates(e))


def _has_amp(code: Analysis, counts: Callable[[Enter], bool]) -> bool:
    return (
        code.any(Enter, counts)
        or code.any(ScalerStep)
        or code.any(Backward, lambda e: is_by_scaler(e.scaled))
        or code.any(Made, lambda e: isinstance(e.value, Wrapper) and e.value.lower)
        or code.any(Managed, lambda e: e.path.startswith("apex.amp"))
    )


def evaluates(event: Event) -> bool:
    """Whether something happens in an evaluation: without gradients, or in one by name."""
    return event.context.no_grad or evaluates_by_name(event)


def evaluates_by_name(event: Event) -> bool:
    """Whether a function that is being executed is called as one that evaluates."""
    names = [each.rpartition(".")[2] for each in event.context.functions]
    return any(map(EVALUATION.search, names))


def uses_half(code: Analysis) -> bool:
    """Whether anything in the file runs in 16 bits."""
    return uses_amp(code) or code.any(CastDown)


UNSEEN = " (if the float16 training that imports this network runs it)"


def with_networks(code: Analysis) -> Iterator[tuple[Trace, str]]:
    """All paths, and those through networks that nothing in sight runs, with what is said of them.

    For mistakes that are some wherever float16 gets, as numbers that it does not hold.
    """
    yield from ((each, "") for each in code.traces)
    yield from ((each, UNSEEN) for each in code.networks)


def is_by_scaler(scaled: Value | None) -> bool:
    """Whether a loss was scaled by something that is there for 16 bits only: apex is, too."""
    if isinstance(scaled, Wrapper):
        return scaled.lower or scaled.path.startswith("apex.amp")
    return scaled is not None


def stays_half(trace: Trace, cast: CastDown) -> bool:
    """Whether what is cast is not cast up again before the next step."""
    key = key_of(cast.value)
    for event in trace.events[trace.events.index(cast) :]:
        if isinstance(event, ScalerStep | OptimizerStep):
            return True
        if isinstance(event, CastUp):
            whole = key_of(event.value)
            if key == whole or key.startswith(f"{whole}."):
                return False
    return True


ADAM = ("Adam", "AdamW", "NAdam", "RAdam")


EPS_LOST = 3e-8
"""Half the smallest float16: what is smaller becomes zero."""


def loses_eps(optimizer: Optimizer) -> bool:
    """Whether it is an Adam whose eps is 0 in float16."""
    eps = optimizer.arguments.get("eps")
    if optimizer.path.rpartition(".")[2] not in ADAM or "fused" in optimizer.arguments:
        return False  # the fused kernel computes in float32
    if eps is None:
        return "**" not in optimizer.arguments
    return isinstance(eps, Const) and isinstance(eps.value, float) and eps.value < EPS_LOST


def is_scaled(value: Value | None) -> bool:
    """Whether a backward was scaled: by a scaler in sight, or by a trainer that is told to."""
    return is_real(value) or (isinstance(value, Wrapper) and value.scales)


def in_float16(*trainers: Wrapper) -> str:
    """How a message begins where trainers scale in float16 only, and their precision is open."""
    return "in float16 " if all(each.mixed == "any" for each in trainers) else ""


def is_real(value: Value | None) -> bool:
    """Whether a backward was scaled by a scaler in sight."""
    return isinstance(value, Scaler) and not value.opaque


def is_unscaled(event: Backward) -> bool:
    """Whether a backward was surely not scaled."""
    return event.scaled is None and not is_handed_in(event.tensor)


def is_handed_in(loss: Value) -> bool:
    """Whether a loss is a caller's, or made of one: what it ran in is not in sight."""
    match loss:
        case Tensor(of=Value() as source):
            return is_handed_in(source)
        case Unknown(made="given"):
            return True
        case Unknown(op="add" | "sub" | "mul" | "div", operands=[first, *_]):
            return is_handed_in(first)
        case _:
            return False


BY_HAND = {
    "exp", "expm1", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp", "pow", "softmax",
    "softplus", "square",
}  # fmt: skip
"""Operations that losses are written with, and that autocast runs in float32."""


def losses_by_hand(trace: Trace) -> Iterator[Op]:
    """Each operation outside autocast of a loss that is no function, on a half output."""
    found = [
        each
        for each in trace.of(Op)
        if each.path in BY_HAND
        and each.context.region is None
        and not each.context.no_grad
        and is_half_output(next(iter(each.inputs), None))
        and not _is_root(each)
        and not _is_in_network(each)
    ]
    if not found:
        return
    losses = [each.tensor for each in trace.of(Backward)]
    parts = {id(each) for each in origins(*losses)}
    yield from (each for each in found if id(each.result) in parts)


def _is_in_network(event: Op) -> bool:
    """Whether a network computes it on the way to its output: the softmax of an attention."""
    networks = [e for e in event.context.functions if e.endswith(".forward")]
    return any(not LOSS.search(each.removesuffix(".forward")) for each in networks)


def is_half_output(value: object) -> bool:
    """Whether something is what a network in autocast returned, or made of it, in 16 bits."""
    if not isinstance(value, Tensor) or not value.forward or not is_low(value.dtype):
        return False
    if value.region is not None:
        return value.region.enabled
    return any(map(is_half_output, flatten(value.inputs)))  # made of it behind the region


def _is_root(event: Op) -> bool:
    """``x ** 0.5``, which makes what overflows smaller."""
    power = event.inputs[1] if len(event.inputs) > 1 else None
    number = power.value if event.path == "pow" and isinstance(power, Const) else None
    return isinstance(number, int | float) and abs(number) <= 1
