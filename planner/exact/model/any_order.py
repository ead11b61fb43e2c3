"""
The time-point MILP of any order: first runs need not be in the program's.

Time points are a chain of ops o_1, …, o_K, each an ancestor of the next one, so that in every
schedule o_k runs for the first time before o_{k+1} does. Segment k is what happens after the first
run of o_{k−1} up to that of o_k; after o_K comes one more, up to the end of the step. Beside the
columns of `planner.exact.model.timepoint` there is the order:

    D[k, v]   op v has run by the first run of o_k, that run left out
    X[k, d]   tensor d is resident while o_k runs
    Y[k, v]   op v, which has run by o_{k−1}, is run again in segment k

D is known of the ancestors of o_k, of o_k itself and of its descendants: on real steps of nearly
all ops.

Why the optimum is a bound: take any schedule that the verifier accepts, in default bodies and
without transfers, and D, X and Y as they say. All that an op reads has run before it, so D holds
the producers of what it holds, and grows with k. What is read in segment k, by a first run or by an
op that is run again, was first made in the segment, is run again in it, or was resident while
o_{k−1} ran, and so was what is resident while o_k runs or is an output of the step in the end.
While o_k runs its inputs, its outputs, its workspace and what else is resident fit. That is all the
rows ask for. Nothing is said of overwriting, nor of ops that are run again before o_1 or in the
segment in which they first run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from coop_plan.planner.core.needs import needs
from coop_plan.planner.exact.model.milp import INFINITY, Milp
from coop_plan.planner.exact.model.points import groups, too_full
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import COST_SCALE, ROUNDING
from coop_plan.planner.keep_all import keep_all_schedule

LOOKS = 1000
"""Ops that are looked at, at most, for the first time point."""

Terms = list[tuple[int, float]]
"""A sum of columns: column, coefficient; a column may come twice."""


class Ancestry:
    """What must have run before an op, and what can only run after it, by the data they read."""

    def __init__(self, program: Program) -> None:
        problem = program.problem
        self.program = program
        self.before: list[set[int]] = [
            {problem.producer[t] for t in inputs} - {-1}
            for inputs in problem.op_inputs[: program.n]
        ]
        self.after: list[set[int]] = [set() for _ in self.before]
        for op, producers in enumerate(self.before):
            for producer in producers:
                self.after[producer].add(op)

    def ancestors(self, op: int) -> set[int]:
        """Ops that run before the first run of `op`."""
        return _reached(op, self.before)

    def descendants(self, op: int) -> set[int]:
        """Ops that run after the first run of `op`."""
        return _reached(op, self.after)

    def comparable(self, op: int) -> set[int]:
        """Ops of either kind."""
        return self.ancestors(op) | self.descendants(op)

    def held(self, op: int) -> int:
        """Arena bytes that the first run of `op` finds or takes in any order, if nothing goes."""
        program, problem = self.program, self.program.problem
        later = self.descendants(op) | {op}
        there = {
            t
            for earlier in self.ancestors(op)
            for t in program.makes[earlier]
            if problem.is_output[t] or not later.isdisjoint(problem.consumers[t])
        }
        return program.workspace(op) + sum(problem.size[t] for t in there.union(program.makes[op]))


def _reached(op: int, edges: Sequence[Iterable[int]]) -> set[int]:
    found: set[int] = set()
    left = [op]
    while left:
        new = set(edges[left.pop()]) - found
        found |= new
        left += new
    return found


def chain(ancestry: Ancestry, capacity: int, count: int) -> list[int]:
    """
    Time points: `count` ops at most, each an ancestor of the next one.

    They are ops at which keeping everything in program order exceeds the capacity (bytes). The
    first choice is where most is held in any order; the others are, of each of as many stretches of
    the program, the op with the largest working set that the chain has room for.
    """
    over = too_full(ancestry.program, capacity)
    if not over:
        return []
    chosen = [_fullest(ancestry, over)]
    allowed = ancestry.comparable(chosen[0]).intersection(over)
    for stretch in groups(sorted(allowed), count - 1):
        for op in sorted(stretch, key=ancestry.program.touched, reverse=True):
            if op in allowed:
                chosen.append(op)
                allowed &= ancestry.comparable(op)
                break
    return sorted(chosen)


def _fullest(ancestry: Ancestry, ops: Sequence[int]) -> int:
    """Of some ops the one that holds most in any order, which is no more than in program order."""
    live = keep_all_schedule(ancestry.program.problem).live_bytes()
    best, most = ops[0], -1
    for op in sorted(ops, key=lambda op: -int(live[op]))[:LOOKS]:
        if live[op] <= most:
            break
        if (held := ancestry.held(op)) > most:
            best, most = op, held
    return best


@dataclass
class AnyOrderModel:
    """
    The MILP for one chain of time points.

    `capacity` is bytes (see `Program.capacity`). Costs are divided by `cost_unit` µs, so that the
    base cost is `COST_SCALE`.
    """

    program: Program
    capacity: int
    points: list[int]
    ancestry: Ancestry
    cost_unit: float = field(init=False)
    milp: Milp = field(default_factory=Milp)

    def __post_init__(self) -> None:
        self.cost_unit = self.program.problem.base_cost_us / COST_SCALE or 1.0
        self._no = self.milp.column(0.0, 0.0, 0.0, integer=True)
        self._yes = self.milp.column(1.0, 1.0, 0.0, integer=True)
        producer, always = self.program.problem.producer, self.program.always
        self._read = [
            [t for t in dict.fromkeys(reads) if producer[t] >= 0 and not always[t]]
            for reads in self.program.reads
        ]
        self._wanted = sorted({t for reads in self._read for t in reads})
        self._order: list[list[int]] = []
        self._resident: list[dict[int, int]] = []
        self._again: list[list[int]] = [[]]
        for k, point in enumerate(self.points):
            self._order.append(self._first_runs(point))
            self._resident.append(self._residents(k, point))
            self._precedence(k)
        self._order.append([self._yes] * self.program.n)
        for k in range(1, len(self.points) + 1):
            self._again.append(self._reruns(k))
        for k in range(len(self.points) + 1):
            self._dependencies(k)
        for k, point in enumerate(self.points):
            self._memory(k, point)

    def _first_runs(self, point: int) -> list[int]:
        # [Variable] D[k, v], where it is open.
        known = dict.fromkeys(self.ancestry.ancestors(point), self._yes)
        known |= dict.fromkeys(self.ancestry.descendants(point) | {point}, self._no)
        return [known[op] if op in known else self.milp.binary() for op in range(self.program.n)]

    def _residents(self, k: int, point: int) -> dict[int, int]:
        # [Variable] X[k, d] of what may be there and is read by some op.
        inputs, producer = set(self._read[point]), self.program.problem.producer
        columns = {}
        for t in self._wanted:
            made = self._order[k][producer[t]]
            if made != self._no:
                columns[t] = self._yes if t in inputs else self.milp.binary()
        return columns

    def _reruns(self, k: int) -> list[int]:
        # [Variable] Y[k, v] of what may have run by o_{k−1} and can run again.
        cost, until = self.program.problem.cost, self.program.until
        columns = []
        for op, ran in enumerate(self._order[k - 1]):
            possible = ran != self._no and until[op] > op
            columns.append(self.milp.binary(cost[op] / self.cost_unit) if possible else self._no)
        return columns

    def _at_least(self, terms: Terms, least: float) -> None:
        """A row, unless it holds anyway."""
        milp, row = self.milp, dict[int, float]()
        for column, value in terms:
            if column in (self._no, self._yes):
                least -= value * (column == self._yes)
            else:
                row[column] = row.get(column, 0.0) + value
        if sum(min(value, 0.0) for value in row.values()) < least:
            milp.row(list(row.items()), least, INFINITY)

    def _precedence(self, k: int) -> None:
        # [Constraint] D[k, v] ≤ D[k, u] for the producers u of what v reads; D[k−1, v] ≤ D[k, v].
        for op, producers in enumerate(self.ancestry.before):
            ran = self._order[k][op]
            for producer in producers:
                self._at_least([(self._order[k][producer], 1.0), (ran, -1.0)], 0.0)
            if k:
                self._at_least([(ran, 1.0), (self._order[k - 1][op], -1.0)], 0.0)

    def _there(self, k: int, t: int) -> Terms:
        """Whether t was resident at the last time point, or is made again since."""
        if k == 0:
            return []
        resident = self._resident[k - 1].get(t, self._no)
        return [(resident, 1.0), (self._again[k][self.program.problem.producer[t]], 1.0)]

    def _dependencies(self, k: int) -> None:
        producer = self.program.problem.producer
        now = self._order[k]
        before = self._order[k - 1] if k else [self._no] * self.program.n
        # [Constraint] inputs of what is first run in segment k and was made before it.
        for op in range(self.program.n) if k else ():
            if now[op] == before[op]:
                continue
            for t in self._read[op]:
                first = [(now[op], -1.0), (before[op], 1.0), (before[producer[t]], -1.0)]
                self._at_least([*self._there(k, t), *first], -1.0)
        # [Constraint] inputs of what is run again, which has run.
        for op, again in enumerate(self._again[k]):
            if again == self._no:
                continue
            self._at_least([(before[op], 1.0), (again, -1.0)], 0.0)
            for t in self._read[op]:
                self._at_least([*self._there(k, t), (again, -1.0)], 0.0)
        # [Constraint] what is resident at o_k was there or is first made in the segment.
        if k < len(self.points):
            for t, resident in self._resident[k].items():
                made = [(now[producer[t]], 1.0), (before[producer[t]], -1.0)]
                self._at_least([*self._there(k, t), *made, (resident, -1.0)], 0.0)
        else:
            for t in self._read[self.program.n]:
                self._at_least([*self._there(k, t), (before[producer[t]], -1.0)], 0.0)

    def _memory(self, k: int, point: int) -> None:
        # [Constraint] Σ bytes of residents + inputs, outputs and workspace of o_k ≤ capacity.
        program, size = self.program, self.program.problem.size
        touched = {*program.reads[point], *program.makes[point]}
        room = self.capacity - needs(program.problem).first[point]
        terms = [
            (column, -size[t] / self.capacity)
            for t, column in self._resident[k].items()
            if t not in touched and size[t]
        ]
        self._at_least(terms, -room / self.capacity - ROUNDING)
