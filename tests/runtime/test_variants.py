"""Plans that name other variants of ops than the default."""

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import coop_plan
from coop_plan.planner import InvalidPlanError, plan
from coop_plan.runtime import CaptureError
from coop_plan.runtime.capture import op_replacements
from coop_plan.runtime.execute import find_plan
from coop_plan.runtime.offline_capture.target import capture
from coop_plan.runtime.variants import max_pool
from coop_plan.runtime.variants.bit_masks import (
    DROPOUT_BITS,
    DROPOUT_BITS_BACKWARD,
    RELU_BITS,
    RELU_BITS_BACKWARD,
)
from coop_plan.runtime.variants.bitwise_check import bitwise_equal
from coop_plan.runtime.variants.inplace_outputs import run_into_copies
from coop_plan.schemas import Compute
from tests.runtime.stepping import eager_and_compiled


def tiled(graph, options):
    """As another version might have planned the graph that it captured."""
    made = plan(graph, options)
    number = next(i for i, step in enumerate(made.steps) if isinstance(step, Compute))
    steps = list(made.steps)
    steps[number] = msgspec.structs.replace(steps[number], variant="tiled")
    return msgspec.structs.replace(made, steps=steps)


@pytest.mark.parametrize("verified", [True, False])
def test_a_plan_with_a_body_that_is_not_known_is_refused(monkeypatch, verified):
    monkeypatch.setattr(find_plan, "plan", tiled)
    if not verified:
        monkeypatch.setattr(find_plan, "verify", lambda *_: None)
    torch._dynamo.reset()
    w = torch.randn(8, 8, requires_grad=True)
    options = {"budget": "min"}
    step = torch.compile(lambda x: torch.sin(x @ w).sum(), backend="coop", options=options)
    what = r"op 0 \(aten.mm.default\) has no variant 'tiled'"
    if not verified:
        what = r"runs variant 'tiled' of op 0 \(aten.mm.default\), which this capture does not have"
    with pytest.raises(Exception, match=what) as told:
        step(torch.randn(4, 8))
    error = getattr(told.value, "inner_exception", told.value)
    assert isinstance(error, InvalidPlanError if verified else CaptureError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8,), (3, 5, 16), (40, 10, 8)])
