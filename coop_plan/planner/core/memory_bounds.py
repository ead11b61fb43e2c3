"""
The smallest budget from below: what no schedule of any method is without.

All of it is true in every order of the ops and however often they run, so that no search for a
smaller plan can go below it. With transfers or variants only working sets are.
"""

from collections.abc import Iterator

from coop_plan.planner.core.working_sets import least_working_set, needs
from coop_plan.planner.core.problem import Problem

DEPTH = 8
"""How many makings it looks back from the run of an op."""

MOST = 32
"""Tensors that are there together, above which it does not ask which of them was made last."""

FUEL = 256
"""Such questions for the run of one op."""

MOST_KEPT = 512
"""Tensors of ops that run once whose lives are followed, the largest."""


def least_budget(problem: Problem) -> int:
    """Bytes of a budget that no schedule goes below, resident tensors included."""
    cut = problem.alignment - 1  # the topmost block need not end at a multiple
    return problem.fixed_bytes + max(0, least_arena(problem) - cut)


def least_arena(problem: Problem) -> int:
    """
    Bytes that are live together at some moment of every schedule, each size rounded up.

    When an op runs, all that it reads is there. One of those tensors was made last; when it was,
    the others were there already, beside what its maker needs. Of what was there then, one was made
    last, and so on back: the least over all answers is a bound. What ops make that run only once is
    there from their run to its last reader, so beside every op that lies on a path between them.
    And at the end all outputs are there.
    """
    floor = max(0, least_working_set(problem).bytes)
    if problem.beyond_recomputation:
        return floor
    looking = _Looking(problem)
    first = needs(problem).first
    for op, kept in enumerate(_kept_beside(problem)):
        there = frozenset(problem.reads[op])
        beside = kept - there - frozenset(problem.makes[op])
        floor = max(floor, first[op] + looking.bytes(beside))
        floor = max(floor, looking.back(there | beside, floor))
        floor = max(floor, looking.back(there, floor))
    outputs = frozenset(
        t for t in range(problem.tensor_count) if problem.is_output[t] and not problem.outside[t]
    )
    floor = max(floor, looking.bytes(outputs))
    return max(floor, looking.back(outputs, floor))


class _Looking:
    """Looks back from moments at which tensors in the arena are there together."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.need = [min(pair) for pair in zip(*needs(problem), strict=True)]
        self.reads = [frozenset(reads) for reads in problem.reads]
        self.used = [
            reads.union(makes) for reads, makes in zip(self.reads, problem.makes, strict=True)
        ]
        self.fuel = 0

    def bytes(self, tensors: frozenset[int]) -> int:
        """Their sizes together."""
        return sum(self.problem.size[t] for t in tensors)

    def back(self, there: frozenset[int], floor: int) -> int:
        """What is live at some moment before all of these are there; `floor` if not more."""
        self.fuel = FUEL
        return self._back(there, floor, DEPTH)

    def _back(self, there: frozenset[int], floor: int, depth: int) -> int:
        self.fuel -= 1
        if not there or len(there) > MOST or depth == 0 or self.fuel < 0:
            return floor
        least = []
        for maker in {self.problem.producer[t] for t in there}:
            rest = there - self.used[maker]
            least.append((self.need[maker] + self.bytes(rest), maker))
        least.sort()
        best = -1
        for bytes_, maker in least:
            if 0 <= best <= bytes_:
                break  # the others are no less
            deeper = there.difference(self.problem.makes[maker]) | self.reads[maker]
            found = max(bytes_, floor, self._back(deeper, floor, depth - 1))
            best = found if best < 0 else min(best, found)
            if best <= floor:
                return floor
        return best


def _kept_beside(problem: Problem) -> Iterator[frozenset[int]]:
    """Op by op, tensors of ops that run once and that it runs before a reader of."""
    once = [
        t
        for t in range(problem.tensor_count)
        if (maker := problem.producer[t]) >= 0
        and not problem.graph.ops[maker].recomputable
        and not problem.outside[t]
        and problem.size[t]
    ]
    once = sorted(once, key=problem.size.__getitem__, reverse=True)[:MOST_KEPT]
    if not once:
        yield from (frozenset() for _ in range(problem.op_count))
        return
    bit = {t: 1 << number for number, t in enumerate(once)}
    ends = sum(bit[t] for t in once if problem.is_output[t])
    n = problem.op_count
    made, wanted = [0] * n, [0] * n  # before an op's first run; after it
    for op in range(n):
        for t in problem.op_inputs[op]:
            maker = problem.producer[t]
            if maker >= 0:
                made[op] |= made[maker] | bit.get(t, 0)
    for op in range(n - 1, -1, -1):
        for t in problem.op_inputs[op]:
            wanted[op] |= bit.get(t, 0)
        for t in problem.op_inputs[op]:
            if problem.producer[t] >= 0:
                wanted[problem.producer[t]] |= wanted[op]
    for op in range(n):
        both = made[op] & (wanted[op] | ends)
        yield frozenset(t for t in once if both & bit[t]) if both else frozenset()
