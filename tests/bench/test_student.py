"""Student's t, against SciPy's."""

from __future__ import annotations

import pytest
from scipy import special

from ampwise.bench import student


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 11, 100, 999])
def test_as_scipy_has_it(freedom):
    for t in (-1e9, -30.0, -2.5, -0.1, 0.0, 0.3, 1.0, 4.0, 1e9):
        assert student.cdf(freedom, t) == pytest.approx(special.stdtr(freedom, t), abs=1e-13)
    for p in (0.5, 0.8, 0.9, 0.975, 0.99375, 0.9999):
        assert student.quantile(freedom, p) == pytest.approx(
            special.stdtrit(freedom, p), rel=1e-9, abs=1e-12
        )
