"""Collectives in a step: never run to be profiled, in one order, one plan for all ranks."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from coop_plan import runtime
from coop_plan.runtime.capture import profiler
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.distributed import collectives
from tests.runtime.ranks import cache_with_extension, together

HERE = "tests.runtime.test_collectives"


class Exchanging(nn.Module):
    """Layers between an all-reduce, an all-gather and a reduce-scatter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(32, 32), nn.Tanh())])
        self.second = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(32, 32), nn.Tanh())])

    def forward(self, x):
        h = functional.all_reduce(self.first(x), "sum", dist.group.WORLD)
        h = functional.all_gather_tensor(self.second(h), 0, dist.group.WORLD)
        part = functional.reduce_scatter_tensor(h.sin(), "sum", 0, dist.group.WORLD)
        return h.square().mean() + part.mean()


def gradients(model, called, x):
    model.zero_grad()
    loss = called(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def train(rank, count):
    """Bitwise eager, within the budget; one plan; the collectives of the step alone are run."""
    warnings.simplefilter("ignore", FutureWarning)
    asked = []
    measure = profiler._measure

    def watched(target, *rest):
        asked.append(str(target))
        return measure(target, *rest)

    profiler._measure = watched
    torch.manual_seed(10 + rank)
    x = torch.randn(128, 32)
    eager = Exchanging()
    expected = gradients(eager, eager, x)
    model = Exchanging()
    step = torch.compile(model, backend="coop", fullgraph=True, options={"budget": "min"})
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, step, x), expected))
    (report,) = runtime.reports()
    assert report.plan.recomputed_ops > 0
    assert report.outside_bytes == 0
    assert report.measured_peak_bytes <= report.budget_bytes
    once = [op for op in report.graph.ops if not op.recomputable]
    assert len(once) == 6
    assert not [name for name in asked if "c10d" in name]
    plans = [None] * count
    dist.all_gather_object(plans, (report.plan.to_json(), [op.cost_us for op in report.graph.ops]))
    assert all(found == plans[0] for found in plans)
    print("profiled", report.profiled_ops)  # noqa: T201


@pytest.fixture
def caches(tmp_path):
    return [cache_with_extension(tmp_path / name) for name in ("a", "b")]


def test_two_ranks_with_cold_and_warm_caches(tmp_path, caches):
    """Rank 0 starts cold, then warm beside a cold one: the same numbers, one plan."""
    cold, other = caches
    first = together(f"{HERE}:train", tmp_path / "first", caches=[cold, cold])
    assert not all("profiled 0" in output for output in first)  # either may come first
    second = together(f"{HERE}:train", tmp_path / "second", caches=[other, cold])
    assert "profiled 0" in second[1]
    assert "profiled 0" not in second[0]


def scratch(rank, count):
    """No collective takes more than is modelled, on any rank."""
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    size = 4096 * count
    whole = torch.randn(size)
    turned = torch.randn(4, size // 4).t()
    calls = [
        (ops.all_reduce.default, (whole, "sum", group)),
        (ops.all_reduce.default, (turned, "avg", group)),
        (ops.all_reduce_coalesced.default, ([whole, whole[:4096]], "sum", group)),
        (ops.all_gather_into_tensor.default, (whole, count, group)),
        (ops.all_gather_into_tensor.default, (turned, count, group)),
        (ops.all_gather_into_tensor_coalesced.default, ([whole, whole[:4096]], count, group)),
        (ops.reduce_scatter_tensor.default, (whole, "sum", count, group)),
        (ops.reduce_scatter_tensor.default, (turned, "sum", count, group)),
        (ops.reduce_scatter_tensor_coalesced.default, ([whole, whole], "sum", count, group)),
        (ops.all_to_all_single.default, (whole, [4096] * count, [4096] * count, group)),
        (ops.broadcast.default, (whole, 0, group)),
        (torch.ops._dtensor.shard_dim_alltoall.default, (whole.view(count, -1), 0, 1, group)),
    ]
    small = 4096  # what is not the size of data: a few numbers of the group's own
    for op, args in calls:
        run = collectives._blocking(op)
        try:
            run(*args)
        except RuntimeError as refusal:  # PyTorch 2.11 gathers and scatters contiguous tensors
            assert "is_contiguous" in str(refusal)
            assert torch.__version__.startswith("2.11.")
            continue
        dist.barrier()
        before, _ = process_bytes()
        reset_peak()
        made = run(*args)
        _, peak = process_bytes()
        outputs = collectives._bytes(collectives._tensors(made))
        allowed = outputs + collectives.scratch_bytes(op, args, {}, made)
        assert peak - before <= allowed + small, op
        facts = collectives.modelled_profile(op, args, {}, made)
        strides = [output.stride for output in facts.outputs]
        assert strides == [tensor.stride() for tensor in collectives._tensors(made)], op


def test_the_groups_buffers_are_bounded(tmp_path):
    together(f"{HERE}:scratch", tmp_path / "run", 4)


def test_messages_between_two_ranks_are_refused():
    graph = torch.fx.Graph()
    tensor = graph.placeholder("tensor")
    made = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (tensor,))
    graph.output(made)
    module = torch.fx.GraphModule(nn.Module(), graph)
    with pytest.raises(runtime.CaptureError, match="issued outside it"):
        collectives.complete_collectives(module)
