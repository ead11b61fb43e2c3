"""The largest batch within a limit is one whose own step has a plan within it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import gpt
from coop_plan.planner import plan
from coop_plan.planner.fit import ONE_FORWARD, Budgeting, fit, largest_sizes, scaled
from coop_plan.planner.planning import least_at_any_costs
from coop_plan.schemas import Device, InvalidInputError, parse_graph
from tests.strategies import graphs

LAYERS = 6


def chain(batch, bend=lambda batch: batch):
    """A chain forward and back: every activation is 512 bytes an example, an op 1 us."""
    size = 512 * bend(batch)
    forward, gradients = range(1, LAYERS + 1), range(LAYERS + 1, 2 * LAYERS + 1)
    tensors = [{"id": 0, "bytes": 512, "kind": "input"}]
    tensors += [{"id": t, "bytes": size, "kind": "activation"} for t in forward]
    tensors += [{"id": t, "bytes": 512, "kind": "activation"} for t in gradients[:-1]]
    tensors += [{"id": 2 * LAYERS, "bytes": 512, "kind": "output"}]
    ops = [
        {"id": t - 1, "name": "f", "inputs": [t - 1], "outputs": [t], "cost_us": float(batch)}
        for t in forward
    ]
    ops += [
        {
            "id": t - 1,
            "name": "b",
            "phase": "backward",
            "inputs": [t - 1, 2 * LAYERS + 1 - t],
            "outputs": [t],
            "cost_us": float(batch),
        }
        for t in gradients
    ]
    return parse_graph({"schema": "coop-plan/graph/1", "tensors": tensors, "ops": ops})


def test_a_graph_between_two_captured_ones_is_the_captured_one():
    assert scaled(chain(2), chain(4), 3.5) == chain(9)
    assert scaled(chain(2), chain(4), -0.5) == chain(1)
    with pytest.raises(InvalidInputError, match="other ops at another size"):
        named = chain(4).to_json().replace('"name":"f"', '"name":"g"')
        scaled(chain(2), parse_graph(named), 1)


def holds(batch, memory, limit, graph_at):
    try:
        return plan(graph_at(batch), memory).overhead <= limit
    except ValueError:
        return False


@pytest.mark.parametrize(
    "bend", [lambda batch: batch, lambda batch: batch + batch // 12], ids=["affine", "bent"]
)
def test_the_largest_batch_is_the_largest_and_has_a_plan(bend):
    memory, asked = 512 * 50, []

    def graph_at(batch):
        asked.append(batch)
        return chain(batch, bend)

    budget = Budgeting(memory)
    found = fit(chain(4, bend), budget)
    assert found.planned is not None
    assert found.kept.overhead == 0
    assert found.least.peak_bytes <= found.kept.peak_bytes
    largest_of = largest_sizes(graph_at, 4, budget, {"none": 0.0})
    assert set(largest_of) == {"none", ONE_FORWARD}
    for largest in largest_of.values():
        assert largest.plan.peak_bytes <= memory
        assert largest.plan.overhead <= largest.limit
        assert largest.plan.graph == plan(chain(largest.size, bend), "100%").graph
    assert 0 < largest_of["none"].size < largest_of[ONE_FORWARD].size
    assert len(asked) == len(set(asked)) <= 8
    if bend(12) == 12:
        for largest in largest_of.values():
            assert not holds(largest.size + 1, memory, largest.limit, graph_at)


def test_a_link_makes_room_for_a_larger_batch():
    memory = 512 * 50
    alone, linked = (
        largest_sizes(chain, 4, Budgeting(memory, link=link), {"none": 0.0})["none"]
        for link in (0, 10**12)
    )
    assert linked.size > alone.size
    assert linked.plan.swapped_bytes > 0 == alone.plan.swapped_bytes
    assert linked.plan.peak_bytes <= memory


@pytest.mark.parametrize("link", [0, 10**12])
def test_the_smallest_budget_uses_the_same_link_as_the_plan_within(link):
    """With the device's own link it was a budget that fit could not plan within."""
    graph = chain(4).model_copy({"device": Device(d2h_bytes_per_s=1e12, h2d_bytes_per_s=1e12)})
    least = fit(graph, Budgeting(1 << 20, link=link)).least
    assert (least.swapped_bytes > 0) == (link > 0)
    assert fit(graph, Budgeting(least.peak_bytes, link=link)).planned is not None


def test_where_nothing_fits_there_is_no_batch():
    assert fit(chain(4), Budgeting(600)).planned is None
    assert fit(chain(4), Budgeting(-1)).planned is None
    found = largest_sizes(chain, 4, Budgeting(600), {})
    assert found[ONE_FORWARD].size == 0
    assert found[ONE_FORWARD].plan is None


def recosted(graph, draw):
    """The same step on another machine."""
    ops = [
        op.model_copy({"cost_us": draw.uniform(0, draw.choice([0.1, 3, 99]))}) for op in graph.ops
    ]
    return graph.model_copy({"ops": ops})


def check_any_costs(graph, draw, budget, **options):
    made = plan(recosted(graph, draw), budget, smallest=True, **options)
    assert made.peak_bytes <= budget


@pytest.mark.parametrize("layers", [3, 4, 5, 12])
def test_the_smallest_budget_has_a_plan_at_any_costs(layers):
    """`coop-plan fit` prints it by modelled costs, and the runtime plans by measured ones."""
    draw = random.Random(layers)
    graph = recosted(gpt(layers, draw.choice([512, 4096])), draw)
    least = fit(graph, Budgeting(1, "gradients")).least
    check_any_costs(graph, draw, least.budget_bytes, outputs="gradients")


@settings(max_examples=30, deadline=None)
@given(graph=graphs(max_ops=12, variants=False), draw=st.randoms(use_true_random=False))
def test_the_smallest_budget_of_a_small_graph_has_a_plan_at_any_costs(graph, draw):
    least = least_at_any_costs(graph, alignment=8)
    assert least.peak_bytes <= least.budget_bytes
    if least.budget_bytes:
        check_any_costs(graph, draw, least.budget_bytes, alignment=8)
