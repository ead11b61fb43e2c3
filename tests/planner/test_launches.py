"""The host launches ops and copies: ahead of a device, or in the time of its own processor."""

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from coop_plan.planner import Problem, find_faults, plan
from coop_plan.planner.core.timeline import Timeline, plan_timeline
from coop_plan.planner.verifier.clock import Clock
from coop_plan.schemas import Compute, Device, Offload, Prefetch, Wait, cost_signature
from tests.planner.core.test_schedule import OUTPUTS, plan_of, random_orders, siblings
from tests.planner.test_search_makespan import pyramid
from tests.schedules import schedule_of
from tests.strategies import graphs


def longest_path(graph, steps):
    """End of the last compute step, µs: the longest path over launches, runs, copies and waits.

    A node is its duration and those that it follows; its end is known once it is added.
    """
    device, sizes = graph.device, {t.id: t.bytes for t in graph.tensors}
    costs = {
        (op.id, v and v.name): (v or op).cost_us for op in graph.ops for v in (None, *op.variants)
    }
    last = {"compute": 0.0, "launches": 0.0, Offload: 0.0, Prefetch: 0.0}
    copies, held = {}, {}

    def add(duration, lane, *follows):
        last[lane] = max([last[lane], *follows]) + duration
        return last[lane]

    def launch(duration):
        return add(duration, "compute" if device.kind == "cpu" else "launches")

    for step in steps:
        if isinstance(step, Compute):
            held |= {write.buffer: write.tensor for write in step.writes}
            cost = costs[step.op, step.variant]
            add(cost, "compute", *([launch(device.launch_us)] if cost else []))
        elif isinstance(step, (Offload, Prefetch)):
            if isinstance(step, Prefetch):
                held[step.buffer] = step.tensor
            back = isinstance(step, Prefetch)
            rate = device.h2d_bytes_per_s if back else device.d2h_bytes_per_s
            us = device.copy_latency_us + sizes[held[step.buffer]] / rate * 1e6
            launched = launch(device.copy_launch_us)
            copies[step.buffer] = add(us, type(step), launched, last["compute"])
        elif isinstance(step, Wait):
            add(0.0, "compute", copies[step.buffer])
    return last["compute"]


@settings(max_examples=200, deadline=None)
@given(graph=graphs(max_ops=10, rng=False, launches=True), outputs=OUTPUTS, data=st.data())
def test_a_makespan_is_the_longest_path_over_launches_and_copies(graph, outputs, data):
    """Planner and verifier agree on it, for any variants, recomputes and copies."""
    problem = Problem.from_graph(graph, 1, outputs)
    made = plan_of(schedule_of(problem, random_orders(problem, data.draw)))
    event(f"{graph.device.kind}, launches: {graph.device.launch_us > 0}")
    assert find_faults(graph, made) == []
    assert made.cost_us == pytest.approx(longest_path(graph, made.steps))
    assert made.cost_us >= problem.floor_us * (1 - 1e-12)
    once = [Compute(op=op.id, variant=None, reads=[], writes=[]) for op in graph.ops]
    assert made.base_cost_us == pytest.approx(longest_path(graph, once))


@pytest.mark.parametrize(("kind", "now_us"), [("cpu", 5.0), ("cuda", 0.0)])
def test_an_update_on_the_host_begins_after_a_launch_of_a_copys_time(kind, now_us):
    """On the CPU the step waits for the launch; iterations with such updates looked too cheap."""
    device = Device(kind=kind, copy_launch_us=5.0)
    timeline, clock = Timeline(device), Clock(device)
    timeline.compute_on_host(7.0, [])
    clock.run_on_host(7.0, [])
    assert (timeline.now_us, timeline.host_us) == (now_us, 12.0)
    assert (clock.now_us, clock.host_free_us) == (now_us, 12.0)
    timeline.compute_on_host(0.0, [])
    assert (timeline.now_us, timeline.host_us) == (now_us, 12.0)


def launching(graph, kind, launch_us, copy_launch_us, rate=0.0):
    device = Device(kind=kind, launch_us=launch_us, copy_launch_us=copy_launch_us)
    return graph.model_copy({"device": device.with_link(rate)})


@pytest.mark.parametrize(("kind", "cost"), [("cpu", 3 * 6), ("cuda", 3 * 5 + 1)])
def test_a_step_of_small_ops_takes_the_time_of_its_launches(kind, cost):
    """Three ops of 1 µs, launched in 5 µs each."""
    made = plan(launching(siblings(), kind, 5.0, 0.0), "100%", alignment=1)
    assert (made.base_cost_us, made.cost_us, made.overhead) == (cost, cost, 0.0)


@pytest.mark.parametrize(
    ("kind", "cost", "stalls"),
    [
        ("cuda", 11.0, (1.0, 4.0)),  # launches end at 4 and 8, copies at 6 and 10
        ("cpu", 14.0, (1.0, 2.0)),  # launches at 1 and 7 µs, copies at 5 and 11
    ],
)
def test_launches_of_copies_delay_what_is_launched_next(kind, cost, stalls):
    """Two copies of 2 µs, launched in 4 µs each, and three ops of 1 µs."""
    problem = Problem.from_graph(launching(siblings(), kind, 0.0, 4.0, 4e6), 1)
    away = [("run", 0), ("offload", 2), ("run", 1), ("wait", 2)]
    made = plan_of(schedule_of(problem, [*away, ("prefetch", 2), ("wait", 2), ("run", 2)]))
    assert find_faults(problem.graph, made) == []
    assert (made.cost_us, (made.offload_stall_us, made.prefetch_stall_us)) == (cost, stalls)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_copies_that_take_the_host_long_to_launch_are_fewer(kind):
    graph = launching(pyramid(20), kind, 9.0, 40.0, 40e6)
    free = launching(pyramid(20), kind, 0.0, 0.0, 40e6)
    before, after = (plan(each, 1000, alignment=1) for each in (free, graph))
    copies = [sum(isinstance(s, Offload) for s in made.steps) for made in (before, after)]
    assert copies[1] < copies[0]
    assert after.cost_us < plan_timeline(graph, before).end_us


@pytest.mark.parametrize("rate", [0.0, 40e6])
@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_plans_of_ops_longer_than_their_launches_are_proved(budget, rate):
    """Every schedule waits for the first launch, and then for the ops alone."""
    graph = launching(pyramid(8), "cuda", 0.5, 0.5, rate)
    made = plan(graph, budget, method="auto", alignment=1)
    assert made.status == "optimal"
    assert made.lower_bound_us == pytest.approx(made.cost_us)


def test_launches_are_a_part_of_the_key_of_plans():
    keys = {
        cost_signature(launching(siblings(), "cuda", *launches, 4e6))
        for launches in [(0.0, 0.0), (5.0, 0.0), (0.0, 5.0), (5.0, 5.0)]
    }
    assert len(keys) == 4
