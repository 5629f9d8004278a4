"""The rules, one file each. A file that is here is a rule; nothing else lists them."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from ampwise_lint.rule import Rule
from ampwise_lint.triggers import Trigger


@cache
def all_rules() -> dict[str, Rule]:
    """Every rule by its code: the modules of this package."""
    found: dict[str, Rule] = {}
    for each in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{each.name}")
        made: Rule = module.check
        found[made.code] = made
    return dict(sorted(found.items()))


@cache
def all_triggers() -> tuple[Trigger, ...]:
    """What any rule is triggered by, each once."""
    return tuple(dict.fromkeys(each for rule in all_rules().values() for each in rule.triggers))
