"""What is said where a trainer is not installed, and what the package itself needs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from ampwise import MissingExtraError


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_the_error_names_the_extra(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"ampwise.integrations.{name}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"\[{name}\]") as refusal:
        importlib.import_module(f"ampwise.integrations.{name}")
    assert "\n" not in str(refusal.value)


def test_adaptive_clipping_names_the_extra_too(monkeypatch):
    import torch

    from ampwise.integrations.timm import NativeScaler

    monkeypatch.setitem(sys.modules, "timm", None)
    weight = torch.nn.Parameter(torch.ones(2))
    scaler = NativeScaler(policy="fp32")
    with pytest.raises(MissingExtraError, match=r"\[timm\]"):
        scaler(
            weight.square().sum(), torch.optim.SGD([weight]), clip_grad=0.1, clip_mode="agc",
            parameters=[weight],
        )  # fmt: skip


def test_the_package_loads_none_of_them():
    code = "import ampwise.integrations, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "lightning", "transformers", "timm"} & set(done.stdout.split())
