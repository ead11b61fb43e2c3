"""An order of events is a schedule: what follows from it is what the verifier sees."""

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.build_plan import assemble
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, Offload, Prefetch, Run, Schedule, Wait
from coop_plan.planner.core.timeline import plan_timeline
from coop_plan.planner.method import Solution
from coop_plan.planner.placement.layout import lay_out, lay_out_host
from coop_plan.planner.verifier import find_faults
from coop_plan.schemas import Device
from tests.schedules import schedule_of
from tests.strategies import graphs
from tests.support import make_graph

OUTPUTS = st.sampled_from(["outside", "arena", "gradients"])


def plan_of(schedule, budget=None):
    """The plan of a schedule, placed greedily."""
    placed, _ = lay_out(schedule, work=0)
    host = lay_out_host(schedule)
    return assemble(
        Solution(placed),
        host_offsets=host.offsets,
        host_arena_bytes=host.peak,
        link_bytes_per_s=None,
        method="test",
        budget_bytes=placed.problem.fixed_bytes + placed.arena_bytes if budget is None else budget,
        solve_seconds=0.0,
    )


def random_orders(problem, draw):
    """Any variants, ops run again wherever they may be, copies to the host and back, in flight."""
    orders, made, hosted, away, back = [], [], set(), set(), set()
    overwritten = problem.overwritten

    def wait(t):
        orders.append(("wait", t))
        if t in away:
            hosted.add(t)
        away.discard(t)
        back.discard(t)

    def run(variant):
        for t in problem.variants[variant].inputs:
            if t in back:
                wait(t)
        orders.append(("run", variant))

    repeatable = problem.rerunnable(problem.rematerializable)
    for op in range(problem.op_count):
        again = [o for o in range(op) if repeatable[o]]
        for variant in draw(st.lists(st.sampled_from(again), max_size=3)) if again else ():
            run(variant)
        run(
            draw(
                st.sampled_from(
                    [b for b, variant in enumerate(problem.variants) if variant.op == op]
                )
            )
        )
        made += [t for t in problem.makes[op] if not overwritten[t]]
        for t in sorted(away | back):
            if draw(st.booleans()):
                wait(t)
        fetched = sorted(hosted - away - back)
        if fetched and draw(st.booleans()):
            t = draw(st.sampled_from(fetched))
            orders.append(("prefetch", t))
            back.add(t)
        free = sorted(set(made) - away - back)
        if problem.device.d2h_bytes_per_s and free and draw(st.integers(0, 2)) == 0:
            t = draw(st.sampled_from(free))
            orders.append(("offload", t))
            hosted.discard(t)
            away.add(t)
    for t in sorted(away | back):
        wait(t)
    return orders


@settings(max_examples=300, deadline=None)
@given(
    graph=graphs(max_ops=10, rng=False, launches=True),
    outputs=OUTPUTS,
    unit=st.sampled_from([1, 8]),
    data=st.data(),
)
def test_any_order_that_reads_what_is_there_is_a_valid_plan(graph, outputs, unit, data):
    """Lifetimes, in-place pairs, figures and the timeline are the verifier's, to the last byte."""
    problem = Problem.from_graph(graph, unit, outputs)
    schedule = schedule_of(problem, random_orders(problem, data.draw))
    made = plan_of(schedule)
    assert find_faults(graph, made) == []
    event(f"stalls: {made.prefetch_stall_us > 0}, {made.offload_stall_us > 0}")
    timeline = plan_timeline(graph, made)
    assert timeline.end_us == made.cost_us
    assert timeline.prefetch_stall_us == made.prefetch_stall_us
    assert timeline.offload_stall_us == made.offload_stall_us
    assert schedule.host_copies.live <= problem.rounded(made.host_arena_bytes)
    assert [type(event) for event in schedule.events()] == [
        {0: Run, 1: Offload, 2: Prefetch, 3: Wait}[do] for do in schedule.do.tolist()
    ]


@settings(max_examples=200, deadline=None)
@given(graph=graphs(max_ops=10, variants=False, bandwidth=False), unit=st.sampled_from([1, 8]))
def test_no_layout_needs_less_than_what_is_live(graph, unit):
    """The one rule of bytes: rounded sizes against units, exact ends against bytes."""
    schedule = Schedule.of(Problem.from_graph(graph, unit, "arena"), range(len(graph.ops)))
    placed, placement = lay_out(schedule)
    most = int(schedule.live_bytes().max(initial=0))
    assert schedule.blocks().live >= most
    assert most <= schedule.problem.rounded(placed.arena_bytes)
    assert schedule.fits(placed.arena_bytes)
    assert placement.lower_bound <= placed.arena_bytes
    assert (schedule.live_bytes(exact=True) <= schedule.live_bytes()).all()


def siblings(**fields):
    """Op 0 makes 1 and 2 of 0; op 1 reads 1, op 2 reads 2 and what op 1 made."""
    tensors = {0: ("input", 8), 1: ("activation", 8), 2: ("activation", 8)}
    tensors |= {3: ("activation", 8), 4: ("output", 8)}
    ops = [
        {"inputs": [0], "outputs": [1, 2]},
        {"inputs": [1], "outputs": [3]},
        {"inputs": [2, 3], "outputs": [4]},
    ]
    return make_graph(tensors, ops, **fields)