def test_a_dropout_of_bits_is_atens(monkeypatch, dtype, shape):
    """Forward from the same state of the generator, and backward, however many parts it takes."""
    monkeypatch.setattr(op_replacements, "CHUNK_ELEMENTS", 1 << 10)
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
    """A plan as if the default variants of dropouts and their backwards cost a lot."""
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
    monkeypatch.setattr(find_plan, "plan", dear)
    monkeypatch.setattr(find_plan, "verify", lambda *_: None)  # of other costs
    seen = eager_and_compiled(model, x, {"budget": budget, "variants": True})
    assert all(map(torch.equal, *seen))
    report = coop_plan.reports()[-1]
    assert report.measured_arena_bytes == report.planned_arena_bytes
    assert report.outside_bytes == 0
    named = [step.op for step in report.plan.steps if isinstance(step, Compute) and step.variant]
    dropout = [op.id for op in report.graph.ops if op.variants]
    assert set(named) == set(dropout)
    assert len(dropout) == 6
    sizes = {tensor.id: tensor.bytes for tensor in report.graph.tensors}
    assert {sizes[op.variants[0].outputs[1]] for op in report.graph.ops if op.rng} == {
        256 * 64 // 8
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_of_a_relu_pass_its_gradient(monkeypatch, dtype):
    """In the place of what they are computed from, too; NaN and both zeros among the values."""
    monkeypatch.setattr(op_replacements, "CHUNK_ELEMENTS", 1 << 10)
    aten = torch.ops.aten
    values, gradient = (4 * torch.randn(40, 10, 8, dtype=dtype) for _ in range(2))
    special = [float("nan"), 0.0, -0.0, float("inf"), float("-inf"), 6.0]
    values.view(-1)[:6] = gradient.view(-1)[4:10] = torch.tensor(special, dtype=dtype)
    made = aten.relu.default(values)
    expected = aten.threshold_backward.default(gradient, made, 0)
    ours, bits = RELU_BITS(values)
    assert bitwise_equal(ours, made)
    assert bitwise_equal(RELU_BITS_BACKWARD(gradient, bits), expected)
    (over, again), _ = run_into_copies(RELU_BITS, ((values,), {}), {0: 0})
    assert bitwise_equal(over, made)
    assert torch.equal(again, bits)
    (over,), _ = run_into_copies(RELU_BITS_BACKWARD, ((gradient, bits), {}), {0: 0})
    assert bitwise_equal(over, expected)


class Activated(nn.Module):
    """Of each activation another variant of its gradient reads less."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = F.avg_pool2d(F.relu(layer(x)), 3, 1, 1)
            x = F.leaky_relu(F.hardtanh(layer(x), 0.0, 0.5) - 0.2)
            x = F.max_pool2d(x, 3, 1, 1)
        return x.square().mean()


@pytest.mark.parametrize("budget", ["100%", "80%", "min"])
def test_gradients_of_activations_that_read_less_are_eagers_to_the_bit(monkeypatch, budget):
    torch.manual_seed(0)
    model, x = Activated(), torch.randn(4, 4, 16, 16)
    monkeypatch.setattr(find_plan, "plan", dear)
    monkeypatch.setattr(find_plan, "verify", lambda *_: None)  # of other costs
    seen = eager_and_compiled(model, x, {"budget": budget, "variants": True})
    assert all(map(torch.equal, *seen))
    report = coop_plan.reports()[-1]
    assert report.measured_arena_bytes == report.planned_arena_bytes
    assert report.outside_bytes == 0
    run = [step for step in report.plan.steps if isinstance(step, Compute)]
    names = {"bits": set(), "output": set(), "places": set()}
    for step in run:
        names.setdefault(step.variant, set()).add(report.graph.ops[step.op].name)
    assert names["bits"] == {"aten.relu.default", "aten.threshold_backward.default"}
    gradients = {"aten.hardtanh_backward.default", "aten.leaky_relu_backward.default"}
    assert names["output"] == gradients
    pool = "max_pool2d_with_indices"
    both = {f"aten.{pool}.default", f"coop_plan.{pool}_backward_of_size.default"}
    assert names["places"] == both or (budget == "min" and names["places"] < both)


def test_bothgradients_read_nothing_of_what_was_pooled():
    w = torch.randn(4, 4, 3, 3, requires_grad=True)
    step = lambda x: F.avg_pool2d(F.max_pool2d(F.conv2d(x, w), 2), 2).sum()  # noqa: E731
    sizes = []
    for variants in (False, True):
        graph = capture(step, (torch.randn(2, 4, 12, 12),), variants=variants)
        sizes.append({op.name: len(op.inputs) for op in graph.ops if "pool2d" in op.name})
    assert sizes[0]["aten.max_pool2d_with_indices_backward.default"] == 3
    assert sizes[1]["coop_plan.max_pool2d_with_indices_backward_of_size.default"] == 2
    assert sizes[1]["coop_plan.avg_pool2d_backward_of_size.default"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", [[2, 2], [3, 2]])
@pytest.mark.parametrize("stride", [[2, 2], [1, 3]])
@pytest.mark.parametrize("padding", [[0, 0], [1, 1]])
@pytest.mark.parametrize("dilation", [[1, 1], [2, 1]])
@pytest.mark.parametrize("ceil", [False, True])
def test_places_in_windows_are_atens_numbers(
    monkeypatch, dtype, kernel, stride, padding, dilation, ceil
):
    """However many planes at once; equal numbers, infinities and NaN among what is pooled."""
    monkeypatch.setattr(max_pool, "CHUNK_ELEMENTS", 64)
    aten, window = torch.ops.aten, (kernel, stride, padding, dilation, ceil)
    values = torch.randn(3, 2, 9, 11, dtype=dtype).mul(3).round()
    values.view(-1)[::17] = float("nan")
    values[0, 0] = float("-inf")
    made, numbers = aten.max_pool2d_with_indices(values, *window)
    gradient = torch.randn_like(made)
    expected = aten.max_pool2d_with_indices_backward(gradient, values, *window, numbers)
    ours, places = max_pool.POOL(values, [*made.shape], *window)
    assert bitwise_equal(ours, made)
    assert (places.dtype, places.numel()) == (torch.uint8, made.numel())
    sizes = [*values.shape]
    assert bitwise_equal(max_pool.POOL_BACKWARD(gradient, places, sizes, *window), expected)


def test_places_of_no_window_stay_within_the_plane():
    """Stand-ins are any bytes, and ATen writes wherever its numbers say."""
    window = ([2, 2], [2, 2], [1, 1], [1, 1], False)
    gradient, places = torch.ones(1, 2, 4, 4), torch.arange(32, dtype=torch.uint8).mul(8)
    made = max_pool.POOL_BACKWARD(gradient, places, [1, 2, 6, 6], *window)
    assert made.sum() == 32


def test_no_places_where_numbers_are_read():
    """By an unpooling, or whoever else has them."""
    w = torch.randn(4, 4, 3, 3, requires_grad=True)

    def step(x):
        made, numbers = F.max_pool2d(F.conv2d(x, w), 2, return_indices=True)
        return F.max_unpool2d(F.conv2d(made, w, padding=1), numbers, 2).square().sum()

    graph = capture(step, (torch.randn(2, 4, 12, 12),), variants=True)
    assert any("max_pool2d" in op.name for op in graph.ops)
    assert not any(v.name == "places" for op in graph.ops for v in op.variants)


def test_no_bits_of_what_another_gradient_reads():
    """A convolution's weights get theirs from the result of the ReLU before it."""
    w = torch.randn(4, 4, 3, 3, requires_grad=True)
    step = lambda x: F.conv2d(F.relu(F.conv2d(x, w)), w).sum()  # noqa: E731
    graph = capture(step, (torch.randn(2, 4, 12, 12),), variants=True)
    assert any(op.name == "aten.relu.default" for op in graph.ops)
    assert not any(v.name == "bits" for op in graph.ops for v in op.variants)
