"""Bounds that contain transfers: against exhaustive search over event sequences."""

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coop_plan.planner import Problem, find_faults
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.exact.dual.bounding import Bounding
from coop_plan.planner.exact.model.milp import Outcome
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.optimal import solve_optimal
from coop_plan.planner.exact.params import ExactParams
from coop_plan.planner.exact.solver.jobs import SolveMilp
from coop_plan.planner.exact.solver.milp_solvers import solve_milp
from coop_plan.planner.heuristic.coop_offline import CoopOffline
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.registry import Request
from tests.planner.brute_force import cheapest
from tests.planner.brute_force_swap import TooManyStatesError, shortest
from tests.planner.core.test_schedule import plan_of
from tests.planner.models import SECONDS, relaxations
from tests.planner.test_exact import BUDGETS, SETTINGS
from tests.strategies import graphs
from tests.support import make_graph

TINY = graphs(max_ops=5, mutates=False, variants=False, launches=True)
TINY_APART = graphs(max_ops=5, mutates=False, variants=False, inplace=False, launches=True)
HOSTS = st.sampled_from([None, None, 8, 24])


def drawn(graph, outputs, share, alignment, host):
    """A tiny problem with a link, an arena too small for everything, and its shortest makespan."""
    problem = Problem.from_graph(graph, alignment, outputs, host)
    assume(problem.op_count > 0 and problem.tensor_count <= 12)
    most = int(keep_all_schedule(problem).live_bytes().max(initial=0))
    least = largest_working_set(problem).bytes
    assume(least < most)
    arena = problem.rounded(least + int((most - 1 - least) * share))
    try:
        best = shortest(problem, arena)
    except TooManyStatesError:
        assume(False)
    without = cheapest(problem, arena)
    ahead = not graph.device.is_host and graph.device.launch_us  # the sum is only a lower bound
    assert without is None or ahead or best <= without + 1e-9
    return problem, arena, best


@settings(SETTINGS, max_examples=25)
@given(graph=TINY, host=HOSTS, chosen=st.sets(st.integers(0, 5)), **BUDGETS)
def test_no_plan_is_shorter_than_the_model_says(
    process, graph, host, chosen, outputs, share, alignment
):
    """At any time points, and at all of them."""
    problem, arena, best = drawn(graph, outputs, share, alignment, host)
    assert Program.of(problem).host_link is not None
    for answer, bound in relaxations(process, problem, arena, chosen):
        if best is None:
            continue
        assert answer.outcome is not Outcome.INFEASIBLE
        assert bound <= best * (1 + 1e-6) + 1e-6


@settings(SETTINGS, max_examples=25)
@given(graph=TINY, host=HOSTS, **BUDGETS)
def test_no_relaxation_with_path_cuts_exceeds_the_shortest(graph, host, outputs, share, alignment):
    """More and more time points, until all ops are time points."""
    problem, arena, best = drawn(graph, outputs, share, alignment, host)
    assume(best is not None)
    told = []
    params = ExactParams(first_spread=1)
    Bounding(Program.of(problem), problem.rounded(arena), set(), told.append, params).run()
    assert told
    assert max(told) <= best * (1 + 1e-6) + 1e-6


@settings(SETTINGS, max_examples=20)
@given(graph=TINY, host=HOSTS, **BUDGETS)
def test_optimal_agrees_with_exhaustive_search(graph, host, outputs, share, alignment):
    """
    Keep, recompute or swap: the bound is not above the shortest makespan, the plan not below it, a
    proof is right, and the verifier's clock ends where the planner's does.
    """
    problem, arena, best = drawn(graph, outputs, share, alignment, host)
    try:
        found = solve_optimal(problem, Request(arena, deadline=time.monotonic() + SECONDS))
    except DoesNotFitError:  # fragmentation, or nothing was found
        return
    assert best is not None
    assert found.lower_bound_us <= best * (1 + 1e-6) + 1e-6
    assert found.placed.cost_us >= best * (1 - 1e-9)
    if found.status == "optimal":
        assert found.placed.cost_us == pytest.approx(best, rel=1e-6)
    made = plan_of(found.placed.schedule)
    assert find_faults(graph, made) == []


@settings(SETTINGS, max_examples=20)
@given(graph=TINY_APART, host=HOSTS, **BUDGETS)
def test_coop_offline_finds_the_shortest_makespan(graph, host, outputs, share, alignment):
    """In program order, nothing in place; among outputs too, which may go and come back.

    With launches, whose order counts, its plans are no shorter and rarely longer.
    """
    problem, arena, best = drawn(graph, outputs, share, alignment, host)
    try:
        found = CoopOffline(problem, Request(arena, off=frozenset({"reorder"})))
        found.begin()
        cost_us = found.solution().placed.cost_us
    except DoesNotFitError:
        cost_us = None
    if best is None:
        assert cost_us is None
    else:
        launches = graph.device.launch_us or graph.device.copy_launch_us
        assert best * (1 - 1e-6) <= cost_us <= best * (1.1 if launches else 1 + 1e-6)


