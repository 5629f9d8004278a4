"""What must stand in a file for a rule to find something in it, before the parser's work.

Most files have nothing to do with mixed precision, and their text says so. Words are looked for as
they are; every pattern begins with letters that stand for themselves, which makes the search fast.
Each rule names its triggers (``@rule(..., triggers=...)``); the prefilter asks for those of all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trigger:
    """Words and patterns, of which one is enough."""

    words: tuple[str, ...] = ()
    patterns: tuple[re.Pattern[str], ...] = ()
    beside: tuple[str, ...] = ()
    """Words of which there must be one, too."""
    anywhere: bool = False
    """In any file; else where a training step is, in that file or in one that it imports."""

    def is_in(self, text: str) -> bool:
        """Whether a file's text has it."""
        if self.beside and not any(each in text for each in self.beside):
            return False
        return any(each in text for each in self.words) or any(
            each.search(text) for each in self.patterns
        )


SCALER = Trigger(
    ("loss_scal", "unscale_", "amp_", "apex"),
    (re.compile(r"calers?\b"), re.compile(r"\.scale\s*\(.*\)\s*\.backward")),
)
"""Something scales losses: a gradient scaler, apex, or a factor written by hand."""

AUTOCAST = Trigger(
    ("autocast", "ccelerator.backward", "manual_backward"),
    (re.compile(r"precision\s*="), re.compile(r"Accelerator\s*\(\s*[\w)]")),
)
"""A region of autocast, or a trainer that is told to open one, here or as it is launched."""

HALF = Trigger(
    ("HalfTensor", "float16", "bf16", "fp16", "half_precision", "torch.half", "import half"),
    (re.compile(r"\.half\s*\("),),
)
"""Something is of 16 bits by name."""

MIXED = (SCALER, AUTOCAST, HALF)
"""Anything of mixed precision."""

OLD_PACKAGES = Trigger(
    patterns=(re.compile(r"amp(?<!\wamp)\b"), re.compile("fp16_utils")), anywhere=True
)
"""A package called amp: it has old homes (torch.cuda.amp, apex.amp), wherever they are named."""

FLOAT8 = Trigger(("convert_to_float8_training",), anywhere=True)
"""Layers are converted to float8 by torchao, wherever that is."""

TRAINERS = ("Trainer", "TrainingArguments", "Fabric", "Accelerator")
"""Classes that run steps themselves."""

STEP = Trigger(
    ("autocast", "GradScaler", "unscale_", "scale_loss"),
    (
        re.compile(r"backward(?<!\wbackward)(?<!def backward)\s*\("),
        *(re.compile(rf"\.{each}\s*\(") for each in ("step", "half", "scale")),
        *(re.compile(rf"{e}\s*\(") for e in TRAINERS),
        re.compile(
            r"torch\.(zeros|tensor|full)\([\s\S]{0,200}?dtype *= *torch\.(b?float16|half)\b"
        ),
    ),
)
"""Part of a training step. It is no rule's: without it a file is not searched for steps."""

WHOLE_STEP = (re.compile(r"\.backward\s*\("), re.compile(r"\.step\s*\("))
BY_WRAPPER = re.compile(r"scaler\s*\(\s*[\w.]+( / [\w.]+)?\s*,\s*[\w.]*opt")
"""``loss_scaler(loss, optimizer, ...)``, which is a whole step."""


def has_whole_step(text: str) -> bool:
    """Whether a file may make whole training steps, not only a part."""
    return all(each.search(text) for each in WHOLE_STEP) or bool(BY_WRAPPER.search(text))
