"""Split regions: a step over fused regions in the memory that its ops need with eager's kernels."""

from collections.abc import Callable, Mapping

from coop_plan.planner import PlanOptions
from coop_plan.planner.core.memory_bounds import needs_with_resident_outputs, working_sets
from coop_plan.planner.core.problem import Problem
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.fused.regions import REGION

CaptureSplit = Callable[[Mapping[int, int]], Captured | None]
"""Captures the step with the `limits` of `fused.regions.fuse_regions`; None if that is refused."""


def split_regions(
    fused: Captured, eager: Captured, options: PlanOptions, capture: CaptureSplit
) -> Captured | None:
    """The step with those regions split that need more bytes than any op with eager's kernels.

    An op needs its inputs, results and scratch, the residents, and the outputs made before it that
    stay in the arena. No plan needs less. So the regions to split are known from bytes alone, and
    are equal for all ranks, starts and budgets. Parts of a region read and make at most what its
    scratch leaves. If the scratch of a part is too much, its region is split into single ops.

    Args:
        fused: the step over whole regions.
        eager: the step with eager's kernels.
        options: those of which `outputs` and `alignment` count.
        capture: captures the step over split regions.

    Returns:
        The captured step; None if no region needs more, or none can be split into such as do not.
    """
    most = max(_Needs(eager, options).of_ops)
    best, limits = fused, dict[int, int]()
    while over := (needs := _Needs(best, options)).limits(most):
        if not any(limits.get(number, 1) for number in over):
            break  # they are split as far as they can be
        limits |= {number: 0 if number in limits else limit for number, limit in over.items()}
        captured = capture(limits)
        if captured is None:
            break
        if max(_Needs(captured, options).of_ops) < max(needs.of_ops):
            best = captured
    return None if best is fused else best


class _Needs:
    """Bytes that the ops of a captured step need."""

    def __init__(self, captured: Captured, options: PlanOptions) -> None:
        self._captured = captured
        problem = Problem.from_graph(captured.graph, options.alignment, options.outputs)
        self.of_ops = [problem.fixed_bytes + b for b in needs_with_resident_outputs(problem)]
        self._own = working_sets(problem).first

    def limits(self, most: int) -> dict[int, int]:
        """Bytes that parts may read and make, by the number of a region that needs over `most`."""
        found: dict[int, int] = {}
        captured = self._captured
        for i, (op, node) in enumerate(zip(captured.graph.ops, captured.ops, strict=True)):
            if REGION in node.meta and self.of_ops[i] > most:
                beside = self.of_ops[i] - self._own[i] + op.workspace_bytes
                number = node.meta[REGION]
                found[number] = min(found.get(number, most), max(0, most - beside))
        return found
