"""
The time-point MILP of any order: first runs need not be in the program's.

Time points are a chain of ops o_1, …, o_K (`planner.exact.model.chains`), each an ancestor of the
next one, so that in every schedule o_k runs for the first time before o_{k+1} does. Segment k is
what happens after the first run of o_k up to that of o_{k+1}, the last one up to the end of the
step. Beside the columns of `planner.exact.model.timepoint` there is the order:

    D[k, v]   op v has run by the first run of o_k, that run left out
    X[k, d]   tensor d is resident while o_k runs
    Y[k, v]   op v, which has run by o_k, is run again in segment k

D is known of the ancestors of o_k, of o_k itself and of its descendants: on real steps of nearly
all ops.

Why the optimum is a bound: take any schedule that the verifier accepts, in default variants and
without transfers, and D, X and Y as they say. All that an op reads has run before it, so D holds
the producers of what it holds, and grows with k. What is read in segment k, by a first run or by an
op that is run again, was first made in the segment, is run again in it, or was resident while o_k
ran, and so was what is resident while o_{k+1} runs or is an output of the step in the end.
While o_k runs its inputs, its outputs, its workspace and what else is resident fit. That is all the
rows ask for. Nothing is said of overwriting, nor of ops that are run again before o_1 or in the
segment in which they first run.
"""

from dataclasses import dataclass, field

from coop_plan.planner.core.memory_bounds import working_sets
from coop_plan.planner.exact.model.chains import Ancestry
from coop_plan.planner.exact.model.milp import INFINITY, Milp
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.segments import Terms
from coop_plan.planner.exact.model.timepoint import COST_SCALE, ROUNDING


@dataclass
class AnyOrderModel:
    """
    The MILP for one chain of time points.

    `capacity` is bytes (see `Program.capacity`). Costs are divided by `cost_unit` µs, so that the
    base cost is `COST_SCALE`.
    """

    ancestry: Ancestry
    capacity: int
    points: list[int]
    program: Program = field(init=False)
    cost_unit: float = field(init=False)
    milp: Milp = field(default_factory=Milp)

    def __post_init__(self) -> None:
        self.program = self.ancestry.program
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
        for k, point in enumerate(self.points):
            self._order.append(self._first_runs(point))
            self._resident.append(self._residents(k, point))
            self._precedence(k)
        self._again = [self._reruns(before) for before in self._order]
        self._order.append([self._yes] * self.program.n)
        for k in range(len(self.points)):
            self._kept(k)
            self._dependencies(k)
        self._outputs()
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

    def _reruns(self, before: list[int]) -> list[int]:
        # [Variable] Y[k, v] of what may have run by o_k and can run again.
        cost, until = self.program.problem.cost, self.program.until
        columns = []
        for op, ran in enumerate(before):
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
        """Whether t was resident at o_k, or is made again in segment k."""
        again = self._again[k][self.program.problem.producer[t]]
        return [(self._resident[k].get(t, self._no), 1.0), (again, 1.0)]

    def _kept(self, k: int) -> None:
        # [Constraint] what is resident at o_k was there or is first made in the segment before.
        producer = self.program.problem.producer
        for t, resident in self._resident[k].items():
            made = [(self._order[k][producer[t]], 1.0)]
            if k:
                made += [(self._order[k - 1][producer[t]], -1.0), *self._there(k - 1, t)]
            self._at_least([*made, (resident, -1.0)], 0.0)

    def _dependencies(self, k: int) -> None:
        producer, before, now = self.program.problem.producer, self._order[k], self._order[k + 1]
        # [Constraint] inputs of what is first run in segment k and was made before it.
        for op in range(self.program.n):
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

    def _outputs(self) -> None:
        # [Constraint] outputs of the step are there in the end, unless the last segment makes them.
        last = len(self.points) - 1
        for t in self._read[self.program.n]:
            made = self._order[last][self.program.problem.producer[t]]
            self._at_least([*self._there(last, t), (made, -1.0)], 0.0)

    def _memory(self, k: int, point: int) -> None:
        # [Constraint] Σ bytes of residents + inputs, outputs and workspace of o_k ≤ capacity.
        program, size = self.program, self.program.problem.size
        touched = {*program.reads[point], *program.makes[point]}
        room = self.capacity - working_sets(program.problem).first[point]
        terms = [
            (column, -size[t] / self.capacity)
            for t, column in self._resident[k].items()
            if t not in touched and size[t]
        ]
        self._at_least(terms, -room / self.capacity - ROUNDING)
