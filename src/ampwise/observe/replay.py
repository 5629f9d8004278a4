"""A step of a script that can be run again: `Replayable` for scripts that nobody changed.

A pass is run again in one of two ways. Where it is known how its loss is computed (`tape`), that
is computed. Else the module calls are made again by themselves, and into their outputs go the
gradients that came into them; what the script computed outside of modules is then not looked into.
Regions of autocast that were on run in whatever precision a replay asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ampwise.clock import done_at
from ampwise.data import leaves, tensors
from ampwise.distributed.layout import unwrapped
from ampwise.observe.autocast import Autocasts
from ampwise.observe.calls import Call, Pass
from ampwise.observe.tape import Program, Values, run_call
from ampwise.policy import PRESETS, Policy
from ampwise.step.arguments import scalar
from ampwise.step.loss_scale import FLOOR
from ampwise.step.modules import as_one, held_by, modules_of
from ampwise.step.recorder import MicroBatch, RandomState, Stash, finite
from ampwise.step.replay import finite_buffers, gradients_of, let_go, poisoned, undisturbed
from ampwise.step.replayable import Replayed
from ampwise_lint.base.words import joined, power_in_code


@dataclass(frozen=True)
class Recorded:
    """Passes up to an update, and what they ran under.

    Attributes
    ----------
    earlier
        Passes of the same step before the last update.
    scale
        Loss scale; None where nothing scaled.
    """

    step: int
    passes: Sequence[Pass]
    earlier: Sequence[Pass]
    optimizer: Optimizer
    device: torch.device
    dtype: torch.dtype | None
    scale: float | None

    def before(self, index: int) -> list[Call]:
        """Calls of the passes before one."""
        return [call for each in (*self.earlier, *self.passes[:index]) for call in each.calls]


class Observed:
    """A step of a script.

    Parameters
    ----------
    programs
        How each pass computes its loss; None to feed gradients instead.
    of_outputs
        Have the sum of all outputs for a loss: where they are not finite it is they that matter.
    """

    def __init__(
        self,
        recorded: Recorded,
        autocasts: Autocasts,
        programs: Sequence[Program] | None,
        *,
        of_outputs: bool = False,
    ) -> None:
        self._recorded, self._autocasts, self._of_outputs = recorded, autocasts, of_outputs
        called = [call for each in recorded.passes for call in each.calls]
        if programs is not None:
            for index, program in enumerate(programs):
                called += program.earlier(recorded.before(index))
        self._called = list(dict.fromkeys(unwrapped(call.module) for call in called))
        trained = [each for each in self._called if next(each.parameters(), None) is not None]
        self.models: Sequence[nn.Module] = trained
        self.optimizers = (recorded.optimizer,)
        self.device = recorded.device
        self.policy = policy_of(recorded)
        self.scales_loss = recorded.scale is not None
        self.least_scale = FLOOR  # torch's scaler has none, and comes to 0
        self.steps = recorded.step - 1
        self.open: Stash | None = None
        self.closed = self._stash(programs)
        self.ranks = 1
        self.group: ProcessGroup | None = None
        self.can_replay = True

    def _stash(self, programs: Sequence[Program] | None) -> Stash:
        scale = torch.tensor(self._recorded.scale or 1.0, device=self.device)
        stash = Stash(self._recorded.step, scale)
        for index, each in enumerate(self._recorded.passes):
            program = None if programs is None else programs[index]
            before = self._recorded.before(index)
            again = _Again(each, before, program, float(scale), self.device, self._of_outputs)
            random_state = each.calls[0].began if each.calls else RandomState.now(self.device)
            stash.micro_batches.append(MicroBatch(again, again.batch, random_state))
            if each.loss is not None and not self._of_outputs:
                stash.losses.append(scalar_of(each.loss))
        return stash

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The models' parameters by FQN."""
        return dict(as_one(self.models).named_parameters())

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The same, and those that only the optimizer knows."""
        named: dict[str, Tensor] = {**self.parameters()}
        known = set(map(id, named.values()))
        held = [each for each in held_by(self.optimizers) if id(each) not in known]
        return named | {f"optimizers.{number}": each for number, each in enumerate(held)}

    def rewind_buffers(self) -> None:
        """Nothing: each call rewinds its own."""

    def replay(
        self,
        stash: Stash,
        *,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        policy: Policy | None = None,
        scale: float | None = None,
        change: Callable[[Any], Any] | None = None,
        backward: bool = True,
        until_bad: bool = False,
    ) -> Replayed:
        """Run the step again; see `Replayable.replay`."""
        result = Replayed()
        scale = float(stash.scale) if scale is None else scale
        with self._apart(), self._under(policy):
            good = finite_buffers(self.models)
            try:
                with around():
                    for each in stash.micro_batches:
                        batch = each.batch if change is None else change(each.batch)
                        began = time.perf_counter()
                        loss = _scalar_with_grad(each.run(self.models, batch))
                        result.forward_s += done_at(loss.device) - began
                        result.losses.append(loss.detach())
                        if until_bad and not finite(loss):
                            break
                        if backward:
                            loss.backward(torch.full_like(loss, scale))
            except Exception as error:  # noqa: BLE001 - the caller wants to know what it is
                let_go(error)
                result.error = error
            result.gradients = gradients_of(self.parameters())
            result.poisoned = poisoned(self.models, good)
        return result

    @contextmanager
    def _apart(self) -> Generator[None]:
        """Nothing of the script's is changed by what runs inside."""
        buffers = [each for model in self._called for each in model.buffers()]
        # The script may have a graph that backward has still to go through: it asks for versions.
        versioned = tuple(each for each in buffers if not each.is_inference())
        with (
            torch.autograd._unsafe_preserve_version_counter(versioned),
            undisturbed(self, self._called),
            _no_hooks_after(self.named_tensors().values()),
            torch.enable_grad(),
        ):
            torch.clear_autocast_cache()
            _mend_statistics(self._called)
            try:
                yield
            finally:
                torch.clear_autocast_cache()

    def _under(self, policy: Policy | None) -> AbstractContextManager[None]:
        if policy is None or policy == self.policy:
            return nullcontext()
        return self._autocasts.overridden(
            getattr(torch, policy.compute_dtype) if policy.autocast else None
        )

    @property
    def outputs_finite(self) -> bool:
        """Whether what modules returned in the last replay was finite; True where none fed them."""
        again = [each.run for each in self.closed.micro_batches]
        return all(
            finite(one) for each in again if isinstance(each, _Again) for one in each.outputs
        )

    def how(self, policy: Policy) -> str:
        """What to write for another policy."""
        if not policy.autocast:
            return f'torch.autocast("{self.device.type}", enabled=False)'
        return f'torch.autocast("{self.device.type}", dtype=torch.{policy.compute_dtype})'

    def how_in_float32(self, *modules: str) -> str:
        """What to write to keep modules in float32."""
        return (
            f'with torch.autocast("{self.device.type}", enabled=False): in the forward of '
            f"{joined(modules)}, and .float() on its inputs"
        )

    def how_scaled(self, scale: float) -> str:
        """What to write for a loss scale that begins with this."""
        return f"GradScaler(init_scale={power_in_code(scale)})"


