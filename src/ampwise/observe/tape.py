"""How a script computes its loss from what its modules return, learned by looking at one step.

Between calls of outermost modules a script computes, too: a loss, a cast, a mean. In a step that is
looked at, a torch-function mode sees each of these calls, passes it through, and notes function,
arguments, autocast state and line. It is off while a module runs, so that modules, compiled ones
among them, see no mode. Sliced backwards from the loss this is a `Program`: the loss as a function
of the module calls and the batch. In a later step its arguments are looked up anew: made by this
operation, returned by that call, in the batch at this path.

A program need not hold in another step: a loss may depend on anything. Whoever runs one compares
its loss with the recorded one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves, tree_map

from ampwise.data import leaves
from ampwise.data.move import changed
from ampwise.distributed.layout import unwrapped
from ampwise.observe.calls import Autocast, Call, Pass
from ampwise.observe.spots import Spots, call_from, callers_spots

_DRAWS = frozenset(
    ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
     "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "normal",
     "bernoulli", "multinomial", "poisson", "gumbel_softmax", "rrelu", "normal_", "uniform_",
     "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"]
)  # fmt: skip
_WRITES = frozenset(
    ["__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__",
     "__iand__", "__ior__", "__ixor__", "__ipow__", "__ifloordiv__", "__imod__", "__imatmul__"]
)  # fmt: skip
_NO_WRITES = frozenset(["requires_grad_", "retain_grad_", "share_memory_"])
_SETTERS = tuple(getattr(torch.Tensor, name) for name in ("grad", "requires_grad"))
"""Attributes whose assignment is no change of values."""


class NoProgramError(Exception):
    """The loss cannot be had as a function of module calls and batch; says why."""


# -- where an argument comes from ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """The output of a node, by its position or path; the tensor that it wrote for None."""

    node: int
    at: int | str | None


@dataclass(frozen=True, slots=True)
class OfBatch:
    """A tensor of the loader's batch."""

    path: str


@dataclass(frozen=True, slots=True)
class OfCall:
    """A tensor among the arguments of a call, by its number in the pass."""

    number: int
    path: str


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """That very tensor."""

    tensor: Tensor


Ref = Made | OfBatch | OfCall | Same


# -- nodes -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Operation:
    """A call of a torch function outside of modules; tensors in it are `Ref`s."""

    function: Any
    args: Any
    kwargs: Any
    autocast: Autocast
    spots: Spots
    written: Ref | None = None

    @property
    def name(self) -> str:
        """Of the function."""
        return getattr(self.function, "__name__", "")

    def refs(self) -> Iterator[Made]:
        """The nodes that it needs."""
        yield from (each for each in tree_leaves((self.args, self.kwargs)) if type(each) is Made)


@dataclass(slots=True)
class Called:
    """A call of a module: its number in the pass (below 0: in those before), and what is passed on.

    Attributes
    ----------
    passed
        By their paths the arguments that are made by other nodes and that gradients go through.
    """

    number: int
    passed: dict[str, Ref] = field(default_factory=dict[str, Ref])

    def refs(self) -> Iterator[Made]:
        """The nodes that it needs."""
        yield from (each for each in self.passed.values() if type(each) is Made)


# -- looking ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    function: Any
    args: Any
    kwargs: Any
    result: Any
    autocast: Autocast
    spots: Spots


class Tape(TorchFunctionMode):
    """Notes what is computed outside of modules."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._on = False
        self._handling = 0
        self._noted: list[_Seen | Call] = []

    def switch(self, *, on: bool) -> None:
        """Note what comes, or not: be at the bottom of the stack of modes, or off it.

        Others come and go above it as ever. A mode that is handling a call is off the stack, and
        put back afterwards; what it then sees it passes on, until it is switched the next time.
        """
        self._on = on
        if self._handling:
            return
        stack = _get_current_function_mode_stack()
        others = [each for each in stack if each is not self]
        if len(stack) - len(others) == on and (not on or stack[0] is self):
            return
        for _ in stack:
            _pop_mode()
        for each in [self, *others] if on else others:
            _push_mode(each)

    def called(self, call: Call) -> None:
        """A module was called."""
        self._noted.append(call)

    def forget(self) -> None:
        """Begin anew."""
        self._noted = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._handling += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._handling -= 1
        if not self._on or getattr(func, "__self__", None) in _SETTERS:
            return result
        if _written(func, args, kwargs) is not None or _tensors(result):
            state, spots = Autocast.now(self._device), callers_spots()
            self._noted.append(_Seen(func, args, kwargs, result, state, spots))
        return result

    def program(self, loss: Tensor, of: Pass, before: Sequence[Call]) -> Program:
        """The loss of a pass as a function.

        Parameters
        ----------
        before
            Calls of earlier passes.

        Raises
        ------
        NoProgramError
            When it depends on more than module calls, the batch and what stays the same.
        """
        return _Slicer(self._noted, of, before).slice(loss)


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _written(function: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a call writes to."""
    name = getattr(function, "__name__", "")
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    in_place = in_place or name in _WRITES or kwargs.get("inplace") is True
    return args[0] if in_place and args and isinstance(args[0], Tensor) else None


