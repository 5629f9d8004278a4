"""What was asked for and what ran: regions, matrix products by dtype and line, tensors by dtype."""

import textwrap

import pytest

from ampwise.observe.result import Asked
from tests.observe.inside import line_of, observe

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
"""

ATTENTION = """
class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(16, 48), nn.Linear(16, 16), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)  # attention
        return self.out(y.transpose(1, 2).reshape(2, 5, 16))

class Model(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.ModuleList(Attention(dropout) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Model({dropout})
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16):  # region
        loss = model(torch.randn(2, 5, 16)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path):
    def write(body, **values):
        path = tmp_path / "script.py"
        path.write_text(HEAD + textwrap.dedent(body).format(**values))
        return path

    return write


def test_products_are_counted_by_dtype_and_those_out_of_line_are_placed(script):
    path = script(ATTENTION, dropout=0.1)
    found = observe(path).report.precision
    # Two linear layers a block in bfloat16; attention with dropout is two products in float32.
    assert found.ran.forward == {"bfloat16": 4, "float32": 4}
    # Of a linear layer two, but for the input of the first, which needs none.
    assert found.ran.backward == {"bfloat16": 7, "float32": 8}
    forward = [each for each in found.exceptions if each.phase == "forward"]
    assert {(each.module, each.line, each.dtype) for each in forward} == {
        (f"layers.{i}", line_of(path, "# attention"), "float32") for i in range(2)
    }
    assert sum(each.times for each in forward) == 4
    assert {each.module for each in found.exceptions} == {"layers.0", "layers.1"}


def test_where_all_runs_in_the_format_nothing_is_out_of_line(script):
    path = script(ATTENTION, dropout=0.0)
    found = observe(path).report.precision
    assert found.active
    assert found.exceptions == []
    assert found.ran.forward == {"bfloat16": 6}
    assert found.asked == [Asked("bfloat16", str(path), line_of(path, "# region"))]
    (region,) = found.regions
    assert (region.device, region.enabled, region.entered) == ("cpu", True, 3)
    assert found.parameters == {"float32": 8}
    assert found.gradients == {"float32": 8}
    assert found.optimizer_state == {"float32": 16}


TRAINING = """
model = nn.Linear(8, 8){cast}
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
{before}
for _ in range(3):
    with {context}:  # region
        loss = model(torch.ones(2, 8){cast}).square().mean()
    loss.backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    ("context", "before", "cast", "asked", "active"),
    [
        ("torch.enable_grad()", "", "", [], True),
        ("torch.autocast('cuda')", "", "", ["float16"], False),
        ("torch.autocast('cuda', torch.bfloat16)", "", "", ["bfloat16"], False),
        ("torch.autocast('cuda', enabled=False)", "", "", [], True),
        ("torch.autocast('cpu', enabled=False)", "", "", [], True),
        ("torch.autocast('cpu')", "", "", ["bfloat16"], True),
        ("torch.cuda.amp.autocast()", "", "", ["float16"], False),
        ("torch.enable_grad()", "torch.amp.GradScaler('cuda')", "", ["float16"], False),
        ("torch.enable_grad()", "torch.amp.GradScaler('cuda', enabled=False)", "", [], True),
        ("torch.enable_grad()", "torch.cuda.amp.GradScaler(enabled=True)", "", ["float16"], False),
        ("torch.enable_grad()", "", ".bfloat16()", [], True),
        ("torch.autocast('cuda', torch.bfloat16)", "", ".bfloat16()", ["bfloat16"], True),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_precision_that_is_asked_for_and_not_active_is_said(
    script, context, before, cast, asked, active
):
    path = script(TRAINING, context=context, before=before, cast=cast)
    report = observe(path).report
    found = report.precision
    assert [each.dtype for each in found.asked] == asked
    assert found.active is active
    assert ("AMP501" in {each.code for each in report.findings}) is not active
    if before and asked:
        assert found.asked[0].line == line_of(path, "GradScaler")
    if not active:
        assert report.findings[0].code == "AMP501"
        assert found.ran.forward == {"float32": 1}


def test_autocast_that_only_a_package_enters_is_placed_at_the_users_line(script, tmp_path):
    package = tmp_path / "site-packages" / "trainer.py"
    package.parent.mkdir()
    package.write_text(
        "import torch\n"
        "def fit(model, optimizer):\n"
        "    for _ in range(3):\n"
        "        with torch.autocast('cpu', torch.bfloat16):\n"
        "            loss = model(torch.ones(2, 8)).sum()\n"
        "        loss.backward(); optimizer.step()\n"
    )
    path = script(f"""
        import sys; sys.path.insert(0, {str(package.parent)!r})
        from trainer import fit
        model = nn.Linear(8, 8)
        fit(model, torch.optim.SGD(model.parameters(), 0.1))  # started
    """)
    (asked,) = observe(path).report.precision.asked
    assert (asked.file, asked.line) == (str(path), line_of(path, "# started"))


def test_one_step_is_looked_at_and_the_others_run_without_a_mode(script):
    path = script("""
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as stack
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            loss = model(torch.ones(2, 8)).sum()
            print(len(stack()), end=" ")
            loss.backward(); optimizer.step()
    """)
    assert observe(path).report.precision.ran.forward == {"float32": 1}


COMPILED = """
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            output = compiled(torch.ones(2, 8))
        (output.float() @ torch.ones(2, 1)).sum().backward(); optimizer.step()
    print("frames", counter.frame_count)
"""


def test_products_of_compiled_code_are_counted_and_it_stays_compiled(script, capfd):
    report = observe(script(COMPILED)).report
    out, err = capfd.readouterr()
    assert "frames 1" in out
    assert err == ""
    assert report.not_observed == []
    assert report.precision.ran.forward == {"bfloat16": 2, "float32": 1}
    assert report.precision.ran.backward == {"bfloat16": 3, "float32": 1}
    assert report.precision.active
    (forward, backward) = report.precision.exceptions
    assert (forward.op, forward.dtype, forward.phase, forward.line) == (
        "mm",
        "float32",
        "forward",
        0,
    )
    assert backward.phase == "backward"


def test_a_precision_that_compiled_code_does_not_run_in_is_said(script):
    """The region is inside of what is never called in it."""
    path = script("""
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.ones(2, 8) * 2
            compiled(x).sum().backward(); optimizer.step()
    """)
    report = observe(path).report
    assert report.precision.active is False
    assert report.precision.ran.forward == {"float32": 2}
    assert "AMP501" in [each.code for each in report.findings]


def test_a_step_in_which_more_is_compiled_is_not_the_one_that_is_counted(script):
    path = script("""
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        compiled = torch.compile(model, backend="aot_eager", dynamic=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(6):
            compiled(torch.ones(2 + min(step, 2), 8)).sum().backward(); optimizer.step()
    """)
    report = observe(path).report
    assert report.not_observed == []
    assert report.precision.ran.forward == {"float32": 2}
    assert report.precision.ran.backward == {"float32": 3}


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_script_that_profiles_itself_gets_the_profiler(script, when, capfd):
    path = script(f"""
        model = nn.Linear(8, 8)
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        for step in range(3):
            if step == (0 if {when!r} == "before" else 1):
                profile.start()
            compiled(torch.ones(2, 8)).sum().backward(); optimizer.step()
        profile.stop()
        print("seen", "aten::addmm" in [each.key for each in profile.key_averages()])
    """)
    report = observe(path).report
    (missing,) = report.not_observed
    assert "the script uses the profiler" in missing.why
    assert report.ending == "finished"
    assert "seen True" in capfd.readouterr().out


def test_what_the_compiler_writes_itself_is_said_not_to_be_counted(script):
    path = script("""
        model = nn.Linear(8, 8)
        other = torch.compile(nn.Linear(2, 2), mode="max-autotune")
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            compiled(torch.ones(2, 8)).sum().backward(); optimizer.step()
    """)
    (missing,) = observe(path).report.not_observed
    assert missing.what == "dtypes of matrix products"
    assert "of the compiler's own" in missing.why