def test_an_offload_begins_when_the_one_before_ends_though_compute_waits_for_that():
    """Two outputs of one op leave, the second while the next op runs, which waits for the first."""
    tensors = {0: ("input", 4), 1: ("activation", 1), 2: ("activation", 3), 3: ("activation", 12)}
    tensors |= {4: ("activation", 3), 5: ("activation", 8)}
    ops = [
        {"inputs": [0], "outputs": [1, 2], "cost_us": 10.0},
        {"inputs": [1], "outputs": [3], "cost_us": 0.5},
        {"inputs": [3, 0], "outputs": [4], "cost_us": 3.25},
        {"inputs": [2], "outputs": [5], "cost_us": 10.0},
        {"inputs": [3], "cost_us": 3.25},
    ]
    link = {"kind": "cpu", "h2d_bytes_per_s": 1e7 / 3, "d2h_bytes_per_s": 4e6}
    graph = make_graph(tensors, ops, device=link | {"copy_latency_us": 0.75})
    problem = Problem.from_graph(graph, 1, "arena", 8)
    found = CoopOffline(problem, Request(15, off=frozenset({"reorder"})))
    found.begin()
    assert found.solution().placed.cost_us == pytest.approx(shortest(problem, 15))


def test_a_prefetch_begins_before_the_bytes_that_its_reader_adds_are_free():
    """Tensor 1 comes back while tensor 2 still leaves, whose bytes the op needs for its own."""
    tensors = {0: ("parameter", 4), 1: ("activation", 12), 2: ("activation", 4)}
    tensors |= {3: ("activation", 4)}
    ops = [
        {"outputs": [1], "cost_us": 0.0, "recomputable": False},
        {"inputs": [0], "outputs": [2], "cost_us": 0.5, "workspace_bytes": 16},
        {"inputs": [0, 1], "outputs": [3], "cost_us": 1.0, "workspace_bytes": 3},
        {"inputs": [1, 2], "cost_us": 0.0},
    ]
    link = {"kind": "cpu", "h2d_bytes_per_s": 4e6, "d2h_bytes_per_s": 2e6}
    problem = Problem.from_graph(make_graph(tensors, ops, device=link), 8, "arena")
    found = CoopOffline(problem, Request(32, off=frozenset({"reorder"})))
    found.begin()
    assert found.solution().placed.cost_us == pytest.approx(shortest(problem, 32))


def test_a_program_that_highs_gives_up_is_solved_all_the_same():
    """HiGHS ends this model with an error of its own."""
    tensors = {0: ("activation", 4), 1: ("output", 4), 2: ("activation", 2)}
    ops = [
        {"outputs": [0], "cost_us": 1.0, "rng": True},
        {"outputs": [1], "cost_us": 0.5},
        {"outputs": [2], "cost_us": 0.0, "rng": True},
        {"cost_us": 1.0},
    ]
    link = {"kind": "cpu", "h2d_bytes_per_s": 4e6, "d2h_bytes_per_s": 2e6}
    program = Program.of(Problem.from_graph(make_graph(tensors, ops, device=link), 1, "arena"))
    model = TimePointModel(program, 5, [2, program.n], ())
    answer = solve_milp(SolveMilp(model.milp), SECONDS, lambda _: None)
    assert answer.outcome is Outcome.OPTIMAL


@pytest.mark.parametrize("us", [8.0, 5.0, 0.0])
def test_optimal_swaps_where_nothing_else_fits(us):
    """What runs once cannot be recomputed: the tensor goes to the host and back, proved."""
    problem = there_and_back(us)
    found = solve_optimal(problem, Request(16, deadline=time.monotonic() + SECONDS))
    assert found.status == "optimal"
    assert found.placed.cost_us == pytest.approx(shortest(problem, 16))


def there_and_back(us, speed=1e6, **limits):
    """One tensor of 8 bytes in the way of others, ops of `us`, and a link of 1 byte/µs each way."""
    graph = make_graph(
        {0: ("activation", 8), 1: ("activation", 8), 2: ("activation", 8), 3: ("output", 0)},
        [
            {"outputs": [0], "cost_us": 1.0, "recomputable": False},
            {"inputs": [0], "cost_us": us},
            {"outputs": [1], "cost_us": 1.0},
            {"inputs": [1], "outputs": [2], "cost_us": us},
            {"inputs": [2], "cost_us": us},
            {"inputs": [0], "outputs": [3], "cost_us": 1.0},
        ],
        device={"kind": "cuda", "h2d_bytes_per_s": speed, "d2h_bytes_per_s": speed},
    )
    return Problem.from_graph(graph, 1, **limits)


@pytest.mark.parametrize(("us", "stall"), [(8.0, 0.0), (5.0, 5.0), (0.0, 15.0)])
def test_the_model_tells_what_the_link_has_no_time_for(process, us, stall):
    """A copy that goes away beside one op and comes back beside another stalls for the rest."""
    problem = there_and_back(us)
    program = Program.of(problem)
    model = TimePointModel(program, 16, list(range(program.n + 1)), ())
    answer = process.solve(model.milp, time.monotonic() + SECONDS)
    assert model.bound_us(answer.bound) == pytest.approx(problem.base_cost_us + stall, abs=1e-3)
    assert shortest(problem, 16) == pytest.approx(problem.base_cost_us + stall)


def test_a_host_that_is_too_small_takes_no_copy(process):
    problem = there_and_back(8.0, host_budget=7)
    program = Program.of(problem)
    model = TimePointModel(program, 16, list(range(program.n + 1)), ())
    answer = process.solve(model.milp, time.monotonic() + SECONDS)
    assert answer.outcome is Outcome.INFEASIBLE
    assert shortest(problem, 16) is None


def test_without_transfers_the_model_is_what_it_was():
    """A budget of the host of 0 bytes leaves no column and no row of them."""
    models = []
    for problem in (there_and_back(8.0, host_budget=0), there_and_back(8.0, speed=0.0)):
        program = Program.of(problem)
        models.append(TimePointModel(program, 24, list(range(program.n + 1)), ()))
    assert models[0].transfers is None
    assert models[0].milp == models[1].milp
