"""Hill climbs: plans get cheaper and fit, and more time continues them."""

import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import gpt
from coop_plan.planner import Problem
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.heuristic import coop_offline
from coop_plan.planner.heuristic.coop_offline import CoopOffline
from coop_plan.planner.heuristic.hill_climb import HillClimbs
from coop_plan.planner.heuristic.params import DEFAULTS
from coop_plan.planner.heuristic.portfolio import Portfolio
from coop_plan.planner.method import Request

LAYERS = 6
"""Layers of the GPT."""

FAR = 1e6
"""Seconds: of a deadline that does not come."""


@pytest.fixture(scope="module")
def problem():
    """A GPT of a few layers."""
    return Problem.from_graph(gpt(LAYERS))


@pytest.fixture
def request_(problem):
    """An arena just above its largest working set."""
    return Request(int(1.4 * largest_working_set(problem).bytes))


def after(times):
    """Enough once it was asked so often, which it is between a few steps."""
    asked = iter(range(times))
    return lambda: next(asked, None) is None


def test_plans_get_cheaper_and_fit(problem, request_):
    method = CoopOffline(problem, request_, replace(DEFAULTS, annealing_effort=1e-9))
    method.begin()
    before = method.solution().placed.cost_us
    method.improve(time.monotonic() + FAR, after(125))
    schedule = method.solution().placed
    assert schedule.cost_us < before
    assert schedule.arena_bytes <= request_.arena_bytes


def test_no_plan_is_no_trouble(problem):
    """Nothing runs at the budgets around the arena of an incumbent from elsewhere."""
    portfolio = Portfolio(problem, Request(1))
    found = portfolio.candidate_of(np.arange(problem.op_count))
    portfolio.keep(replace(found, budget=1), np.zeros(0, dtype=np.int64))
    climbs = HillClimbs(portfolio)
    assert climbs.searches == []
    climbs.run()
    climbs.run_until(time.monotonic() + FAR, lambda: False)
    assert portfolio.best.found.budget == 1


def test_it_ends_at_its_deadline(problem, request_, clock):
    portfolio = Portfolio(problem, request_)
    portfolio.sweep()
    deadline = clock.now + 3
    HillClimbs(portfolio).run_until(deadline, lambda: False)
    assert deadline <= clock.now < deadline + 20 * clock.TICK


def test_more_time_continues_the_climbs(problem, request_):
    """No step is made twice: the climbs go on from where they ended."""
    once, twice = (Portfolio(problem, request_) for _ in range(2))
    for portfolio in (once, twice):
        portfolio.sweep()
    climbs = HillClimbs(once)
    climbs.run_until(time.monotonic() + FAR, after(10))
    parts = HillClimbs(twice)
    for steps in (4, 6):
        parts.run_until(time.monotonic() + FAR, after(steps))
    values = [[search.value for search in each.searches] for each in (climbs, parts)]
    assert values[0] == values[1]


def test_the_sequence_is_annealed_as_often_as_the_time_suffices(
    problem, request_, clock, monkeypatch
):
    """Each time by another seed, and at least once."""
    seeds = []

    class Noted:
        """In place of an annealing, its seed."""

        def __init__(self, portfolio, ops, deadline):
            seeds.append(portfolio.request.seed)

        def run(self, done):
            """Nothing."""

    method = CoopOffline(problem, request_)
    method.portfolio.sweep()
    monkeypatch.setattr(coop_offline, "SequenceAnnealing", Noted)
    one = DEFAULTS.annealing_seconds_per_event * method.portfolio.best.found.run.ops.size
    for seconds, runs in ((0.5 * one, 1), (2.5 * one, 2), (FAR, DEFAULTS.annealings)):
        seeds.clear()
        method._anneal_until(clock.now + seconds, lambda: False)
        assert seeds == list(range(runs))
