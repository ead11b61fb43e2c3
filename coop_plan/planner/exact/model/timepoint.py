"""The time-point MILP: memory is constrained only while K chosen ops run for the first time.

Time points τ_1 < … < τ_K are program positions, the last one the end of the step. Segment k spans
from after the first run of τ_{k−1} up to and including that of τ_k. The variables, in the symbols
of Jain et al., Checkmate, MLSys 2020, section 4:

    X[k, d]   tensor d is resident while τ_k runs (their S, at time points only)
    Y[k, v]   variant v is recomputed in segment k (their R below the diagonal)
    Z[k, p]   in-place pair p of τ_k shares one address, which ends its input
    H[k, d]   d stays resident through the whole of segment k (only where a cut needs it)
    F[v]      variant v runs its op for the first time: δ of Shah et al., MONeT, ICLR 2021, section
              4.2 (only for ops of several variants, Σ F = 1 by op)

Minimise Σ cost[v] · F[v] + Σ cost[v] · Y[k, v]. `planner.exact.model.transfers` adds the columns of
transfers; without a host link, `planner.exact.model.overwriting` adds those of overwritten tensors.

The rows are necessary conditions, so the minimum is a lower bound for every schedule that the
verifier accepts, with first runs in program order and in the variants of the program. Neither the
order nor the number of recomputes within a segment is modelled. Without a cut, of variants with
equal inputs and outputs only the cheapest that fits into the arena alone has a column Y. A schedule
is read out of a solution (`planner.exact.primal.readout`); if it overflows, time points and cuts
refine the model.
"""

import time
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, field
from math import fsum, inf

from coop_plan.planner.core.errors import TimeLimitError
from coop_plan.planner.core.memory_bounds import working_sets
from coop_plan.planner.core.problem import Pair
from coop_plan.planner.exact.model.milp import ROUNDING, Milp, Terms
from coop_plan.planner.exact.model.overwriting import Overwriting
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.transfers import Transfers

COST_SCALE = 1e4
"""Base cost in a model's units, chosen far above solver tolerances."""


