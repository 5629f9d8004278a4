"""Scripts observed on a GPU: the host never waits for it, and a race says what a precision gains."""

from __future__ import annotations

import pytest

from ampwise.observe.race import racers
from tests.observe.inside import observe

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [each for _ in range(4) for each in (nn.Linear({width}, {width}), nn.ReLU())]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda", enabled={scaled})
x = torch.randn({width}, {width}, device="cuda")

def step():
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16, enabled={scaled}):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    if {clipped}:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()

for _ in range({warm_up}):
    step()
torch.cuda.set_sync_debug_mode("{mode}")
try:
    for _ in range({steps}):
        step()
finally:
    torch.cuda.set_sync_debug_mode("default")
"""


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_observing_never_waits_for_the_device(tmp_path, scaled, clipped):
    path = tmp_path / "script.py"
    settings = {"width": 64, "warm_up": 5, "steps": 100, "mode": "error"}
    path.write_text(SCRIPT.format(scaled=scaled, clipped=clipped, **settings))
    report = observe(path).report
    assert (report.ending, report.steps) == ("finished", 105)
    assert report.loss_last is not None


def test_a_race_takes_turns_of_several_steps(tmp_path):
    path = tmp_path / "script.py"
    settings = {"width": 2048, "warm_up": 5, "steps": 1000, "mode": "default"}
    path.write_text(SCRIPT.format(scaled=False, clipped=False, **settings))
    found = observe(path, race=racers("bf16"), steps=1000).report.race["bf16"]
    assert found.pairs >= 20
    assert found.speed is not None
    assert found.speed.low > 1.2
