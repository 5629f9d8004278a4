"""What a step is given: each thing checked, and its mistakes told in a line.

Optimizers and parameters are checked again whenever they have changed (`members`), settings once.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ampwise.capability import multiplies_float8
from ampwise.errors import UsageError
from ampwise.formats import dtype_name
from ampwise.policy import Policy, Resolution, resolve
from ampwise.step import optimizers as optim
from ampwise.step.loss_scale import LossScale, UnitLossScale
from ampwise.step.modules import held_by, several
from ampwise.step.warn import warn_user
from ampwise_lint.base.words import joined

_HALF = (torch.float16, torch.bfloat16)
_SPELLED = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_One = TypeVar("_One")


# -- models and optimizers -------------------------------------------------------------------------


def models_of(model: Any) -> tuple[nn.Module, ...]:
    """The models of what was given as such."""
    return _all_of("model", model, nn.Module, "an nn.Module, or several")


def optimizers_of(optimizer: Any) -> tuple[Optimizer, ...]:
    """The optimizers of what was given as such; each can be driven, and is there once."""
    found = _all_of("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer, or several")
    for index, each in enumerate(found):
        optim.check(each)
        if any(each is other for other in found[:index]):
            raise UsageError(
                f"optimizer: {type(each).__name__} is listed twice (positions "
                f"{found.index(each)} and {index}); its step would be made twice"
            )
    return found


def _all_of(name: str, given: Any, kind: type[_One], expected: str) -> tuple[_One, ...]:
    found: tuple[Any, ...] = (given,) if isinstance(given, nn.Module) else several(given)
    if not found:
        raise UsageError(f"{name}: expected {expected}, got none ({given!r})")
    for each in found:
        if not isinstance(each, kind):
            among = "" if each is given else f" in a {type(given).__name__}"
            raise UsageError(f"{name}: expected {expected}, got {_in_words(each)}{among}")
    return found


def _in_words(thing: object) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}; make an instance of it"
    if isinstance(thing, Tensor):
        return f"a {type(thing).__name__.lower()} of shape {tuple(thing.shape)}"
    return "None" if thing is None else f"{type(thing).__name__} {str(thing)[:60]!r}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def device_of(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    """The device that models are on: that of their first parameter."""
    if not parameters:
        raise UsageError("model: it has no parameters, so there is nothing to train")
    return next(iter(parameters.values())).device


def check_parameters(
    named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], policy: Policy
) -> None:
    """Whether optimizers train the models, and parameters are in a format that can be trained.

    Raises
    ------
    UsageError
        When no optimizer holds a parameter of the models; for 16-bit parameters under a policy that
        scales the loss.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    strangers = [
        each
        for each in optimizers
        if (held := held_by([each])) and not any(id(parameter) in names for parameter in held)
    ]
    if strangers:
        _foreign(strangers, optimizers)
    _check_formats(names, held_by(optimizers), policy)


def _foreign(strangers: Sequence[Optimizer], optimizers: Sequence[Optimizer]) -> None:
    kinds = ", ".join(type(each).__name__ for each in strangers)
    if len(strangers) == len(optimizers):
        raise UsageError(
            f"optimizer: {kinds} holds no parameter of the model, so nothing of it would be "
            "trained; make the optimizer over model.parameters() of this very model, after it was "
            "copied, wrapped or sharded"
        )
    warn_user(
        f"optimizer: {kinds} holds no parameter of the models given; its own are trained all the "
        "same, where the loss depends on them"
    )


