"""Annealing: copies are changed alike, plans get cheaper and fit, and it comes back to fit."""

import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.synthetic import gpt
from coop_plan.planner import Problem
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.heuristic import weight_annealing
from coop_plan.planner.heuristic.coop_offline import CoopOffline
from coop_plan.planner.heuristic.eviction_run import Record
from coop_plan.planner.heuristic.params import DEFAULTS
from coop_plan.planner.heuristic.portfolio import Portfolio
from coop_plan.planner.heuristic.weight_annealing import WeightAnnealing
from coop_plan.planner.method import Request
from tests.support import make_graph

LAYERS, OPS, BACKWARD = 6, 16, 20
"""Layers of the GPT, ops of one of them forward and backward."""

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


def after(steps):
    """Enough once so many steps were made, counted as often as it is asked."""
    asked = iter(range(steps // DEFAULTS.weight_annealing.check_steps))
    return lambda: next(asked, None) is None


def test_copies_are_alike_and_others_are_not(problem, request_):
    portfolio = Portfolio(problem, request_)
    numbers = weight_annealing.interval_classes(problem, portfolio.arrays)
    assert numbers.size == portfolio.arrays.uses.size + 1
    number = {}
    for t, consumers in enumerate(problem.consumers):
        for slot, consumer in enumerate(consumers):
            number[t, consumer] = numbers[portfolio.arrays.uses_ptr[t] + slot]

    def between(layer, maker, user):
        """The interval from one op of a layer to another, both counted in the layer."""
        (t,) = problem.makes[1 + layer * OPS + maker]
        return number[t, 1 + layer * OPS + user]

    gelu, second = 13, 14
    assert len({between(layer, gelu, second) for layer in range(LAYERS)}) == 1
    assert between(0, gelu, second) != between(0, gelu - 1, gelu)
    assert np.unique(numbers).size < numbers.size / 2


def test_nothing_to_keep_is_no_trouble():
    portfolio = Portfolio(Problem.from_graph(make_graph({}, [])), Request(0))
    assert weight_annealing.interval_classes(portfolio.problem, portfolio.arrays).size == 1


def test_plans_get_cheaper_and_fit(problem, request_):
    at_once = replace(DEFAULTS.sequence_annealing, max_fixed_effort=1e-9)
    method = CoopOffline(problem, request_, replace(DEFAULTS, sequence_annealing=at_once))
    method.begin()
    before = method.solution().placed.cost_us
    method.improve(time.monotonic() + FAR, after(2000))
    schedule = method.solution().placed
    assert schedule.cost_us < before
    assert schedule.arena_bytes <= request_.arena_bytes


def test_it_comes_back_from_where_nothing_fits(problem, request_):
    too_little = replace(DEFAULTS.weight_annealing, penalty=0.3)
    portfolio = Portfolio(problem, request_, replace(DEFAULTS, weight_annealing=too_little))
    settings, budget = portfolio.settings[0], int(1.2 * request_.arena_bytes)
    found = portfolio.candidate(budget, settings)
    assert found is not None
    assert found.peak > request_.arena_bytes
    portfolio.best.found = found
    spent = after(20_000)
    kinds = weight_annealing.interval_classes(problem, portfolio.arrays)
    WeightAnnealing(portfolio, kinds, time.monotonic() + FAR).run(
        lambda: spent() or np.isfinite(portfolio.best.cost_us)
    )
    assert portfolio.best.found is not found
    assert np.isfinite(portfolio.best.cost_us)
    assert portfolio.solution().placed.arena_bytes <= request_.arena_bytes


def test_it_goes_on_from_ops_that_no_weights_chose(problem, request_):
    """As the annealing of sequences leaves them."""
    portfolio = Portfolio(problem, request_)
    portfolio.sweep()
    found = portfolio.best.found
    portfolio.best.found = replace(found, run=Record(found.run.cost_us, found.run.ops))
    kinds = weight_annealing.interval_classes(problem, portfolio.arrays)
    WeightAnnealing(portfolio, kinds, time.monotonic() + FAR).run(after(200))
    assert portfolio.solution().placed.arena_bytes <= request_.arena_bytes


def test_it_ends_at_its_deadline(problem, request_, clock):
    portfolio = Portfolio(problem, request_)
    portfolio.sweep()
    deadline = clock.now + 3
    WeightAnnealing(
        portfolio, weight_annealing.interval_classes(problem, portfolio.arrays), deadline
    ).run(lambda: False)
    assert deadline <= clock.now < deadline + 20 * clock.TICK
