"""The annealing of every objective: its restarts, its incumbent and its limit, on drawn results."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import Request
from coop_plan.planner.search import annealing
from coop_plan.planner.search.annealing import Annealing
from tests.planner.conftest import TickingClock
from tests.support import make_graph

PROBLEM = Problem.from_graph(
    make_graph({0: ("input", 8), 1: ("output", 8)}, [{"inputs": [0], "outputs": [1]}])
)


class Drawn(Annealing):
    """Chunks end with the costs and excesses of a list; a sequence is the number of its chunk."""

    def __init__(self, ends, fitting):
        super().__init__(PROBLEM, Request(1000))
        self.ends, self.fitting = ends, fitting
        self.number, self.at = -1, np.array([-1])
        self.loaded, self.tried, self.penalties, self.limits = [], [], [], []
        self.best = float("inf")

    @property
    def cost_us(self):
        return self.best

    def load(self, sequence):
        self.loaded.append((self.number, int(sequence[0])))
        self.at = sequence

    def stored(self):
        return self.at

    def steps(self, count, temperature, penalty):
        self.number += 1
        self.at = np.array([self.number])
        self.penalties.append(penalty)
        self.limits.append(self.limit)
        return self.ends[self.number % len(self.ends)]

    def place(self, sequence, work):
        cost, excess = self.ends[int(sequence[0]) % len(self.ends)]
        assert excess == 0
        self.tried.append(int(sequence[0]))
        fits = self.fitting[len(self.tried) % len(self.fitting)]
        if fits:
            self.best = cost
        return fits

    def report(self):
        pass


END = st.tuples(st.integers(1, 50).map(float), st.sampled_from([0.0, 0.1, 0.1, 0.1]))

ENDS = st.lists(st.tuples(END, st.sampled_from([1, 1, 3, 40, 120])), min_size=1, max_size=120).map(
    lambda stretches: [end for end, count in stretches for _ in range(count)]
)
"""Ends of chunks, in stretches of equal ones."""


@settings(max_examples=200, deadline=None)
@given(
    ends=ENDS,
    fitting=st.lists(st.booleans(), min_size=1, max_size=9),
    timed=st.booleans(),
    few=st.booleans(),
    ramp=st.sampled_from([1.0, 1e-3]),
)
def test_it_restarts_from_the_best_end_after_as_many_chunks_each_time(
    ends, fitting, timed, few, ramp
):
    with pytest.MonkeyPatch.context() as patch:
        clock = TickingClock()
        patch.setattr(annealing, "time", clock)
        search = Drawn(ends, fitting)
        search.few_chunks = few
        deadline = clock.now + 400 * clock.TICK if timed else None
        value, end = search.anneal(np.array([-1]), 400, 0.1, lambda: False, deadline, ramp)
    done = [ends[k % len(ends)] for k in range(search.number + 1)]
    streak = 0
    restarts = dict(search.loaded[1:])
    for number, (_, excess) in enumerate(done):
        streak = streak + 1 if excess > 0 else 0
        if number in restarts:
            earlier = [k for k in range(number) if done[k][1] == 0]
            assert restarts[number] == min(earlier, key=lambda k: done[k][0])
            assert streak > (50 if timed else 16)
            streak = 0
    feasible = [k for k, (_, excess) in enumerate(done) if excess == 0]
    if feasible:
        assert (value, int(end[0])) == (min(done[k][0] for k in feasible), end[0])
        assert done[int(end[0])] == (value, 0.0)
    tried = [done[k][0] for k in search.tried]
    placed = [cost for k, cost in enumerate(tried, 1) if fitting[k % len(fitting)]]
    assert search.best == min(placed, default=float("inf"))
    assert all(0 < limit <= 1000 for limit in search.limits)
    if not any(fitting) and len(search.limits) > 1 and len(tried) > 1:
        assert search.limit == pytest.approx(1000 * (1 - 4e-3) ** len(tried))
