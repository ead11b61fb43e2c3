"""A plan for one size serves another: the same runs, the sizes' own addresses, or nothing."""

import msgspec
import pytest

from coop_plan.planner import plan, verify
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.rescale import rescaled
from coop_plan.schemas import Compute, parse_graph
from tests.support import make_graph


def chain(size, layers=12, **op):
    """Forward and backward of layers with `size` bytes each, beside parameters and gradients."""
    tensors = {0: ("input", size), 1: ("parameter", 4096)}
    tensors |= {2 + i: ("activation", size + 64 * (i % 3)) for i in range(layers)}
    tensors |= {2 + layers + i: ("activation", size) for i in range(layers)}
    tensors[2 + 2 * layers] = ("output", 4096)
    ops = [
        {"inputs": [0 if i == 0 else 1 + i, 1], "outputs": [2 + i], "cost_us": 1.0 + i % 5, **op}
        for i in range(layers)
    ]
    for i in reversed(range(layers)):
        later = [] if i == layers - 1 else [3 + layers + i]
        ops.append({"phase": "backward", "inputs": [2 + i, *later], "outputs": [2 + layers + i]})
    ops.append({"phase": "backward", "inputs": [2 + layers], "outputs": [2 + 2 * layers]})
    return make_graph(tensors, ops)


def asked(budget, **fields):
    return PlanOptions.of({"budget": budget, **fields})


def runs(made):
    return [step.op for step in made.steps if isinstance(step, Compute)]


@pytest.mark.parametrize("size", [4096, 5000, 7000])
def test_a_share_at_another_size_is_met_by_the_same_runs(size):
    options, like, graph = asked("60%"), chain(4096), chain(size)
    made = plan(like, options)
    assert made.recomputed_ops > 0
    found = rescaled(graph, like, made, options)
    assert runs(found) == runs(made)
    assert found.budget_bytes == plan(graph, options).budget_bytes >= found.peak_bytes
    verify(graph, found)


def test_what_does_not_fit_or_leaves_much_idle_is_to_be_searched():
    like = chain(4096)
    made = plan(like, asked("60%"))
    within = asked(made.budget_bytes)
    assert runs(rescaled(chain(4100), like, made, within)) == runs(made)
    assert rescaled(chain(5000), like, made, within) is None  # more than there is
    assert rescaled(chain(3000), like, made, within) is None  # less would run again
    assert rescaled(chain(9000), like, made, asked("60%")) is None  # too far away


def test_what_needs_no_search_or_is_another_question_is_left_alone():
    like, graph = chain(4096), chain(5000)
    made = plan(like, asked("60%"))
    assert rescaled(graph, like, made, asked("100%")) is None  # everything is kept
    assert rescaled(graph, like, made, asked("min")) is None
    assert rescaled(graph, like, made, asked("60%", time_limit=5)) is None
    assert rescaled(chain(5000, layers=11), like, made, asked("60%")) is None
    assert rescaled(chain(5000, recomputable=False), like, made, asked("60%")) is None
    document = msgspec.to_builtins(graph)
    document["ops"][0]["variants"] = [{"name": "v", "inputs": [0, 1], "outputs": [2], "cost_us": 9}]
    assert rescaled(parse_graph(document), like, made, asked("60%")) is None
