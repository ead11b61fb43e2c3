"""
Overwriting in the time-point model: each run of an op ends a buffer of the version it overwrites.

The model of `planner.exact.model.timepoint` knows whether a tensor is resident, not how many
buffers of it exist. Version d of an overwritten tensor (see `planner.core.ssa`) ends with each run
of the op w that overwrites it. Keeping d beyond that run takes another buffer, from another run of
the op v that makes it. The columns, used only without transfers, as a prefetch would make buffers,
too:

    B[k, d]   buffers of d at the end of segment k
    E[k, v]   runs of v in segment k beyond its first run and one in each variant, Y[k, ·]

Why the optimum is a bound: take any plan that the verifier accepts, with B and E as defined. Every
buffer of d is made by a run of v and every run of w ends one. So B grows by at most the runs of v
less the runs of w. At least one buffer exists where d is resident, and no more than fit into the
arena. E is charged the cost of its runs; the rows may allow fewer runs than there are.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from coop_plan.planner.exact.model.segments import Segments


@dataclass
class Overwriting:
    """Columns of overwriting in a model, added segment by segment."""

    model: Segments
    buffers: dict[int, int] = field(default_factory=dict)
    """B of the last segment, by version."""
    _makers: list[tuple[int, list[tuple[int, int]]]] = field(init=False)
    """(v, [(w, d), ...]) per op v that makes versions d, later ops first."""

    def __post_init__(self) -> None:
        program = self.model.program
        found = defaultdict(list)
        for writer, pairs in enumerate(program.overwrites):
            for _, read in pairs:
                if program.problem.size[read]:
                    found[program.problem.producer[read]].append((writer, read))
        self._makers = sorted(found.items(), reverse=True)

    def rows(self, k: int) -> None:
        """Add columns and rows of segment k, after those of X, Y and Z."""
        model, program, milp = self.model, self.model.program, self.model.milp
        start, point = model.start(k), model.points[k]
        before, self.buffers = self.buffers, {}
        extra: dict[int, int] = {}
        for maker, pairs in self._makers:
            versions = [(w, d) for w, d in pairs if program.last_useful[d] > start]
            if maker > point or not versions:
                continue
            limits = [float(max(1, model.capacity // program.problem.size[d])) for _, d in versions]
            variants = program.choices[maker]
            if max(program.until[v] for v in variants) > max(start, maker):
                # [Variable] E[k, v]: at most what may remain and what may end in the segment.
                ending = sum(
                    1.0 + len(program.choices[w]) + (milp.upper[extra[w]] if w in extra else 0.0)
                    for w, _ in versions
                )
                cost = min(map(model.cost, variants))
                extra[maker] = milp.column(0.0, sum(limits) + ending, cost, integer=False)
            for (writer, d), limit in zip(versions, limits, strict=True):
                # [Variable] B[k, d].
                self.buffers[d] = milp.column(0.0, limit, 0.0, integer=False)
                terms = [(self.buffers[d], 1.0)]
                terms += [(before[d], -1.0)] if d in before else []
                for op, sign in (maker, -1.0), (writer, 1.0):
                    again = [model.y[k][v] for v in program.choices[op] if v in model.y[k]]
                    terms += [(c, sign) for c in again + ([extra[op]] if op in extra else [])]
                # [Constraint] B[k, d] ≤ B[k−1, d] + runs of v − runs of w.
                milp.row(terms, -inf, float((start < maker) - (start < writer <= point)))
                self._residency_row(k, writer, d)

    def _residency_row(self, k: int, writer: int, d: int) -> None:
        """[Constraint] B[k, d] ≥ X[k, d], less the buffer that ends if w is τ_k."""
        model, now = self.model, self.model.points[k] == writer
        ends = model.inplace_columns(k, d) if now else []
        if d not in model.x[k] or (now and not ends):
            return
        column = model.x[k][d]
        row = [(self.buffers[d], 1.0), *((z, 1.0) for z in ends)]
        row += [] if column is None else [(column, -1.0)]
        model.milp.row(row, float(column is None), inf)