@dataclass
class TimePointModel:
    """The MILP for one set of time points.

    `capacity` is in bytes, a multiple of the alignment; `points` are positions in rising order, the
    last one `program.n`. Each cut (position, op) allows the recompute only if its working set fits
    with the tensors resident through the segment of that position. Costs are divided by
    `cost_unit` µs, so that the base cost is `COST_SCALE`.

    With `ordered`, tensors made before the op of a cut count as resident too, as if recomputes of a
    segment ran once and in program order: a stricter model for the search, which proves nothing.
    Building a large model is abandoned at `deadline` (a `time.monotonic` value, s).

    Raises:
        TimeLimitError: the deadline passed.
    """

    program: Program
    capacity: int
    points: list[int]
    cuts: Collection[tuple[int, int]] = ()
    ordered: bool = False
    deadline: float | None = None
    milp: Milp = field(default_factory=Milp)
    f: dict[int, int] = field(default_factory=dict)
    """Variant → column of F, for ops with several variants."""
    x: list[dict[int, int | None]] = field(default_factory=list)
    """Per segment: tensor → column of X, or None where X is 1."""
    y: list[dict[int, int]] = field(default_factory=list)
    """Per segment: variant → column of Y."""
    z: list[dict[Pair, int]] = field(default_factory=list)
    """Per segment: in-place pair of τ_k → column of Z."""
    h: list[dict[int, int]] = field(default_factory=list)
    """Per segment: tensor → continuous column of H; empty without a cut."""
    memory: list[list[int]] = field(default_factory=list)
    """Per segment: memory rows of τ_k, the exact one first."""
    cut_rows: list[list[int]] = field(default_factory=list)
    """Per segment: memory rows of recomputes with cuts."""
    transfers: Transfers | None = None
    """Columns of transfers; None without a host link."""
    fixed_us: float = field(init=False)
    """Cost of first runs of ops with a single variant, µs."""

    def __post_init__(self) -> None:
        program = self.program
        self.cost_unit = program.problem.base_cost_us / COST_SCALE or 1.0
        self._first_runs()
        self._cut: list[dict[int, int]] = [{} for _ in self.points]
        for position, op in sorted(self.cuts):
            self._cut[bisect_left(self.points, position)][op] = position
        if program.host_link is not None:
            self.transfers = Transfers(self)
        overwriting = Overwriting(self) if self.transfers is None else None
        for k in range(len(self.points)):
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise TimeLimitError("time limit reached before any plan was found")
            self._variables(k)
            self._dependencies(k)
            self._memory(k)
            if overwriting is not None:
                overwriting.rows(k)
            self._working_sets(k)
        if self.transfers is not None:
            self.transfers.finish()

    def start(self, k: int) -> int:
        """The position before segment k, whose ops are start + 1 … points[k]."""
        return self.points[k - 1] if k else -1

    def bound_us(self, bound: float) -> float:
        """Cost of a whole step for a cost in the model's units, µs."""
        return self.fixed_us + bound * self.cost_unit

    def chosen(self, values: list[float]) -> list[int]:
        """Per op the variant of its first run in a solution."""
        return [
            max(variants, key=lambda v: values[self.f[v]]) if len(variants) > 1 else variants[0]
            for variants in self.program.choices
        ]

    def cost(self, v: int) -> float:
        """Cost of a variant, in the model's units."""
        return self.program.problem.variants[v].cost_us / self.cost_unit

    def _first_runs(self) -> None:
        # [Variable] F[v]; [Constraint] Σ F[v] = 1 over the variants of an op; F[v] = 0 if v does
        # not fit.
        problem, need = self.program.problem, working_sets(self.program.problem).first
        alone = [v[0] for v in self.program.choices if len(v) == 1]
        self.fixed_us = fsum(problem.variants[v].cost_us for v in alone)
        for variants in self.program.choices:
            if len(variants) > 1:
                for v in variants:
                    upper = 1.0 if need[v] <= self.capacity else 0.0
                    self.f[v] = self.milp.column(0.0, upper, self.cost(v), integer=True)
                self.milp.row([(self.f[v], 1.0) for v in variants], 1.0, 1.0)

    def _variables(self, k: int) -> None:
        program, point, start = self.program, self.points[k], self.start(k)
        producer, inputs = program.problem.producer, set(program.read_by_all[point])
        # [Variable] X[k, d] for every tensor made before τ_k that is useful from τ_k on.
        self.x.append(
            {
                t: None if t in inputs else self.milp.binary()
                for t, last in enumerate(program.last_useful)
                if 0 <= producer[t] < point <= last and not program.unconstrained[t]
            }
        )
        # [Variable] Y[k, v] for every recomputable op whose outputs can be of use.
        need, columns = working_sets(program.problem).rerun, dict[int, int]()
        seen = set[tuple[tuple[int, ...], tuple[int, ...]]]()
        for op, variants in enumerate(program.choices[:point]):
            # Outputs that every variant makes are resident already. With cuts, those of τ_{k−1} may
            # have been evicted within the segment.
            again = op < start or (op == start and self._cut[k])
            until = program.useful if again else program.optional
            for v in variants:
                if min(until[v], program.until[v]) <= max(start, op) or need[v] > self.capacity:
                    continue
                kind = program.reads[v], program.makes[v]
                if op in self._cut[k] or kind not in seen:
                    seen.add(kind)
                    columns[v] = self.milp.binary(self.cost(v))
        self.y.append(columns)
        if self.transfers is not None:
            self.transfers.variables(k)

    def first_run_inputs(self, k: int) -> list[int]:
        """Tensors read by first runs of segment k in all variants; the step's end counts as one."""
        positions = range(self.start(k) + 1, self.points[k] + 1)
        return sorted({t for at in positions for t in self.program.read_by_all[at]})

    def made_first(self, t: int) -> tuple[int, Terms]:
        """Constant and terms of: the first run of its producer makes t."""
        op = self.program.problem.producer[t]
        if t in self.program.made[op]:
            return 1, []
        makers = (v for v in self.program.choices[op] if t in self.program.makes[v])
        return 0, [(self.f[v], 1.0) for v in makers]

    def kept(self, k: int, t: int) -> tuple[int, Terms]:
        """Constant and terms of: t is resident when segment k begins, or first made in it."""
        if self.program.problem.producer[t] >= self.start(k):
            return self.made_first(t)
        if self.program.unconstrained[t]:
            constant, terms = self.made_first(t)
            earlier = () if constant else range(k)
            return constant, [*terms, *(term for j in earlier for term in self.recomputed(j, t))]
        if t not in self.x[k - 1]:
            return 0, []
        column = self.x[k - 1][t]
        evicted = [(z, -1.0) for z in self.inplace_columns(k - 1, t)]
        return (1, evicted) if column is None else (0, [(column, 1.0), *evicted])

    def inplace_columns(self, k: int, source: int) -> list[int]:
        """Columns Z[k, ·] of pairs whose input is `source`."""
        return [z for pair, z in self.z[k].items() if pair[1] == source]

    def available(self, k: int, t: int) -> tuple[int, Terms]:
        """Constant and terms of: t is kept, recomputed or prefetched in segment k."""
        constant, terms = self.kept(k, t)
        return constant, [*terms, *self.obtained(k, t)]

    def recomputed(self, k: int, t: int) -> Terms:
        """Terms of: t is recomputed in segment k."""
        y, makes = self.y[k], self.program.makes
        variants = self.program.choices[self.program.problem.producer[t]]
        return [(y[v], 1.0) for v in variants if v in y and t in makes[v]]

    def obtained(self, k: int, t: int) -> Terms:
        """Terms of: t is recomputed or prefetched in segment k."""
        awaited = [] if self.transfers is None else self.transfers.awaited(k, t)
        return [*self.recomputed(k, t), *awaited]

    def _require(self, k: int, t: int, demand: int, minus: Terms) -> None:
        constant, terms = self.available(k, t)
        if not constant or terms:
            self.milp.row([*terms, *minus], demand - constant, inf)

    def _dependencies(self, k: int) -> None:
        program = self.program
        # [Constraint] inputs of first runs in segment k are available: available(k, d) ≥ 1, or
        # ≥ Σ F of the variants that read d.
        everywhere = self.first_run_inputs(k)
        for t in everywhere:
            self._require(k, t, 1, [])
        for variants in program.choices[self.start(k) + 1 : self.points[k] + 1]:
            if len(variants) > 1:
                some = {t for v in variants for t in program.reads[v]}.difference(everywhere)
                for t in sorted(some):
                    readers = [(self.f[v], -1.0) for v in variants if t in program.reads[v]]
                    self._require(k, t, 0, readers)
        # [Constraint] inputs of recomputes are available: available(k, d) ≥ Y[k, v].
        for v, column in self.y[k].items():
            for t in program.reads[v]:
                self._require(k, t, 0, [(column, -1.0)])
        # [Constraint] residents of τ_k are available: available(k, d) ≥ X[k, d].
        for t, resident in self.x[k].items():
            if resident is not None:
                self._require(k, t, 0, [(resident, -1.0)])
        if self.transfers is not None:
            self.transfers.rows(k)

    def _memory(self, k: int) -> None:
        # [Constraint] Σ bytes of residents + outputs + workspace of τ_k ≤ capacity.
        program, milp, point = self.program, self.milp, self.points[k]
        size = program.problem.size
        variants = program.choices[point] if point < program.n else ()
        fixed = sum(size[t] for t, column in self.x[k].items() if column is None)
        weights = {c: size[t] for t, c in self.x[k].items() if c is not None and size[t]}
        if self.transfers is not None:
            weights |= {column: size[t] for t, column in self.transfers.arriving[k].items()}
        users: dict[Pair, list[int]] = {}
        for v in variants:
            for pair in program.inplace_pairs(v):
                users.setdefault(pair, []).append(v)
            if len(variants) == 1:
                fixed += program.output_bytes(v)
                continue
            weights[self.f[v]] = program.output_bytes(v)
            # [Constraint] inputs of the chosen variant are resident: X[k, d] ≥ F[v].
            for t in program.reads[v]:
                resident = self.x[k].get(t)
                if resident is not None:
                    milp.row([(resident, 1.0), (self.f[v], -1.0)], 0.0, inf)
        z: dict[Pair, int] = {}
        for (out, source), users_of_pair in users.items():
            everywhere = len(users_of_pair) == len(variants)
            rivals = [pair for pair in users if out in pair or source in pair]
            if everywhere and program.last_useful[source] <= point and len(rivals) == 1:
                fixed -= size[out]
                continue
            column = z[out, source] = milp.binary()
            weights[column] = -size[out]
            if not everywhere:
                milp.row([(column, -1.0), *((self.f[v], 1.0) for v in users_of_pair)], 0.0, inf)
        milp.match(z.items())
        self.z.append(z)
        unit = max(1, self.capacity)
        terms = [(column, weight / unit) for column, weight in weights.items()]
        room = self.capacity - fixed
        exact = milp.row(terms, -inf, room / unit + ROUNDING)
        rounded = milp.rounded_rows(weights, room, finest=40)
        self.memory.append([exact, *rounded])

    def _working_sets(self, k: int) -> None:
        """Cuts: Σ bytes of H[k, d], d no input of v, + working set of v · Y[k, v] ≤ capacity."""
        program, milp = self.program, self.milp
        problem, start = program.problem, self.start(k)
        self.h.append({})
        variants = [v for v in self.y[k] if problem.variants[v].op in self._cut[k]]
        for t, resident in self.x[k].items() if variants else ():
            # A tensor first made in the segment may be recomputed in it without a column Y.
            if problem.producer[t] > start or not problem.size[t]:
                continue
            constant, terms = self.kept(k, t)
            if not constant and not terms:
                continue
            # [Constraint] H ≥ kept + X − 1 − Y − L.
            h = self.h[k][t] = milp.column(0.0, 1.0, 0.0, integer=False)
            row = [(h, 1.0), *((c, -value) for c, value in terms), *self.obtained(k, t)]
            if resident is not None:
                row.append((resident, -1.0))
            milp.row(row, constant + (resident is None) - 1, inf)
        need, unit = working_sets(problem).rerun, max(self.capacity, 1)
        self.cut_rows.append([])
        for v in variants:
            terms, room = [(self.y[k][v], need[v] / unit)], 1.0
            op = problem.variants[v].op
            for t, resident in self.x[k].items():
                if t in program.reads[v]:
                    continue
                maker = problem.producer[t]
                before = self.ordered and (maker < op or start < maker < self._cut[k][op])
                column = resident if before else self.h[k].get(t)
                if column is not None:
                    terms.append((column, problem.size[t] / unit))
                elif before:
                    room -= problem.size[t] / unit
            self.cut_rows[k].append(milp.row(terms, -inf, room + ROUNDING))
