"""Split regions: a step over fused regions in the memory that its ops need with eager's kernels."""

from collections.abc import Callable, Mapping

from coop_plan.planner import PlanOptions
from coop_plan.planner.core.memory_bounds import needs_with_resident_outputs, working_sets
from coop_plan.planner.core.problem import Problem
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.fused.regions import REGION
from coop_plan.schemas import Graph

CaptureSplit = Callable[[Mapping[int, int]], Captured | None]
"""Captures the step with the `limits` of `fused.regions.fuse_regions`; None if that is refused."""


def split_regions(
    fused: Captured, eager: Captured, options: PlanOptions, capture: CaptureSplit
) -> Captured | None:
    """The step with those regions split that need more bytes than any op with eager's kernels.

    An op needs its inputs, results and scratch, the residents, and the outputs made before it that
    stay in the arena. No plan needs less. So the regions to split are known from bytes alone, and
    are equal for all ranks, starts and budgets. Parts of a region read and make at most what its
    scratch leaves. A region is single ops if a part needs more, by scratch of its own.

    Args:
        fused: the step over whole regions.
        eager: the step with eager's kernels.
        options: those of which `outputs` and `alignment` count.
        capture: captures the step over split regions.

    Returns:
        The captured step; None if no region is to be split, or `capture` returns None.
    """
    problem = _problem(eager.graph, options)
    most = problem.fixed_bytes + max(needs_with_resident_outputs(problem))
    limits: dict[int, int] = {}
    captured: Captured | None = fused
    while captured is not None and (over := _limits(captured, options, most)):
        limits |= {number: 0 if number in limits else limit for number, limit in over.items()}
        captured = capture(limits)
    return captured if limits else None


def _limits(captured: Captured, options: PlanOptions, most: int) -> dict[int, int]:
    """The bytes that parts may read and make, by number of a region that needs over `most`."""
    problem = _problem(captured.graph, options)
    needs, own = needs_with_resident_outputs(problem), working_sets(problem).first
    found: dict[int, int] = {}
    for i, (op, node) in enumerate(zip(captured.graph.ops, captured.ops, strict=True)):
        if REGION in node.meta and problem.fixed_bytes + needs[i] > most:
            beside = problem.fixed_bytes + needs[i] - own[i] + op.workspace_bytes
            number = node.meta[REGION]
            found[number] = min(found.get(number, most), max(0, most - beside))
    return found


def _problem(graph: Graph, options: PlanOptions) -> Problem:
    return Problem.from_graph(graph, options.alignment, options.outputs)
