"""DTYPE_ERROR: the step raises in this precision, and runs in float32."""

from __future__ import annotations

from ampwise.numerics.explain.cause import Cause, Explanation, Fault


def raised(policy: str, message: str) -> Explanation:
    """What is said of an error that no bad value came before."""
    return Explanation(
        "DTYPE_ERROR", f"Under {policy} this raises {message}. In float32 the same step runs."
    )


CAUSE = Cause("DTYPE_ERROR", Fault.in_another_precision, of_precision=True)
