"""The time-point MILP: memory is constrained only while K chosen ops run for the first time.

Time points τ_1 < … < τ_K are program positions, the last one the end of the step. Segment k spans
from after the first run of τ_{k−1} up to and including that of τ_k. The variables, in the symbols
of Jain et al., Checkmate, MLSys 2020, section 4:

    X[k, d]   tensor d is resident while τ_k runs (their S, at time points only)
    Y[k, v]   op v is recomputed in segment k (their R below the diagonal)
    Z[k, p]   in-place pair p of τ_k shares one address, which ends its input
    H[k, d]   d stays resident through the whole of segment k (only where a cut needs it)

Minimise Σ cost[v] · Y[k, v]. `planner.exact.model.transfers` adds the columns of transfers; without
a host link, `planner.exact.model.overwriting` adds those of overwritten tensors.

The rows are necessary conditions, so the minimum is a lower bound for every schedule that the
verifier accepts, with first runs in program order and in default variants. Neither the order nor
the number of recomputes within a segment is modelled. A schedule is read out of a solution
(`planner.exact.primal.readout`); if it overflows, time points and cuts refine the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from coop_plan.planner.exact.model.milp import INFINITY, Milp, Terms
from coop_plan.planner.exact.model.overwriting import Overwriting
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.transfers import Transfers
from coop_plan.planner.exact.params import DEFAULTS, ModelParams

COST_SCALE = 1e4
"""Base cost in a model's units, chosen far above solver tolerances."""

ROUNDING = 1e-9
"""Relative slack of memory rows, so that scaling by the capacity cuts off no solution."""


