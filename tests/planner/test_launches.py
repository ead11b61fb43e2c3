"""The host launches ops and copies: ahead of a device, or in the place of its own processor's work."""

import pytest

from coop_plan.planner import Problem, find_faults, plan
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.core.timeline import Timeline, plan_timeline
from coop_plan.schemas import Device
from tests.planner.core.test_schedule import plan_of, siblings
from tests.planner.test_search_makespan import pyramid
from tests.schedules import schedule_of


def launching(graph, kind, launch_us, copy_launch_us, rate=0.0):
    device = Device(kind=kind, launch_us=launch_us, copy_launch_us=copy_launch_us)
    return graph.model_copy({"device": device.with_link(rate)})


@pytest.mark.parametrize(("kind", "cost"), [("cpu", 3 * 6), ("cuda", 3 * 5 + 1)])
def test_a_step_of_small_ops_takes_the_time_of_its_launches(kind, cost):
    """Three ops of 1 µs, launched in 5 µs each: the last one runs after the third launch."""
    graph = launching(siblings(), kind, 5.0, 0.0)
    made = plan(graph, "100%", alignment=1)
    assert (made.base_cost_us, made.cost_us, made.overhead) == (cost, cost, 0.0)


@pytest.mark.parametrize(("kind", "cost"), [("cpu", 3 + 2 * 4 + 4), ("cuda", 4 + 2 + 2 + 1)])
def test_launches_of_copies_delay_what_the_host_launches_next(kind, cost):
    """
    Two copies of 2 µs, launched in 4 µs each; ops of 1 µs. On the CPU all is one after another,
    but for op 1, which runs while the first copy does: it is 2 µs, and its wait 1 µs of them.
    """
    graph = launching(siblings(), kind, 0.0, 4.0, 4e6)
    problem = Problem.from_graph(graph, 1)
    away = [("run", 0), ("offload", 2), ("run", 1), ("wait", 2)]
    made = plan_of(schedule_of(problem, [*away, ("prefetch", 2), ("wait", 2), ("run", 2)]))
    assert find_faults(graph, made) == []
    assert plan_timeline(graph, made).end_us == made.cost_us
