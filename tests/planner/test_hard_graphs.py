"""Plans of graphs that no method was tuned for; see `benchmarks.hard_graphs`."""

import math

import pytest

from benchmarks.hard_graphs import FAMILIES, hard_graph, parse_name
from coop_plan.planner import METHODS, Problem
from coop_plan.planner.core.build_plan import assemble
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import lay_out, lay_out_host
from coop_plan.planner.verifier import verify
from coop_plan.schemas import fingerprint

OPS = 80
SHARES = (0.5, 0.7, 0.92)
"""Of keep-everything's arena."""


def overheads(graph, method, shares=SHARES):
    """By share the overhead of a verified plan; infinite where the method finds none."""
    problem = Problem.from_graph(graph, outputs="arena")
    everything, _ = lay_out(keep_all_schedule(problem))
    found = []
    for share in shares:
        arena = int(share * everything.arena_bytes)
        try:
            placed = METHODS[method].solve(problem, Request(arena)).placed
        except DoesNotFitError:
            found.append(math.inf)
            continue
        budget = problem.fixed_bytes + arena
        made = assemble(
            Solution(placed),
            host_offsets=lay_out_host(placed.schedule).offsets,
            host_arena_bytes=0,
            link_bytes_per_s=None,
            method=method,
            budget_bytes=budget,
            solve_seconds=0.0,
        )
        verify(graph, made)
        found.append(made.overhead)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_coop_offline_is_monotone_and_never_worse_than_what_runs_online(family):
    graph = hard_graph(family, 0, OPS)
    mine = overheads(graph, "coop-offline")
    assert mine[-1] < math.inf
    assert mine == sorted(mine, reverse=True)
    for method in ("coop", "dtr", "dte"):
        theirs = overheads(graph, method)
        assert all(a <= b + 1e-9 for a, b in zip(mine, theirs, strict=True)), method


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_seeds_make_equal_graphs_and_plans(family):
    graph, again, other = (hard_graph(family, seed, OPS // 2) for seed in (5, 5, 6))
    assert graph == again
    assert fingerprint(graph) != fingerprint(other)
    assert overheads(graph, "coop-offline", [0.7]) == overheads(again, "coop-offline", [0.7])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_one_gradient(family, seed):
    graph = hard_graph(family, seed, OPS)
    phases = [op.phase for op in graph.ops]
    assert phases == sorted(phases, key=("forward", "backward", "optimizer").index)
    parameters = [t.id for t in graph.tensors if t.kind == "parameter"]
    updated = [t for op in graph.ops for t in op.mutates]
    outputs = [t.id for t in graph.tensors if t.kind == "output"]  # gradients and the loss
    shared = sum(t.kind == "output" for t in graph.tensors) == 1
    assert sorted(updated) == (parameters if shared else [])
    assert shared or len(outputs) == len(parameters) + 1


@pytest.mark.parametrize("name", ["hard:none:1", "hard:tiny", "hard:tiny:x", "hard:tiny:1:2:3"])
def test_a_name_that_says_nothing_is_refused(name):
    with pytest.raises(ValueError, match="a hard graph is"):
        parse_name(name)
    assert len(parse_name("hard:tiny:1:50").ops) < 200