@dataclass
class TimePointModel:
    """The MILP for one set of time points.

    `capacity` is in bytes, a multiple of the alignment; `points` are positions in rising order, the
    last one `program.n`. Each cut (position, op) allows the recompute only if its working set fits
    with the tensors resident through the segment of that position. Costs are divided by
    `cost_unit` µs, so that the base cost is `COST_SCALE`.
    """

    program: Program
    capacity: int
    points: list[int]
    cuts: Iterable[tuple[int, int]]
    params: ModelParams = DEFAULTS.model
    cost_unit: float = field(init=False)
    milp: Milp = field(default_factory=Milp)
    x: list[dict[int, int | None]] = field(default_factory=list)
    """Per segment: tensor → column of X, or None where X is 1."""
    y: list[dict[int, int]] = field(default_factory=list)
    """Per segment: op → column of Y."""
    z: list[dict[int, int]] = field(default_factory=list)
    """Per segment: index of a pair of τ_k → column of Z."""
    memory: list[list[int]] = field(default_factory=list)
    """Per segment: memory rows of τ_k."""
    transfers: Transfers | None = None
    """Columns of transfers; None without a host link."""

    def __post_init__(self) -> None:
        self.cost_unit = self.program.problem.base_cost_us / COST_SCALE or 1.0
        if self.program.host_link is not None:
            self.transfers = Transfers(self)
        overwriting = Overwriting(self) if self.transfers is None else None
        for k in range(len(self.points)):
            self._variables(k)
            self._dependencies(k)
            self._memory(k)
            if overwriting is not None:
                overwriting.rows(k)
        if self.transfers is not None:
            self.transfers.finish()
        cut_ops: dict[int, list[int]] = {}
        for position, op in sorted(self.cuts):
            k = next(k for k, point in enumerate(self.points) if point >= position)
            if op in self.y[k] and op not in cut_ops.setdefault(k, []):
                cut_ops[k].append(op)
        for k, ops in cut_ops.items():
            self._working_sets(k, ops)

    def start(self, k: int) -> int:
        """The position before segment k, whose ops are start + 1 … points[k]."""
        return self.points[k - 1] if k else -1

    def _variables(self, k: int) -> None:
        program, point, start = self.program, self.points[k], self.start(k)
        inputs = set(program.reads[point])
        producer = program.problem.producer
        # [Variable] X[k, d] for every tensor made before τ_k that is useful from τ_k on.
        self.x.append(
            {
                t: None if t in inputs else self.milp.binary()
                for t, last in enumerate(program.last_useful)
                if 0 <= producer[t] < point <= last and self._takes_memory(t)
            }
        )
        # [Variable] Y[k, v] for every recomputable op first run before τ_{k−1}.
        cost = program.problem.cost
        self.y.append(
            {
                v: self.milp.binary(cost[v] / self.cost_unit)
                for v in range(max(start, 0))
                if program.until[v] > max(start, v)
                and any(program.last_useful[t] > start for t in program.makes[v])
            }
        )
        if self.transfers is not None:
            self.transfers.variables(k)

    def _takes_memory(self, t: int) -> bool:
        problem = self.program.problem
        return not (self.program.unconstrained[t] or problem.resident[t] or problem.outside[t])

    def first_run_inputs(self, k: int) -> list[int]:
        """Tensors read by first runs of segment k, including the end of the step."""
        ops = range(self.start(k) + 1, self.points[k] + 1)
        return sorted({t for op in ops for t in self.program.reads[op]})

    def kept(self, k: int, t: int) -> tuple[int, Terms]:
        """Constant and terms of: t is resident when segment k begins, or first made in it."""
        if self.program.problem.producer[t] >= self.start(k) or self.program.unconstrained[t]:
            return 1, []
        if t not in self.x[k - 1]:
            return 0, []
        column = self.x[k - 1][t]
        evicted = [(z, -1.0) for z in self.inplace_columns(k - 1, t)]
        return (1, evicted) if column is None else (0, [(column, 1.0), *evicted])

    def inplace_columns(self, k: int, source: int) -> list[int]:
        """Columns Z[k, ·] of pairs whose input is `source`."""
        pairs = self.program.inplace_pairs[self.points[k]]
        return [z for number, z in self.z[k].items() if pairs[number][1] == source]

    def available(self, k: int, t: int) -> tuple[int, Terms]:
        """Constant and terms of: t is kept, recomputed or prefetched in segment k."""
        constant, terms = self.kept(k, t)
        terms = [*terms, *self.recomputed(k, t)]
        if self.transfers is not None:
            terms += self.transfers.awaited(k, t)
        return constant, terms

    def recomputed(self, k: int, t: int) -> Terms:
        """Terms of: t is recomputed in segment k."""
        column = self.y[k].get(self.program.problem.producer[t])
        return [] if column is None else [(column, 1.0)]

    def _dependencies(self, k: int) -> None:
        program, milp = self.program, self.milp

        def require(t: int, demand: int, column: int | None) -> None:
            constant, terms = self.available(k, t)
            if constant and not terms:
                return
            if column is not None:
                terms = [*terms, (column, -1.0)]
            if constant < demand or len(terms) > 1 or column is None:
                milp.row(terms, demand - constant, INFINITY)

        # [Constraint] inputs of first runs in segment k are available: available(k, d) ≥ 1.
        for t in self.first_run_inputs(k):
            require(t, 1, None)
        # [Constraint] inputs of recomputes are available: available(k, d) ≥ Y[k, v].
        for v, column in self.y[k].items():
            for t in program.reads[v]:
                require(t, 0, column)
        # [Constraint] residents of τ_k are available: available(k, d) ≥ X[k, d].
        for t, resident in self.x[k].items():
            if resident is not None:
                require(t, 0, resident)
        if self.transfers is not None:
            self.transfers.rows(k)

    def _memory(self, k: int) -> None:
        # [Constraint] Σ bytes of residents + outputs + workspace of τ_k ≤ capacity.
        program, milp = self.program, self.milp
        point, size = self.points[k], self.program.problem.size
        fixed = program.working_set(point)
        weights = {
            column: size[t] for t, column in self.x[k].items() if column is not None and size[t]
        }
        if self.transfers is not None:
            weights |= {column: size[t] for t, column in self.transfers.arriving[k].items()}
        z: dict[int, int] = {}
        pairs = program.inplace_pairs[point]
        for number, (out, source) in enumerate(pairs):
            if program.last_useful[source] <= point:
                rivals = [p for p in pairs if out in p or source in p]
                if len(rivals) == 1:
                    fixed -= size[out]
                    continue
            z[number] = milp.binary()
            weights[z[number]] = -size[out]
        milp.match((pairs[number], column) for number, column in z.items())
        self.z.append(z)
        unit = max(1, self.capacity)
        terms = [(column, weight / unit) for column, weight in weights.items()]
        room = self.capacity - fixed
        exact = milp.row(terms, -INFINITY, room / unit + ROUNDING)
        rounded = milp.rounded_rows(weights, room, self.params.finest_rounding)
        self.memory.append([exact, *rounded])

    def _working_sets(self, k: int, ops: list[int]) -> None:
        """Cuts of segment k: Σ bytes of H[k, d], d no input of v, + working set of v · Y[k, v] ≤
        capacity.
        """
        program, milp = self.program, self.milp
        size, producer = program.problem.size, program.problem.producer
        throughout: list[tuple[int, int]] = []
        for t, column in self.x[k].items():
            constant, terms = self.kept(k, t)
            # A tensor made after τ_{k−1} may be recomputed in the segment without a column Y.
            if producer[t] >= self.start(k) or not size[t] or (not constant and not terms):
                continue
            # [Constraint] H ≥ kept + X − 1 − Y − L.
            h = milp.column(0.0, 1.0, 0.0, integer=False)
            recomputed = self.y[k].get(producer[t])
            row = [(h, 1.0), *((c, -value) for c, value in terms)]
            if column is not None:
                row.append((column, -1.0))
            if recomputed is not None:
                row.append((recomputed, 1.0))
            if self.transfers is not None:
                row += self.transfers.awaited(k, t)
            milp.row(row, constant + (column is None) - 1, INFINITY)
            throughout.append((t, h))
        for v in ops:
            need = program.rerun_working_set(v)
            inputs = set(program.reads[v])
            unit = max(1, self.capacity)
            terms = [(h, size[t] / unit) for t, h in throughout if t not in inputs]
            limit = self.capacity / unit + ROUNDING
            milp.row([*terms, (self.y[k][v], need / unit)], -INFINITY, limit)
