"""The arguments of a call, evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampwise_lint.values.abstract import Value


@dataclass(slots=True)
class Arguments:
    """What a call is given."""

    positional: list[Value] = field(default_factory=list[Value])
    named: dict[str, Value] = field(default_factory=dict[str, Value])
    open: bool = False
    """There are more (``*args``, ``**kwargs``)."""

    @property
    def values(self) -> list[Value]:
        """All, positional ones first."""
        return [*self.positional, *self.named.values()]

    @property
    def count(self) -> int:
        """How many."""
        return len(self.positional) + len(self.named)

    def first(self, *names: str) -> Value | None:
        """The first positional one, or one of these names."""
        return self.get(0, *names)

    def get(self, index: int, *names: str) -> Value | None:
        """The argument at a position, or under one of these names."""
        if index < len(self.positional):
            return self.positional[index]
        return next((self.named[name] for name in names if name in self.named), None)
