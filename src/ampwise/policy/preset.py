"""Precision policies: what is stored, computed, reduced and returned in which format.

===========  ==========  ==========  =======  ====  ==============================================
preset       weights     compute     scaling  TF32  what it is
===========  ==========  ==========  =======  ====  ==============================================
fp32         float32     float32     no       no    strict float32
tf32         float32     float32     no       yes   float32 whose matmuls round their inputs: TF32
                                                    on GPUs, oneDNN's bf16 math on CPUs
fp16         float32     float16     yes      no    autocast with dynamic loss scaling
bf16         float32     bfloat16    no       no    autocast
bf16-master  bfloat16    bfloat16    no       no    forward and backward in bfloat16 copies of
                                                    the float32 parameters, the master weights
bf16-pure    bfloat16    bfloat16    no       no    parameters, gradients and optimizer state in
                                                    bfloat16, updates rounded stochastically
fp8          float32     bfloat16    no       no    autocast whose linear layers multiply in float8,
                                                    scaled tensor by tensor
===========  ==========  ==========  =======  ====  ==============================================

A policy has one text spelling: the preset, then what differs from it, with ``:`` between the
settings and ``+`` between islands::

    policy   = preset { ":" setting }
    setting  = "reduce=" format | "output=" format | "scaling=" switch | "tf32=" switch
             | "islands=" island { "+" island }            (also "param=", "compute=")
             | "rounding=" ( "stochastic" | "kahan" )
             | "recipe=" ( "tensorwise" | "rowwise" | "rowwise_with_gw_hp" )
    island   = pattern | function "()"
    switch   = "on" | "off"

    bf16    fp16:scaling=off    bf16:reduce=bf16:islands=head+*.norm+softmax()

There is no comma in it, so a list of policies can be split at commas. ``Policy.parse(p.text) == p``
for every policy. The parameter and compute format belong to the name: a policy called ``fp16``
that computes in bfloat16 is refused, because every report would carry the wrong name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ampwise import formats
from ampwise.errors import PolicyError, nearest

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes a policy can name."""

ROUNDINGS = ("stochastic", "kahan")
"""How updates of 16-bit parameters are rounded."""

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""How tensors are scaled into float8, by torchao's names.

