"""The bound on the cost of plans with homes: below every plan, and worth having."""

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from coop_plan.planner import InfeasibleBudgetError, Problem, plan
from coop_plan.planner.core.memory_bounds import budget_lower_bound
from coop_plan.planner.exact.dual.homes import HomesBounding
from coop_plan.planner.homes.updates import host_updates
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.planning import keep_all_peak
from tests.planner.brute_force_swap import TooManyStatesError, shortest_with_homes
from tests.planner.test_exact import SETTINGS
from tests.planner.test_homes import movable
from tests.planner.test_host_updates import UPDATED, entangled, on_host
from tests.strategies import COSTS, graphs


def bound_of(problem, budget):
    """The bound in µs after the last model."""
    told = [0.0]
    HomesBounding(problem, budget, told.append).run()
    return max(told)


@st.composite
def tiny(draw):
    """Tiny graphs of movable residents; some updates may run on the host."""
    graph = movable(draw(graphs(max_ops=4, variants=False)))
    resident = {tensor.id for tensor in graph.tensors if tensor.resident}
    ops = [
        on_host(op, draw(COSTS)) if not op.outputs and {*op.mutates} <= resident else op
        for op in graph.ops
    ]
    return graph.model_copy({"ops": ops})


@settings(SETTINGS, max_examples=250)
@given(tiny(), st.sampled_from(["outside", "arena"]), st.sampled_from([1, 8]), st.integers(0, 9))
def test_no_schedule_is_cheaper_than_the_bound(graph, outputs, alignment, share):
    """Exhaustive search over homes, updates on the host, recomputes and copies."""
    problem = Problem.from_graph(graph, alignment, outputs)
    assume(problem.home_candidates and problem.tensor_count <= 9)
    options = PlanOptions.given("min", {"alignment": alignment, "outputs": outputs})
    high = keep_all_peak(graph, options)
    low = budget_lower_bound(problem)
    budget = max(1, low + (high - low) * share // 10)
    try:
        best = shortest_with_homes(problem, budget)
    except TooManyStatesError:
        assume(False)
    assume(best is not None)
    event(f"above the floor: {best > problem.floor_us}, updates: {bool(host_updates(problem))}")
    found = bound_of(problem, budget)
    event(f"tight: {found >= best * (1 - 1e-6)}")
    assert found <= best * (1 + 1e-6) + 1e-6


@settings(SETTINGS, max_examples=30)
@given(st.one_of(UPDATED, entangled()), st.integers(0, 9))
def test_no_plan_is_cheaper_than_the_bound(graph, share):
    """Plans by coop-offline of larger graphs, within the smallest budget and larger ones."""
    least = plan(graph, "min", alignment=1)
    high = keep_all_peak(graph, PlanOptions.given("min", {"alignment": 1}))
    budget = least.peak_bytes + (high - least.peak_bytes) * share // 10
    try:
        made = plan(graph, max(1, budget), alignment=1)
    except InfeasibleBudgetError:
        made = least
    problem = Problem.from_graph(graph, 1)
    assume(problem.home_candidates)
    found = bound_of(problem, made.budget_bytes)
    event(f"above each op once: {found > problem.floor_us * (1 + 1e-6)}")
    assert found <= made.cost_us * (1 + 1e-6) + 1e-6
