"""delta and swap-only on memories whose right answer is known, with each idea on and off."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coop_plan.planner import METHODS, InfeasibleBudgetError, plan
from coop_plan.schemas import Offload, Prefetch
from tests.planner.test_search_makespan import linked, pyramid
from tests.strategies import graphs
from tests.support import make_graph

SWITCHES = tuple(METHODS["delta"].switches)


def two_tensors(cheap_us, dear_us, room=200):
    """A cheap (1) and a dear (2) tensor of 100 bytes, both read after one that needs their room."""
    tensors = {0: ("input", 1), 1: ("activation", 100), 2: ("activation", 100)}
    tensors |= {3: ("activation", 1), 4: ("activation", room), 5: ("activation", 1)}
    tensors |= {6: ("activation", 1), 7: ("output", 1)}
    ops = [
        {"inputs": [0], "outputs": [1], "cost_us": cheap_us},
        {"inputs": [0], "outputs": [2], "cost_us": dear_us},
        {"inputs": [1, 2], "outputs": [3], "cost_us": 100.0},
        {"inputs": [3], "outputs": [4], "cost_us": 100.0, "recomputable": False},
        {"inputs": [4], "outputs": [5], "cost_us": 100.0, "recomputable": False},
        {"inputs": [5, 1], "outputs": [6], "cost_us": 100.0},
        {"inputs": [6, 2], "outputs": [7], "cost_us": 100.0},
    ]
    return make_graph(tensors, ops)


def moved(made, graph):
    """Ids of the tensors that are fetched."""
    return {step.tensor for step in made.steps if isinstance(step, Prefetch)}


def off(*names):
    return dict.fromkeys(names, False)


def test_the_director_swaps_what_is_dear_and_recomputes_what_is_cheap():
    # There and back is 2 x 50 µs.
    graph = linked(two_tensors(20.0, 400.0), 2.0)
    made = plan(graph, 230, method="delta", alignment=1)
    assert moved(made, graph) == {2}
    assert made.recomputed_ops == 1
    blind = plan(graph, 230, method="delta", alignment=1, switches=off("director"))
    assert moved(blind, graph) == {1, 2}
    assert blind.recomputed_ops == 0
    assert blind.cost_us > made.cost_us


def test_on_a_slow_link_the_director_recomputes_all():
    graph = linked(two_tensors(20.0, 400.0), 0.1)
    made = plan(graph, 230, method="delta", alignment=1)
    assert made.swapped_bytes == 0
    assert made.recomputed_ops == 2


def test_the_filter_releases_what_is_cheap_to_have_again():
    # Tensor 1 was read last, and so is not the stalest; but it is nearly free.
    graph = two_tensors(1.0, 400.0, room=100)
    ops = list(graph.ops)
    ops[2] = ops[2].model_copy(update={"inputs": [2]})
    ops.insert(3, ops[2].model_copy(update={"id": 9, "inputs": [1], "outputs": []}))
    ops.insert(4, ops[2].model_copy(update={"id": 8, "inputs": [3], "outputs": []}))
    graph = linked(graph.model_copy(update={"ops": ops}), 2.0)
    made = plan(graph, 290, method="delta", alignment=1, switches=off("overlap"))
    assert not moved(made, graph)
    assert made.recomputed_ops == 1
    stale = plan(graph, 290, method="delta", alignment=1, switches=off("overlap", "filter"))
    assert moved(stale, graph) == {2}


@pytest.mark.parametrize("method", ["delta", "swap-only"])
def test_prefetch_and_overlap_hide_copies(method):
    # Copies take 10 µs, as long as an op; nothing is cheaper to compute again.
    graph = linked(pyramid(80, cost=30.0), 10.0)
    everything = plan(graph, 4000, method=method, alignment=1)
    on_demand = plan(graph, 4000, method=method, alignment=1, switches=off("prefetch"))
    at_need = plan(graph, 4000, method=method, alignment=1, switches=off("overlap"))
    assert everything.prefetch_stall_us < on_demand.prefetch_stall_us
    assert everything.offload_stall_us < at_need.offload_stall_us


def test_swap_only_computes_nothing_again():
    graph = linked(pyramid(16), 10.0)
    made = plan(graph, 700, method="swap-only", alignment=1)
    assert made.recomputed_ops == 0
    assert made.swapped_bytes > 0


def test_without_a_link_delta_is_dtr_and_swap_only_keeps_all():
    graph = pyramid(16)
    made = plan(graph, 700, method="delta", alignment=1)
    assert made.steps == plan(graph, 700, method="dtr", alignment=1).steps
    with pytest.raises(InfeasibleBudgetError):
        plan(graph, 700, method="swap-only", alignment=1)


@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(max_ops=14, variants=False),
    share=st.sampled_from(["80%", "60%", "45%"]),
    method=st.sampled_from(["delta", "swap-only"]),
    host=st.sampled_from([None, 8, 24]),
    chosen=st.sets(st.sampled_from(SWITCHES)),
)
def test_every_plan_passes_the_verifier_and_keeps_the_hosts_budget(
    graph, share, method, host, chosen
):
    assume(sum(t.bytes for t in graph.tensors))
    switches = {name: False for name in chosen if name in METHODS[method].switches}
    try:
        made = plan(graph, share, method=method, alignment=1, host_budget=host, switches=switches)
    except InfeasibleBudgetError:
        return
    assert host is None or made.host_arena_bytes <= host
    assert method == "delta" or made.recomputed_ops == 0
    assert sum(isinstance(step, Offload) for step in made.steps) <= len(graph.tensors)
