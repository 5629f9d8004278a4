"""The public cases, as other tools see them: does the report name the line, the module, the cause?

- `torch.autograd.detect_anomaly`: NaN in backward, with the forward's traceback
- Hugging Face's `DebugUnderflowOverflow`: inf and NaN in forward, by module hooks
- `torch.utils._debug_mode.DebugMode`: a log of every operation; it judges nothing
- `ampwise.diagnose`

Each gets one step (forward, scaled backward) of the case under float16 autocast. A line counts as
named when file and number of the line that breaks stand in what the tool says; a module, when its
name or class does. The overhead is that of one such step of charlm tiny in bfloat16, in turns.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _common import paired_ratio, save, show, take_turns
from _replays import rehearsed
from ampwise import diagnose, load_task
from ampwise.numerics.observe.trace import watch
from ampwise.step import TrainStep

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.numerics import cases

SCALE = 65536.0


def one_step(model: nn.Module, loss: Callable[..., Any], batch: Any) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        value = loss(model, batch)
    (value.float() * SCALE).backward()


def anomaly(model: nn.Module, loss: Callable[..., Any], batch: Any) -> str:
    with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly():
        warnings.simplefilter("always")
        try:
            one_step(model, loss, batch)
        except RuntimeError as error:
            return str(error) + "".join(str(each.message) for each in caught)
    return ""


def hugging_face(model: nn.Module, loss: Callable[..., Any], batch: Any) -> str:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            one_step(model, loss, batch)
        except ValueError as error:
            return said.getvalue() + str(error)
        except RuntimeError:
            return ""
    return ""


def debug_mode(model: nn.Module, loss: Callable[..., Any], batch: Any) -> str:
    from torch.utils._debug_mode import DebugMode

    with DebugMode(record_nn_module=True) as mode, contextlib.suppress(RuntimeError):
        one_step(model, loss, batch)
    text = mode.debug_string()
    return text if re.search(r"\b(nan|inf)\b", text, re.IGNORECASE) else ""


TOOLS = {"detect_anomaly": anomaly, "DebugUnderflowOverflow": hugging_face, "DebugMode": debug_mode}


def see(case: cases.Case) -> dict[str, Any]:
    """What each tool says of one case."""
    found: dict[str, Any] = {}
    line = cases.line_of(case.line_of) if case.line_of is not None else None
    for name, tool in TOOLS.items():
        torch.manual_seed(0)
        task = case.make()
        said = tool(task.model(), task.loss, next(iter(task.batches())))
        found[name] = {
            "alarm": bool(said),
            "line": line is not None and f'cases.py", line {line}' in said,
            "module": bool(case.module)
            and re.search(rf"\b{re.escape(case.module)}\b", said) is not None,
            "cause": False,
        }
    torch.manual_seed(0)
    diagnosis = diagnose(case.make(), case.precision, steps=6)
    origin = diagnosis.origin
    found["ampwise"] = {
        "alarm": diagnosis.status == "fault",
        "line": origin is not None and line is not None and origin.line == line,
        "module": origin is not None and bool(case.module) and origin.module == case.module,
        "cause": diagnosis.cause == case.cause,
        "verified_fix": any(each.verified for each in diagnosis.fixes),
    }
    return found


def overheads(rounds: int = 12) -> dict[str, Any]:
    """One step under each tool over one without."""
    task = load_task("charlm", {"size": "tiny"})
    torch.manual_seed(0)
    model, batch = task.model(), next(iter(task.batches()))
    step = TrainStep(model, torch.optim.AdamW(model.parameters()), policy="bf16")
    again, stash = rehearsed(step, task.loss, batch)

    def plain() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = task.loss(model, batch)
        loss.backward()

    def under_anomaly() -> None:
        with warnings.catch_warnings(), torch.autograd.detect_anomaly():
            warnings.simplefilter("ignore")
            plain()

    def under_debug_mode() -> None:
        from torch.utils._debug_mode import DebugMode

        with DebugMode(record_nn_module=True):
            plain()

    arms: dict[str, Callable[[], object]] = {
        "plain": plain,
        "detect_anomaly": under_anomaly,
        "DebugMode": under_debug_mode,
        "ampwise, plain replay": lambda: again.replay(stash),
        "ampwise, watched replay": lambda: watch(again, stash),
    }
    times = take_turns(arms, rounds, warm_up=2)
    # Its hooks stay on the model, so it comes last and apart.
    from transformers.debug_utils import DebugUnderflowOverflow

    hooked = task.model()
    hooked.load_state_dict(model.state_dict())
    DebugUnderflowOverflow(hooked)

    def under_hooks() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = task.loss(hooked, batch)
            loss.backward()

    apart = take_turns({"plain": plain, "DebugUnderflowOverflow": under_hooks}, rounds, warm_up=2)
    found = {name: paired_ratio(times[name], times["plain"]) for name in arms if name != "plain"}
    found["DebugUnderflowOverflow"] = paired_ratio(apart["DebugUnderflowOverflow"], apart["plain"])
    for name, ratio in found.items():
        print(show(name, ratio))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {name: see(case) for name, case in cases.CASES.items()}
    tools = [*TOOLS, "ampwise"]
    print(f"{'case':30s}" + "".join(f"{name:>24s}" for name in tools))
    for name, seen in found.items():
        words = [
            " ".join(what for what, said in seen[tool].items() if said) or "-" for tool in tools
        ]
        print(f"{name:30s}" + "".join(f"{word:>24s}" for word in words))
    faults = [name for name, case in cases.CASES.items() if case.status == "fault"]
    counts = {
        tool: {what: sum(found[name][tool].get(what, False) for name in faults)
               for what in ("alarm", "line", "module", "cause", "verified_fix")}
        for tool in tools
    }  # fmt: skip
    print(f"of {len(faults)} faults: {counts}")
    save("origins-cpu", {"faults": len(faults), "counts": counts, "cases": found,
                         "step_time": overheads()})  # fmt: skip


if __name__ == "__main__":
    main()
