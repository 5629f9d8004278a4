"""A float64 shadow beside a replay: what every value would be without rounding.

Each operation runs three times: as it is, in float64 on the shadows of its inputs (the *propagated*
result, as if nothing had been rounded since the batch), and in float64 on the actual inputs (the
*local* result: what this operation alone rounds away). Shadows are kept by storage (`twins`).
Integers, masks and random draws follow the actual run, so the two never take different branches;
unless the shadow is told to decide by itself what is compared, sorted or chosen. An operation that
has no float64 form is taken as exact from there on.

Memory: 8 bytes for every element that the run keeps alive, so 2 to 4 times that of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ampwise import formats
from ampwise.formats import dtype_name
from ampwise.numerics.observe.ancestry import (
    Ancestor,
    cancelled,
    flushed,
    is_of_one_sign,
    lost_constants,
    overflowed,
)
from ampwise.numerics.observe.constants import Constants, originals
from ampwise.numerics.observe.draws import finer
from ampwise.numerics.observe.exact import FLOATS, UnsupportedError, exact
from ampwise.numerics.observe.operation_errors import (
    Made,
    OperationError,
    OperationErrors,
    Qualities,
)
from ampwise.numerics.observe.operations import (
    Operation,
    OperationMode,
    copied,
    is_hollow,
    tensors,
    written,
)
from ampwise.numerics.observe.range_losses import Part, RangeLoss, RangeLosses, is_of
from ampwise.numerics.observe.shares import brought, distance, own_error
from ampwise.numerics.observe.terms import Terms
from ampwise.numerics.observe.trace import sources
from ampwise.numerics.observe.twins import Key, Twins, key_of
from ampwise.places import Place, Places, placing
from ampwise.policy import Policy
from ampwise.sqnr import sqnr_db
from ampwise.step.recorder import Stash, finite
from ampwise.step.replayable import Replayable, Replayed

_PRUNE_EVERY = 256
_FLOAT32_BYTES = 4


@dataclass(slots=True)
class ShadowRun:
    """What a shadow replay showed.

    Attributes
    ----------
    errors
        Of every operation that computes in floating point, in order.
    gradients
        Float64 gradients by parameter name, scaled like the actual ones.
    losses
        Float64 losses.
    terms
        Size of the terms that each loss is the sum of: how small an error of it can be asked for.
    inputs, actual
        Shadows of the inputs of the operation that was asked for, as arguments for it; and these
        inputs as they are.
    makers
        What made each tensor among them; None where it comes from outside.
    brought
        The error that each of these brings into the result, where that was asked for.
    decided
        Whether everything that was compared, sorted or chosen came out as without rounding; of a
        run whose errors are measured.
    followed
        Whether every operation could be made with what was decided so: masks and indices choose
        how many rows there are, and the run has its own number of them.
    poisoned
        Of the buffers that the run leaves with inf or NaN, those that have it in float64, too.
    range_losses
        What left the range of its format where the shadow rounds.
    """

    replayed: Replayed
    errors: list[OperationError] = field(default_factory=list[OperationError])
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    losses: list[Tensor] = field(default_factory=list[Tensor])
    terms: list[float] = field(default_factory=list[float])
    inputs: tuple[Any, Any] | None = None
    actual: tuple[Any, Any] | None = None
    makers: list[Ancestor | None] = field(default_factory=list["Ancestor | None"])
    brought: list[float] = field(default_factory=list[float])
    decided: bool = True
    followed: bool = True
    poisoned: list[str] = field(default_factory=list[str])
    range_losses: list[RangeLoss] = field(default_factory=list[RangeLoss])


def shadow(
    step: Replayable,
    stash: Stash,
    *,
    errors: bool = True,
    at: tuple[str, Place, int] | None = None,
    shares: bool = False,
    decides: bool = False,
    rounds: Rounds | None = None,
    draws: bool = False,
    policy: Policy | None = None,
    scale: float | None = None,
) -> ShadowRun:
    """Replay a window with a float64 shadow.

    Parameters
    ----------
    errors
        Measure every operation's errors (twice the work).
    at
        Name, place and occurrence of an operation: keep the shadows of its inputs and what they
        were made of, and stop there.
    shares
        Measure, up to `at`, which argument brings which error (two to six times the work).
    decides
        Let the shadow make comparisons, sorts and choices of its own, on its own values.
    rounds
        Operations at which the shadow rounds what it makes, as the run does there: it shows the
        harm that is done at these, and nowhere else.
    draws
        Take random numbers that are drawn in 16 bits for rounded ones.
    policy, scale
        As for `Replayable.replay`.
    """
    with placing(step.models, inner=True) as places:
        mode = Shadow(places, errors=errors, at=at, shares=shares, decides=decides, rounds=rounds,
                      draws=draws)  # fmt: skip
        for _, tensor, _ in sources(step.models, stash):
            mode.source(tensor)
        mode.originals(step.models)
        replayed = step.replay(stash, around=mode.beside, policy=policy, scale=scale)
    run = mode.seen(replayed)
    if at is None:
        run.losses = [_or_actual(mode.of(each), each) for each in replayed.losses]
        run.terms = [mode.terms.of(each) for each in replayed.losses]
        run.gradients = {
            name: _or_actual(mode.of(each), each)
            for name, each in replayed.gradients.items()
            if not each.is_sparse
        }
        buffers = {n: _or_actual(mode.of(e), e) for n, e in replayed.poisoned.items()}
        run.poisoned = [name for name, each in buffers.items() if not finite(each)]
    return run


def _or_actual(reference: Tensor | None, actual: Tensor) -> Tensor:
    return actual.double() if reference is None else reference.clone()


@dataclass(frozen=True)
class Rounds:
    """Where a shadow rounds, too.

    Attributes
    ----------
    at
        Whether an operation, by its name and place, is one of those.
    part
        What of its errors: only what becomes inf, or 0; all where it is None.
    """

    at: Callable[[str, Place], bool]
    part: Part | None = None

    @classmethod
    def nowhere(cls) -> Rounds:
        """No operation."""
        return cls(lambda *_: False)

    @classmethod
    def on(cls, lines: Container[tuple[str, int]], part: Part | None = None) -> Rounds:
        """All operations on some lines."""
        return cls(lambda _, place: place.file_line in lines, part)


class _ReachedError(Exception):
    """The operation that was asked for."""


def shadowed(mode: Shadow, make: Callable[[AbstractContextManager[Any]], object]) -> None:
    """Make an update beside a shadow, as far as the operation that is asked for."""
    with suppress(_ReachedError):
        make(mode.beside())


class Shadow(OperationMode):
    """The dispatch mode of `shadow`.

    Attributes
    ----------
    terms
        Of the numbers that are sums.
    range_losses
        What left the range of its format where it rounds.
    """

    def __init__(
        self, places: Places, *, errors: bool, at: tuple[str, Place, int] | None,
        shares: bool = False, decides: bool = False, rounds: Rounds | None = None,
        draws: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._decides, self._draws = decides, draws
        self._rounds = rounds or Rounds.nowhere()
        self.range_losses = RangeLosses()
        self._decided = self._followed = True
        self._twins = Twins(discrete=decides)
        self.terms = Terms(self._twins)
        self._errors = OperationErrors(self._twins)
        self._qualities = Qualities()
        self._inputs: tuple[Any, Any] | None = None
        self._actual: tuple[Any, Any] | None = None
        self._makers: list[Ancestor | None] = []
        self._brought: list[float] = []
        self._seen: dict[tuple[str, Place], int] = {}
        self._places = places
        self._measure = errors
        self._at = at
        self._shares = shares
        self._count = 0
        self._made: dict[Key, Ancestor] = {}

    @contextmanager
    def beside(self) -> Generator[None]:
        """Context in which everything is computed that is shadowed."""
        with Constants(self._constant), self:
            yield

    def source(self, tensor: Tensor) -> None:
        """A tensor from outside is exact."""
        if tensor.dtype in FLOATS and not tensor.is_sparse:
            self._twins.write(tensor, tensor.detach().double())

    def originals(self, models: Iterable[nn.Module]) -> None:
        """Tensors that models hold are what they were before they were rounded, where known."""
        for tensor, original in originals(models):
            self._rounded(tensor, original.exact, original.maker)

    def _constant(self, made: Tensor, numbers: Tensor) -> None:
        """A tensor was made of Python numbers, which it rounds."""
        if not made.numel():
            return
        extreme = max(map(float, torch.aminmax(numbers)), key=abs)
        kept, place = sqnr_db(made, numbers), self._places.here()
        dtype = dtype_name(made.dtype)
        self._rounded(
            made, numbers,
            Ancestor("tensor", place, dtype, math.inf, kept, (), (), extreme=extreme),
        )  # fmt: skip

    def _rounded(self, made: Tensor, numbers: Tensor, maker: Ancestor) -> None:
        """A tensor is made of numbers that it rounds."""
        if self._rounds.at(maker.name, maker.place):
            numbers = self._rounded_to(maker.name, maker.place, made, numbers, numbers)
        self._twins.write(made, numbers)
        self._qualities.measure([made], [numbers])
        if self._measure:
            self._errors.constant(self._count, maker.place, made, numbers)
        if self._at is not None:
            error = distance(made, numbers)
            self._made[key_of(made)] = replace(maker, error=error, own=error, index=self._count)

    def maker_of(self, tensor: Tensor) -> Ancestor | None:
        """What made a tensor, while an operation is looked for; None where nothing was seen."""
        return self._made.get(key_of(tensor))

    def of(self, tensor: Tensor) -> Tensor | None:
        """The shadow of a tensor; None where there is none."""
        return self._twins.of(tensor)

    def seen(self, replayed: Replayed) -> ShadowRun:
        """What it saw of operations."""
        return ShadowRun(replayed, self._errors.found, inputs=self._inputs, actual=self._actual,
                         makers=self._makers, brought=self._brought,
                         decided=self._decided, followed=self._followed,
                         range_losses=self.range_losses.found)  # fmt: skip

    def operate(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        func = op.func
        place = self._places.here()
        index, self._count = self._count, self._count + 1
        if self._count % _PRUNE_EVERY == 0:
            self._prune()
        occurrence = self._seen.get((op.name, place), 0)
        self._seen[op.name, place] = occurrence + 1
        if self._at == (op.name, place, occurrence):
            self._stop(func, args, kwargs)
        floating = [each for each in tensors((args, kwargs)) if each.dtype in FLOATS]
        given = copied((args, kwargs)) if op.mutates else (args, kwargs)
        raised = tree_map(self._twins.raised, args), tree_map(self._twins.raised, kwargs)
        result = func(*args, **kwargs)
        results = [] if op.empty else [
            each for each in written(op, args, kwargs, result)
            if each.dtype in FLOATS and not is_hollow(each)
        ]  # fmt: skip
        self._decide(op, args, kwargs, raised, result)
        rounded = self._errors.follow(floating, results)
        if not results:
            if rounded and op.name == "_to_copy":
                self._errors.index(index, place, args[0], result)
            return result
        inputs_db = self._qualities.worst(floating)
        references = self._shadowed(op, args, raised, result, results)
        if references is not None and self._rounds.at(op.name, place):
            self._round(op, place, given, result, results, references)
        if references is not None and place.phase == "forward":
            self.terms.note(op, args, kwargs, results)
        if self._measure or self._at is not None:
            self._look(Made(index, occurrence, op, place, given[0], given[1], raised, floating,
                            result, results, references, inputs_db))  # fmt: skip
        return result

    def _decide(
        self, op: Operation, args: Any, kwargs: Any, raised: tuple[Any, Any], result: Any
    ) -> None:
        """Let integers and masks be what they are without rounding, or see whether they are."""
        if not ((self._measure and self._decided) or self._decides) or op.empty:
            return
        made = written(op, args, kwargs, result, discrete=True)
        if not made:
            return
        try:
            wanted = exact(op.func, *raised, result, discrete=True)
        except UnsupportedError:
            return
        for tensor, ideal in zip(made, wanted, strict=False):
            if ideal.shape != tensor.shape or is_hollow(tensor):
                continue
            if self._decides:
                self._twins.write(tensor, ideal)
            elif not op.mutates and not torch.equal(tensor, ideal):
                self._decided = False

    def _round(
        self, op: Operation, place: Place, given: tuple[Any, Any], result: Any,
        results: list[Tensor], references: list[Tensor],
    ) -> None:  # fmt: skip
        """Give shadows the error that the operation itself makes of what it is given."""
        try:
            local = exact(op.func, *given, result)
        except UnsupportedError:
            return
        for tensor, reference, own in zip(results, references, local, strict=False):
            if tensor.element_size() < _FLOAT32_BYTES and tensor.shape == reference.shape:
                rounded = self._rounded_to(op.name, place, tensor, reference, own)
                self._twins.write(tensor, rounded)

    def _rounded_to(
        self, name: str, place: Place, tensor: Tensor, reference: Tensor, own: Tensor
    ) -> Tensor:
        """A shadow with the error of an operation, or with the part of it that is asked for.

        Rounded where it only rounds; what a kernel loses inside, such as a sum in 16 bits, is
        added.
        """
        self.range_losses.note(name, place, tensor, own)
        error = (tensor.detach().double() - own).nan_to_num(0.0, 0.0, 0.0)
        rounds = tensor == own.to(tensor.dtype)
        narrow = reference.to(tensor.dtype).double()
        rounded = torch.where(rounds, narrow, reference + error)
        if self._rounds.part is None:
            return rounded
        return torch.where(is_of(self._rounds.part, tensor, own), rounded, reference)

    def _look(self, made: Made) -> None:
        """Measure what was made, and note what it was made of, as far as that is asked for."""
        propagated_db = self._qualities.measure(made.written, made.references)
        if self._measure:
            self._errors.note(made, propagated_db)
        if self._at is not None:
            self._remember(made, propagated_db)

    def _prune(self) -> None:
        """Forget what is known of memory that is gone."""
        alive = self._twins.prune()
        self._qualities.keep(alive)
        self._errors.keep(alive)
        self.terms.keep(alive)
        self._made = {key: each for key, each in self._made.items() if key in alive}

    def _remember(self, made: Made, propagated_db: float) -> None:
        """Note which operation made what was written, and from what."""
        made_by = [self._made.get(key_of(each)) for each in made.floating]
        parents = tuple(each for each in made_by if each is not None)
        result, name, ideal = made.written[0], made.operation.name, made.raised[0]
        wanted = made.references[0] if made.references else result.double()
        count, rounded_to = cancelled(name, made.args, ideal, result, wanted)
        gone = flushed(result, wanted, formats.lookup(result.dtype).min_subnormal)
        wide = result.detach().float() if result.element_size() == 1 else result.detach()
        ends = torch.aminmax(wide) if result.numel() else ()
        extreme = max(map(float, ends), key=abs, default=0.0)
        lost = lost_constants(name, made.args, ideal, result)
        maker = Ancestor(
            name, made.place, dtype_name(result.dtype), made.inputs_db, propagated_db, lost,
            parents, count, rounded_to, gone, gone / max(1, result.numel()), extreme,
            *self._split(made, made_by),
            made.index, is_of_one_sign(name, ideal), overflowed(result, wanted),
        )  # fmt: skip
        self._made.update(dict.fromkeys(map(key_of, made.written), maker))

    def _split(
        self, made: Made, made_by: list[Ancestor | None]
    ) -> tuple[float, float, tuple[float, ...]]:
        """The error of a result, what the operation adds to it, and what each parent brings."""
        result, wanted = made.written[0], made.references[0] if made.references else None
        if not self._shares or wanted is None or wanted.shape != result.shape:
            return 0.0, 0.0, tuple(0.0 for each in made_by if each is not None)
        func, given = made.operation.func, (made.args, made.kwargs)
        shares = brought(func, given, made.raised, made_by, wanted, made.result)
        return (
            distance(result, wanted),
            own_error(func, given, result, made.result),
            tuple(share for share, by in zip(shares, made_by, strict=True) if by is not None),
        )

    def _stop(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what the operation that was asked for is given, and go no further."""
        self._inputs = (tree_map(self._twins.raised, args), tree_map(self._twins.raised, kwargs))
        self._actual = copied((args, kwargs))
        self._makers = [self._made.get(key_of(each)) for each in tensors(args)]
        if self._shares:
            floating = [each for each in tensors((args, kwargs)) if each.dtype in FLOATS]
            made_by = [self._made.get(key_of(each)) for each in floating]
            found = iter(brought(func, (args, kwargs), self._inputs, made_by))
            self._brought = [next(found) if each.dtype in FLOATS else 0.0 for each in tensors(args)]
        raise _ReachedError

    def _shadowed(
        self, op: Operation, args: Any, raised: tuple[Any, Any], result: Any, results: list[Tensor]
    ) -> list[Tensor] | None:
        """Write the shadows of what an operation wrote; None where it has no float64 form."""
        try:
            references = exact(op.func, raised[0], raised[1], result)
        except UnsupportedError as error:
            self._followed &= error.__cause__ is None
            for tensor in results:
                given = finer(op.name, args, tensor) if self._draws else tensor.detach().double()
                self._twins.write(tensor, given)
            self._qualities.forget(results)
            return None
        for tensor, reference in zip(results, references, strict=False):
            if reference.shape == tensor.shape:
                self._twins.write(tensor, reference)
            else:
                self._followed = False
        return references
