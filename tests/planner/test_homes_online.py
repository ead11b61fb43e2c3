"""Online methods with movable residents on the host: they begin there, and are written back."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import gpt, with_adamw
from coop_plan.planner import METHODS, InfeasibleBudgetError, plan
from coop_plan.planner.core.memory_bounds import budget_lower_bound, largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.homes.lower import lowered_online
from coop_plan.planner.homes.online import OnlineHomes
from coop_plan.planner.homes.search import by_uses
from coop_plan.planner.method import Request
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.planning import keep_all_peak
from coop_plan.schemas import Offload
from tests.planner.test_homes import iteration, movable
from tests.strategies import graphs

ONLINE = [name for name, info in METHODS.items() if info.homes == "all"]


@given(
    graphs(launches=True),
    st.sampled_from(ONLINE),
    st.sampled_from(["outside", "arena"]),
    st.sampled_from([1, 4]),
    st.sampled_from([None, 8, 40]),
    st.data(),
)
@settings(max_examples=100)
def test_each_plan_is_valid_down_to_the_smallest_budget(
    graph, method, outputs, alignment, host, data
):
    """Also where residents on the device cost less; `OnlineHomes` verifies each plan."""
    switches = data.draw(st.sets(st.sampled_from(sorted(METHODS[method].switches))))
    fields = {"method": method, "outputs": outputs, "alignment": alignment}
    fields |= {"host_budget": host, "switches": dict.fromkeys(switches, False)}
    fixed, free = movable(graph, yes=False), movable(graph)
    problem = Problem.from_graph(free, alignment, outputs, host)
    assume(problem.home_candidates)
    least, less = (plan(g, "min", **fields) for g in (fixed, free))
    assert less.peak_bytes <= least.peak_bytes
    limit = max(1, less.budget_bytes)
    assert plan(free, limit, **fields).peak_bytes <= limit
    assert budget_lower_bound(problem) <= less.peak_bytes
    options = PlanOptions.given("min", fields)
    high = keep_all_peak(free, options)
    low, share = less.budget_bytes, data.draw(st.integers(0, 10))
    budget = max(1, low + (high - low) * share // 10)
    search = OnlineHomes(problem, options, Request(0, options.off))
    found = search.cheapest(budget, float("inf"))
    assert found is None or found.peak_bytes <= budget
    try:
        cost = plan(fixed, budget, **fields).cost_us
    except InfeasibleBudgetError:
        return
    assert plan(free, budget, **fields).cost_us <= cost


@pytest.mark.parametrize("method", ONLINE)
def test_residents_may_exceed_the_budget(method):
    """Below them, down to the working sets, each overwritten one is written back after its use."""
    graph = iteration()
    resident = sum(t.bytes for t in graph.tensors if t.resident)
    mutated = {t for op in graph.ops for t in op.mutates}
    for budget in ("min", resident):
        made = plan(graph, budget, method=method, alignment=1)
        homes = {home.host_offset for home in made.homes}
        written = [s for s in made.steps if isinstance(s, Offload) and s.host_offset in homes]
        assert len(written) >= len(mutated)
    assert plan(graph, "min", method=method, alignment=1).peak_bytes == budget_lower_bound(
        Problem.from_graph(graph, 1)
    )


def test_the_smallest_budget_of_a_larger_graph_is_searched_near_its_working_set():
    """An online run is quick: the search takes as many probes as one without transfers."""
    problem = Problem.from_graph(with_adamw(gpt(4, tokens=8192, width=4096), 25.0))
    made = plan(problem.graph, "min", method="delta")
    assert len(made.homes) == len(problem.home_candidates)
    low = lowered_online(problem, by_uses(problem)).form.problem
    assert made.peak_bytes <= 1.5 * (low.fixed_bytes + largest_working_set(low).bytes)
