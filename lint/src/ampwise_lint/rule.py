"""What a rule is. Each lives in a file of its own under `rules`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ampwise_lint.analysis import Analysis
from ampwise_lint.findings import Edit, Safety, Severity
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.project import Module
from ampwise_lint.triggers import Trigger


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake at a node; the engine makes a `Finding` of it."""

    node: Node
    module: Module
    message: str
    """What is wrong, what happens, what to write."""
    edits: tuple[Edit, ...] = ()
    mend: Callable[[], tuple[Edit, ...]] | None = None
    """Works `edits` out, where that takes a search: once for each place, not on every path."""
    severity: Severity | None = None
    """Where it is another one than the rule's."""
    fix: Safety | None = None
    """How safe its edits are, where that is another one than the rule's."""


Check = Callable[[Analysis], Iterable[Mistake]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the catalogue."""

    code: str
    name: str
    severity: Severity
    fix: Safety
    triggers: tuple[Trigger, ...]
    """A file without any of them is not looked at."""
    check: Check
    doc: str
    echo_of: str = ""
    """The rule that has said all there is to say, where it finds something in the same file by way
    of another one."""

    def __call__(self, code: Analysis) -> Iterator[Mistake]:
        """All its mistakes on a file's paths, also those in files it imports; each place once."""
        seen: set[tuple[Path, int, int]] = set()
        for mistake in self.check(code):
            place = (mistake.module.path, mistake.node.lineno, mistake.node.col_offset)
            if place not in seen:
                seen.add(place)
                yield mistake if mistake.mend is None else replace(mistake, edits=mistake.mend())


def rule(
    code: str,
    name: str,
    severity: Severity,
    *,
    triggers: tuple[Trigger, ...],
    fix: Safety = "",
    echo_of: str = "",
) -> Callable[[Check], Rule]:
    """Make a rule of a function that yields the mistakes of a file.

    Raises
    ------
    ValueError
        Without triggers, with which it would find nothing in a file that no other rule looks at.
    """
    if not triggers:
        raise ValueError(
            f"rule {code}: expected triggers, got none; name the words that a file must have for "
            "it, as ampwise_lint.triggers has them"
        )

    def make(check: Check) -> Rule:
        module = inspect.getmodule(check)
        doc = inspect.getdoc(module) or ""
        return Rule(code, name, severity, fix, triggers, check, doc, echo_of)

    return make
