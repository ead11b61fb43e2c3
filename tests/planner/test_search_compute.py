"""Metropolis search: every sequence is a schedule with the cost and memory that it states."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import gpt
from coop_plan.planner import InfeasibleBudgetError, Problem, TimeLimitError, find_faults, plan
from coop_plan.planner.core.arrays import to_arrays, to_program
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.heuristic.coop_offline import CoopOffline
from coop_plan.planner.heuristic.portfolio import Portfolio
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.placement.layout import lay_out
from coop_plan.planner.planning import verified_plan
from coop_plan.planner.search.compute.annealing import SequenceAnnealing
from coop_plan.planner.search.compute.metropolis import evaluate_sequence, metropolis
from coop_plan.planner.search.compute.params import MoveParams
from coop_plan.planner.search.compute.sequence import (
    current_sequence,
    new_state,
    set_sequence,
)
from tests.strategies import graphs
from tests.support import make_graph

PENALTY = 5.0
"""What memory costs, in base costs."""


@pytest.fixture(scope="module")
def problem():
    """A GPT of a few layers."""
    return Problem.from_graph(gpt(6))


@pytest.fixture
def portfolio(problem):
    """A portfolio with a plan in an arena just above the largest working set."""
    method = CoopOffline(problem, Request(int(1.4 * largest_working_set(problem).bytes)))
    method.begin()
    return method.portfolio


def check(problem, program, state, arena):
    """The sequence is a schedule that may run, and it is known what it costs and needs."""
    ops = current_sequence(state)
    first = list(dict.fromkeys(ops.tolist()))
    assert sorted(first) == list(range(problem.op_count))
    if state.params.first_run_chance == 0:
        assert first == sorted(first)
    for one, other in itertools.combinations(first, 2):
        if problem.phase[one] != problem.phase[other]:
            assert one < other
    schedule = Schedule.of(problem, ops)
    placed, _ = lay_out(schedule, work=0)
    options = PlanOptions.of({"budget": "100%"})
    budget = max(1, placed.arena_bytes + problem.fixed_bytes)
    verified_plan(problem.graph, Solution(placed), options, budget, 0.0)  # as the verifier sees it
    most = int(schedule.live_bytes().max(initial=0))
    assert schedule.blocks().live >= most
    cost, over = evaluate_sequence(program, state, arena)
    assert cost == pytest.approx(schedule.cost_us)
    # The search counts one in-place pair of an op, the schedule uses all that can be.
    assert (over > 0) >= (most > arena)
    if over > 0:
        assert over * arena >= most - arena
    assert evaluate_sequence(program, state, most - 1)[1] > 0
    if not any(problem.inplace):
        assert evaluate_sequence(program, state, most)[1] == 0


@settings(max_examples=150, deadline=None)
@given(
    graphs(max_ops=10, mutates=True, inplace=True, rng=True),
    st.sampled_from(["arena", "outside", "gradients"]),
    st.integers(0, 1 << 20),
    st.sampled_from([0.0, 0.5]),
)
def test_what_it_says_of_memory_is_so(graph, outputs, seed, first_run_chance):
    problem = Problem.from_graph(graph, 1, outputs)
    portfolio = Portfolio(problem, Request(largest_working_set(problem).bytes))
    program, random = to_program(portfolio.arrays), np.random.default_rng(seed)
    for budget in (1 << 30, *(largest_working_set(problem).bytes + extra for extra in (0, 8, 16))):
        run = portfolio.runner(budget, portfolio.settings[0])
        if run is None or not run.ops.size:
            continue
        state = new_state(
            problem, 3 * run.ops.size + 20, MoveParams(first_run_chance=first_run_chance)
        )
        set_sequence(state, run.ops)
        check(problem, program, state, budget)
        for _ in range(8):
            arena = largest_working_set(problem).bytes
            metropolis(program, state, 30, arena, 5.0, PENALTY, int(random.integers(1 << 31)))
            check(problem, program, state, arena)


def test_what_fits_keeps_fitting(portfolio):
    """With a high enough penalty no step exceeds the memory anywhere."""
    program, arena = to_program(portfolio.arrays), portfolio.request.arena_bytes
    state = new_state(portfolio.problem, 3000, MoveParams())
    set_sequence(state, portfolio.best.found.run.ops)
    cost, over = evaluate_sequence(program, state, arena)
    assert over == 0
    for seed in range(8):
        metropolis(program, state, 300, arena, 0.0, 1e12, seed)
        assert evaluate_sequence(program, state, arena)[1] == 0
        assert evaluate_sequence(program, state, arena)[0] <= cost * (1 + 1e-9)
        cost = evaluate_sequence(program, state, arena)[0]
    assert cost < portfolio.best.cost_us


def test_small_blocks_that_run_full(portfolio):
    """The result of a search equals a fresh evaluation, for any layout of events in blocks."""
    program, arena = to_program(portfolio.arrays), portfolio.request.arena_bytes
    base = portfolio.problem.base_cost_us
    state = new_state(portfolio.problem, 3000, MoveParams(max_insertion=4))
    members, saved = (
        np.ascontiguousarray(each[:, :12]) for each in (state.members, state.saved_members)
    )
    state = state._replace(members=members, saved_members=saved)
    set_sequence(state, portfolio.best.found.run.ops)
    over = []
    for seed in range(40):
        temperature = base * [0.0, 0.01, 0.1][seed % 3]
        at = int(arena * [1.0, 0.9][seed % 2])
        found = metropolis(program, state, 200, at, temperature, base, seed)
        assert evaluate_sequence(program, state, at) == pytest.approx(found)
        over.append(found[1] > 0)
    assert any(over)
    assert not all(over)


def test_plans_get_cheaper_and_fit(portfolio, clock):
    before = portfolio.best.cost_us
    found = portfolio.best.found
    search = SequenceAnnealing(portfolio, found.run.ops)
    search.run(lambda: portfolio.best.found is not found, clock.now + 60)
    assert portfolio.best.cost_us < before
    schedule = portfolio.solution().placed
    assert schedule.cost_us == pytest.approx(portfolio.best.cost_us)
    assert schedule.arena_bytes <= portfolio.request.arena_bytes


def test_it_ends_at_its_deadline(portfolio, clock):
    deadline = clock.now + 3
    SequenceAnnealing(portfolio, portfolio.best.found.run.ops).run(deadline=deadline)
    assert deadline <= clock.now < deadline + 20 * clock.TICK


def test_nothing_is_run_again_after_what_it_reads_was_overwritten():
    graph = make_graph(
        {
            0: ("buffer", 8),
            1: ("input", 8),
            2: ("activation", 8),
            3: ("activation", 8),
            4: ("output", 8),
        },
        [
            {"inputs": [0], "outputs": [2]},
            {"inputs": [1], "outputs": [3]},
            {"inputs": [0], "outputs": [], "mutates": [0]},
            {"inputs": [2, 3], "outputs": [4]},
        ],
    )
    problem = Problem.from_graph(graph)
    again = new_state(problem, 10, MoveParams()).op["can_rerun"]
    assert again.tolist() == [False, True, False, False]


def test_where_nothing_can_be_saved_it_is_not_tried(clock):
    problem = Problem.from_graph(gpt(2))
    method = CoopOffline(problem, Request(1 << 40, deadline=clock.now + 1000))
    method.begin()
    assert clock.now < 100
    assert method.portfolio.best.cost_us == pytest.approx(problem.base_cost_us)


def test_without_a_deadline_nobody_looks_at_the_clock(clock):
    """So that a seed alone decides on the plan."""
    problem = Problem.from_graph(gpt(6))
    CoopOffline(problem, Request(int(1.4 * largest_working_set(problem).bytes))).begin()
    assert clock.now == 0


BRANCHES = {
    "tensors": {
        0: ("input", 4),
        1: ("activation", 400),
        2: ("activation", 400),
        3: ("activation", 8),
        4: ("activation", 8),
        5: ("output", 8),
    },
    "ops": [
        {"inputs": [0], "outputs": [1]},
        {"inputs": [0], "outputs": [2]},
        {"inputs": [1], "outputs": [3]},
        {"inputs": [2], "outputs": [4]},
        {"inputs": [3, 4], "outputs": [5]},
    ],
}
"""Two branches side by side, of which the order of the program makes the large halves first."""

ONE_BRANCH = 4 + 400 + 8 + 8 + 8


@pytest.fixture(scope="module")
def compiled_search():
    """Compile the search, so that no time limit below includes it."""
    problem = Problem.from_graph(make_graph(BRANCHES["tensors"], BRANCHES["ops"]), 1)
    state = new_state(problem, 40, MoveParams())
    set_sequence(state, np.arange(5))
    metropolis(to_program(to_arrays(problem)), state, 1, 1 << 20, 5.0, PENALTY, 0)


@pytest.mark.usefixtures("compiled_search")
@pytest.mark.parametrize("method", ["coop-offline", "auto"])
def test_first_runs_leave_the_order_of_the_program(method):
    graph = make_graph(BRANCHES["tensors"], BRANCHES["ops"])
    asked = {"method": method, "alignment": 1, "time_limit": 4.0}
    made = plan(graph, ONE_BRANCH, **asked)
    assert (made.recomputed_ops, made.overhead) == (0, 0)
    held = plan(graph, ONE_BRANCH, switches={"reorder": False}, **asked)
    assert held.recomputed_ops == 2


@pytest.mark.usefixtures("compiled_search")
def test_they_do_so_beside_a_link():
    """Too slow to be of use: in program order the least is to recompute."""
    slow = {"d2h_bytes_per_s": 1.0, "h2d_bytes_per_s": 1.0}
    graph = make_graph(BRANCHES["tensors"], BRANCHES["ops"], device=slow)
    made = plan(graph, ONE_BRANCH, method="auto", alignment=1, time_limit=4.0)
    assert find_faults(graph, made) == []
    assert (made.recomputed_ops, made.swapped_bytes, made.overhead) == (0, 0, 0)


@pytest.mark.usefixtures("compiled_search")
def test_no_bound_of_program_order_is_above_a_cost():
    graph = make_graph(BRANCHES["tensors"], BRANCHES["ops"])
    made = plan(graph, ONE_BRANCH, method="auto", alignment=1, time_limit=4.0)
    assert (made.lower_bound_model, made.lower_bound_us) == ("any", made.base_cost_us)
    exact = plan(graph, ONE_BRANCH, method="optimal", alignment=1, time_limit=20.0)
    assert (exact.lower_bound_model, exact.status) == ("program-order", "optimal")
    assert exact.cost_us > made.cost_us


def dense_block(layers):
    """Each layer reads the concatenation, cheap to make, of what all layers before it made."""
    tensors, ops, made, layer = {}, [], [], []

    def new(kind, size):
        tensors[len(tensors)] = kind, size
        return len(tensors) - 1

    def run(inputs, parts, cost_us, kind="activation", **fields):
        ops.append({"inputs": inputs, "outputs": [new(kind, parts * 1024)], "cost_us": cost_us})
        ops[-1] |= fields
        return len(tensors) - 1

    made.append(run([], 1, 60.0))
    for n in range(1, layers + 1):
        read = run(list(made), n, 3.0 * n) if n > 1 else made[0]
        layer.append((read, run([read], n, 5.0 * n)))
        made.append(run([layer[-1][1]], 1, 60.0 * n))
    gradient = run([made[-1]], layers + 1, 1.0, phase="backward")
    for n in range(layers, 0, -1):
        read, result = layer[n - 1]
        gradient = run([result, gradient], n, 120.0 * n, phase="backward")
        kind = "output" if n == 1 else "activation"
        gradient = run([read, gradient], n, 5.0 * n, kind, phase="backward")
    return make_graph(tensors, ops)


@pytest.mark.parametrize("share", ["80%", "75%", "70%"])
def test_what_many_recomputes_read_is_kept_for_all_of_them(share):
    """
    One concatenation less saves nothing, as all it is made of must be kept for it; all of them do.

    Where each is looked at by itself, plans recompute by a quarter to a half more than they must.
    """
    graph = dense_block(20)
    options = {"outputs": "arena", "alignment": 1}
    made = plan(graph, share, switches={"reorder": False}, **options)
    least = plan(graph, share, method="optimal", time_limit=60.0, **options)
    assert least.status == "optimal"
    assert made.overhead <= 1.05 * least.overhead


@pytest.mark.parametrize("what", [{"rng": True}, {"recomputable": False}, {"phase": "backward"}])
def test_what_has_an_effect_or_another_phase_stays_behind_what_it_follows(what):
    """The second branch may not begin before the first one's end, or both draw."""
    ops = [dict(op) for op in BRANCHES["ops"]]
    for op in (1, 2):
        ops[op] |= what
    if "phase" in what:
        ops[2]["phase"], ops[3]["phase"], ops[4]["phase"] = "backward", "backward", "backward"
        ops[1]["phase"] = "forward"
    problem = Problem.from_graph(make_graph(BRANCHES["tensors"], ops), 1)
    program, state = to_program(to_arrays(problem)), new_state(problem, 40, MoveParams())
    set_sequence(state, np.arange(5))
    for seed in range(20):
        metropolis(program, state, 50, 1 << 20, 5.0, PENALTY, seed)
        first = list(dict.fromkeys(current_sequence(state).tolist()))
        assert first.index(1) < first.index(2)


@pytest.mark.usefixtures("compiled_search")
@settings(max_examples=25, deadline=None)
@given(
    graphs(max_ops=12, mutates=True, inplace=True, variants=True, rng=True),
    st.sampled_from(["arena", "outside", "gradients"]),
    st.sampled_from(["80%", "50%"]),
)
def test_plans_in_any_order_are_valid(graph, outputs, budget):
    """`plan` verifies what it returns."""
    if not sum(tensor.bytes for tensor in graph.tensors):
        budget = 1
    with contextlib.suppress(InfeasibleBudgetError, TimeLimitError):
        plan(graph, budget, outputs=outputs, alignment=1, time_limit=0.5)
