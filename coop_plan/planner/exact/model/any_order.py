"""The time-point MILP of any order: first runs need not be in program order.

Time points are a chain of ops o_1, …, o_K (`planner.exact.model.point_selection`), each an ancestor
of the next. So in every schedule o_k first runs before o_{k+1} does. Segment k spans from after the
first run of o_k up to that of o_{k+1}, the last one up to the end of the step. The variables
(minimise Σ cost[v] · Y[k, v]):

    D[k, v]   op v has run before the first run of o_k
    X[k, d]   tensor d is resident while o_k runs
    Y[k, v]   op v, which has run by o_k, is recomputed in segment k

D is constant for o_k, its ancestors and its descendants: on real steps for nearly all ops.

Why the optimum is a bound: take any schedule that the verifier accepts, in default variants and
without transfers, and D, X and Y as defined. The inputs of an op run before it, so D is closed
under producers, and it grows with k. A tensor read in segment k is first made in the segment,
recomputed in it, or resident while o_k ran. The same holds for residents of o_{k+1} and for outputs
at the end of the step. While o_k runs, its working set and the other residents fit. The rows ask
for no more. They ignore overwriting, recomputes before o_1, and recomputes in the segment of an
op's first run.
"""

from dataclasses import dataclass, field
from math import inf

from coop_plan.planner.core.memory_bounds import working_sets
from coop_plan.planner.exact.model.milp import ROUNDING, Milp, Terms
from coop_plan.planner.exact.model.point_selection import Ancestry
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import COST_SCALE


@dataclass
class AnyOrderModel:
    """The MILP for one chain of time points.

    `capacity` is in bytes, a multiple of the alignment. Costs are divided by `cost_unit` µs, so
    that the base cost is `COST_SCALE`.
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
        self._zero = self.milp.column(0.0, 0.0, 0.0, integer=True)
        self._one = self.milp.column(1.0, 1.0, 0.0, integer=True)
        producer, unconstrained = self.program.problem.producer, self.program.unconstrained
        self._inputs = [
            [t for t in dict.fromkeys(reads) if producer[t] >= 0 and not unconstrained[t]]
            for reads in self.program.read_by_all
        ]
        self._read_tensors = sorted({t for reads in self._inputs for t in reads})
        self._ran: list[list[int]] = []
        self._resident: list[dict[int, int]] = []
        for k, point in enumerate(self.points):
            self._ran.append(self._first_runs(point))
            self._resident.append(self._residents(k, point))
            self._precedence(k)
        self._rerun = [self._reruns(before) for before in self._ran]
        self._ran.append([self._one] * self.program.n)
        for k in range(len(self.points)):
            self._residency(k)
            self._dependencies(k)
        self._outputs()
        for k, point in enumerate(self.points):
            self._memory(k, point)

    def bound_us(self, bound: float) -> float:
        """Cost of a whole step for a bound in the model's units, µs."""
        return self.program.problem.work_us + bound * self.cost_unit

    def _first_runs(self, point: int) -> list[int]:
        # [Variable] D[k, v], constant for ancestors and descendants.
        fixed = dict.fromkeys(self.ancestry.ancestors(point), self._one)
        fixed |= dict.fromkeys(self.ancestry.descendants(point) | {point}, self._zero)
        return [fixed[op] if op in fixed else self.milp.binary() for op in range(self.program.n)]

    def _residents(self, k: int, point: int) -> dict[int, int]:
        # [Variable] X[k, d] of tensors that some op reads and that may be made before o_k.
        inputs, producer = set(self._inputs[point]), self.program.problem.producer
        columns = {}
        for t in self._read_tensors:
            made = self._ran[k][producer[t]]
            if made != self._zero:
                columns[t] = self._one if t in inputs else self.milp.binary()
        return columns

    def _reruns(self, before: list[int]) -> list[int]:
        # [Variable] Y[k, v] of recomputable ops that may have run before o_k.
        cost, until = self.program.problem.cost, self.program.until
        columns = []
        for op, ran in enumerate(before):
            possible = ran != self._zero and until[op] > op
            columns.append(self.milp.binary(cost[op] / self.cost_unit) if possible else self._zero)
        return columns

    def _at_least(self, terms: Terms, lower: float) -> None:
        """Add the row Σ terms ≥ lower, unless it always holds."""
        milp, row = self.milp, dict[int, float]()
        for column, value in terms:
            if column in (self._zero, self._one):
                lower -= value * (column == self._one)
            else:
                row[column] = row.get(column, 0.0) + value
        if sum(min(value, 0.0) for value in row.values()) < lower:
            milp.row(list(row.items()), lower, inf)

    def _precedence(self, k: int) -> None:
        # [Constraint] D[k, v] ≤ D[k, u] for the producers u of what v reads; D[k−1, v] ≤ D[k, v].
        for op, producers in enumerate(self.ancestry.producers):
            ran = self._ran[k][op]
            for producer in producers:
                self._at_least([(self._ran[k][producer], 1.0), (ran, -1.0)], 0.0)
            if k:
                self._at_least([(ran, 1.0), (self._ran[k - 1][op], -1.0)], 0.0)

    def _available(self, k: int, t: int) -> Terms:
        """Terms of: t was resident at o_k, or is recomputed in segment k."""
        rerun = self._rerun[k][self.program.problem.producer[t]]
        return [(self._resident[k].get(t, self._zero), 1.0), (rerun, 1.0)]

    def _residency(self, k: int) -> None:
        # [Constraint] residents of o_k were available, or first made, in the segment before.
        producer = self.program.problem.producer
        for t, resident in self._resident[k].items():
            made = [(self._ran[k][producer[t]], 1.0)]
            if k:
                made += [(self._ran[k - 1][producer[t]], -1.0), *self._available(k - 1, t)]
            self._at_least([*made, (resident, -1.0)], 0.0)

    def _dependencies(self, k: int) -> None:
        producer, before, now = self.program.problem.producer, self._ran[k], self._ran[k + 1]
        # [Constraint] inputs of first runs in segment k that were made before it are available.
        for op in range(self.program.n):
            if now[op] == before[op]:
                continue
            for t in self._inputs[op]:
                first = [(now[op], -1.0), (before[op], 1.0), (before[producer[t]], -1.0)]
                self._at_least([*self._available(k, t), *first], -1.0)
        # [Constraint] a recomputed op has run before, and its inputs are available.
        for op, rerun in enumerate(self._rerun[k]):
            if rerun == self._zero:
                continue
            self._at_least([(before[op], 1.0), (rerun, -1.0)], 0.0)
            for t in self._inputs[op]:
                self._at_least([*self._available(k, t), (rerun, -1.0)], 0.0)

    def _outputs(self) -> None:
        # [Constraint] outputs of the step are available in the last segment, or first made in it.
        last = len(self.points) - 1
        for t in self._inputs[self.program.n]:
            made = self._ran[last][self.program.problem.producer[t]]
            self._at_least([*self._available(last, t), (made, -1.0)], 0.0)

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
