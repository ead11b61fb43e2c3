"""Selection of time points for the program-order and the any-order model."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.keep_all import keep_all_schedule

T = TypeVar("T")


def initial_points(program: Program, capacity: int, count: int) -> list[int]:
    """At most `count` ops and the end of the step, in program order.

    Candidates are the ops at which keep-all exceeds the capacity (bytes). They are split into
    groups of equal length; each group contributes its op with the largest working set.
    """
    over = ops_over_capacity(program, capacity)
    return [*worst_of_groups(over, count, key=program.working_set), program.n]


def ops_over_capacity(program: Program, capacity: int) -> list[int]:
    """Ops at which keep-all exceeds the capacity (bytes), in program order."""
    live = keep_all_schedule(program.problem).live_bytes().tolist()
    return [op for op, used in enumerate(live) if used > capacity]


def segment_of(points: Sequence[int], position: int) -> tuple[int, int]:
    """The segment (start, end] of a position: the time points before it and at its end."""
    number = bisect_left(points, position)
    return points[number - 1] if number else -1, points[number]


def equal_groups(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Split items into at most `count` consecutive, non-empty groups of equal length."""
    number = min(count, len(items))
    edges = [len(items) * group // number for group in range(number + 1)] if number > 0 else []
    return [items[low:high] for low, high in pairwise(edges)]


def worst_of_groups(items: Sequence[T], count: int, key: Callable[[T], int]) -> list[T]:
    """The item with the largest key of each of at most `count` groups of equal length."""
    return [max(group, key=key) for group in equal_groups(items, count)]


class Ancestry:
    """Transitive predecessors and successors of ops by data dependence."""

    def __init__(self, program: Program) -> None:
        problem = program.problem
        self.program = program
        self.producers: list[set[int]] = [
            {problem.producer[t] for t in inputs} - {-1}
            for inputs in problem.op_inputs[: program.n]
        ]
        self.consumers: list[set[int]] = [set() for _ in self.producers]
        for op, producers in enumerate(self.producers):
            for producer in producers:
                self.consumers[producer].add(op)

    def ancestors(self, op: int) -> set[int]:
        """Ops that run before the first run of `op` in every order."""
        return _reached(op, self.producers)

    def descendants(self, op: int) -> set[int]:
        """Ops that run after the first run of `op` in every order."""
        return _reached(op, self.consumers)

    def comparable(self, op: int) -> set[int]:
        """Ancestors and descendants of `op`."""
        return self.ancestors(op) | self.descendants(op)

    def live_bytes(self, op: int) -> int:
        """Arena bytes live at the first run of `op` in every order, without evictions."""
        program, problem = self.program, self.program.problem
        later = self.descendants(op) | {op}
        live = {
            t
            for earlier in self.ancestors(op)
            for t in program.makes[earlier]
            if problem.is_output[t] or not later.isdisjoint(problem.consumers[t])
        }
        return problem.workspace[op] + sum(problem.size[t] for t in live.union(program.makes[op]))


def _reached(op: int, edges: Sequence[Iterable[int]]) -> set[int]:
    found: set[int] = set()
    left = [op]
    while left:
        new = set(edges[left.pop()]) - found
        found |= new
        left += new
    return found


class Chains:
    """Time points at one capacity (bytes), each an ancestor of the next.

    Only ops at which keep-all exceeds the capacity qualify. The first point is the op with the most
    bytes live in every order. The program is then split into stretches of equal length; each
    contributes its op with the largest working set that is comparable with all points chosen
    before.
    """

    def __init__(self, ancestry: Ancestry, capacity: int) -> None:
        self.ancestry = ancestry
        over = ops_over_capacity(ancestry.program, capacity)
        self._first = [_fullest(ancestry, over)] if over else []
        self._allowed = {op for first in self._first for op in ancestry.comparable(first)}
        self._allowed.intersection_update(over)

    def points(self, count: int) -> list[int]:
        """At most `count` ops in program order; empty if keep-all fits."""
        chosen, allowed = list(self._first), set(self._allowed)
        for stretch in equal_groups(sorted(allowed), count - 1):
            for op in sorted(stretch, key=self.ancestry.program.working_set, reverse=True):
                if op in allowed:
                    chosen.append(op)
                    allowed &= self.ancestry.comparable(op)
                    break
        return sorted(chosen)


def _fullest(ancestry: Ancestry, ops: Sequence[int]) -> int:
    """The op with the most bytes live in every order, at most those of keep-all in this order."""
    live = keep_all_schedule(ancestry.program.problem).live_bytes()
    best, most = ops[0], -1
    for op in sorted(ops, key=lambda op: -int(live[op]))[:1000]:
        if live[op] <= most:
            break
        if (live_bytes := ancestry.live_bytes(op)) > most:
            best, most = op, live_bytes
    return best
