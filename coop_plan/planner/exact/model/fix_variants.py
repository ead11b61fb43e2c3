"""A step in which each op has one variant, for the methods that know of no others."""

from collections.abc import Sequence

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import PlacedSchedule, Schedule


def restricted(problem: Problem, chosen: Sequence[int]) -> Problem:
    """
    The problem with variant `chosen[o]` as the only one of op o, with the same tensors and no host.

    Every variant must find what it reads: the variant chosen of its maker makes it.
    """
    ops = []
    for op, number in zip(problem.graph.ops, chosen, strict=True):
        name = problem.variants[number].name
        form = next((v for v in op.variants if v.name == name), op)
        ops.append(
            op.model_copy(
                update={
                    "inputs": form.inputs,
                    "outputs": form.outputs,
                    "cost_us": form.cost_us,
                    "workspace_bytes": form.workspace_bytes,
                    "inplace": form.inplace,
                    "variants": [],
                }
            )
        )
    graph = problem.graph.model_copy(update={"ops": ops})
    return Problem.from_graph(graph, problem.alignment, problem.outputs, host_budget=0)


def plainest(problem: Problem) -> Problem | None:
    """
    The problem without variants and in-place pairs, with the same tensors; None if there are none.

    What is a schedule of it is one of `problem` (`carried_back`, by each op's default variant).
    """
    if not any(op.variants or op.inplace for op in problem.graph.ops):
        return None
    bare: dict[str, object] = {"variants": [], "inplace": []}
    ops = [op.model_copy(update=bare) for op in problem.graph.ops]
    graph = problem.graph.model_copy(update={"ops": ops})
    return Problem.from_graph(graph, problem.alignment, problem.outputs, problem.host_budget)


def carried_back(problem: Problem, chosen: Sequence[int], placed: PlacedSchedule) -> PlacedSchedule:
    """
    A placed schedule of the restricted problem as one of `problem`: same events, same places.

    The lifetimes, too: an online method has decided for itself what ends when.
    """
    old = placed.schedule
    what = old.what.copy()
    for event, variant in enumerate(old.variants):
        if variant >= 0:
            what[event] = chosen[variant]
    schedule = Schedule(problem, old.do, what, old.trace)
    return PlacedSchedule(schedule, placed.offset, placed.workspace_offset)
