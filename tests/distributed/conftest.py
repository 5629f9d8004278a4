from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks, close_all, pair


@pytest.fixture
def ranks() -> Ranks:
    """Two processes that belong together."""
    return pair()


def pytest_sessionfinish() -> None:
    close_all()
