"""Tensors that ops overwrite in the arena: the exact methods drop them and make them again."""

import math
import time
from collections import Counter

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from coop_plan.planner import InfeasibleBudgetError, Problem, find_faults, plan
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set, unrecomputable_residents
from coop_plan.planner.core.schedule import NoScheduleError, Schedule
from coop_plan.planner.core.ssa import SsaForm
from coop_plan.planner.exact.checkmate import solve_checkmate
from coop_plan.planner.exact.dual.bounding import Bounding
from coop_plan.planner.exact.model.milp import Outcome
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.optimal import solve_optimal
from coop_plan.planner.exact.params import ExactParams
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.placement.layout import lay_out
from coop_plan.planner.registry import Request
from coop_plan.planner.search.compute.annealing import reordered
from tests.planner.brute_force import cheapest
from tests.planner.brute_force_swap import TooManyStatesError, shortest
from tests.planner.core.test_schedule import plan_of
from tests.planner.intervals import schedule_intervals
from tests.planner.models import SECONDS, readout_of, relaxations
from tests.planner.test_exact import BUDGETS, SETTINGS, cost_of, tight
from tests.strategies import overwriting_graphs
from tests.support import make_graph

GRAPHS = overwriting_graphs(max_ops=8)


def overwriting(graph, outputs, share, alignment):
    """As `tight`, of a graph in which something in the arena is overwritten."""
    problem, arena = tight(graph, outputs, share, alignment)
    assume(any(problem.overwritten))
    return problem, arena


def check(problem, placed, best):
    """It is a plan, and not below the optimum."""
    assert find_faults(problem.graph, plan_of(placed.schedule)) == []
    assert placed.cost_us >= best * (1 - 1e-9)
    runs = Counter(placed.schedule.variants)
    again = any(runs[op] > 1 and problem.touches_overwritten(op) for op in runs)
    event(f"made again: {again}")


def layers(count, **made):
    """Ops make a buffer, which others overwrite; then all are read from the last one on."""
    tensors, ops = {}, []
    for i in range(count):
        tensors[i] = ("activation", 4)
        ops.append({"inputs": [i - 1] if i else [], "outputs": [i], "cost_us": 10.0, **made})
        ops.append({"inputs": [i], "mutates": [i], "cost_us": 1.0})
    for i in range(count):
        tensors[count + i] = ("activation", 4)
        reads = [count - 1 - i, *([count + i - 1] if i else [])]
        ops.append({"inputs": reads, "outputs": [count + i], "cost_us": 10.0})
    return make_graph(tensors, ops)


@pytest.mark.parametrize("method", ["optimal", "auto", "checkmate"])
def test_what_is_overwritten_is_dropped_and_made_again(method):
    """Kept to their last use, six buffers need 28 bytes; three layers run again within 16."""
    graph = layers(6)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 16, method="coop-offline", alignment=1, smallest=True)
    assert caught.value.min_feasible_bytes == 28
    made = plan(graph, 16, method=method, alignment=1, time_limit=20)
    assert find_faults(graph, made) == []
    assert made.cost_us == 159
    assert [s.op for s in made.steps if s.do == "compute"].count(1) == 2
    if method != "checkmate":
        assert (made.status, made.lower_bound_us) == ("optimal", pytest.approx(159))


@pytest.mark.parametrize("method", ["optimal", "checkmate"])
def test_what_cannot_be_made_again_is_kept(method):
    """Nor does an op run again that overwrites what only one run makes."""
    graph = layers(6, recomputable=False)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 27, method=method, alignment=1, time_limit=20, smallest=True)
    assert caught.value.min_feasible_bytes == 28


def test_an_op_that_cannot_overwrite_again_is_named():
    """It is why a tensor is kept; that the tensor is overwritten is not."""
    graph = make_graph(
        {0: ("input", 8), 1: ("activation", 100), 2: ("activation", 60), 3: ("output", 1)},
        [
            {"outputs": [1], "name": "make"},
            {"inputs": [1, 0], "mutates": [1], "name": "add"},
            {"inputs": [0], "mutates": [0], "name": "overwrite"},
            {"outputs": [2]},
            {"inputs": [1], "outputs": [3]},
        ],
    )
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 150, method="optimal", alignment=1, time_limit=20)
    said = "op 1 (add) cannot run again once op 2 (overwrite) has overwritten tensor 0"
    assert said in caught.value.held