The first is the default, as it is torchao's: the fastest, and the one whose products every device
with float8 has. An outlier in a tensor costs its other elements bits; in a row, only those of it.
"""

_DTYPE_FIELDS = ("param_dtype", "compute_dtype", "reduce_dtype", "output_dtype")
_FP32: dict[str, Any] = dict.fromkeys(_DTYPE_FIELDS, "float32") | {
    "loss_scaling": False,
    "tf32": False,
    "rounding": "",
    "recipe": "",
}
_PRESET_FIELDS: Mapping[str, dict[str, Any]] = {
    "fp32": _FP32,
    "tf32": _FP32 | {"tf32": True},
    "fp16": _FP32 | {"compute_dtype": "float16", "loss_scaling": True},
    "bf16": _FP32 | {"compute_dtype": "bfloat16"},
    "bf16-master": _FP32 | {"compute_dtype": "bfloat16", "param_dtype": "bfloat16"},
    "bf16-pure": _FP32
    | {"compute_dtype": "bfloat16", "param_dtype": "bfloat16", "rounding": "stochastic"},
    "fp8": _FP32 | {"compute_dtype": "bfloat16", "recipe": RECIPES[0]},
}
_CHOICES = {
    "rounding": (ROUNDINGS, "rounding is of updates of 16-bit parameters; that is bf16-pure"),
    "recipe": (RECIPES, "a recipe is of products in float8; that is fp8"),
}
"""Field -> its values where the preset has one, and what is said elsewhere."""
_PATTERN = re.compile(r"[^\s,:+]+")


@dataclass(frozen=True)
class Policy:
    """A precision policy, as a plain value; dtypes are PyTorch's names as strings.

    Attributes
    ----------
    name
        The preset this policy is, or is a variation of.
    param_dtype
        Dtype of the weights that forward and backward see. With anything but float32 they are
        copies; the parameters themselves stay float32, and are the master weights. Only under
        ``bf16-pure`` they are the parameters.
    compute_dtype
        Dtype of the operations that autocast lowers.
    reduce_dtype
        Dtype in which gradients are summed across ranks.
    output_dtype
        Dtype of what the model returns: float32, or the compute dtype.
    loss_scaling
        Whether the loss is scaled dynamically. Needed by float16; harmless for bfloat16.
    tf32
        Whether float32 matmuls may run in the device's faster float32 mode.
    islands
        What stays in float32: patterns (`fnmatch`) of module names, and torch's functions, such as
        ``softmax()``, wherever the model or the loss calls them.
    rounding
        How updates of 16-bit parameters are rounded: ``stochastic`` or ``kahan``; empty where
        parameters stay float32.
    recipe
        How operands of linear layers are scaled into float8 (`RECIPES`); empty where they are not.

    Raises
    ------
    PolicyError
        When a value is unknown or the values contradict each other.
    """

    name: str
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"
    output_dtype: str = "float32"
    loss_scaling: bool = False
    tf32: bool = False
    islands: tuple[str, ...] = ()
    rounding: str = ""
    recipe: str = ""

    def __post_init__(self) -> None:
        for field in _DTYPE_FIELDS:
            object.__setattr__(self, field, _dtype_named(getattr(self, field)))
        islands = (self.islands,) if isinstance(self.islands, str) else tuple(self.islands)
        object.__setattr__(self, "islands", islands)
        if complaint := _contradiction(self):
            raise PolicyError(f"impossible precision {self.name!r}: {complaint}")

    @property
    def autocast(self) -> bool:
        """Whether part of the work runs in a 16-bit format."""
        return self.compute_dtype != "float32"

    @property
    def master_weights(self) -> bool:
        """Whether forward and backward see copies of float32 parameters."""
        return self.param_dtype != "float32" and not self.pure

    @property
    def pure(self) -> bool:
        """Whether parameters themselves are in 16 bits, and their updates rounded with care."""
        return bool(self.rounding)

    @property
    def float8(self) -> bool:
        """Whether linear layers multiply in float8."""
        return bool(self.recipe)

    @property
    def island_modules(self) -> tuple[str, ...]:
        """Patterns of modules that stay in float32."""
        return tuple(each for each in self.islands if not each.endswith("()"))

    @property
    def island_functions(self) -> tuple[str, ...]:
        """Names of torch's functions that stay in float32."""
        return tuple(each[:-2] for each in self.islands if each.endswith("()"))

    @property
    def compute_format(self) -> str:
        """The format the matmuls run in: `compute_dtype`, ``tf32`` or float8."""
        if self.float8:
            return formats.FLOAT8_E4M3FN.name
        return "tf32" if self.tf32 and not self.autocast else self.compute_dtype

    @property
    def text(self) -> str:
        """The text spelling; `parse` reads it back."""
        preset = PRESETS[self.name]
        settings = (
            f"{word}={_print(getattr(self, field))}"
            for word, field in _WORDS.items()
            if getattr(self, field) != getattr(preset, field)
        )
        return ":".join((self.name, *settings))

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Policy:
        """The policy of a text spelling such as ``bf16`` or ``bf16:islands=head+*.norm``.

        Raises
        ------
        PolicyError
            When the preset, a setting or a value is unknown, given twice, or contradicts another.
        """
        name, *settings = text.strip().split(":")
        changes: dict[str, Any] = {}
        for setting in settings:
            field, value = _parse_setting(setting, text)
            if field in changes:
                raise PolicyError(f"precision {text!r} sets {setting.partition('=')[0]!r} twice")
            changes[field] = value
        return dataclasses.replace(_preset(name), **changes)