class _Slicer:
    """Turns what was noted into the nodes that a loss needs."""

    def __init__(self, noted: Sequence[_Seen | Call], of: Pass, before: Sequence[Call]) -> None:
        self._of, self._before = of, before
        self._made: dict[int, Made] = {}
        self._nodes: list[Operation | Called] = []
        self._early: dict[int, int] = {}
        self._kept: dict[int, Ref] = {id(each): OfBatch(path) for path, each in leaves(of.batch)}
        for number, call in enumerate(of.calls):
            for path, each in leaves((call.args, call.kwargs), ""):
                self._kept.setdefault(id(each), OfCall(number, path))
        for each in noted:
            node = self._call(each) if isinstance(each, Call) else self._operation(each)
            self._nodes.append(node)

    def slice(self, loss: Tensor) -> Program:
        """The nodes that the loss needs; where some of them draw numbers, all that do."""
        wanted = self._ref(loss)
        if not isinstance(wanted, Made):
            raise NoProgramError("its loss was made before the last update")
        drawing = {index for index, each in enumerate(self._nodes)
                   if isinstance(each, Operation) and each.name in _DRAWS}  # fmt: skip
        needed = self._needed([wanted.node])
        if drawing & needed:
            needed = self._needed([wanted.node, *drawing])
        nodes = {index: self._nodes[index] for index in sorted(needed)}
        for each in nodes.values():
            _check(each)
        # Calls of earlier passes are noted last, when first asked for, and come first.
        order = sorted(nodes, key=lambda index: (index not in self._early.values(), index))
        signature = tuple(id(each.module) for each in self._of.calls)
        return Program({index: nodes[index] for index in order}, wanted, signature)

    def _needed(self, queue: list[int]) -> set[int]:
        """Some nodes, and all that they are made from."""
        needed: set[int] = set()
        while queue:
            index = queue.pop()
            if index not in needed:
                needed.add(index)
                queue += [each.node for each in self._nodes[index].refs()]
        return needed

    def _operation(self, seen: _Seen) -> Operation:
        written = _written(seen.function, seen.args, seen.kwargs)
        into = None if written is None else self._ref(written)
        args, kwargs = tree_map(self._or_ref, seen.args), tree_map(self._or_ref, seen.kwargs)
        index = len(self._nodes)
        for at, tensor in enumerate(_tensors(seen.result)):
            self._made[id(tensor)] = Made(index, at)
        if written is not None:
            self._made[id(written)] = Made(index, None)
        return Operation(seen.function, args, kwargs, seen.autocast, seen.spots, into)

    def _call(self, call: Call) -> Called:
        node = Called(_index(self._of.calls, call))
        for path, tensor in leaves((call.args, call.kwargs), ""):
            if tensor.grad_fn is not None and isinstance(ref := self._ref(tensor), Made):
                node.passed[path] = ref
        index = len(self._nodes)
        for key, (ref, path) in call.outputs.items():
            if ref() is not None:
                self._made[key] = Made(index, path)
        return node

    def _or_ref(self, value: Any) -> Any:
        return self._ref(value) if isinstance(value, Tensor) else value

    def _ref(self, tensor: Tensor) -> Ref:
        made = self._made.get(id(tensor))
        if made is not None and (made.at is None or tensor.grad_fn is not None):
            return made
        if tensor.grad_fn is not None and (early := self._of_earlier(tensor)) is not None:
            return early
        # What was kept of a step need not be made again: it may come from anywhere.
        return self._kept.get(id(tensor)) or made or Same(tensor)

    def _of_earlier(self, tensor: Tensor) -> Made | None:
        """An output of a call in a pass before this one."""
        for number, call in enumerate(self._before, -len(self._before)):
            if (path := call.path_of(tensor)) is not None:
                if number not in self._early:
                    self._early[number] = len(self._nodes)
                    self._nodes.append(Called(number))
                return Made(self._early[number], path)
        return None


def _index(calls: Sequence[Call], call: Call) -> int:
    return next(index for index, each in enumerate(calls) if each is call)


def _check(node: Operation | Called) -> None:
    """Refuse what cannot be run again."""
    if not isinstance(node, Operation):
        return
    where = f"line {node.spots[-1].line}" if node.spots else "its loss"
    if node.written is not None and not isinstance(node.written, Made):
        raise NoProgramError(f"{where} writes into a tensor that was there before")
    for each in tree_leaves((node.args, node.kwargs)):
        if isinstance(each, Same) and each.tensor.grad_fn is not None:
            raise NoProgramError(f"{where} uses a value that was computed before the last update")