class _Again:
    """One pass, as a loss of models and batch.

    Attributes
    ----------
    batch
        What it takes from outside, as nearly in the shape of the loader's as it can be.
    """

    def __init__(
        self,
        of: Pass,
        before: Sequence[Call],
        program: Program | None,
        scale: float,
        device: torch.device,
        of_outputs: bool,
    ) -> None:
        self._of, self._before, self._program = of, before, program
        self._scale, self._device, self._of_outputs = scale, device, of_outputs
        self.outputs: list[Tensor] = []
        self.batch = _batch_of(of, [] if program is None else program.constants())

    def __call__(self, _models: Any, batch: Any) -> Tensor:
        given = tensors(self.batch)
        values = Values(given, tensors(batch))
        if self._program is not None:
            return self._program.run(values, self._of, self._before, self._device)
        return self._fed(values)

    def _fed(self, values: Values) -> Tensor:
        """The recorded loss, whose gradients into the outputs of calls are the recorded ones."""
        self.outputs = []
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for call in self._of.calls:
            output = run_call(call, values, {}, self._device)
            made = dict(leaves(output, ""))
            self.outputs += [each for each in made.values() if each.is_floating_point()]
            for each in call.incoming:
                if each.gradient is not None and each.path in made and _is_last(each.path, made):
                    outputs.append(made[each.path])
                    gradients.append(each.gradient)
        if self._of_outputs:
            return torch.stack([each.float().sum() for each in self.outputs]).sum()
        loss = self._of.loss
        recorded = torch.zeros((), device=self._device) if loss is None else scalar_of(loss)
        return _Feed.apply(recorded, self._scale, gradients, *outputs)  # pyright: ignore[reportReturnType]


