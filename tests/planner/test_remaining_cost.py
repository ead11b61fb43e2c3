"""Coop's run is given up only if it is sure to cost more than another plan, or looks too far."""

import math

import pytest

from benchmarks.hard_graphs import FAMILIES, hard_graph
from coop_plan.planner import Problem
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.heuristic import coop_offline
from coop_plan.planner.heuristic.params import DEFAULTS
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.method import Request
from coop_plan.planner.online.methods import run_coop
from coop_plan.planner.online.params import OnlineParams
from coop_plan.planner.online.run import CostLimitError
from coop_plan.planner.placement.layout import lay_out


def arenas(problem):
    """Some bytes below what keep-everything takes, and what Coop costs in them."""
    everything, _ = lay_out(keep_all_schedule(problem))
    for share in (0.6, 0.8):
        request = Request(int(share * everything.arena_bytes))
        try:
            yield request, run_coop(problem, request).cost_us
        except DoesNotFitError:
            continue


@pytest.mark.parametrize("outputs", ["outside", "arena"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_ends_early_only_if_it_costs_more(family, outputs):
    problem = Problem.from_graph(hard_graph(family, 1, 90), outputs=outputs)
    often = OnlineParams(chunk_ops=1)  # it looks after every op
    for request, cost in arenas(problem):
        assert run_coop(problem, request, often, cost).cost_us == cost
        with pytest.raises(CostLimitError):
            run_coop(problem, request, often, cost * (1 - 1e-6))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_ends_early_once_it_has_looked_at_too_many_blocks(family):
    """Each failed allocation looks at all blocks, which costs the square of a graph's ops."""
    problem = Problem.from_graph(hard_graph(family, 1, 90))
    for request, cost in arenas(problem):
        assert run_coop(problem, request, scan_limit=1 << 40).cost_us == cost
        with pytest.raises(CostLimitError):
            run_coop(problem, request, scan_limit=0)


def test_a_run_is_not_limited_where_nothing_else_fits(monkeypatch):
    """It is one candidate of coop-offline among others, and the last resort without them."""
    limits = []

    def noted(problem, request, *, scan_limit, **rest):
        limits.append(scan_limit)
        return run_coop(problem, request, scan_limit=scan_limit, **rest)

    monkeypatch.setattr(coop_offline, "run_coop", noted)
    problem = Problem.from_graph(hard_graph("layered", 1, 90))
    everything, _ = lay_out(keep_all_schedule(problem))
    coop_offline.solve_coop_offline(problem, Request(everything.arena_bytes // 2))
    with pytest.raises(DoesNotFitError):
        coop_offline.solve_coop_offline(problem, Request(everything.arena_bytes // 100))
    assert limits == [DEFAULTS.coop_scans * problem.op_count, math.inf]
