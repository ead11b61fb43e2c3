"""From a kernel's record to a `Schedule`."""

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.offline.run import Run


def rebuild(problem: Problem, run: Run) -> Schedule:
    """The schedule that `run` recorded, without addresses."""
    schedule = Schedule(problem)
    drops: dict[int, list[int]] = {}
    for t, event in zip(run.dropped.tolist(), run.drop_event.tolist(), strict=True):
        drops.setdefault(event, []).append(t)
    pairs: dict[int, list[tuple[int, int]]] = {}
    for event, out, source in run.inplace.tolist():
        pairs.setdefault(event, []).append((out, source))
    for event, op in enumerate(run.ops.tolist()):
        schedule.run(op, tuple(pairs.get(event, ())))
        for t in drops.get(event, ()):
            schedule.drop(t, at_last_touch=True)
    schedule.finish()
    return schedule
