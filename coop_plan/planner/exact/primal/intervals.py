"""Retention intervals in CP-SAT, after Bartan et al., Moccasin, ICML 2023: exact on small graphs.

Every op may run up to C times, at free times. Its outputs are retained for an interval after each
run, and the intervals fit the capacity. Recomputes have no imposed order, so with enough copies
this is exact for schedules with first runs in program order. With `joint`, every interval also has
an address (NoOverlap2D): eviction and layout are decided as one.

A version that an op overwrites in the arena ends with the run (see `planner.core.ssa`).
"""

from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.milp import Outcome
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.params import DEFAULTS
from coop_plan.planner.exact.primal.schedule_builder import ScheduleBuilder
from coop_plan.planner.exact.solver.jobs import ScheduleIntervals
from coop_plan.planner.exact.solver.process import SolverProcess


def schedule_intervals(
    process: SolverProcess,
    program: Program,
    capacity: int,
    deadline: float,
    *,
    copies: int = DEFAULTS.search.joint_copies,
    joint: bool = False,
) -> tuple[Outcome, Schedule | None]:
    """The cheapest schedule within `capacity` bytes, without addresses, and the solver's outcome.

    `deadline` is a `time.monotonic` value, s; `copies` is the number of runs an op may have. With
    `joint` a layout exists, if in-place pairs are used as in the model.
    """
    problem = program.problem
    unit = problem.alignment
    job = ScheduleIntervals(
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
    answer = process.schedule(job, deadline)
    return answer.outcome, None if answer.ops is None else in_order(program, answer.ops)


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
