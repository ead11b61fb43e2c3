"""Coop's run is given up once, and only once, it is sure to cost more than another plan does."""

import pytest

from benchmarks.hard_graphs import FAMILIES, hard_graph
from coop_plan.planner import Problem
from coop_plan.planner.core.errors import DoesNotFitError
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
