"""Schedules from events by name."""

import numpy as np

from coop_plan.planner.core.lifetimes import OFFLOAD, PREFETCH, RUN, WAIT
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule

KINDS = {"run": RUN, "offload": OFFLOAD, "prefetch": PREFETCH, "wait": WAIT}


def schedule_of(problem: Problem, events) -> Schedule:
    """The schedule of events ("run", variant) and ("offload" | "prefetch" | "wait", tensor)."""
    table = np.array([(KINDS[do], what) for do, what in events], np.int64).reshape(-1, 2)
    return Schedule.of_events(problem, table[:, 0].copy(), table[:, 1].copy())
