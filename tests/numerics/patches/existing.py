"""The public cases of `tests.numerics.cases` by name, so that a fresh process can load them."""

from __future__ import annotations

from ampwise import Task
from tests.numerics.cases import CASES, VARIANTS


def task(name: str) -> Task:
    return (CASES | VARIANTS)[name].make()
