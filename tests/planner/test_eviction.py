"""Offline eviction chooses the same victims from a scan of all live tensors and from a pool."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hard_graphs import FAMILIES, hard_graph
from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.heuristic.eviction_run import Record, Runner, Settings
from coop_plan.planner.heuristic.params import EvictionParams
from coop_plan.planner.heuristic.portfolio import Portfolio
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.method import Request

SCAN = EvictionParams(pool_min_live=1 << 40)
ORDER = replace(SCAN, pool_min_live=0, pool_size=4096)


def run(problem: Problem, params: EvictionParams, share: float, settings: Settings):
    program = Schedule.of(problem, np.arange(problem.op_count))
    runner = Runner(to_arrays(problem), params, lambda: False)
    return runner(int(share * program.blocks().live), settings)


def drawn(problem: Problem, seed: int, alpha: float, cap: bool, foresee: bool) -> Settings:
    """Settings whose weights leave no two scores equal."""
    uses = to_arrays(problem).uses.size + 1
    weight = np.exp(np.random.default_rng(seed).normal(0.0, 0.1, uses))
    return Settings(weight, alpha, cap, foresee)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(list(FAMILIES)),
    st.integers(0, 99),
    st.sampled_from([0.3, 0.4, 0.5, 0.7]),
    st.sampled_from([1 / 16, 0.25, 0.5, 1.0, 2.0]),
    st.booleans(),
    st.booleans(),
)
def test_in_order_as_by_looking_at_all(family, seed, share, alpha, cap, foresee):
    """Whatever the rule, if every tensor that is live is among the best that are kept in hand."""
    problem = Problem.from_graph(hard_graph(family, seed, 150), outputs="arena")
    rule = drawn(problem, seed, alpha, cap, foresee)
    scanned = run(problem, SCAN, share, rule)
    ordered = run(problem, ORDER, share, rule)
    if scanned is None:
        assert ordered is None
        return
    assert isinstance(ordered, Record)
    assert ordered.ops.tolist() == scanned.ops.tolist()


@pytest.mark.parametrize("family", ["unrolled", "experts"])
def test_a_run_costs_about_the_same_per_op_in_a_large_graph(family):
    """Hubs and ops that run once only made each eviction walk the whole program before it."""

    def seconds_per_op(ops):
        problem = Problem.from_graph(hard_graph(family, 0, ops))
        budget = keep_all_schedule(problem).blocks().live // 2
        portfolio = Portfolio(problem, Request(budget))
        spent = []
        for _ in range(3):
            began = time.process_time()
            assert portfolio.runner(budget, portfolio.settings[4]) is not None
            spent.append(time.process_time() - began)
        return min(spent) / problem.op_count

    seconds_per_op(300)  # loads the kernels
    assert seconds_per_op(10_000) < 5 * seconds_per_op(1_000)