# -- running ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Program:
    """A loss as a function of module calls and batch.

    Attributes
    ----------
    nodes
        In order; by the number that `Made` has.
    signature
        Identities of the modules that its pass calls.
    """

    nodes: dict[int, Operation | Called]
    loss: Made
    signature: tuple[int, ...]

    @property
    def draws(self) -> bool:
        """Whether the loss depends on random numbers drawn outside of modules."""
        return any(isinstance(e, Operation) and e.name in _DRAWS for e in self.nodes.values())

    def fits(self, other: Pass) -> bool:
        """Whether a pass calls the same modules in the same order."""
        return self.signature == tuple(id(each.module) for each in other.calls)

    def earlier(self, before: Sequence[Call]) -> list[Call]:
        """Calls of earlier passes that it makes again."""
        return [before[each.number] for each in self.nodes.values()
                if isinstance(each, Called) and each.number < 0]  # fmt: skip

    def constants(self) -> list[Tensor]:
        """Tensors of no call and no batch that it takes; parameters aside."""
        found = (
            each.tensor
            for node in self.nodes.values() if isinstance(node, Operation)
            for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, Same)
        )  # fmt: skip
        return list({id(each): each for each in found
                     if not isinstance(each, nn.Parameter)}.values())  # fmt: skip

    def differs(self, other: Program) -> bool:
        """Whether it takes other tensors of no call and no batch: they change with the step."""
        mine, theirs = set(map(id, self.constants())), set(map(id, other.constants()))
        return mine != theirs

    def run(self, values: Values, of: Pass, before: Sequence[Call], device: torch.device) -> Tensor:
        """The loss, computed anew."""
        return _Run(values, of, before, device).of(self)


class _Run:
    """One computation of a program."""

    def __init__(
        self, values: Values, of: Pass, before: Sequence[Call], device: torch.device
    ) -> None:
        self._values, self._of, self._before, self._device = values, of, before, device
        self._batch = dict(leaves(of.batch))
        self._made: dict[tuple[int, int | str | None], Tensor] = {}

    def of(self, program: Program) -> Tensor:
        """Its loss."""
        begun = False
        for index, node in program.nodes.items():
            early = isinstance(node, Called) and node.number < 0
            if not (begun or early):  # the pass itself begins
                begun = True
                if self._of.began is not None:
                    self._of.began.restore(self._device)
            if isinstance(node, Called):
                self._call(index, node)
            else:
                self._operate(index, node)
        return self._lookup(program.loss)

    def _call(self, index: int, node: Called) -> None:
        call = self._of.calls[node.number] if node.number >= 0 else self._before[node.number]
        passed = {path: self._lookup(ref) for path, ref in node.passed.items()}
        output = run_call(call, self._values, passed, self._device)
        self._made.update({(index, path): each for path, each in leaves(output, "")})
        if call.ended is not None:
            call.ended.restore(self._device)

    def _operate(self, index: int, node: Operation) -> None:
        args, kwargs = tree_map(self._lookup, node.args), tree_map(self._lookup, node.kwargs)
        with node.autocast.again():
            result = call_from(node.spots, node.function, args, kwargs)
        if node.written is not None:
            self._made[index, None] = self._lookup(node.written)
        self._made.update({(index, at): each for at, each in enumerate(_tensors(result))})

    def _lookup(self, ref: Any) -> Any:
        if isinstance(ref, Made):
            return self._made[ref.node, ref.at]
        if isinstance(ref, OfBatch):
            return self._values.of(self._batch[ref.path])
        if isinstance(ref, OfCall):
            call = self._of.calls[ref.number]
            return self._values.of(dict(leaves((call.args, call.kwargs), ""))[ref.path])
        return self._values.of(ref.tensor) if isinstance(ref, Same) else ref


class Values:
    """What stands for each tensor from outside in a replay: itself, or what a change made of it."""

    def __init__(self, given: Sequence[Tensor], instead: Sequence[Tensor]) -> None:
        self._of = {id(each): other for each, other in zip(given, instead, strict=True)}

    def of(self, tensor: Tensor) -> Tensor:
        """It, without the graph that it has outside."""
        found = self._of.get(id(tensor), tensor)
        if isinstance(found, nn.Parameter) or not found.requires_grad:
            return found
        found = self._of[id(tensor)] = found.detach().requires_grad_()
        return found


def run_call(call: Call, values: Values, passed: dict[str, Tensor], device: torch.device) -> Any:
    """Call a module again, as it was called."""
    paths = {id(each): path for path, each in leaves((call.args, call.kwargs), "")}

    def instead(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        path = paths.get(id(value))
        return passed[path] if path in passed else values.of(value)

    args, kwargs = changed((call.args, call.kwargs), instead)
    call.rewind(device)
    with call.autocast.again():
        return call_from(call.spots, unwrapped(call.module), args, kwargs)
