"""Sequences: every one that the walk comes by is a schedule that needs what it says."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import gpt
from coop_plan.planner import Problem
from coop_plan.planner.core.assemble import arena_bytes
from coop_plan.planner.exact.primal.live import live_bytes
from coop_plan.planner.method import Request
from coop_plan.planner.offline.lifetimes import lifetimes
from coop_plan.planner.offline.metropolis import excess, walk
from coop_plan.planner.offline.rebuild import rebuild
from coop_plan.planner.offline.resequence import Resequencing
from coop_plan.planner.offline.search import Search
from coop_plan.planner.offline.sequence import LENGTH, go_to, record, start
from coop_plan.planner.offline.solve import CoopOffline
from tests.strategies import graphs
from tests.support import make_graph

STEEP = 5.0
"""What memory costs, in base costs."""


@pytest.fixture(scope="module")
def problem():
    """A GPT of a few layers."""
    return Problem.from_graph(gpt(6))


@pytest.fixture
def search(problem):
    """A search with a plan in an arena just above the largest working set."""
    method = CoopOffline(problem, Request(int(1.4 * problem.largest_working_set[1])))
    method.begin()
    return method.search


def sequence(w):
    return w.ops[: w.counts[LENGTH]].copy()


def check(problem, arrays, w, arena):
    """The sequence is a schedule in program order, and `excess` says of it what it needs."""
    ops = sequence(w)
    assert list(dict.fromkeys(ops.tolist())) == list(range(problem.op_count))
    run = record(problem, arrays, ops)
    live = live_bytes(rebuild(problem, run))
    assert lifetimes(arrays, run)[3] == max(live)
    cost, over = excess(arrays, w, arena)
    assert cost == pytest.approx(run.cost_us)
    assert (over > 0) == (max(live) > arena)
    if over > 0:
        assert over * arena >= max(live) - arena
    assert excess(arrays, w, max(live))[1] == 0
    assert excess(arrays, w, max(live) - 1)[1] > 0


@settings(max_examples=150, deadline=None)
@given(
    graphs(max_ops=10, mutates=True, inplace=True, rng=True),
    st.sampled_from(["arena", "outside", "gradients"]),
    st.integers(0, 1 << 20),
)
def test_what_it_says_of_memory_is_so(graph, outputs, seed):
    problem = Problem.from_graph(graph, 1, outputs)
    search = Search(problem, Request(problem.largest_working_set[1]))
    arrays, random = search.arrays, np.random.default_rng(seed)
    for budget in (1 << 30, *(problem.largest_working_set[1] + extra for extra in (0, 8, 16))):
        run = search.runner(budget, search.settings[0])
        if run is None or not run.ops.size:
            continue
        w = start(problem, arrays, 3 * run.ops.size + 20)
        go_to(w, run.ops)
        check(problem, arrays, w, budget)
        for _ in range(8):
            length = int(w.counts[LENGTH])
            low = int(random.integers(length))
            high = int(random.integers(low, length)) + 1
            before = sequence(w)
            arena = problem.largest_working_set[1]
            walk(arrays, w, low, high, 30, arena, 5.0, STEEP, int(random.integers(1 << 31)))
            check(problem, arrays, w, arena)
            after = sequence(w)
            np.testing.assert_array_equal(after[:low], before[:low])
            np.testing.assert_array_equal(after[after.size - (length - high) :], before[high:])


def test_a_window_that_fits_keeps_fitting(search):
    """Steep enough, no step within a window may need more than there is, anywhere."""
    arrays, arena = search.arrays, search.request.arena_bytes
    w = start(search.problem, arrays, 3000)
    go_to(w, search.best.found.run.ops)
    cost, over = excess(arrays, w, arena)
    assert over == 0
    for low in range(0, int(w.counts[LENGTH]) - 100, 50):
        walk(arrays, w, low, low + 100, 300, arena, 0.0, 1e12, low)
        assert excess(arrays, w, arena)[1] == 0
        assert excess(arrays, w, arena)[0] <= cost * (1 + 1e-9)
        cost = excess(arrays, w, arena)[0]
    assert cost < search.best.cost_us


def test_plans_get_cheaper_and_fit(search):
    before = search.best.cost_us
    found = search.best.found
    deadline = time.monotonic() + 600  # kernels may have to be compiled
    Resequencing(search, deadline).run(lambda: search.best.found is not found)
    assert search.best.cost_us < before
    schedule = search.solution().schedule
    assert schedule.cost_us == pytest.approx(search.best.cost_us)
    assert arena_bytes(schedule) <= search.request.arena_bytes


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
    again = start(problem, Search(problem, Request(1 << 20)).arrays, 10).again
    assert again.tolist() == [0, 1, 0, 0]