@settings(SETTINGS, max_examples=40)
@given(graph=GRAPHS, **BUDGETS)
def test_optimal_agrees_with_exhaustive_search(graph, outputs, share, alignment):
    """The bound never exceeds the true optimum, the plan never undercuts it, a proof is right."""
    problem, arena = overwriting(graph, outputs, share, alignment)
    best = cheapest(problem, arena)
    assert best is None or unrecomputable_residents(problem, arena) is None
    try:
        solution = solve_optimal(problem, Request(arena, deadline=time.monotonic() + SECONDS))
    except DoesNotFitError:
        # Fragmentation is in the way, or what fits has two buffers of one version at once, or an
        # in-place pair that could be used must not be.
        _, schedule = schedule_intervals(Program.of(problem), arena, 1.0, joint=True)
        if schedule is None or lay_out(schedule, arena).placed.arena_bytes > arena:
            return
        # Such plans are found sooner or later, by luck: then there must be one given time.
        until = time.monotonic() + 4 * SECONDS
        solution = solve_optimal(problem, Request(arena, deadline=until))
    assert best is not None
    assert solution.lower_bound_us <= best * (1 + 1e-6)
    check(problem, solution.placed, best)
    event(solution.status)
    if solution.status == "optimal":
        assert solution.placed.cost_us == pytest.approx(best, rel=1e-6)


@settings(SETTINGS, max_examples=60)
@given(graph=GRAPHS, chosen=st.sets(st.integers(0, 7)), **BUDGETS)
def test_no_schedule_is_cheaper_than_the_model_says(
    process, graph, chosen, outputs, share, alignment
):
    """At any time points, at all of them, and with every path cut."""
    problem, arena = overwriting(graph, outputs, share, alignment)
    best = cheapest(problem, arena)
    assume(best is not None)
    for answer, bound in relaxations(process, problem, arena, chosen):
        assert answer.outcome is Outcome.OPTIMAL
        assert bound <= best * (1 + 1e-6) + 1e-6
    reported, params = [0.0], ExactParams(first_spread=1)
    Bounding(Program.of(problem), problem.rounded(arena), set(), reported.append, params).run()
    assert max(reported) <= best * (1 + 1e-6) + 1e-6


@settings(SETTINGS, max_examples=20)
@given(
    graph=overwriting_graphs(max_ops=4, bandwidth=True),
    host=st.sampled_from([None, 8]),
    chosen=st.sets(st.integers(0, 4)),
    **BUDGETS,
)
def test_no_plan_with_transfers_is_shorter_than_the_model_says(
    process, graph, host, chosen, outputs, share, alignment
):
    """SsaForm may be copied to the host and come back."""
    problem = Problem.from_graph(graph, alignment, outputs, host)
    assume(any(problem.overwritten) and problem.tensor_count <= 12)
    least = largest_working_set(problem).bytes
    most = int(keep_all_schedule(problem).live_bytes().max(initial=0))
    assume(least < most)
    arena = problem.rounded(least + int((most - 1 - least) * share))
    try:
        best = shortest(problem, arena)
    except TooManyStatesError:
        assume(False)
    assume(best is not None)
    for answer, bound in relaxations(process, problem, arena, chosen):
        assert answer.outcome is not Outcome.INFEASIBLE
        assert bound <= best * (1 + 1e-6) + 1e-6


@settings(SETTINGS, max_examples=30)
@given(graph=GRAPHS, **BUDGETS)
def test_checkmate_and_intervals_agree_with_exhaustive_search(graph, outputs, share, alignment):
    """CP-SAT's schedules are none below the optimum, Checkmate's is the cheapest of its class."""
    problem, arena = overwriting(graph, outputs, share, alignment)
    best, program = cheapest(problem, arena), Program.of(problem)
    _, schedule = schedule_intervals(program, arena, SECONDS)
    if schedule is not None:
        original = program.versions.to_original(schedule)
        check(problem, lay_out(original)[0], best)
        # A layout may need more: the block of a smaller output stays as large as its first buffer.
        assert original.live_bytes().max(initial=0) <= arena
    staged = cheapest(problem, arena, staged=True)
    found = cost_of(solve_checkmate, problem, arena)
    if found is not None:
        assert found == pytest.approx(staged, rel=1e-6)
    rounded = cost_of(solve_checkmate, problem, arena, integral=False)
    if rounded is not None:
        assert rounded >= staged * (1 - 1e-9)


