"""The time-point MILP with variants: memory is constrained only while K chosen ops first run.

As `planner.exact.model.timepoint`, with the operator variants of MONeT (Shah et al., ICLR 2021,
section 4.2) as columns:

    F[v]      variant v runs its op for the first time (their δ; Σ F = 1 by op)
    X[k, d]   tensor d is resident while τ_k runs
    Y[k, v]   the op of variant v is recomputed in segment k, in that variant
    Z[k, p]   in-place pair p of τ_k shares one address, which ends its input
    H[k, d]   d stays resident through the whole of segment k (only where a cut needs it)

Minimise Σ cost[v] · F[v] + Σ cost[v] · Y[k, v]. The rows are necessary conditions, so the minimum
is a lower bound for every schedule with first runs in program order, in any variants. Dominated
variants are left out (`planner.exact.model.variants`). Cuts constrain the memory of recomputes.
Without a cut, of variants with equal inputs and outputs only the cheapest that fits into the arena
alone has a column Y.
"""

import time
from bisect import bisect_left
from dataclasses import dataclass, field

from coop_plan.planner.core.errors import TimeLimitError
from coop_plan.planner.core.memory_bounds import working_sets
from coop_plan.planner.exact.model.milp import INFINITY, Milp, Terms
from coop_plan.planner.exact.model.timepoint import COST_SCALE, ROUNDING
from coop_plan.planner.exact.model.variants import VariantChoices
from coop_plan.planner.exact.params import DEFAULTS, ModelParams