def test_what_is_made_again_takes_over_from_its_sibling():
    problem = Problem.from_graph(siblings(), 1)
    schedule = Schedule.of(problem, [0, 1, 0, 2])
    assert schedule.tensor == [1, 2, 3, 1, 2]
    assert list(zip(schedule.first, schedule.last, strict=True)) == [
        *((0, 1), (0, 0), (1, 3)),
        *((2, 2), (2, 3)),
    ]
    assert schedule.live_bytes().tolist() == [16, 16, 24, 16]


@pytest.mark.parametrize("orders", [[("run", 1)], [("offload", 1)], [("run", 0), ("wait", 1)]])
def test_what_is_not_there_cannot_be_used(orders):
    problem = Problem.from_graph(siblings(), 1)
    with pytest.raises(NoScheduleError):
        schedule_of(problem, orders)


def test_copies_overlap_with_compute_and_waits_stall():
    """8 bytes take 1 µs of latency and 2 µs at 4 MB/s to the host, 1 + 1 µs back."""
    device = Device(d2h_bytes_per_s=4e6, h2d_bytes_per_s=8e6, copy_latency_us=1.0)
    graph = siblings(device=device)
    problem = Problem.from_graph(graph, 1)
    orders = [("run", 0), ("offload", 2), ("run", 1), ("wait", 2), ("prefetch", 2), ("wait", 2)]
    schedule = schedule_of(problem, [*orders, ("run", 2)])
    assert schedule.cost_us == pytest.approx(1 + 3 + 2 + 1)  # op 1 runs during the first copy
    made = plan_of(schedule)
    assert find_faults(graph, made) == []
    assert (made.swapped_bytes, made.recomputed_ops) == (16, 0)


def test_stalls_are_told_by_cause():
    """Op 1 waits 2 µs for bytes on their way to the host, op 2 4 µs for what comes back."""
    device = Device(d2h_bytes_per_s=4e6, h2d_bytes_per_s=2e6)
    problem = Problem.from_graph(siblings(device=device), 1)
    orders = [("run", 0), ("offload", 2), ("wait", 2), ("run", 1), ("prefetch", 2), ("wait", 2)]
    made = plan_of(schedule_of(problem, [*orders, ("run", 2)]))
    assert (made.offload_stall_us, made.prefetch_stall_us) == (2.0, 4.0)
    assert made.cost_us == pytest.approx(3 + 2 + 4)


def test_an_engine_takes_its_copies_in_order():
    """Two of 2 µs each begin when op 0 is over: the second one ends at 1 + 2 + 2."""
    problem = Problem.from_graph(siblings(device=Device(d2h_bytes_per_s=4e6, h2d_bytes_per_s=4e6)))
    orders = [("run", 0), ("offload", 1), ("offload", 2), ("wait", 2), ("wait", 1)]
    made = plan_of(schedule_of(problem, [*orders, ("run", 1), ("run", 2)]))
    assert (made.offload_stall_us, made.cost_us) == (4.0, 7.0)
    assert find_faults(problem.graph, made) == []


def test_copies_on_the_host_share_addresses_once_they_are_read():
    """A copy lives from its offload to the last wait on it or on a prefetch from it."""
    problem = Problem.from_graph(
        siblings(device=Device(d2h_bytes_per_s=4e6, h2d_bytes_per_s=2e6)), 1
    )
    away = [("offload", 1), ("wait", 1)], [("offload", 2), ("wait", 2)]
    back = [("prefetch", 1), ("wait", 1)], [("prefetch", 2), ("wait", 2)]
    apart = [*away[0], *back[0], *away[1], *back[1]]
    together = [*away[0], *away[1], *back[0], *back[1]]
    for orders, needed in ((apart, 8), (together, 16)):
        schedule = schedule_of(problem, [("run", 0), *orders, ("run", 1), ("run", 2)])
        made = plan_of(schedule)
        assert made.host_arena_bytes == schedule.host_copies.live == needed
        assert find_faults(problem.graph, made) == []


def test_arrays_are_rows_of_bodies():
    """Variants follow the default variants, each with its own reads, makes and cost."""
    op = {"inputs": [0], "outputs": [1], "cost_us": 5.0}
    lean = {"name": "lean", "inputs": [0], "outputs": [1, 2], "cost_us": 7.0, "workspace_bytes": 3}
    tensors = {0: ("input", 8), 1: ("output", 8), 2: ("activation", 1)}
    problem = Problem.from_graph(make_graph(tensors, [{**op, "variants": [lean]}]), 4)
    a = to_arrays(problem)
    assert (a.ops, a.op.tolist(), a.cost.tolist()) == (1, [0, 0], [5.0, 7.0])
    assert (a.workspace.tolist(), a.scratch.tolist()) == ([0, 4], [0, 3])
    assert np.split(a.makes, a.makes_ptr[1:-1])[1].tolist() == [1, 2]
    assert (problem.base_cost_us, problem.floor_us) == (5.0, 5.0)
    assert problem.beyond_recomputation == ["variants"]
