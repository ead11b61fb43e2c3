"""
Overwriting in the time-point model: a run of an op uses up the version that it overwrites.

The model of `planner.exact.model.timepoint` says of a tensor whether it is there, not how often.
Version d of an overwritten tensor (see `planner.core.ssa`) ends with each run of the op w that
overwrites it. To keep it beyond that takes another buffer of it, from another run of the op v that
makes it. The columns, where nothing can be moved to the host, which would make buffers as well:

    B[k, d]   buffers of d at the end of segment k
    E[k, v]   runs of v in segment k of which neither Y nor its being a first run tells

Why the optimum is a bound: take any plan that the verifier accepts, with B and E as they say. Every
buffer of d is made by a run of v and every run of w ends one, so B grows by no more than the runs
of v less those of w. There is at least one where d is resident, and no more than fit into the
arena. E costs what the runs cost; it may be less than there are, as far as the rows allow.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coop_plan.planner.exact.model.milp import INFINITY

if TYPE_CHECKING:
    from coop_plan.planner.exact.model.timepoint import TimePointModel


@dataclass
class Overwriting:
    """The columns of overwriting in a model, added segment by segment."""

    model: "TimePointModel"
    buffers: dict[int, int] = field(default_factory=dict)
    """B of the last segment, by version."""
    _makers: list[tuple[int, list[tuple[int, int]]]] = field(init=False)
    """The ops v that make versions d, later ones first, and the (w, d) of each."""

    def __post_init__(self) -> None:
        program = self.model.program
        found = defaultdict(list)
        for writer, pairs in enumerate(program.overwrites):
            for _, read in pairs:
                if program.problem.size[read]:
                    found[program.problem.producer[read]].append((writer, read))
        self._makers = sorted(found.items(), reverse=True)

    def rows(self, k: int) -> None:
        """The columns and rows of segment k; those of X, Y and Z are there already."""
        model, program, milp = self.model, self.model.program, self.model.milp
        start, point = model.start(k), model.points[k]
        before, self.buffers = self.buffers, {}
        extra_runs: dict[int, int] = {}
        for maker, versions in self._makers:
            live_versions = [(w, d) for w, d in versions if program.last_useful[d] > start]
            if maker > point or not live_versions:
                continue
            max_buffers = [
                float(max(1, model.capacity // program.problem.size[d])) for _, d in live_versions
            ]
            if program.until[maker] > max(start, maker):
                # [Variable] E[k, v]: what stays of it and what ends of it are no more than that.
                ending = sum(
                    2.0 + milp.upper[extra_runs[w]] if w in extra_runs else 2.0
                    for w, _ in live_versions
                )
                cost = program.problem.cost[maker] / model.cost_unit
                extra_runs[maker] = milp.column(0.0, sum(max_buffers) + ending, cost, integer=False)
            for (writer, d), room in zip(live_versions, max_buffers, strict=True):
                # [Variable] B[k, d].
                self.buffers[d] = milp.column(0.0, room, 0.0, integer=False)
                terms = [(self.buffers[d], 1.0)]
                terms += [(before[d], -1.0)] if d in before else []
                for op, sign in (maker, -1.0), (writer, 1.0):
                    terms += [(runs[op], sign) for runs in (model.y[k], extra_runs) if op in runs]
                # [Constraint] B[k, d] ≤ B[k−1, d] + runs of v − runs of w.
                milp.row(terms, -INFINITY, float((start < maker) - (start < writer <= point)))
                self._residency_row(k, writer, d)

    def _residency_row(self, k: int, writer: int, d: int) -> None:
        """[Constraint] B[k, d] ≥ X[k, d], less the one that ends if w is τ_k."""
        model, now = self.model, self.model.points[k] == writer
        ends = model.inplace_columns(k, d) if now else []
        if d not in model.x[k] or (now and not ends):
            return
        column = model.x[k][d]
        row = [(self.buffers[d], 1.0), *((z, 1.0) for z in ends)]
        row += [] if column is None else [(column, -1.0)]
        model.milp.row(row, float(column is None), INFINITY)
