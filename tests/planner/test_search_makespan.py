"""coop-offline with a link: what transfers cost is what the verifier says, and they only help."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coop_plan.api.cli.link_report import unused_link_reason
from coop_plan.planner import InfeasibleBudgetError, Problem, plan
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.method import Request
from coop_plan.planner.placement.layout import lay_out
from coop_plan.planner.search.makespan.annealing import MOVES, MakespanSearch, run_parallel
from coop_plan.planner.search.makespan.metropolis import evaluate_sequence, metropolis
from coop_plan.planner.search.makespan.sequence import (
    new_state,
    set_sequence,
    to_closed_program,
    to_events,
)
from coop_plan.schemas import Device
from tests.strategies import graphs
from tests.support import make_graph

INFINITE = float("inf")


def linked(graph, to_host, to_device=None, latency=0.0):
    """The graph on a device with so many bytes per µs to the host and back."""
    device = Device(
        d2h_bytes_per_s=to_host * 1e6,
        h2d_bytes_per_s=(to_host if to_device is None else to_device) * 1e6,
        copy_latency_us=latency,
    )
    return graph.model_copy(update={"device": device})


def pyramid(layers, size=100, cost=10.0):
    """Activations of a chain, read again in the opposite order; none is cheap to make again."""
    tensors = {0: ("input", 1)}
    ops = []
    for layer in range(layers):
        tensors[layer + 1] = ("activation", size)
        ops.append({"inputs": [layer], "outputs": [layer + 1], "cost_us": cost})
    gradient = layers + 1
    tensors[gradient] = ("activation", 1)
    ops.append({"inputs": [layers], "outputs": [gradient], "cost_us": cost, "phase": "backward"})
    for layer in range(layers - 1, 0, -1):
        tensors[gradient + 1] = ("activation", 1)
        op = {"inputs": [gradient, layer], "outputs": [gradient + 1], "cost_us": cost}
        ops.append(op | {"phase": "backward"})
        gradient += 1
    return make_graph(tensors, ops)


def overhead(graph, budget, **options):
    try:
        return plan(graph, budget, **options).overhead
    except InfeasibleBudgetError:
        return INFINITE


@settings(max_examples=40, deadline=None)
@given(
    graph=graphs(max_ops=14, variants=False, launches=True),
    share=st.sampled_from(["80%", "60%", "45%", "30%"]),
    host=st.sampled_from([None, 4, 16, 40]),
)
def test_a_link_never_makes_a_plan_dearer_and_the_hosts_budget_is_kept(graph, share, host):
    assume(sum(t.bytes for t in graph.tensors))
    alone = overhead(graph, share, host_budget=0, alignment=1)
    try:
        made = plan(graph, share, host_budget=host, alignment=1)
    except InfeasibleBudgetError:
        assert alone == INFINITE
        return
    assert made.overhead <= alone
    assert host is None or made.host_arena_bytes <= host
    assert plan(graph, share, host_budget=host, alignment=1).steps == made.steps


@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(max_ops=16, variants=False, launches=True),
    seed=st.integers(0, 99),
    share=st.floats(0.2, 0.9),
    outputs=st.sampled_from(["arena", "outside"]),
)
def test_the_search_measures_what_the_schedule_costs_and_needs(graph, seed, share, outputs):
    problem = Problem.from_graph(graph, 1, outputs)
    assume(problem.op_count)
    program = to_closed_program(problem)
    state = new_state(problem, program, 400, MOVES)
    set_sequence(state, np.arange(problem.op_count))
    everything = Schedule.of(problem, range(problem.op_count)).live_bytes().max(initial=0)
    arena = int(share * everything)
    for number in range(20):
        metropolis(program, state, 20, arena, 5.0, 20.0, 100 * seed + number)
        cost, over = evaluate_sequence(program, state, arena)
        schedule = Schedule.of_events(problem, *to_events(state))
        assert cost == pytest.approx(schedule.cost_us)
        runs = [variant for variant in schedule.variants if variant >= 0]
        assert list(dict.fromkeys(runs)) == list(range(problem.op_count))
        if over == 0:
            assert schedule.fits(arena)


@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(max_ops=16, variants=False, launches=True),
    seed=st.integers(0, 99),
    share=st.floats(0.5, 1.0),
    speeds=st.tuples(st.sampled_from([0.5, 2.0, 8.0]), st.sampled_from([0.5, 2.0, 8.0])),
)
def test_cold_steps_make_nothing_dearer_or_too_large(graph, seed, share, speeds):
    """With a high enough penalty no step costs more or exceeds the memory."""
    problem = Problem.from_graph(linked(graph, *speeds, latency=0.5), 1, "arena")
    assume(problem.op_count)
    program = to_closed_program(problem)
    state = new_state(problem, program, 400, MOVES)
    state.flow.host_capacity = 40
    set_sequence(state, np.arange(problem.op_count))
    everything = Schedule.of(problem, range(problem.op_count)).live_bytes().max(initial=0)
    arena = int(share * everything)
    random = np.random.default_rng(seed)
    for number in range(6):
        metropolis(program, state, 60, arena, 3.0, 300.0, 10 * seed + number)
        before, over = evaluate_sequence(program, state, arena)
        for _ in range(8 if over == 0 else 0):
            drawn = int(random.integers(1 << 31))
            kept = metropolis(program, state, 30, arena, 0.0, 1e12, drawn)
            after, over = evaluate_sequence(program, state, arena)
            assert kept == pytest.approx((after, over))  # step by step, and anew
            assert over == 0
            assert after <= before * (1 + 1e-9)
            before = after
        do, what = to_events(state)
        assert Schedule.of_events(problem, do, what).cost_us == pytest.approx(before)


def test_a_wide_link_hides_every_copy():
    graph = linked(pyramid(16), 1000.0)
    made = plan(graph, 800, alignment=1)
    assert made.recomputed_ops == 0
    assert made.swapped_bytes > 0
    assert made.overhead == 0
    assert plan(graph, 800, alignment=1, host_budget=0).overhead > 0.1


def test_a_copy_that_takes_too_long_is_computed_again_instead():
    graph = linked(pyramid(16), 0.01)
    made = plan(graph, 800, alignment=1)
    assert made.swapped_bytes == 0
    assert made.recomputed_ops > 0


def test_a_link_that_is_worth_nothing_is_told_with_its_numbers():
    # An activation is not used for 290 µs at most, and takes 20 ms there and back.
    slow = linked(pyramid(16), 0.01)
    told = unused_link_reason(Problem.from_graph(slow, 1), plan(slow, 800, alignment=1))
    assert "at 1e-05 GB/s no copy can be hidden" in told
    assert "of 100 B, takes 20 ms there and back; its tensor is unused for 0.29 ms" in told
    wide = linked(pyramid(16), 1000.0)
    assert unused_link_reason(Problem.from_graph(wide, 1), plan(wide, 800, alignment=1)) is None
    alone = plan(wide, 800, alignment=1, host_budget=0)
    assert unused_link_reason(Problem.from_graph(wide, 1, host_budget=0), alone) is None


def test_no_budget_on_the_host_gives_the_plan_of_a_device_without_a_link():
    graph = pyramid(16)
    alone = plan(graph, 800, alignment=1)
    for link in (1.0, 1000.0):
        assert plan(linked(graph, link), 800, alignment=1, host_budget=0).steps == alone.steps


def test_what_cannot_be_computed_again_is_swapped_where_it_does_not_fit():
    graph = pyramid(12)
    ops = [op.model_copy(update={"recomputable": False}) for op in graph.ops]
    graph = linked(graph.model_copy(update={"ops": ops}), 10.0)
    with pytest.raises(InfeasibleBudgetError):
        plan(graph, 600, alignment=1, host_budget=0)
    made = plan(graph, 600, alignment=1)
    assert made.recomputed_ops == 0
    assert made.swapped_bytes > 0


def test_overhead_falls_with_the_link_the_budget_and_the_hosts_budget():
    graph = pyramid(20)
    by_link = [plan(linked(graph, link), 700, alignment=1).overhead for link in (0, 2, 4, 8, 16)]
    assert by_link == sorted(by_link, reverse=True)
    assert by_link[-1] < by_link[0]
    budgets = (300, 500, 700, 1100, 1500, 2100)
    by_budget = [plan(linked(graph, 5.0), b, alignment=1).overhead for b in budgets]
    assert by_budget == sorted(by_budget, reverse=True)
    hosts = (0, 200, 400, 800, 1600)
    by_host = [
        plan(linked(graph, 8.0), 700, alignment=1, host_budget=host).overhead for host in hosts
    ]
    assert by_host == sorted(by_host, reverse=True)


def test_a_tensor_read_twice_is_copied_to_the_host_once():
    tensors = {0: ("activation", 100), 1: ("activation", 1)}
    tensors |= dict.fromkeys((2, 3), ("activation", 90)) | {4: ("output", 1)}
    ops = [
        {"outputs": [0], "cost_us": 1000.0, "recomputable": False},
        {"inputs": [0], "outputs": [1], "cost_us": 100.0, "recomputable": False},
        {"inputs": [1], "outputs": [2], "cost_us": 200.0, "workspace_bytes": 50},
        {"inputs": [0, 1], "outputs": [], "cost_us": 100.0},
        {"inputs": [1], "outputs": [3], "cost_us": 200.0, "workspace_bytes": 50},
        {"inputs": [0], "outputs": [4], "cost_us": 100.0},
    ]
    graph = linked(make_graph(tensors, ops), 2.0)
    made = plan(graph, 150, alignment=1, switches={"reorder": False})
    kinds = [step.do for step in made.steps]
    assert kinds.count("offload") == 1
    assert kinds.count("prefetch") == 2


def test_a_marker_gives_an_offload_and_a_prefetch():
    """It goes when the engine is free, leaves when that is over, comes back before it is read."""
    problem = Problem.from_graph(linked(pyramid(3), 10.0), 1)
    program = to_closed_program(problem)
    state = new_state(problem, program, 400, MOVES)
    set_sequence(state, np.array([0, 1, 2, 3, 4, program.ops + 1, 5]))
    cost, over = evaluate_sequence(program, state, 1000)
    assert (cost, over) == (problem.base_cost_us, 0)
    do, what = to_events(state)
    assert do.tolist() == [0, 1, 0, 3, 0, 0, 2, 0, 3, 0]
    assert what.tolist() == [0, 1, 1, 1, 2, 3, 1, 4, 1, 5]


def test_compute_waits_for_bytes_that_are_leaving_only_where_there_is_no_other_room():
    problem = Problem.from_graph(linked(pyramid(6), 8.0), 1)
    program = to_closed_program(problem)
    state = new_state(problem, program, 400, MOVES)
    n, m = problem.op_count, program.ops
    stalls = []
    for capacity in (800, 210):
        set_sequence(state, np.array([*range(n - 3), m + 3, n - 3, m + 2, n - 2, m + 1, n - 1]))
        cost, _ = evaluate_sequence(program, state, capacity)
        schedule = Schedule.of_events(problem, *to_events(state))
        assert schedule.cost_us == pytest.approx(cost)
        stalls.append(cost - problem.base_cost_us)
    assert stalls[0] == 0 < stalls[1]


def test_a_fetch_waits_where_it_fits_now_but_not_beside_what_comes_before_its_read():
    tensors = dict.fromkeys((0, 1, 2, 3), ("activation", 8))
    ops = [
        {"outputs": [0], "cost_us": 3.0},
        {"outputs": [1], "cost_us": 3.0, "recomputable": False},
        {"outputs": [], "cost_us": 3.0},
        {"outputs": [2, 3], "cost_us": 0.0, "recomputable": False},
        {"inputs": [0, 1], "outputs": [], "cost_us": 1.0},
    ]
    problem = Problem.from_graph(linked(make_graph(tensors, ops), 4.0), 1)
    program = to_closed_program(problem)
    state = new_state(problem, program, 400, MOVES)
    set_sequence(state, np.array([0, 1, 2, 3, program.ops, 4]))
    cost, over = evaluate_sequence(program, state, 24)
    assert (cost, over > 0) == (10.0, True)
    state.flow.look_ahead = True
    assert evaluate_sequence(program, state, 24) == (12.0, 0.0)  # 2 µs are not hidden
    do, what = to_events(state)
    assert list(zip(do, what, strict=True))[-3:] == [(2, 0), (3, 0), (0, 4)]


def test_searches_beside_each_other_end_together_and_the_cheapest_counts():
    problem = Problem.from_graph(linked(pyramid(8), 8.0), 1)
    program = np.arange(problem.op_count)
    asked = iter(range(3))

    def enough():
        return next(asked, None) is None

    searches = [
        MakespanSearch(problem, Request(350, seed=s), [program], INFINITE) for s in range(3)
    ]
    best = run_parallel(searches, time.monotonic() + 600.0, enough)
    assert best.cost_us == min(search.cost_us for search in searches)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_parallel(searches, time.monotonic() + 600.0, interrupted)


def test_one_fragmented_layout_does_not_end_a_search(monkeypatch):
    """Its failure says little about the layouts of other schedules."""
    problem = Problem.from_graph(linked(pyramid(8), 8.0), 1)
    failures = iter(range(2))  # the greedy layout, and the searched one

    def fragmented_first(schedule, *args, **options):
        layout = lay_out(schedule, *args, **options)
        if next(failures, None) is None:
            return layout
        placed = SimpleNamespace(arena_bytes=4 * layout.placed.arena_bytes, schedule=schedule)
        return SimpleNamespace(placed=placed, placement=layout.placement)

    monkeypatch.setattr("coop_plan.planner.search.makespan.annealing.lay_out", fragmented_first)
    search = MakespanSearch(problem, Request(350), [np.arange(problem.op_count)], INFINITE)
    search.run(None, lambda: False)
    assert next(failures, None) is None
    assert search.placed is not None