def _contradiction(policy: Policy) -> str:  # noqa: C901 - one rule after the other
    """What is impossible about a policy, or the empty string."""
    preset = _PRESET_FIELDS.get(policy.name)
    if preset is None:
        return _unknown_name(policy.name)
    for field in ("param_dtype", "compute_dtype"):
        value, expected = getattr(policy, field), preset[field]
        if value != expected:
            others = [name for name, other in _PRESET_FIELDS.items() if other[field] == value]
            instead = f"; that is {' or '.join(others)}" if others else ""
            return f"its {field} is {expected}, not {value}{instead}"
    if policy.output_dtype not in ("float32", policy.compute_dtype):
        return f"output is float32 or the compute dtype, not {policy.output_dtype}"
    for field, (choices, elsewhere) in _CHOICES.items():
        value = getattr(policy, field)
        if value and not preset[field]:
            return elsewhere
        if preset[field] and value not in choices:
            return f"{field} is {' or '.join(choices)}, not {value or 'none'}"
    for pattern in policy.islands:
        if not _PATTERN.fullmatch(pattern):
            return f"island pattern {pattern!r} is empty or has a space, comma, colon or plus in it"
    if policy.autocast:
        return ""
    if policy.tf32 != preset["tf32"]:
        return f"TF32 {_print(policy.tf32)} is the preset {'tf32' if policy.tf32 else 'fp32'!r}"
    if policy.loss_scaling:
        return "loss scaling protects 16-bit gradients, and everything is float32 here"
    if policy.islands:
        return "islands are modules kept in float32, and everything is float32 here"
    return ""


def _preset(name: str) -> Policy:
    """A preset by name; a format's spelling (``half``, ``bfloat16``) names its preset too."""
    word = name.strip().lower()
    if word not in PRESETS:
        word = _short_name(word)
    if word not in PRESETS:
        raise PolicyError(_unknown_name(name.strip()))
    return PRESETS[word]


def _short_name(word: str) -> str:
    try:
        return formats.lookup(word).short
    except PolicyError:
        return word


def _unknown_name(name: str) -> str:
    legal = ", ".join(_PRESET_FIELDS)
    if name == "auto":
        return f"'auto' is a request for ampwise.resolve, not a policy; policies are {legal}"
    close = nearest(name.lower(), (*_PRESET_FIELDS, "auto"))
    return f"unknown precision {name!r}: expected one of {legal}, auto{close}"


def _dtype_named(value: str) -> str:
    """PyTorch's name of a policy dtype, from any spelling."""
    name = formats.lookup(value).name
    if name not in DTYPES:
        raise PolicyError(f"a policy cannot use {name}: expected one of {', '.join(DTYPES)}")
    return name


def _switch(value: str) -> bool:
    if value not in ("on", "off"):
        raise PolicyError(f"expected on or off, not {value!r}")
    return value == "on"


def _patterns(value: str) -> tuple[str, ...]:
    return tuple(value.split("+")) if value else ()


_WORDS = {
    "param": "param_dtype",
    "compute": "compute_dtype",
    "reduce": "reduce_dtype",
    "output": "output_dtype",
    "scaling": "loss_scaling",
    "tf32": "tf32",
    "islands": "islands",
    "rounding": "rounding",
    "recipe": "recipe",
}
"""Word in the text spelling -> field."""

_READERS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(_DTYPE_FIELDS, _dtype_named),
    "loss_scaling": _switch,
    "tf32": _switch,
    "islands": _patterns,
    "rounding": str,
    "recipe": str,
}


def _parse_setting(setting: str, text: str) -> tuple[str, object]:
    """Field and value of one ``word=value``; `text` is the whole spelling, for the message."""
    word, equals, value = setting.partition("=")
    if word not in _WORDS or not equals:
        raise PolicyError(
            f"precision {text!r}: {setting!r} is no setting; expected one of "
            f"{', '.join(f'{w}=' for w in _WORDS)}{nearest(word, _WORDS)}"
        )
    field = _WORDS[word]
    try:
        return field, _READERS[field](value)
    except PolicyError as error:
        raise PolicyError(f"precision {text!r}: {word}: {error}") from None


def _print(value: str | bool | tuple[str, ...]) -> str:
    """A field's value in the text spelling."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "+".join(value)
    if value in (*ROUNDINGS, *RECIPES):
        return value
    return formats.lookup(value).short


PRESETS: Mapping[str, Policy] = MappingProxyType(
    {name: Policy(name, **fields) for name, fields in _PRESET_FIELDS.items()}
)
"""Every preset by name, the plainest first."""
