"""What single ops need: lower bounds on every arena."""

from typing import NamedTuple

from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.core.inplace import working_sets
from coop_plan.planner.core.problem import Problem


class Needs(NamedTuple):
    """
    Per variant the arena bytes that it needs at least, in its first run and when it runs again.

    Inputs, outputs and workspace, rounded up; what can share one address in place counts once.
    """

    first: list[int]
    again: list[int]


class WorkingSet(NamedTuple):
    """An op and the arena bytes that it needs at least, in whichever variant."""

    op: int
    bytes: int


def needs(problem: Problem) -> Needs:
    """The needs of a problem's variants, found once."""
    found = problem.__dict__.get("_needs")
    if found is None:
        first, again = working_sets(to_arrays(problem)).tolist()
        found = problem.__dict__["_needs"] = Needs(first, again)
    made: Needs = found
    return made


def largest_working_set(problem: Problem) -> WorkingSet:
    """
    The op whose default variant needs most, and that many bytes; (−1, 0) without ops.

    A bound on the arena of every schedule of default variants.
    """
    first = needs(problem).first[: problem.op_count]
    if not first:
        return WorkingSet(-1, 0)
    op = max(range(len(first)), key=first.__getitem__)
    return WorkingSet(op, first[op])


def least_working_set(problem: Problem) -> WorkingSet:
    """
    The op whose leanest variant needs most, and that many bytes; (−1, 0) without ops.

    A bound on the arena of every schedule.
    """
    first = needs(problem).first
    least = first[: problem.op_count]
    for number, variant in enumerate(problem.variants):
        least[variant.op] = min(least[variant.op], first[number])
    op = max(range(len(least)), key=least.__getitem__, default=-1)
    return WorkingSet(op, least[op] if op >= 0 else 0)