def _check_formats(names: Mapping[int, str], held: Iterable[Tensor], policy: Policy) -> None:
    half = [each for each in held if each.dtype in _HALF and each.requires_grad]
    if not half or (policy.pure and half[0].dtype == torch.bfloat16):
        return
    dtype = dtype_name(half[0].dtype)
    shown = names.get(id(half[0]), "one outside the model")
    more = f" and {len(half) - 1} more" if len(half) > 1 else ""
    if policy.loss_scaling:
        raise UsageError(
            f"model: parameters are {dtype} ({shown}{more}), and {policy.name} scales the loss for "
            "float32 ones: their scaled gradients overflow, and their updates are lost or NaN; "
            "call model.float() before the optimizer is made, autocast computes in 16 bits anyway"
        )
    warn_user(
        f"model: parameters are {dtype} ({shown}{more}): updates below half an ULP of a weight are "
        "lost, and Adam's eps of 1e-8 is 0 in float16; keep them float32 (model.float()) and let "
        "the policy compute in 16 bits"
    )


def scalar(loss: Any) -> Tensor:
    """The loss as a 0-dimensional tensor of at least float32.

    A 16-bit loss is raised first: multiplied by the scale in its own format it would be inf.

    Raises
    ------
    UsageError
        When it is no scalar that requires grad.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"loss: expected a scalar tensor, got {type(loss).__name__}; loss_fn returns the loss, "
            "or a tuple that begins with it"
        )
    if not loss.is_floating_point():
        raise UsageError(
            f"loss: expected a floating-point scalar, got {loss.dtype}, which has no gradient"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"loss: expected a scalar, got shape {tuple(loss.shape)}; reduce it with .mean()"
        )
    if not loss.requires_grad:
        raise UsageError(
            "loss: it does not require grad; compute it from the model's output, outside "
            "torch.no_grad(), without .item() or .detach()"
        )
    if loss.dtype in (torch.float16, torch.bfloat16):
        loss = loss.float()
    return loss.reshape(()) if loss.dim() else loss


# -- settings --------------------------------------------------------------------------------------


def check_settings(
    max_grad_norm: Any, skip: Any, max_skips: Any, watch_every: Any, undo: Any
) -> None:
    """Refuse settings that cannot work."""
    check_norm(max_grad_norm)
    if skip not in ("all", "each"):
        raise UsageError(f"skip: expected 'all' or 'each', got {skip!r}")
    if undo not in ("micro-batch", "window"):
        raise UsageError(f"undo: expected 'micro-batch' or 'window', got {undo!r}")
    whole_number("max_skips", max_skips, 1, "skipped steps")
    whole_number("watch_every", watch_every, 0, "steps")


def check_norm(max_grad_norm: Any) -> None:
    """Refuse what is no limit of a norm; None is no limit."""
    if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm > 0):
        raise UsageError(f"max_grad_norm: expected a norm above 0, or None, got {max_grad_norm!r}")


def whole_number(name: str, value: Any, least: int, what: str) -> int:
    """`value` as an int of at least `least`; NumPy's are taken, too."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise UsageError(
            f"{name}: expected a whole number of {what}, {least} or more, got {value!r}"
        )
    return number


def check_callable(name: str, value: object, expected: str) -> None:
    """Refuse what cannot be called; None can be left out."""
    if value is not None and (not callable(value) or isinstance(value, type)):
        raise UsageError(f"{name}: expected {expected}, got {_in_words(value)}")


def check_ema(ema: Any, model: nn.Module) -> None:
    """Refuse an average that is none, or that is of another model; None can be left out."""
    if ema is None:
        return
    if not isinstance(ema, AveragedModel):
        raise UsageError(
            f"ema: expected a torch.optim.swa_utils.AveragedModel, got {_in_words(ema)}; update "
            "any other average after the step, where step.boundary is true"
        )
    shapes = [[each.shape for each in of.parameters()] for of in (ema.module, model)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            "ema: its parameters have other shapes than the model's; make it of this very model: "
            "AveragedModel(model)"
        )


