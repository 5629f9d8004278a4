"""What other tests compiled, and keep, is not the training's of these."""

from __future__ import annotations

import pytest

from ampwise.observe import faults
from tests.observe.inside import forget_compiled


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_compiled()
    monkeypatch.setattr(faults, "_compiled_already", lambda: False)
