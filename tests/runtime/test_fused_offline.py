"""Fused regions on absent devices: their kernels, their names, and what `fit` answers of them."""

import functools

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from coop_plan.planner import plan
from coop_plan.planner.fit import scaled
from coop_plan.runtime.fused.compiled import compiled_ops, modelled_ops
from coop_plan.runtime.offline_capture.devices import device
from coop_plan.runtime.offline_capture.fake_device import CaptureRequest, OfflineCapture
from coop_plan.runtime.offline_capture.fit import fit
from coop_plan.runtime.torch_internals import FUSED_SINCE, version
from coop_plan.runtime.torch_internals.inductor_scheduler import scheduled
from coop_plan.schemas import InvalidInputError
from coop_plan.schemas.graph import FUSED_NAME

pytestmark = pytest.mark.skipif(version() < FUSED_SINCE, reason="fused kernels are refused")

SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

def step(batch=4):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(256) for _ in range(3)])
    return (lambda x: model(x).square().mean()), (torch.randn(batch, 512, 256),)

def chain(batch=4):
    x = torch.randn(batch, 1 << 20, requires_grad=True)
    return (lambda x: ((x * 2 + 1).sigmoid() * x).relu()), (x,)
"""
DEVICE = "h100-80gb"


NAME = "fused_steps"


@pytest.fixture(scope="module")
def away(tmp_path_factory):
    """Captures a step of `SOURCE` over a kind of kernels on an absent device, in one process."""
    folder = tmp_path_factory.mktemp("user")
    (folder / f"{NAME}.py").write_text(SOURCE)

    @functools.cache
    def graph(function, kernels="fused", batch=4):
        request = CaptureRequest(
            target=f"{NAME}:{function}", spec=device(DEVICE), batch=batch, kernels=(kernels,)
        )
        return captures.capture(request).graph

    with pytest.MonkeyPatch.context() as patch, OfflineCapture() as captures:
        patch.syspath_prepend(folder)
        yield graph


def regions(graph):
    return [op for op in graph.ops if op.name.startswith(FUSED_NAME)]


def cost_of(size, spec):
    return max(spec.launch_us, size / (spec.bytes_per_s * spec.memory_share) * 1e6)


def drawn(chains, rows, columns):
    """Chains of pointwise ops, each of an input of its own, without common tensors."""
    graph, mode = fx.Graph(), FakeTensorMode()
    results, inputs = [], [graph.placeholder(f"input_{i}") for i in range(chains)]
    for node in inputs:
        for target in (torch.ops.aten.sin.default, torch.ops.aten.neg.default):
            node = graph.call_function(target, (node,))
        results.append(node)
    graph.output(tuple(results))
    with mode:
        values = [torch.empty(rows, columns) for _ in inputs]
        for node in graph.nodes:
            node.meta["val"] = torch.empty(rows, columns)
    return graph, values


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("rows", [8, 24])
def test_kernels_read_each_input_and_write_each_result_once(chains, rows):
    graph, values = drawn(chains, rows, 64)
    found = scheduled(graph, values)
    assert found.moved_bytes == chains * 2 * rows * 64 * 4
    assert 1 <= found.kernels <= chains
    assert found.scratch_bytes == 0


def test_a_region_on_an_absent_device_costs_its_inputs_and_results_once(away):
    graph, eager = away("chain"), away("chain", "eager")
    assert len(regions(graph)) == len(graph.ops) == 2
    for op in graph.ops:
        moved = sum(graph.tensors[t].bytes for t in (*op.inputs, *op.outputs))
        assert op.cost_us == pytest.approx(cost_of(moved, device(DEVICE)))
    assert sum(op.cost_us for op in graph.ops) < 0.5 * sum(op.cost_us for op in eager.ops)


def test_tensors_between_kernels_are_workspace(away):
    """The gradients of a norm's weights are sums over rows that are split for the device."""
    found = regions(away("step"))
    assert any(op.workspace_bytes for op in found)
    assert all(op.cost_us >= device(DEVICE).launch_us for op in found)


def test_graphs_over_regions_can_be_interpolated(away):
    """The names of their regions differ between sizes; other ops are still told apart."""
    middle = scaled(away("step", batch=8), away("step", batch=16), 0.5)
    exact = away("step", batch=12)
    assert {op.name for op in regions(middle)} != {op.name for op in regions(exact)}
    assert [t.bytes for t in middle.tensors] == [t.bytes for t in exact.tensors]
    with pytest.raises(InvalidInputError, match="has other ops at another size"):
        scaled(away("step"), away("chain"), 0.5)


def test_names_are_of_the_content_alone(away):
    """Equal at any number of threads, for code that is compiled here or only modelled."""
    assert away("step").to_json() == away.__wrapped__("step").to_json()
    threads = torch.get_num_threads()
    (graph, values), (other, others) = (drawn(2, 8, columns) for columns in (64, 65))
    seen = [modelled_ops([(graph, values)])[0]]
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            seen.append(compiled_ops([(graph, values)])[0])
    finally:
        torch.set_num_threads(threads)
    assert len(set(seen)) == 3
    (packet,) = {op.overloadpacket for op in seen}
    assert modelled_ops([(other, others)])[0].overloadpacket is not packet


def test_fit_answers_for_fused_kernels(away, importable):
    row = next(fit(f"{importable(NAME, SOURCE)}:step", [DEVICE], 64, kernels="fused"))
    assert row["error"] is None
    assert row["kernels"] == "fused"
    kept = plan(away("step", "eager", 64), "100%", outputs="gradients")
    assert row["keep_all"]["peak_bytes"] < kept.peak_bytes