def policy_for(request: Any, device: torch.device) -> tuple[Policy, Resolution | None]:
    """A named policy is taken at its word; ``auto`` is resolved for the model's device."""
    if isinstance(request, Policy):
        return request, None
    if isinstance(request, Resolution):
        return request.policy, request
    if isinstance(request, str):
        if request.strip().lower() != "auto":
            policy = Policy.parse(request)
            _tell_emulated(policy, device)
            return policy, None
        resolution = resolve(request, device)
        return resolution.policy, resolution
    instead = f"; did you mean {_SPELLED[request]!r}?" if request in _SPELLED else ""
    raise UsageError(
        "policy: expected a precision such as 'bf16', or an ampwise.Policy, got "
        f"{request!r}{instead}"
    )


def _tell_emulated(policy: Policy, device: torch.device) -> None:
    """Warn where float8 is asked for by name and multiplied in float32."""
    if policy.float8 and not multiplies_float8(device):
        warn_user(
            f"policy {policy.text}: no unit of {device} multiplies float8, so it is emulated in "
            "float32: for its numerics only, its speed and memory say nothing"
        )


def loss_scale_for(policy: Policy, settings: Any, device: torch.device) -> LossScale:
    """The loss scale of a step, in its first state."""
    if settings is not None and not isinstance(settings, LossScale):
        instead = f"; did you mean LossScale({settings})?" if _is_number(settings) else ""
        raise UsageError(
            f"loss_scale: expected an ampwise.LossScale, got {_in_words(settings)}{instead}"
        )
    if policy.loss_scaling:
        return (settings or LossScale()).fresh(device)
    if settings is not None:
        warn_user(f"loss_scale: policy {policy.text} does not scale the loss, so it is not used")
    return UnitLossScale().fresh(device)


# -- the schedule ----------------------------------------------------------------------------------


def check_schedule(scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
    """Whether a scheduler can be stepped after each optimizer step; None can be left out.

    Raises
    ------
    UsageError
        For one that needs more than to be called, or that is of another optimizer.
    """
    if scheduler is None:
        return
    if isinstance(scheduler, list | tuple):
        raise UsageError(
            f"scheduler: expected one, got {len(scheduler)}; give one to the step, and call the "
            "others yourself where step.boundary is true"
        )
    by_updates = goes_by_updates(scheduler)
    step = scheduler.step_update if by_updates else getattr(scheduler, "step", None)
    if isinstance(scheduler, type) or not callable(step):
        raise UsageError(
            f"scheduler: expected a learning-rate scheduler, got {_in_words(scheduler)}"
        )
    kind = type(scheduler).__name__
    if by_updates:
        _check_updates(scheduler, kind)
    needed = [each.name for each in inspect.signature(step).parameters.values() if _needed(each)]
    if len(needed) > by_updates:
        raise UsageError(
            f"scheduler: {kind}.{step.__name__} needs {joined(needed)}, which a training "
            "step does not have; leave it out, and call it where you do (after an evaluation or an "
            "epoch, say)"
        )
    owner = getattr(scheduler, "optimizer", None)
    if isinstance(owner, Optimizer) and not _shares_groups(owner, optimizers):
        raise UsageError(
            f"scheduler: {kind} belongs to another optimizer ({type(owner).__name__}), so it would "
            "change nothing here; make it over an optimizer of this step"
        )


def _shares_groups(owner: Optimizer, optimizers: Sequence[Optimizer]) -> bool:
    """Whether some group of an optimizer is one of others': it is one of them, or wraps them."""
    groups = {id(group) for each in optimizers for group in each.param_groups}
    return any(id(group) in groups for group in owner.param_groups)


def goes_by_updates(scheduler: Any) -> bool:
    """Whether a scheduler is of timm's manner: ``step_update(number of updates)``."""
    return callable(getattr(scheduler, "step_update", None))


def _check_updates(scheduler: Any, kind: str) -> None:
    if getattr(scheduler, "t_in_epochs", False):
        raise UsageError(
            f"scheduler: {kind} counts epochs (t_in_epochs=True), and a training step counts "
            "updates; make it with t_in_epochs=False, or leave it out and call its step(epoch) at "
            "the end of each epoch"
        )


def _needed(parameter: inspect.Parameter) -> bool:
    by_name = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in by_name
