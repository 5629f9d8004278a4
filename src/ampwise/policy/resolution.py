"""From a request to the policy that is used, with every reason; nothing changes silently.

1. The device: what the user named wins, also when something faster is present; a device that
   is absent becomes the CPU; no device named means the best one present.
2. The policy: a request for a format that gains over float32 on that device (see
   `ampwise.capability`) is used as it is. One that is emulated, unsupported or gains nothing
   becomes ``fp32``; ``strict`` raises instead, and ``allow_emulated`` keeps it, unless it cannot
   run at all.
3. ``auto`` takes the first of bf16, fp16, tf32 that gains, else fp32. bfloat16 comes first
   because it has float32's range and needs no loss scaling. On a CPU it never takes fp16: PyTorch
   runs float16 convolution gradients there on a reference kernel, whatever its matmuls do. It
   takes fp8 nowhere: what that gains shows in compiled models only, and it costs accuracy.

Matrix products say little about a step of small ones, so ``auto`` is a guess here, and says so
(`Resolution.guess`). A `TrainStep` races the `candidates` on its own first batch and knows better.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampwise.errors import PolicyError, UsageError
from ampwise.policy.preset import PRESETS, Policy

if TYPE_CHECKING:
    import torch

    from ampwise.capability import DeviceCapability, FormatSupport

_AUTO = "auto"
FP16_ON_CPU = "float16 convolution gradients run on a slow reference kernel: bench first"
FP8_BY_NAME = "auto leaves fp8 to be asked for: it gains in compiled models only; bench it"
GUESSED = "a guess from matrix products, until a TrainStep races its own first batch"
_ATTENTION_ON_CPU = "bf16:islands=scaled_dot_product_attention()"
_RACED = ("tf32", "bf16", _ATTENTION_ON_CPU, "bf16-master", "fp16")
"""What ``auto`` may become beside fp32, the plainest first.

