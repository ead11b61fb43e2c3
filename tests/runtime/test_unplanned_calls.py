"""What is compiled and not planned is told of, in one line of the log."""

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from coop_plan import runtime
from coop_plan.runtime.source_lines import user_call
from coop_plan.runtime.torch_internals import dynamo

ROOT = Path(__file__).parents[2]
BUDGET = {"budget": "min"}


def gradients(model, called, *args):
    torch.manual_seed(1)
    model.zero_grad()
    made = called(*args)
    (made[0] if isinstance(made, tuple) else made).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("make", "args"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), 1),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
        (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3),
    ],
    ids=["Sequential", "TransformerEncoderLayer", "MultiheadAttention"],
)
def test_pytorchs_own_modules_are_planned_when_compiled_in_place(make, args, caplog):
    before = torch._dynamo.config.wrap_top_frame
    inputs = [torch.randn(4, 8, 8)] * args
    torch.manual_seed(0)
    model = make()
    expected = gradients(model, model, *inputs)
    model.compile(backend="coop", options=BUDGET)
    assert all(map(torch.equal, gradients(model, model, *inputs), expected))
    assert [report.steps_run for report in runtime.reports()] == [1]
    assert "nothing was planned" not in caplog.text
    assert torch._dynamo.config.wrap_top_frame == before


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        mask = torch.arange(16) < 4
        h = x
        for layer in self.layers:
            h = layer(h).tanh().clone()
            h[mask] = layer(x[:4])
        return h


class Breaking(Rows):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
            torch._dynamo.graph_break()
        return x


class Hooked(Rows):
    def __init__(self):
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda *_: None)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Averaging(Hooked):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.BatchNorm1d(8, momentum=None)])


@pytest.mark.parametrize("make", [Rows, Breaking, Hooked, Averaging])
def test_a_call_in_which_nothing_is_planned_says_so_once(make, caplog):
    x = torch.randn(16, 8, requires_grad=True)
    torch.manual_seed(0)
    model = make()
    expected = gradients(model, model, x)
    called = torch.compile(model, backend="coop", options=BUDGET)
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, called, x), expected))
    planned = sum(report.steps_run for report in runtime.reports())
    assert planned or caplog.text.count("nothing was planned") == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("others", [0, 1], ids=["the first", "as another before"])
def test_a_function_left_to_eager_beside_a_planned_loss_is_told_of_once(caplog, others):
    """The loss alone is planned: its record says nothing of the layers before it."""
    model, x = Breaking(), torch.randn(16, 8)

    def planned():
        return torch.compile(lambda x: model(x).cos().exp(), backend="coop", options=BUDGET)

    for _ in range(others):
        gradients(model, planned(), x)
        runtime.clear_reports()
        caplog.clear()
        torch._dynamo.reset()
    called = planned()
    for _ in range(2):
        gradients(model, called, x)
    (report,) = runtime.reports()
    assert report.steps_run == 2
    assert caplog.text.count("is not within the budget") == 1
    assert "graph_break" in caplog.text


def test_reports_have_the_planned_shares():
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    @torch._dynamo.disable
    def left(x):
        for layer in layers[1:]:
            x = layer(x).tanh()
        return x

    for function in (lambda x: layers[0](x).tanh(), lambda x: left(layers[0](x))):
        called = torch.compile(function, backend="coop", options=BUDGET)
        for _ in range(2):
            called(torch.randn(64, 8)).sum().backward()
    whole, part = runtime.reports()
    assert (whole.planned_ops_share, whole.planned_bytes_share) == (1, 1)
    assert part.planned_ops_share < 0.5
    assert part.planned_bytes_share < 0.8


@pytest.mark.parametrize("in_place", [False, True])
def test_a_module_of_pytorchs_is_named_by_its_call(in_place, caplog):
    model = called = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    options = {"budget": "1%"}
    if in_place:
        model.compile(backend="coop", options=options)
    else:
        called = torch.compile(model, backend="coop", options=options)
    called(torch.ones(4, 8))
    (line,) = [r.getMessage() for r in caplog.records if "cannot meet its share" in r.getMessage()]
    assert re.match(r".*test_unplanned_calls\.py:\d+ \(call of Sequential\): this graph", line)


EXPERTS = """
def experts(x, first, second):
    x = first(x)[x.sum(-1).nonzero()[:, 0]]
    return second(x)[x.sum(-1).nonzero()[:, 0]]
"""


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
def test_experts_that_break_the_graph_are_told_of_once(caplog):
    within = {}
    exec(compile(EXPERTS, "/lib/transformers/models/moe/modeling_moe.py", "exec"), within)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    called = torch.compile(lambda x: within["experts"](x, *layers), backend="coop", options=BUDGET)
    called(torch.ones(4, 8)).sum().backward()
    assert caplog.text.count("graph break at /lib/transformers/models") >= 1
    assert caplog.text.count('experts_implementation="grouped_mm"') == 1


def test_a_retained_gradient_of_an_inner_output_is_told_of(caplog):
    def step(w):
        h = w.tanh()
        return h.square().sum(), h, w.sum()

    called = torch.compile(step, backend="coop", options=BUDGET)
    for _ in range(2):
        loss, h, other = called(torch.ones(8, 8, requires_grad=True))
        other.retain_grad()
        (loss + other).backward()
        assert "retain_grad" not in caplog.text
    for _ in range(2):
        loss, h, _ = called(torch.ones(8, 8, requires_grad=True))
        h.retain_grad()
        loss.backward()
        assert h.grad is None
    assert caplog.text.count("retain_grad() on an output") == 1


def test_gradients_within_the_graph_are_told_of(caplog):
    def loss(w, x):
        return (x @ w).tanh().square().mean()

    step = torch.compile(torch.func.grad(loss), backend="coop", options={"budget": 1000})
    step(torch.randn(8, 8), torch.randn(16, 8))
    assert caplog.text.count("torch.func computes gradients within the graph") == 1
    assert "nothing was planned" not in caplog.text


def test_a_call_that_fails_is_its_own_word(caplog):
    called = torch.compile(nn.Linear(8, 8), backend="coop", options={"budget": "nothing"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        called(torch.randn(4, 8))
    assert "nothing was planned" not in caplog.text


def test_evaluation_is_nothing_to_tell_of(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    called = torch.compile(model, backend="coop", options=BUDGET)
    with torch.no_grad():
        called(torch.randn(4, 8))
    model.requires_grad_(False)
    called(torch.randn(4, 8))
    assert not [record for record in caplog.records if record.name == "coop-plan"]


NEVER = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
model = torch.nn.Linear(4, 4)
model.compile(backend="coop", options={"budget": "min"})
model.forward(torch.randn(2, 4)).sum().backward()
optimizer = torch.optim.SGD(model.parameters())
register_optimizer_step_post_hook(lambda *_: None)
optimizer.step()
optimizer.step()
"""


def test_what_is_never_called_is_told_of_at_the_first_step():
    """As with LightningModule.compile(): its Trainer calls training_step."""
    done = subprocess.run(
        [sys.executable, "-c", NEVER], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stderr.count("before one of them was called") == 1


@pytest.mark.parametrize("walk", [user_call, dynamo.share_recompile_limit, dynamo.compile_call])
def test_a_walk_over_frames_keeps_none_of_them(walk):
    """A frame that is kept keeps its tensors, until garbage is collected."""

    def caller():
        tensor = torch.ones(1)
        walk()
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
