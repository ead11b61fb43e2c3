"""The code of a half: no Python frame an op, and local slots that are used again."""

import operator
import resource
import sys
from types import SimpleNamespace

import pytest
import torch

from coop_plan.runtime import reports
from coop_plan.runtime.capture.sized_numbers import sized
from coop_plan.runtime.execute.straight_line import straight_line

OPS = 200


def chain(x):
    for _ in range(OPS // 2):
        x = torch.sin(x) * 1.01
    return x.sum()


def under(slots):
    """A function whose frame has so many local slots, and calls another."""
    found = {}
    names = "".join(f"v{i} = " for i in range(slots)) or "_ = "
    exec(f"def call(run):\n    {names}None\n    return run()", found)
    return found["call"]


@pytest.mark.parametrize("budget", ["100%", "50%"])
def test_a_step_has_no_python_frame_an_op_and_maps_no_memory_for_one(budget):
    """CPython maps and unmaps a chunk of its stack at each call made at a chunk's end."""
    step = torch.compile(chain, backend="coop", fullgraph=True, options={"budget": budget})
    x = torch.randn(16, requires_grad=True)

    def run():
        x.grad = None
        step(x).backward()

    for _ in range(3):
        run()
    faults = []
    for slots in range(0, 2400, 8):  # a chunk has 2048
        call = under(slots)
        call(run)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        call(run)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert max(faults) < OPS / 2

    calls = []
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    try:
        run()
    finally:
        sys.setprofile(None)
    (report,) = reports()
    assert len(calls) < len(report.plan.steps)


def graph_of(ops):
    """A graph whose op i reads the results of ops[i], or inputs -1, -2, ..."""
    graph = torch.fx.Graph()
    graph.placeholder("invocation")
    inputs = [graph.placeholder(f"x{i}") for i in range(3)]
    made = []
    for reads in ops:
        values = tuple(inputs[-1 - r] if r < 0 else made[r] for r in reads)
        made.append(graph.call_function(torch.ops.aten.add.Tensor, values))
    graph.output((made[-1], made[0]))
    return graph


def test_values_die_at_their_last_use_and_leave_their_slot():
    graph = graph_of([(-1, -2), (0, -1), (1, 1), (2, 0), (3, 3), (4, -2)])
    half = straight_line(graph, torch.fx.GraphModule({}, torch.fx.Graph()))
    assert half.__code__.co_nlocals == 2 + 2  # two values at most, and the parameters
    box = [torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 4.0)]
    last, first = half(None, box)
    assert first.tolist() == [3, 3]
    assert last.tolist() == [24, 24]
    assert box == [None, None, None]


def test_numbers_of_sizes_are_read_from_the_invocation():
    graph = torch.fx.Graph()
    graph.placeholder("invocation")
    x = graph.placeholder("x")
    rows = graph.call_function(torch.ops.aten.view.default, (x, [sized(2, 1), -1]))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (rows, sized(0.5, 0))),))
    half = straight_line(graph, torch.fx.GraphModule({}, torch.fx.Graph()))
    for numbers in ((0.5, 2), (3.0, 4)):
        x = torch.arange(8.0)
        (made,) = half(SimpleNamespace(numbers=numbers), [x])
        assert torch.equal(made, x.view(numbers[1], -1) * numbers[0])


def test_arguments_of_all_kinds():
    graph = torch.fx.Graph()
    graph.placeholder("invocation")
    x = graph.placeholder("x")
    cat = graph.call_function(torch.ops.aten.cat.default, ([x, x], -1))
    parts = graph.call_function(torch.ops.aten.split_with_sizes.default, (cat, [1, 3], 1))
    part = graph.call_function(operator.getitem, (parts, 1))
    clamped = graph.call_function(torch.ops.aten.clamp.default, (part, float("-inf"), 2.5))
    to_double = {"dtype": torch.float64}
    cast = graph.call_function(torch.ops.aten._to_copy.default, (clamped,), to_double)
    graph.output((cast, None, 3))
    half = straight_line(graph, torch.fx.GraphModule({}, torch.fx.Graph()))
    made = half(None, [torch.tensor([[1.0, 5.0]])])
    assert made[1:] == (None, 3)
    assert made[0].dtype == torch.float64
    assert made[0].tolist() == [[2.5, 1.0, 2.5]]
