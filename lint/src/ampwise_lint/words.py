"""What must stand in a file for a rule to find something in it: a glance before the parser's work.

Most files have nothing to do with mixed precision, and their text says so. Words are looked for as
they are; every pattern begins with letters that stand for themselves, which makes the search fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

AMP = (re.compile(r"amp(?<!\wamp)\b"), re.compile("fp16_utils"))
"""A package of that name has old homes (torch.cuda.amp, apex.amp), wherever they are named."""

TRAINERS = ("lightning", "transformers", "accelerate")
OLD_FLAGS = ("amp_", "fp16", "precision")
"""A file with one of each may give a trainer a flag in an old spelling."""

MIXED_WORDS = (
    "autocast", "HalfTensor", "float16", "bf16", "loss_scal", "unscale_",
    "amp_", "apex", "fp16", "half_precision", "torch.half", "import half",
)  # fmt: skip
MIXED = (
    re.compile(r"calers?\b"), re.compile(r"precision\s*="), re.compile(r"\.half\s*\("),
    re.compile(r"\.scale\s*\(.*\)\s*\.backward"),
)  # fmt: skip
"""A file without any of these has nothing to do with mixed precision, AMP and old flags apart."""

STEP_WORDS = ("autocast", "GradScaler", "unscale_", "scale_loss")
STEP = (
    re.compile(r"backward(?<!\wbackward)(?<!def backward)\s*\("),
    *(re.compile(rf"\.{each}\s*\(") for each in ("step", "half", "scale")),
    re.compile(r"torch\.(zeros|tensor|full)\([\s\S]{0,200}?dtype *= *torch\.(b?float16|half)\b"),
)
"""One without any of these is not worth the search for steps (`Roles.core`)."""


WHOLE = (re.compile(r"\.backward\s*\("), re.compile(r"\.step\s*\("))


def concerns(text: str) -> bool:
    """Whether a file may have anything to do with mixed precision.

    Of one that has not, nothing is looked at but whether it parses.
    """
    if _has(text, (), AMP) or (_has(text, TRAINERS) and _has(text, OLD_FLAGS)):
        return True
    return is_mixed(text) and has_step(text)


def is_mixed(text: str) -> bool:
    """Whether a file has words of mixed precision."""
    return _has(text, MIXED_WORDS, MIXED)


def has_loop(text: str) -> bool:
    """Whether a file may train in mixed precision: whole steps, not only a part."""
    return is_mixed(text) and all(each.search(text) for each in WHOLE)


def has_step(text: str) -> bool:
    """Whether a file may hold part of a training step."""
    return _has(text, STEP_WORDS, STEP)


def _has(text: str, words: Iterable[str], patterns: Iterable[re.Pattern[str]] = ()) -> bool:
    return any(each in text for each in words) or any(each.search(text) for each in patterns)
