"""An oracle for small graphs: the cheapest schedule by retention intervals in CP-SAT.

After Bartan et al., Moccasin, ICML 2023. Every op may run up to C times, at free times. Its outputs
are retained for an interval after each run, and the intervals fit the capacity. Recomputes have no
imposed order, so with enough copies this is exact for schedules with first runs in program order.
With `joint`, every interval also has an address (NoOverlap2D): eviction and layout are decided as
one.

A version that an op overwrites in the arena ends with the run (see `planner.core.ssa`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.milp import Outcome
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.primal.schedule_builder import ScheduleBuilder

INTEGER_COSTS = 10**9
"""Sum of all op costs, scaled to CP-SAT's integers."""


def schedule_intervals(
    program: Program, capacity: int, seconds: float, *, copies: int = 3, joint: bool = False
) -> tuple[Outcome, Schedule | None]:
    """The cheapest schedule within `capacity` bytes, without addresses, and the solver's outcome.

    `copies` is the number of runs an op may have. With `joint` a layout exists, if in-place pairs
    are used as in the model.
    """
    problem = program.problem
    unit = problem.alignment
    model = IntervalModel(
        Job(
            capacity=capacity // unit,
            joint=joint,
            copies=[1 if program.runs_once(op) else copies for op in range(program.n)],
            reads=program.reads[: program.n],
            makes=program.makes[: program.n],
            inplace_pairs=problem.inplace,
            overwritten=[[read for _, read in pairs] for pairs in program.overwrites],
            step_outputs=program.read_by_all[program.n],
            until=program.until[: program.n],
            cost=problem.cost,
            workspace=[need // unit for need in problem.workspace],
            size=[size // unit for size in problem.size],
            rerun_outputs=[[t for t in made if problem.outside[t]] for made in problem.op_outputs],
        )
    )
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return Outcome.INFEASIBLE, None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Outcome.UNKNOWN, None
    outcome = Outcome.OPTIMAL if status == cp_model.OPTIMAL else Outcome.FEASIBLE
    return outcome, in_order(program, model.read(solver))


def in_order(program: Program, ops: list[int]) -> Schedule:
    """The schedule that runs `ops` in this order and evicts each tensor after its last read."""
    kept: list[set[int]] = []
    needed = set(program.read_by_all[program.n])
    for op in reversed(ops):
        kept.append(set(needed))
        needed -= set(program.makes[op])
        needed |= set(program.reads[op])
    built = ScheduleBuilder(program)
    position = -1
    for op, after in zip(ops, reversed(kept), strict=True):
        position = max(position, op)
        built.run(op, position)
        built.retain(after)
    return built.schedule()


@dataclass(frozen=True)
class Job:
    """A program's numbers for the model.

    By op: `copies` (maximum runs), the tensors it `reads` and `makes`, `inplace_pairs` (output,
    input), the inputs that its runs end (`overwritten`), `until` (the last position before which it
    can be recomputed), `cost` (µs), `workspace`, and `rerun_outputs`, which only a recompute makes
    in the arena. `size` is by tensor; `step_outputs` are read at the end of the step. Sizes and
    capacity are in one unit. With `joint` every interval has an address, too.
    """

    capacity: int
    joint: bool
    copies: list[int]
    reads: Sequence[Sequence[int]]
    makes: Sequence[Sequence[int]]
    inplace_pairs: Sequence[Sequence[tuple[int, int]]]
    overwritten: Sequence[Sequence[int]]
    step_outputs: Sequence[int]
    until: list[int]
    cost: Sequence[float]
    workspace: list[int]
    size: list[int]
    rerun_outputs: list[list[int]]


class IntervalModel:
    """CP-SAT model of retention intervals; all sizes are in units of the alignment.

    Copy c of op v runs at start[v, c] if active[v, c]; copy 0 is the first run. Its output d is
    retained at offset[d, c] until end[d, c] (exclusive). Minimise Σ cost[v] · active[v, c] over c >
    0.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = cp_model.CpModel()
        self.n = len(job.copies)
        self.horizon = sum(job.copies)
        self.start: dict[tuple[int, int], Any] = {}
        self.active: dict[tuple[int, int], Any] = {}
        self.end: dict[tuple[int, int], Any] = {}
        self.offset: dict[tuple[int, int], Any] = {}
        self.boxes: list[tuple[Any, Any, int]] = []  # (interval in time, offset, size)
        self.producer = {d: v for v, made in enumerate(job.makes) for d in made}
        self.copies = [(v, c) for v in range(self.n) for c in range(job.copies[v])]
        for v, c in self.copies:
            self._run(v, c)
        self._order()
        for v, c in self.copies:
            self._inputs(v, c)
        for d in job.step_outputs:
            self._cover(d, self.horizon, None)
        self._memory()
        scale = INTEGER_COSTS / (sum(job.cost) or 1.0)
        self.model.minimize(
            sum(round(job.cost[v] * scale) * self.active[v, c] for v, c in self.copies if c)
        )

    def _run(self, v: int, c: int) -> None:
        model, job = self.model, self.job
        self.active[v, c] = model.new_bool_var("") if c else model.new_constant(1)
        self.start[v, c] = start = model.new_int_var(0, self.horizon - 1, "")
        for d in job.makes[v]:
            size = job.size[d]
            self.end[d, c] = end = model.new_int_var(1, self.horizon, "")
            model.add(end > start)
            length = model.new_int_var(1, self.horizon, "")
            interval = model.new_optional_interval_var(start, length, end, self.active[v, c], "")
            self.offset[d, c] = self._box(interval, size)
        # Live only during the run: workspace, and recomputed outputs whose first copy left.
        moment = model.new_optional_fixed_size_interval_var(start, 1, self.active[v, c], "")
        self._box(moment, job.workspace[v])
        for d in job.rerun_outputs[v] if c else ():
            self.offset[d, c] = self._box(moment, job.size[d])

    def _box(self, interval: Any, size: int) -> Any:
        offset = self.model.new_int_var(0, max(0, self.job.capacity - size), "")
        self.boxes.append((interval, offset, size))
        return offset

    def _order(self) -> None:
        model = self.model
        # [Constraint] first runs in program order; a recompute after the previous copy, whose
        # outputs end before it, as the newer copy serves as well; one op at a time.
        for v, w in pairwise(range(self.n)):
            model.add(self.start[v, 0] < self.start[w, 0])
        for v, c in self.copies:
            if c:
                model.add(self.start[v, c] > self.start[v, c - 1])
                model.add_implication(self.active[v, c], self.active[v, c - 1])
                for d in self.job.makes[v]:
                    ended = self.end[d, c - 1] <= self.start[v, c]
                    model.add(ended).only_enforce_if(self.active[v, c])
                if self.job.until[v] < self.n:
                    before = self.start[self.job.until[v], 0]
                    model.add(self.start[v, c] < before).only_enforce_if(self.active[v, c])
        model.add_no_overlap(
            model.new_optional_fixed_size_interval_var(self.start[key], 1, self.active[key], "")
            for key in self.copies
        )

    def _inputs(self, v: int, c: int) -> None:
        model, job = self.model, self.job
        start, active = self.start[v, c], self.active[v, c]
        shares: dict[tuple[int, int], Any] = {}
        for out, source in job.inplace_pairs[v]:
            if (out, c) in self.offset:
                shares[out, source] = model.new_bool_var("")
                model.add_implication(shares[out, source], active)
        for side in (0, 1):
            for d in {pair[side] for pair in shares}:
                model.add_at_most_one(z for pair, z in shares.items() if pair[side] == d)
        for d in job.reads[v]:
            mine = {pair: z for pair, z in shares.items() if pair[1] == d}
            links = self._cover(d, start, active, list(mine.values()))
            if d in job.overwritten[v]:
                for k, link in links.items():
                    model.add(self.end[d, k] <= start + 1).only_enforce_if(link)
                for z in mine.values():
                    model.add(z == active)
            for (out, source), z in mine.items():
                self._share(v, c, out, source, z, links)

    def _cover(self, d: int, time: Any, active: Any, shared: Any = ()) -> dict[int, Any]:
        """[Constraint] one copy of d is retained over `time`; if shared, not its last instant."""
        model = self.model
        links = {}
        for p, c in self.copies:
            if p != self.producer[d]:
                continue
            link = links[c] = model.new_bool_var("")
            model.add_implication(link, self.active[p, c])
            model.add(self.start[p, c] < time).only_enforce_if(link)
            taken = sum(shared) if shared else 0
            lasts = self.end[d, c] >= (time if active is None else time + 1 - taken)
            model.add(lasts).only_enforce_if(link)
        if active is None:
            model.add_exactly_one(links.values())
        else:
            model.add(sum(links.values()) == 1).only_enforce_if(active)
        return links

    def _share(self, v: int, c: int, out: int, source: int, z: Any, links: dict[int, Any]) -> None:
        """[Constraint] the output takes the input's offset; the rest of the input stays taken."""
        model, size = self.model, self.job.size
        start = self.start[v, c]
        rest = size[source] - size[out]
        filler = None
        if rest:
            filler = self._box(model.new_optional_fixed_size_interval_var(start, 1, z, ""), rest)
        for k, link in links.items():
            both = [link, z]
            model.add(self.end[source, k] == start).only_enforce_if(both)
            model.add(self.offset[out, c] == self.offset[source, k]).only_enforce_if(both)
            if filler is not None:
                model.add(filler == self.offset[out, c] + size[out]).only_enforce_if(both)

    def _memory(self) -> None:
        # [Constraint] Σ sizes ≤ capacity at every time; if joint, boxes overlap nowhere.
        boxes = [box for box in self.boxes if box[2]]
        intervals, sizes = [box[0] for box in boxes], [box[2] for box in boxes]
        self.model.add_cumulative(intervals, sizes, self.job.capacity)
        if self.job.joint:
            fixed = self.model.new_fixed_size_interval_var
            addresses = [fixed(offset, size, "") for _, offset, size in boxes]
            self.model.add_no_overlap_2d(intervals, addresses)

    def read(self, solver: cp_model.CpSolver) -> list[int]:
        """The ops in the order of their runs."""
        runs = [key for key in self.copies if solver.value(self.active[key])]
        return [v for v, _ in sorted(runs, key=lambda key: solver.value(self.start[key]))]
