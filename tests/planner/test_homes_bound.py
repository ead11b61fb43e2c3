"""The bound on the cost of plans with homes: below every plan, and worth having."""

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from coop_plan.planner import InfeasibleBudgetError, Problem, plan
from coop_plan.planner.core.memory_bounds import budget_lower_bound
from coop_plan.planner.exact.dual.homes import bound_homes
from coop_plan.planner.homes.updates import host_updates
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.planning import keep_all_peak
from tests.planner.brute_force_swap import TooManyStatesError, shortest_with_homes
from tests.planner.test_exact import SETTINGS
from tests.planner.test_homes import iteration, movable
from tests.planner.test_host_updates import UPDATED, entangled, on_host
from tests.strategies import COSTS, graphs
from tests.support import make_graph


def bound_of(problem, budget):
    """The bound in µs after the last model."""
    told = [0.0]
    bound_homes(problem, budget, told.append)
    return max(told)


@st.composite
def tiny(draw):
    """Tiny graphs of movable residents; some updates may run on the host."""
    graph = movable(draw(graphs(max_ops=4, variants=False, launches=True)))
    resident = {tensor.id for tensor in graph.tensors if tensor.resident}
    ops = [
        on_host(op, draw(COSTS)) if not op.outputs and {*op.mutates} <= resident else op
        for op in graph.ops
    ]
    return graph.model_copy({"ops": ops})


@settings(SETTINGS, max_examples=60)
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
    found = bound_of(problem, budget)
    event(f"updates: {bool(host_updates(problem))}, tight: {found >= best * (1 - 1e-6)}")
    event(f"above each op once: {best > problem.floor_us}")
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


def test_exact_methods_publish_the_bound():
    """The parameter leaves for its gradient, comes back for its update, and is written back."""
    made = plan(one_layer(), 2000, method="auto", alignment=1, time_limit=8.0)
    assert made.homes
    assert made.lower_bound_model == "any"
    assert made.base_cost_us * 1.2 < made.lower_bound_us <= made.cost_us
    assert plan(one_layer(), 2000, method="coop-offline", alignment=1).lower_bound_us is None


def one_layer():
    return iteration(layers=1, activation=0)


def test_a_plan_that_costs_the_bound_is_proved():
    """Two parameters of which one fits: each is fetched while compute waits, then read."""
    tensors = {0: ("parameter", 1000), 1: ("parameter", 1000), 2: ("activation", 8)}
    ops = [{"inputs": [0], "outputs": [2]}, {"inputs": [1, 2]}]
    graph = movable(make_graph(tensors, [op | {"cost_us": 400.0} for op in ops]))
    made = plan(graph, 1100, method="optimal", alignment=1, time_limit=8.0)
    assert made.status == "optimal"
    assert made.lower_bound_us == made.cost_us == 2 * (250.25 + 400.0)
