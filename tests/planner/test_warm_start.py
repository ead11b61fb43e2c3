"""Plans that start from another plan of their graph."""

from dataclasses import replace

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from coop_plan.planner import InfeasibleBudgetError, Problem, find_faults, plan
from coop_plan.planner.heuristic.coop_offline import CoopOffline
from coop_plan.planner.method import Request
from coop_plan.planner.verifier import InvalidPlanError
from coop_plan.planner.warm_start import fits, runs_of
from tests.planner.test_methods import HEURISTICS, OUTPUTS, SHARES
from tests.strategies import graphs
from tests.support import make_graph

NOSHRINK = [Phase.explicit, Phase.reuse, Phase.generate]


@settings(max_examples=50, deadline=None, phases=NOSHRINK)
@given(
    graph=graphs(max_ops=12),
    methods=st.tuples(st.sampled_from(HEURISTICS), st.sampled_from(HEURISTICS)),
    budgets=st.tuples(SHARES, SHARES),
    outputs=st.tuples(OUTPUTS, OUTPUTS),
)
def test_a_plan_is_never_worse_than_the_one_that_it_starts_from(graph, methods, budgets, outputs):
    assume(any(tensor.bytes for tensor in graph.tensors))
    options = [
        {"method": method, "outputs": where} for method, where in zip(methods, outputs, strict=True)
    ]
    try:
        start = plan(graph, budgets[0], **options[0])
    except InfeasibleBudgetError:
        return
    budget = budgets[1]
    try:
        made = plan(graph, budget, start=start, **options[1])
    except InfeasibleBudgetError as error:
        assert start.outputs != options[1]["outputs"] or start.peak_bytes > error.budget_bytes
        return
    assert find_faults(graph, made) == []
    assert made.peak_bytes <= made.budget_bytes
    if made.lower_bound_us is not None:
        assert made.lower_bound_us <= made.cost_us
    if start.outputs != made.outputs:
        return
    if budget == "min":
        assert (made.peak_bytes, made.cost_us) <= (start.peak_bytes, start.cost_us)
    elif start.peak_bytes <= made.budget_bytes:
        assert made.cost_us <= start.cost_us


@settings(max_examples=60, deadline=None, phases=NOSHRINK)
@given(graph=graphs(max_ops=12), share=st.sampled_from(["80%", "60%", "40%"]))
def test_the_first_incumbent_is_the_plan_s_sequence(graph, share):
    """With a layout that costs as much in the plan's own arena, whenever it is laid out there."""
    try:
        start = plan(graph, share, method="coop")
    except InfeasibleBudgetError:
        return
    problem = Problem.from_graph(graph, start.alignment, start.outputs, start.host_budget_bytes)
    runs = runs_of(problem, start)
    assume(runs is not None)
    method = CoopOffline(problem, replace(Request(2 * start.arena_bytes), start=runs))
    method._offer_start()
    best = method.portfolio.best
    assert best.found is not None
    assert best.cost_us == pytest.approx(start.cost_us)
    assert tuple(best.found.run.ops) == runs


def test_a_plan_of_another_graph_is_refused():
    tensors = {0: ("input", 8), 1: ("activation", 8), 2: ("output", 8)}
    graph = make_graph(tensors, [{"inputs": [0], "outputs": [1]}, {"inputs": [1], "outputs": [2]}])
    other = make_graph({0: ("input", 8), 1: ("output", 8)}, [{"inputs": [0], "outputs": [1]}])
    with pytest.raises(InvalidPlanError, match="the plan is for graph sha256:"):
        plan(graph, "100%", start=plan(other, "100%"))


def test_a_plan_with_copies_fits_where_its_link_and_host_budget_are():
    from coop_plan.planner.options import PlanOptions

    graph = make_graph({0: ("input", 8), 1: ("output", 8)}, [{"inputs": [0], "outputs": [1]}])
    start = plan(graph, "100%", link="1GB/s").model_copy(update={"host_arena_bytes": 100})
    for options, expected in (
        ({"link": "1GB/s"}, True),
        ({"link": "1GB/s", "host_budget": 100}, True),
        ({"link": "1GB/s", "host_budget": 99}, False),
        ({}, False),
        ({"link": "1GB/s", "alignment": 1}, False),
    ):
        asked = PlanOptions.of({"budget": "100%"} | options)
        assert fits(start, asked, start.budget_bytes) == expected
