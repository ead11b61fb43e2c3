"""Plans that name other bodies of ops than the default."""

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import coop_plan
from coop_plan.planner import InvalidPlanError, plan
from coop_plan.runtime import CaptureError
from coop_plan.runtime.capture import own_ops
from coop_plan.runtime.capture.own_ops import DROPOUT_BITS, DROPOUT_BITS_BACKWARD
from coop_plan.runtime.execute import planning
from coop_plan.schemas import Compute


def tiled(graph, options):
    """As another version might have planned the graph that it captured."""
    made = plan(graph, options)
    number = next(i for i, step in enumerate(made.steps) if isinstance(step, Compute))
    steps = list(made.steps)
    steps[number] = msgspec.structs.replace(steps[number], variant="tiled")
    return msgspec.structs.replace(made, steps=steps)


@pytest.mark.parametrize("verified", [True, False])
def test_a_plan_with_a_body_that_is_not_known_is_refused(monkeypatch, verified):
    monkeypatch.setattr(planning, "plan", tiled)
    if not verified:
        monkeypatch.setattr(planning, "verify", lambda *_: None)
    torch._dynamo.reset()
    w = torch.randn(8, 8, requires_grad=True)
    options = {"budget": "min"}
    step = torch.compile(lambda x: torch.sin(x @ w).sum(), backend="coop", options=options)
    what = "op 0 has no variant 'tiled'"
    if not verified:
        what = r"runs op 0 \(aten.mm.default\) as 'tiled', which is not known here: plan the graph"
    with pytest.raises(Exception, match=what) as told:
        step(torch.randn(4, 8))
    error = getattr(told.value, "inner_exception", told.value)
    assert isinstance(error, InvalidPlanError if verified else CaptureError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (3, 5, 16), (40, 10, 8)])
def test_a_dropout_of_bits_is_atens(monkeypatch, dtype, shape):
    """Forward from the same state of the generator, and backward, however many parts it takes."""
    monkeypatch.setattr(own_ops, "PART_ELEMENTS", 1 << 10)
    aten = torch.ops.aten
    values, gradient = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    gradient.view(-1)[:3] = torch.tensor([float("inf"), -0.0, float("nan")])
    state = torch.get_rng_state()
    made, mask = aten.native_dropout.default(values, 0.3, True)
    torch.set_rng_state(state)
    ours, bits = DROPOUT_BITS(values, 0.3, True)
    assert torch.equal(ours, made)
    assert (bits.dtype, bits.numel()) == (torch.uint8, mask.numel() // 8)
    expected = aten.native_dropout_backward.default(gradient, mask, 1 / 0.7)
    found = DROPOUT_BITS_BACKWARD(gradient, bits, 1 / 0.7)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1)
        return x.square().mean()


def dear(graph, options):
    """A plan as if the default bodies of dropouts and their backwards cost a lot."""
    ops = []
    for op in graph.ops:
        others = [v.model_copy(update={"cost_us": 1.0}) for v in op.variants]
        cost = 1e6 if others else 1.0
        ops.append(op.model_copy(update={"cost_us": cost, "variants": others}))
    return plan(graph.model_copy(update={"ops": ops}), options)


@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_masks_that_are_bits_are_eagers_to_the_bit(monkeypatch, budget):
    """Those of dropouts that run again, too."""
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(256, 64)
    monkeypatch.setattr(planning, "plan", dear)
    monkeypatch.setattr(planning, "verify", lambda *_: None)  # of other costs
    torch._dynamo.reset()
    options = {"budget": budget, "variants": True}
    seen = []
    for step in (model, torch.compile(model, backend="coop", options=options)):
        torch.manual_seed(1)
        values = []
        for _ in range(2):
            model.zero_grad()
            loss = step(x)
            loss.backward()
            values += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        seen.append(values)
    assert all(map(torch.equal, *seen))
    report = coop_plan.reports()[-1]
    assert report.measured_arena_bytes == report.planned_arena_bytes
    assert report.outside_bytes == 0
    named = [step.op for step in report.plan.steps if isinstance(step, Compute) and step.variant]
    dropouts = [op.id for op in report.graph.ops if op.variants]
    assert set(named) == set(dropouts)
    assert len(dropouts) == 6
    sizes = {tensor.id: tensor.bytes for tensor in report.graph.tensors}
    assert {sizes[op.variants[0].outputs[1]] for op in report.graph.ops if op.rng} == {
        256 * 64 // 8
    }
