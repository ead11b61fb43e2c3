"""The bound on the smallest budget: no schedule of whichever order and methods goes below it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hard_graphs import FAMILIES, hard_graph
from coop_plan.planner import InfeasibleBudgetError, Problem, plan
from coop_plan.planner.core.memory_bounds import (
    arena_lower_bound,
    budget_lower_bound,
    largest_working_set,
)
from coop_plan.planner.verifier import find_faults
from tests.planner.brute_force import cheapest
from tests.strategies import graphs
from tests.support import make_graph

OUTPUTS = st.sampled_from(["outside", "arena", "gradients"])


@settings(max_examples=200, deadline=None)
@given(
    graphs(max_ops=7, variants=False, rng=False, bandwidth=False),
    OUTPUTS,
    st.sampled_from([1, 8]),
)
def test_exhaustive_search_finds_nothing_below(graph, outputs, alignment):
    problem = Problem.from_graph(graph, alignment, outputs)
    least = arena_lower_bound(problem)
    assert least >= largest_working_set(problem).bytes
    if least > 0:
        assert cheapest(problem, least - alignment) is None


@pytest.fixture
def two_readers():
    """Reading x and y takes 2 bytes; but whichever of them is made last is made of 3 others."""
    tensors = {0: ("input", 0), 1: ("activation", 3), 2: ("activation", 1), 3: ("activation", 3)}
    tensors |= {4: ("activation", 1), 5: ("output", 0)}
    reads = [[0], [1], [0], [3], [2, 4]]
    makes = [[1], [2], [3], [4], [5]]
    ops = [{"inputs": r, "outputs": m} for r, m in zip(reads, makes, strict=True)]
    return make_graph(tensors, ops)


def test_what_was_made_last_was_made_beside_the_others(two_readers):
    problem = Problem.from_graph(two_readers, 1)
    assert largest_working_set(problem).bytes == 4
    assert arena_lower_bound(problem) == 5
    assert cheapest(problem, 4) is None
    assert cheapest(problem, 5) is not None


def test_what_is_made_once_is_there_on_every_path_to_its_readers():
    tensors = {0: ("input", 0), 1: ("activation", 5), 2: ("activation", 3), 3: ("activation", 4)}
    tensors |= {4: ("output", 0)}
    reads, makes = [[0], [1], [2], [3, 1]], [[1], [2], [3], [4]]
    ops = [{"inputs": r, "outputs": m} for r, m in zip(reads, makes, strict=True)]
    assert arena_lower_bound(Problem.from_graph(make_graph(tensors, ops), 1)) == 9
    ops[0]["recomputable"] = False
    assert arena_lower_bound(Problem.from_graph(make_graph(tensors, ops), 1)) == 12


@pytest.mark.parametrize("family", FAMILIES)
def test_the_smallest_plan_says_how_far_it_may_be_from_the_smallest(family):
    graph = hard_graph(family, 1, 30)
    made = plan(graph, "min", method="dtr", outputs="arena")
    least = made.budget_lower_bound_bytes
    assert least == budget_lower_bound(Problem.from_graph(graph, outputs="arena"))
    assert made.resident_bytes < least <= made.peak_bytes
    assert plan(graph, "100%", method="dtr").budget_lower_bound_bytes is None
    wrong = made.model_copy(update={"budget_lower_bound_bytes": made.peak_bytes + 1})
    assert [fault.code for fault in find_faults(graph, wrong)] == ["wrong-bound"]


@settings(max_examples=100, deadline=None)
@given(graphs(max_ops=7, variants=False, rng=False, bandwidth=False), OUTPUTS, st.data())
def test_a_refusal_says_what_no_schedule_is_without(graph, outputs, data):
    """However small the budget was; what is refused from the bound on may be met by another."""
    options = {"outputs": outputs, "alignment": 8}
    problem = Problem.from_graph(graph, **options)
    least = budget_lower_bound(problem)
    if least < 2:
        return
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(graph, data.draw(st.integers(1, least - 1)), smallest=True, **options)
    assert refused.value.budget_lower_bound_bytes == least <= refused.value.min_feasible_bytes
    assert f"no schedule at all one below {least} bytes" in str(refused.value)
    if arena_lower_bound(problem) > 0:
        assert cheapest(problem, arena_lower_bound(problem) - 8) is None