class _Feed(torch.autograd.Function):
    """Turns a gradient of the loss, a loss scale, into recorded gradients of outputs."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, scale: float, gradients: list[Tensor], *_: Tensor
    ) -> Tensor:
        """The recorded loss."""
        ctx.scale, ctx.gradients = scale, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        """The recorded gradients, under another scale."""
        factor = float(given[0]) / ctx.scale
        scaled = (each if factor == 1 else each * factor for each in ctx.gradients)
        return (None, None, None, *scaled)


def _is_last(path: str, made: Mapping[str, Tensor]) -> bool:
    """Whether no other output is computed from this one: else its gradient came from inside."""
    mine = made[path].grad_fn
    others = [each.grad_fn for at, each in made.items() if at != path and each.grad_fn is not None]
    seen: set[Any] = set()
    queue = [each for each in others if each is not mine]
    while queue:
        node = queue.pop()
        if node is mine:
            return False
        if node not in seen:
            seen.add(node)
            queue += [each for each, _ in node.next_functions if each is not None]
    return True


def _batch_of(of: Pass, constants: Sequence[Tensor]) -> Any:
    """What a pass takes from outside: the loader's batch if that is all, else arguments."""
    made = {key for call in of.calls for key, (ref, _) in call.outputs.items() if ref() is not None}

    def is_given(tensor: Tensor) -> bool:
        inside = tensor.grad_fn is not None or isinstance(tensor, nn.Parameter)
        return not inside and id(tensor) not in made

    taken: dict[int, Tensor] = {}
    for call in of.calls:
        taken |= {id(t): t for _, t in leaves((call.args, call.kwargs)) if is_given(t)}
    taken |= {id(each): each for each in constants if is_given(each)}
    loaded = set(map(id, tensors(of.batch)))
    if taken and taken.keys() <= loaded:
        return of.batch
    named = of.calls[0].kwargs if of.calls else {}
    by_name = {name: each for name, each in named.items() if isinstance(each, Tensor)}
    if by_name and {id(each) for each in by_name.values()} >= taken.keys():
        return by_name
    return tuple(taken.values())


def policy_of(recorded: Recorded) -> Policy:
    """The precision that passes ran in."""
    if recorded.dtype is None:
        high = torch.get_float32_matmul_precision() != "highest"
        return PRESETS["tf32" if high else "fp32"]
    name = "fp16" if recorded.dtype == torch.float16 else "bf16"
    return replace(PRESETS[name], loss_scaling=recorded.scale is not None)


def scalar_of(loss: Tensor) -> Tensor:
    """A detached loss, as a replay gives it."""
    loss = loss.detach().reshape(())
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def _scalar_with_grad(loss: Tensor) -> Tensor:
    return scalar(loss) if loss.requires_grad else scalar(loss.detach().requires_grad_())


def _mend_statistics(models: Sequence[nn.Module]) -> None:
    """Have running statistics that forward has already spoilt be as new.

    Training does not depend on them, so that any that are finite will do.
    """
    for each in modules_of(models):
        if isinstance(each, _NormBase) and each.training and each.track_running_stats:
            mean, variance = each.running_mean, each.running_var
            if (
                mean is not None
                and variance is not None
                and not (finite(mean) and finite(variance))
            ):
                with torch.no_grad():
                    mean.zero_()
                    variance.fill_(1.0)


@contextmanager
def _no_hooks_after(tensors: Any) -> Generator[None]:
    """No hook of the script's runs when a gradient is there: one may make an update."""
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for each in tensors:
        own = getattr(each, "_post_accumulate_grad_hooks", None)
        if own:
            hooks.append((own, dict(own)))
            own.clear()
    try:
        yield
    finally:
        for own, before in hooks:
            own.update(before)
