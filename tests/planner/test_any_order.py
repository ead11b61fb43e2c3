"""The bound that holds in any order of first runs: below every schedule, and worth having."""

import time
from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.synthetic import gpt
from coop_plan.planner import Problem
from coop_plan.planner.exact import auto
from coop_plan.planner.exact.auto import solve_auto
from coop_plan.planner.exact.dual.any_order import bound_any_order
from coop_plan.planner.exact.model.point_selection import Ancestry, Chains, ops_over_capacity
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.optimal import solve_optimal
from coop_plan.planner.exact.params import ExactParams
from coop_plan.planner.heuristic.coop_offline import in_any_order, solve_coop_offline
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.registry import Request
from tests.planner.brute_force import cheapest
from tests.planner.test_exact import BUDGETS, SETTINGS, tight
from tests.strategies import graphs

ORDERS = 200
"""Of a graph, at most."""


def orders(graph):
    """Graphs with the same ops, in every order in which what is read was made."""
    made_here = {t for op in graph.ops for t in op.outputs}

    def extend(done, made, left):
        if not left:
            yield done
        for op in left:
            if made_here.intersection(op.inputs) <= made:
                rest = [other for other in left if other is not op]
                yield from extend([*done, op], made.union(op.outputs), rest)

    for ops in extend([], frozenset(), list(graph.ops)):
        yield graph.model_copy(update={"ops": ops})


def bound_of(problem, arena):
    """The bound on the overhead in µs."""
    program, reported = Program.of(problem), [0.0]
    bound_any_order(program, program.problem.rounded(arena), reported.append)
    return max(reported)


@SETTINGS
@given(graph=graphs(max_ops=6, mutates=False), **BUDGETS)
def test_no_order_is_cheaper_than_the_bound(graph, outputs, share, alignment):
    problem, arena = tight(graph, outputs, share, alignment)
    every = [
        cheapest(Problem.from_graph(other, alignment, outputs, host_budget=0), arena)
        for other in islice(orders(graph), ORDERS + 1)
    ]
    assume(len(every) <= ORDERS)
    costs = [cost for cost in every if cost is not None]
    assume(costs)
    assert bound_of(problem, arena) <= min(costs) + 1e-6


@SETTINGS
@given(graph=graphs(max_ops=9), **BUDGETS)
def test_nor_is_program_order_where_ops_overwrite(graph, outputs, share, alignment):
    problem, arena = tight(graph, outputs, share, alignment)
    best = cheapest(problem, arena)
    assume(best is not None)
    assert bound_of(problem, arena) <= best + 1e-6


@SETTINGS
@given(graph=graphs(max_ops=12), count=st.integers(1, 12), **BUDGETS)
def test_time_points_run_one_after_the_other_in_any_order(graph, count, outputs, share, alignment):
    problem, arena = tight(graph, outputs, share, alignment)
    program = Program.of(problem)
    ancestry = Ancestry(program)
    points = Chains(ancestry, arena).points(count)
    assert len(points) <= count
    assert bool(points) == bool(ops_over_capacity(program, arena))
    for earlier, later in pairwise(points):
        assert earlier in ancestry.ancestors(later)
        assert later in ancestry.descendants(earlier)


@pytest.mark.parametrize("layers", [2, 3, 4])
def test_it_proves_a_plan_that_no_plan_in_program_order_reaches(layers):
    problem = Problem.from_graph(gpt(layers), outputs="arena", host_budget=0)
    arena = int(0.8 * keep_all_schedule(problem).live_bytes().max())
    in_order = solve_optimal(problem, Request(arena, deadline=time.monotonic() + 60))
    assert (in_order.status, in_order.bound_model) == ("optimal", "program-order")
    found_us = min(in_any_order(problem, Request(arena, seed=seed)).cost_us for seed in range(3))
    assert found_us < in_order.lower_bound_us
    base = problem.base_cost_us
    assert bound_of(problem, arena) - base == pytest.approx(found_us - base, rel=1e-5)


def test_auto_ends_with_the_proof_of_such_a_plan():
    problem = Problem.from_graph(gpt(2), outputs="arena", host_budget=0)
    arena = int(0.8 * keep_all_schedule(problem).live_bytes().max())
    params = ExactParams(reorder_seconds=60.0)
    made = solve_auto(problem, Request(arena, deadline=time.monotonic() + 90), params)
    assert (made.status, made.bound_model) == ("optimal", "any")


def test_a_time_too_short_for_a_model_is_coop_offlines(monkeypatch):
    """A model that times out took it: plans cost twice those of coop-offline in that time."""
    problem = Problem.from_graph(gpt(12), outputs="arena", host_budget=0)
    arena = int(0.7 * keep_all_schedule(problem).live_bytes().max())
    request = Request(arena, deadline=time.monotonic() + 60)
    requests = []

    def asked(problem, request):
        requests.append(request)
        return solve_coop_offline(problem, replace(request, deadline=None))

    monkeypatch.setattr(auto, "solve_optimal", None)
    monkeypatch.setattr(auto, "solve_coop_offline", asked)
    made = solve_auto(problem, request, ExactParams(seconds_per_op=61 / problem.op_count))
    assert requests == [request]
    assert made.placed.arena_bytes <= arena
    assert (made.status, made.lower_bound_us) == ("feasible", problem.floor_us)
