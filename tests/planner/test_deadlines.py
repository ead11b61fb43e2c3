"""Deadlines of the searches, on a clock that a busy machine cannot slow down."""

import pytest

from benchmarks.synthetic import gpt
from coop_plan.planner import Problem
from coop_plan.planner.core.needs import largest_working_set
from coop_plan.planner.method import Request
from coop_plan.planner.offline.solve import CoopOffline

TICK = 0.01
"""Seconds that pass with each look at the clock, and in between no time at all."""

LOOKS = 8
"""How often a search may look before it sees that its time is up."""


class Clock:
    """`time.monotonic` of a test; whoever goes on looking long after `deadline` is stopped."""

    def __init__(self, deadline):
        self.deadline = deadline
        self.now = 0.0

    def __call__(self):
        self.now += TICK
        assert self.now < self.deadline + 1000 * TICK, "the deadline was missed"
        return self.now


@pytest.fixture(scope="module")
def problem():
    """A GPT of a few layers."""
    return Problem.from_graph(gpt(6))


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_the_search_for_better_plans_ends_at_its_deadline(problem, seconds, monkeypatch):
    """Not before it either: with time left it would go on."""
    method = CoopOffline(problem, Request(int(1.4 * largest_working_set(problem).bytes)))
    method.begin()
    clock = Clock(seconds)
    monkeypatch.setattr("time.monotonic", clock)
    method.improve(seconds)
    assert seconds <= clock.now < seconds + LOOKS * TICK


def test_where_nothing_can_be_saved_it_is_not_searched_for(problem, monkeypatch):
    """With room for everything it ends long before its deadline."""
    clock = Clock(10_000.0)
    monkeypatch.setattr("time.monotonic", clock)
    method = CoopOffline(problem, Request(1 << 40, deadline=clock.deadline))
    method.begin()
    assert clock.now < clock.deadline / 100
    assert method.solution().placed.cost_us == pytest.approx(problem.base_cost_us)


def test_without_a_deadline_nobody_looks(problem, monkeypatch):
    """So that a seed alone decides on the plan."""
    clock = Clock(0.0)
    monkeypatch.setattr("time.monotonic", clock)
    CoopOffline(problem, Request(int(1.4 * largest_working_set(problem).bytes))).begin()
    assert clock.now == 0.0