@dataclass
class VariantModel:
    """The MILP for one set of time points, in rising order, the last one the end of the step.

    `capacity` is in bytes, rounded up to the alignment. Costs are divided by `cost_unit` µs. Each
    cut (position, op) allows the recompute only if the working set of its variant fits with the
    tensors resident through the segment of that position.

    With `ordered`, tensors made before the op count as resident too, as if recomputes of a segment
    ran once and in program order: a stricter model for the search, which proves nothing. Building a
    large model is abandoned at `deadline` (a `time.monotonic` value, s).

    Raises:
        TimeLimitError: the deadline passed.
    """

    choices: VariantChoices
    capacity: int
    points: list[int]
    cuts: frozenset[tuple[int, int]] = frozenset()
    ordered: bool = False
    deadline: float | None = None
    params: ModelParams = DEFAULTS.model
    milp: Milp = field(default_factory=Milp)
    f: dict[int, int] = field(default_factory=dict)
    """Variant → column of F, for ops with several variants."""
    x: list[dict[int, int | None]] = field(default_factory=list)
    """Per segment: tensor → column of X, or None where X is 1."""
    y: list[dict[int, int]] = field(default_factory=list)
    """Per segment: variant → column of Y."""
    z: list[dict[tuple[int, int], int]] = field(default_factory=list)
    """Per segment: in-place pair of τ_k → column of Z."""
    h: list[dict[int, int]] = field(default_factory=list)
    """Per segment: tensor → continuous column of H; empty without a cut."""
    memory: list[list[int]] = field(default_factory=list)
    """Per segment: memory rows of τ_k and of recomputes with cuts."""
    fixed_us: float = 0.0
    """Cost of first runs of ops with a single variant, µs."""

    def __post_init__(self) -> None:
        problem = self.choices.problem
        self.cost_unit = problem.base_cost_us / COST_SCALE or 1.0
        for op in range(self.choices.n):
            self._first(op)
        self._cut: list[dict[int, int]] = [{} for _ in self.points]
        for position, op in sorted(self.cuts):
            self._cut[bisect_left(self.points, position)][op] = position
        for k in range(len(self.points)):
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise TimeLimitError("time limit reached before any plan was found")
            self._variables(k)
            self._dependencies(k)
            self._memory(k)
            self._working_sets(k)

    def start(self, k: int) -> int:
        """The position before segment k, whose ops are start + 1 … points[k]."""
        return self.points[k - 1] if k else -1

    def _first(self, op: int) -> None:
        # [Variable] F[v]; [Constraint] Σ F[v] = 1 over the variants of an op; F[v] = 0 if v does
        # not fit.
        problem, need = self.choices.problem, working_sets(self.choices.problem).first
        variants = self.choices.of[op]
        if len(variants) == 1:
            self.fixed_us += problem.variants[variants[0]].cost_us
            return
        for v in variants:
            upper = 1.0 if need[v] <= self.capacity else 0.0
            cost = problem.variants[v].cost_us / self.cost_unit
            self.f[v] = self.milp.column(0.0, upper, cost, integer=True)
        self.milp.row([(self.f[v], 1.0) for v in variants], 1.0, 1.0)

    def _variables(self, k: int) -> None:
        choices, point, start = self.choices, self.points[k], self.start(k)
        problem, needed = choices.problem, choices.read_by_all(point)
        # [Variable] X[k, d] for every tensor made before τ_k that is useful from τ_k on.
        self.x.append(
            {
                t: None if t in needed else self.milp.binary()
                for t, last in enumerate(choices.last_useful)
                if 0 <= problem.producer[t] < point <= last and not choices.unconstrained[t]
            }
        )
        # [Variable] Y[k, v] for every recomputable op whose outputs can be of use.
        recomputed, columns = working_sets(problem).rerun, dict[int, int]()
        for op in range(point):
            seen = set[tuple[frozenset[int], frozenset[int]]]()
            for v in choices.of[op]:
                variant = problem.variants[v]
                made = frozenset(variant.outputs)
                # Outputs that every variant makes are resident already. With cuts, those of τ_{k−1}
                # may have been evicted within the segment.
                if op > start or (op == start and not self._cut[k]):
                    made -= choices.made[op]
                of_use = any(choices.last_useful[t] > max(start, op) for t in made)
                kind = choices.reads[v], frozenset(variant.outputs)
                fits = recomputed[v] <= self.capacity
                new = op in self._cut[k] or kind not in seen
                if of_use and fits and choices.until[v] > max(start, op) and new:
                    seen.add(kind)
                    columns[v] = self.milp.binary(variant.cost_us / self.cost_unit)
        self.y.append(columns)

    def made_first(self, t: int) -> tuple[int, Terms]:
        """Constant and terms of: the first run of its producer makes t."""
        choices = self.choices
        op = choices.problem.producer[t]
        if t in choices.made[op]:
            return 1, []
        makers = [v for v in choices.of[op] if t in choices.problem.variants[v].outputs]
        return 0, [(self.f[v], 1.0) for v in makers]

    def recomputed(self, k: int, t: int) -> Terms:
        """Terms of: t is recomputed in segment k."""
        choices = self.choices
        return [
            (self.y[k][v], 1.0)
            for v in choices.of[choices.problem.producer[t]]
            if v in self.y[k] and t in choices.problem.variants[v].outputs
        ]

    def available(self, k: int, t: int) -> tuple[int, Terms]:
        """Constant and terms of: t is kept, first made or recomputed in segment k."""
        choices = self.choices
        if choices.unconstrained[t]:
            constant, terms = self.made_first(t)
            if constant:
                return 1, []
            return 0, [*terms, *(term for j in range(k + 1) for term in self.recomputed(j, t))]
        later = choices.problem.producer[t] > self.start(k)
        constant, terms = self.made_first(t) if later else self.before(k, t)
        if constant and not terms:
            return 1, []
        return constant, [*terms, *self.recomputed(k, t)]

    def before(self, k: int, t: int) -> tuple[int, Terms]:
        """Constant and terms of: t, made up to τ_{k−1}, is resident when segment k begins."""
        if self.choices.problem.producer[t] == self.start(k):
            return self.made_first(t)
        if k == 0 or t not in self.x[k - 1]:
            return 0, []
        column = self.x[k - 1][t]
        evicted = [(z, -1.0) for (_, source), z in self.z[k - 1].items() if source == t]
        return (1, evicted) if column is None else (0, [(column, 1.0), *evicted])

    def _require(self, k: int, t: int, demand: int, minus: Terms) -> None:
        constant, terms = self.available(k, t)
        if not (constant and not terms):
            self.milp.row([*terms, *minus], demand - constant, INFINITY)

    def _dependencies(self, k: int) -> None:
        choices = self.choices
        # [Constraint] inputs of first runs in segment k are available: available(k, d) ≥ Σ F of the
        # variants that read d (1 if all do).
        for op in range(self.start(k) + 1, self.points[k] + 1):
            everywhere = choices.read_by_all(op)
            for t in sorted(everywhere):
                self._require(k, t, 1, [])
            if op < choices.n:
                some = frozenset().union(*(choices.reads[v] for v in choices.of[op])) - everywhere
                for t in sorted(some):
                    readers = [v for v in choices.of[op] if t in choices.reads[v]]
                    self._require(k, t, 0, [(self.f[v], -1.0) for v in readers])
        # [Constraint] inputs of recomputes are available: available(k, d) ≥ Y[k, v].
        for v, column in self.y[k].items():
            for t in sorted(choices.reads[v]):
                self._require(k, t, 0, [(column, -1.0)])
        # [Constraint] residents of τ_k are available: available(k, d) ≥ X[k, d].
        for t, resident in self.x[k].items():
            if resident is not None:
                self._require(k, t, 0, [(resident, -1.0)])

    def _memory(self, k: int) -> None:
        # [Constraint] Σ bytes of residents + outputs + workspace of τ_k ≤ capacity.
        choices, milp, point = self.choices, self.milp, self.points[k]
        problem = choices.problem
        size = problem.size
        fixed = sum(size[t] for t, column in self.x[k].items() if column is None)
        weights = {c: size[t] for t, c in self.x[k].items() if c is not None}
        pairs: dict[tuple[int, int], list[int]] = {}
        variants = choices.of[point] if point < choices.n else ()
        for v in variants:
            variant = problem.variants[v]
            need = problem.rounded(variant.workspace_bytes) + sum(size[t] for t in variant.makes)
            if len(variants) == 1:
                fixed += need
                continue
            weights[self.f[v]] = need
            # [Constraint] inputs of the chosen variant are resident: X[k, d] ≥ F[v].
            for t in sorted(choices.reads[v]):
                resident = self.x[k].get(t)
                if resident is not None:
                    milp.row([(resident, 1.0), (self.f[v], -1.0)], 0.0, INFINITY)
        for v in variants:
            for pair in problem.variants[v].inplace:
                if not problem.outside[pair[0]]:
                    pairs.setdefault(pair, []).append(v)
        z: dict[tuple[int, int], int] = {}
        for pair, users in pairs.items():
            z[pair] = milp.binary()
            weights[z[pair]] = -size[pair[0]]
            if len(users) < len(variants):
                milp.row([(z[pair], -1.0), *((self.f[v], 1.0) for v in users)], 0.0, INFINITY)
        milp.match(z.items())
        self.z.append(z)
        room = self.capacity - fixed
        unit = max(self.capacity, 1)
        terms = [(column, weight / unit) for column, weight in weights.items()]
        exact = milp.row(terms, -INFINITY, room / unit + ROUNDING)
        rounded = milp.rounded_rows(weights, room, self.params.finest_rounding)
        self.memory.append([exact, *rounded])

    def _working_sets(self, k: int) -> None:
        """Cuts: Σ bytes of H[k, d], d no input of v, + working set of v · Y[k, v] ≤ capacity."""
        choices, milp, problem = self.choices, self.milp, self.choices.problem
        self.h.append({})
        variants = [v for v in self.y[k] if problem.variants[v].op in self._cut[k]]
        for t, resident in self.x[k].items() if variants else ():
            # A tensor first made in the segment may be recomputed in it without a column Y.
            if problem.producer[t] > self.start(k) or not problem.size[t]:
                continue
            constant, terms = self.before(k, t)
            if not constant and not terms:
                continue
            # [Constraint] H ≥ kept + X − 1 − Y.
            h = self.h[k][t] = milp.column(0.0, 1.0, 0.0, integer=False)
            row = [(h, 1.0), *((c, -value) for c, value in terms), *self.recomputed(k, t)]
            if resident is not None:
                row.append((resident, -1.0))
            milp.row(row, constant + (resident is None) - 1, INFINITY)
        recomputed, unit = working_sets(problem).rerun, max(self.capacity, 1)
        for v in variants:
            terms, room = [(self.y[k][v], recomputed[v] / unit)], 1.0
            op = problem.variants[v].op
            others = (t for t in self.x[k] if t not in choices.reads[v])
            for t in others:
                maker = problem.producer[t]
                earlier = maker < op or self.start(k) < maker < self._cut[k][op]
                before = self.ordered and earlier
                column = self.x[k][t] if before else self.h[k].get(t)
                if column is not None:
                    terms.append((column, problem.size[t] / unit))
                elif before:
                    room -= problem.size[t] / unit
            self.memory[k].append(milp.row(terms, -INFINITY, room + ROUNDING))

    def bound_us(self, bound: float) -> float:
        """Cost of a whole step for a bound of the program, µs."""
        return self.fixed_us + bound * self.cost_unit

    def chosen(self, values: list[float]) -> list[int]:
        """Per op the variant of its first run in a solution."""
        return [
            max(variants, key=lambda v: values[self.f[v]]) if len(variants) > 1 else variants[0]
            for variants in self.choices.of
        ]
