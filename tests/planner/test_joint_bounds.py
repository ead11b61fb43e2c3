"""Bounds of programs with variants, and transfers or overwritten tensors, against enumeration."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coop_plan.planner import InfeasibleBudgetError, find_faults, plan
from coop_plan.planner.core.memory_bounds import working_set_bound
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.exact.dual.bounding import Bounding
from coop_plan.planner.exact.model.milp import Outcome
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.params import ExactParams
from coop_plan.planner.keep_all import keep_all_schedule
from tests.planner.brute_force_swap import TooManyStatesError, shortest
from tests.planner.models import relaxations
from tests.planner.test_exact import BUDGETS, SETTINGS
from tests.planner.test_variants import masks
from tests.strategies import variant_graphs

pytest.importorskip("ortools")

HOSTS = st.sampled_from([None, 8])
GRAPHS = st.one_of(
    variant_graphs(max_ops=4),
    variant_graphs(max_ops=4, mutates=True),
    variant_graphs(max_ops=5, mutates=True, bandwidth=False),
)


def drawn(graph, outputs, share, alignment, host):
    """A tiny problem with variants, an arena too small for everything, its shortest makespan."""
    problem = Problem.from_graph(graph, alignment, outputs, host)
    assume("variants" in problem.beyond_recomputation and problem.tensor_count <= 12)
    most = int(keep_all_schedule(problem).live_bytes().max(initial=0))
    least = working_set_bound(problem).bytes
    assume(least < most)
    arena = problem.rounded(least + int((most - 1 - least) * share))
    try:
        best = shortest(problem, arena, variants=True)
    except TooManyStatesError:
        assume(False)
    return problem, arena, None if best == math.inf else best  # a copy without a link never ends


@settings(SETTINGS, max_examples=60)
@given(graph=GRAPHS, host=HOSTS, chosen=st.sets(st.integers(0, 5)), **BUDGETS)
def test_no_schedule_is_cheaper_than_the_program_says(
    process, graph, host, chosen, outputs, share, alignment
):
    """At any time points, at all of them, and with every path cut."""
    problem, arena, best = drawn(graph, outputs, share, alignment, host)
    assume(best is not None)
    for answer, bound in relaxations(process, problem, arena, chosen, variants=True):
        assert answer.outcome is Outcome.OPTIMAL
        assert bound <= best * (1 + 1e-6) + 1e-6
    reported, params = [0.0], ExactParams(first_spread=1)
    program = Program.of(problem, variants=True)
    Bounding(program, problem.rounded(arena), set(), reported.append, params).run()
    assert max(reported) <= best * (1 + 1e-6) + 1e-6


@settings(SETTINGS, max_examples=8)
@given(graph=GRAPHS, host=HOSTS, **BUDGETS)
def test_plans_have_the_bound_of_all_that_the_graph_offers(graph, host, outputs, share, alignment):
    problem, arena, best = drawn(graph, outputs, share, alignment, host)
    options = {"outputs": outputs, "alignment": alignment, "host_budget": host, "time_limit": 2}
    budget = arena + problem.fixed_bytes
    try:
        made = plan(graph, budget, method="optimal", **options)
    except InfeasibleBudgetError:
        return
    assert find_faults(graph, made) == []
    assert best is not None
    assert best <= made.cost_us * (1 + 1e-6) + 1e-6
    if made.lower_bound_model is not None:  # else only a plan without variants and pairs was found
        assert made.lower_bound_us <= best * (1 + 1e-6) + 1e-6


@pytest.mark.parametrize("method", ["coop-offline", "optimal", "auto"])
def test_a_mask_and_a_transfer_are_chosen_together(method):
    """Each alone leaves an overhead: the mask costs 4 µs, and the copy of both halves stalls."""
    link = {"kind": "cuda", "h2d_bytes_per_s": 4e5, "d2h_bytes_per_s": 4e5}
    graph = masks()
    linked = graph.model_copy(update={"device": graph.device.model_copy(update=link)})
    made = plan(linked, 19, method=method, alignment=1, time_limit=6)
    assert find_faults(linked, made) == []
    alone = [plan(graph, 19, method=method, alignment=1, time_limit=3).cost_us]
    bare = [op.model_copy(update={"variants": []}) for op in linked.ops]
    without = linked.model_copy(update={"ops": bare})
    alone.append(plan(without, 19, method=method, alignment=1, time_limit=3).cost_us)
    assert made.cost_us <= min(alone) + 1e-9
    assert (made.lower_bound_model is None) == (method == "coop-offline")