@settings(SETTINGS, max_examples=30)
@given(graph=GRAPHS, point=st.integers(0, 7), **BUDGETS)
def test_a_solution_is_read_out_as_a_schedule(process, graph, point, outputs, share, alignment):
    """With next to no time points: versions at one address are one buffer."""
    problem, arena = overwriting(graph, outputs, share, alignment)
    program, best = Program.of(problem), cheapest(problem, arena)
    readout = readout_of(process, program, arena, point)
    placed = lay_out(readout.schedule).placed
    restored = program.versions.placed_to_original(placed)
    assert restored.arena_bytes == placed.arena_bytes
    if not readout.overflows:
        check(problem, restored, best)


@settings(SETTINGS, max_examples=8)
@given(graph=GRAPHS, outputs=st.sampled_from(["outside", "arena", "gradients"]))
def test_auto_makes_valid_plans(graph, outputs):
    """Also where other orders than the program's are looked for from there on."""
    problem = Problem.from_graph(graph, 1, outputs)
    assume(any(problem.overwritten) and sum(problem.size))
    made = plan(graph, "min", method="auto", alignment=1, outputs=outputs, time_limit=1.0)
    assert find_faults(graph, made) == []


def test_versions_of_one_place_are_one_buffer():
    """The arena is as large, and the verifier sees one buffer that is overwritten."""
    problem = Problem.from_graph(layers(2), 1)
    versions = SsaForm.of(problem)
    assert versions.problem.tensor_count == 6
    assert versions.tensor == [0, 1, 2, 3, 0, 1]
    assert versions.overwrites == [(), ((4, 0),), (), ((5, 1),), (), ()]
    placed, _ = lay_out(Schedule.of(versions.problem, [0, 1, 2, 3, 4, 0, 1, 5]))
    restored = versions.placed_to_original(placed)
    assert restored.schedule.tensor == [0, 1, 2, 0, 3]
    assert restored.arena_bytes == placed.arena_bytes
    assert find_faults(problem.graph, plan_of(restored.schedule)) == []


def test_what_was_overwritten_is_not_read():
    versions = SsaForm.of(Problem.from_graph(layers(2), 1))
    with pytest.raises(NoScheduleError):
        versions.to_original(Schedule.of(versions.problem, [0, 1, 1, 2, 3, 4, 5]))


def test_without_overwritten_tensors_nothing_is_renamed():
    graph = make_graph({0: ("input", 4), 1: ("activation", 4)}, [{"inputs": [0], "outputs": [1]}])
    problem = Problem.from_graph(graph, 1)
    assert SsaForm.of(problem).problem is problem


def test_keeping_a_version_beyond_its_overwriting_takes_another_run(process):
    """A reader of version 0 that runs late finds it only where its producer ran again."""
    graph = make_graph(
        {0: ("activation", 4), 1: ("activation", 4), 2: ("activation", 8), 3: ("output", 1)},
        [
            {"outputs": [0], "cost_us": 10.0},
            {"inputs": [0], "outputs": [1]},
            {"inputs": [0], "mutates": [0]},
            {"outputs": [2]},
            {"inputs": [2], "outputs": [3]},
            {"inputs": [0, 1]},
        ],
    )
    problem = Problem.from_graph(graph, 1)
    model = TimePointModel(Program.of(problem), 12, [2, 3, 5, 6], ())
    answer = process.solve(model.milp, time.monotonic() + SECONDS)
    assert model.bound_us(answer.objective) == pytest.approx(problem.base_cost_us + 11.0)
    assert cheapest(problem, 12) == problem.base_cost_us + 11


def test_other_orders_do_not_begin_where_an_overwritten_tensor_is_made_again():
    problem = Problem.from_graph(layers(2), 1)
    request = Request(16, deadline=time.monotonic() + 1)
    sequence = Schedule.of(problem, [0, 1, 2, 3, 4, 0, 1, 5]).what
    assert reordered(problem, sequence, math.inf, request) is None