Attention stays in float32 on CPUs, where its backward in bfloat16 takes up to five times as long.
"""


@dataclass(frozen=True)
class Resolution:
    """What became of a request; as a string, a sentence.

    Attributes
    ----------
    request
        What was asked for: a policy's text, or ``auto``.
    policy
        The policy to use.
    device
        The device to use.
    reasons
        Why, one sentence each, figures included.
    changed
        Whether policy or device differ from what was asked for.
    guess
        Whether nothing but matrix products speaks for it: a step may find another one faster.
    """

    request: str
    policy: Policy
    device: str
    reasons: tuple[str, ...]
    changed: bool
    guess: bool = False

    def __str__(self) -> str:
        use = f"{self.policy} on {self.device}"
        if self.changed:
            use = f"asked for {self.request}, using {use}"
        elif self.request == _AUTO:
            use = f"auto: {use}"
        return f"{use}: {'; '.join(self.reasons)}" if self.reasons else use

    @property
    def asked(self) -> Policy | None:
        """The policy of the request, also where another came of it; None for ``auto``."""
        return _as_policy(self.request)

    def to_json(self) -> dict[str, object]:
        """The resolution as plain values."""
        return {
            "request": self.request,
            "precision": self.policy.text,
            "device": self.device,
            "reasons": list(self.reasons),
            "changed": self.changed,
            "guess": self.guess,
        }


def resolve(
    request: str | Policy = _AUTO,
    device: str | torch.device | None = None,
    *,
    strict: bool = False,
    allow_emulated: bool = False,
) -> Resolution:
    """The policy and device to use for a request, and why.

    Parameters
    ----------
    request
        A policy, its text spelling, or ``auto``.
    device
        None or ``auto`` for the best device present.
    strict
        Raise instead of changing what was asked for.
    allow_emulated
        Keep a request that is emulated or gains nothing on the device.

    Raises
    ------
    PolicyError
        For an unknown precision, and under `strict` for one that would have been changed.
    UsageError
        For a device that PyTorch does not know, or an index that is not present.
    """
    from ampwise import capability

    asked = _as_policy(request)
    device, device_reason, moved = choose_device(device, capability.present_devices())
    if moved and strict:
        raise PolicyError(f"{device_reason}; name a device that is present, or drop strict")
    guess = False
    if asked is not None and asked.compute_format == "float32":
        policy, reasons = asked, ()  # every device does float32: nothing to measure
    else:
        supported = capability.probe(device)
        policy, reasons = decide(asked, supported, strict=strict, allow_emulated=allow_emulated)
        guess = asked is None and bool(candidates(supported)[0])
    reasons = (device_reason, *reasons) if device_reason else reasons
    changed = moved or asked not in (None, policy)
    return Resolution(asked.text if asked else _AUTO, policy, device, reasons, changed, guess)


def candidates(capability: DeviceCapability) -> tuple[list[Policy], dict[str, str]]:
    """What a step on a device may be fastest in beside fp32, the plainest first.

    Beside them what is left out, with the reason: formats that are not native there, and float16 on
    CPUs, whose slow kernels nobody can interrupt.
    """
    found: list[Policy] = []
    left_out: dict[str, str] = {}
    for policy in map(Policy.parse, _RACED):
        name, support = policy.text, capability.formats.get(policy.compute_format)
        if name == _ATTENTION_ON_CPU and capability.kind != "cpu":
            continue
        if support is None or support.verdict != "native":
            left_out[name] = "unknown on this device" if support is None else support.reason
        elif name == "fp16" and capability.kind == "cpu":
            left_out[name] = FP16_ON_CPU
        else:
            found.append(policy)
    left_out["fp8"] = FP8_BY_NAME
    return found, left_out


def choose_device(
    wanted: str | torch.device | None, present: Sequence[str]
) -> tuple[str, str, bool]:
    """Device to use, the reason (may be empty), and whether it is not the one wanted.

    Parameters
    ----------
    present
        Device strings, the best first, ``cpu`` last.
    """
    best, wanted = present[0], str(wanted or _AUTO)
    if wanted == _AUTO:
        return best, "no accelerator is present" if best == "cpu" else "", False
    kind, _, index = wanted.partition(":")
    if kind == "cpu":
        return "cpu", "" if best == "cpu" else f"cpu as asked, although {best} is present", False
    same_kind = [device for device in present if device.partition(":")[0] == kind]
    if wanted in same_kind:
        return wanted, "", False
    if same_kind and (not index or (same_kind == [kind] and index == "0")):
        return same_kind[0], "", False
    if same_kind or not _is_device(wanted):
        what = "is not present" if same_kind else "is no device PyTorch knows"
        raise UsageError(f"device {wanted!r} {what}: expected one of {', '.join(present)}, auto")
    return "cpu", f"{wanted} was asked for and is not present{_not_built(kind)}", True


def decide(
    asked: Policy | None,
    capability: DeviceCapability,
    *,
    strict: bool = False,
    allow_emulated: bool = False,
) -> tuple[Policy, tuple[str, ...]]:
    """The policy for a device of known capability, and the reasons; `asked` is None for auto.

    Raises
    ------
    PolicyError
        Under `strict`, when the policy would not be the one asked for.
    """
    if asked is None:
        return _automatic(capability)
    if asked.compute_format == "float32":
        return asked, ()
    support = capability.formats.get(asked.compute_format)
    if support is None:
        return asked, (f"{asked.compute_format} on {capability.device} is unknown to ampwise",)
    if support.gains:
        return asked, _reasons_for(support, capability)
    if allow_emulated and support.verdict != "unsupported":
        return asked, (support.reason, "kept all the same, as allowed")
    instead = _instead(asked, capability)
    if asked.float8 and support.verdict == "emulated":
        instead += "; allow_emulated trains in it all the same, for its numerics"
    if strict:
        raise PolicyError(
            f"precision {asked.text!r} refused on {capability.device}: {support.reason}; "
            f"{instead}, or drop strict"
        )
    return PRESETS["fp32"], (support.reason, instead)


def _automatic(capability: DeviceCapability) -> tuple[Policy, tuple[str, ...]]:
    """The first preset that gains; if none does, float32 and why not each of the others.

    Either is a guess where a step could find that another one is faster.
    """
    policy, reasons = _by_products(capability)
    return policy, (GUESSED, *reasons) if candidates(capability)[0] else reasons


def _by_products(capability: DeviceCapability) -> tuple[Policy, tuple[str, ...]]:
    for name in ("bf16", "tf32") if capability.kind == "cpu" else ("bf16", "fp16", "tf32"):
        support = capability.formats.get(PRESETS[name].compute_format)
        if support is not None and support.gains:
            return PRESETS[name], _reasons_for(support, capability)
    reasons = (_reasons_for(support, capability) for support in capability.formats.values())
    return PRESETS["fp32"], tuple(itertools.chain.from_iterable(reasons))


def _reasons_for(support: FormatSupport, capability: DeviceCapability) -> tuple[str, ...]:
    """What speaks for or against a format, and what to know before it is used."""
    reasons = [support.reason]
    if support.gains and support.format == "float16" and capability.kind == "cpu":
        reasons.append(FP16_ON_CPU)
    fp8 = capability.formats.get(PRESETS["fp8"].compute_format)
    if support.gains and fp8 is not None and fp8.gains and fp8 is not support:
        reasons.append(f"{fp8.reason}; {FP8_BY_NAME}")
    return tuple(reasons)


def _instead(asked: Policy, capability: DeviceCapability) -> str:
    """What to use in place of a policy that gains nothing."""
    best, _ = _automatic(capability)
    if best.compute_format in ("float32", asked.compute_format):
        return "fp32 is the fastest here"
    measured = capability.formats[best.compute_format].reason
    return f"{best.name} would gain: {measured}"


def _as_policy(request: str | Policy) -> Policy | None:
    """The policy that is asked for; None for ``auto``."""
    if isinstance(request, Policy):
        return request
    return None if request.strip().lower() == _AUTO else Policy.parse(request)


def _is_device(name: str) -> bool:
    import torch

    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def _not_built(kind: str) -> str:
    """The remedy for a device kind that this build of PyTorch cannot use at all."""
    import torch

    backend = getattr(torch.backends, kind, None)
    is_built = getattr(backend, "is_built", None)
    return f" (this PyTorch is built without {kind})" if is_built and not is_built() else ""
