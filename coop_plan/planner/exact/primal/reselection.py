"""Re-selection of the variant of each run of a schedule."""

from collections.abc import Callable, Iterator

import numpy as np

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.lifetimes import RUN
from coop_plan.planner.core.schedule import NoScheduleError, Schedule
from coop_plan.planner.exact.model.program import Program


class Reselection:
    """Local search over the variants of a schedule's runs, and over dropping runs.

    Schedules are those of the program's problem. They are compared by their bytes above the
    capacity, then by cost.
    """

    def __init__(self, program: Program, capacity: int) -> None:
        self.program, self.capacity = program, capacity

    def evaluate(self, schedule: Schedule) -> tuple[int, float]:
        """Bytes above the capacity, summed over all events, and the cost (µs)."""
        over = schedule.live_bytes() - self.capacity
        return int(over[over > 0].sum()), schedule.cost_us

    def improve(self, best: Schedule, stop: Callable[[], bool] = lambda: False) -> Schedule:
        """Local optimum of single changes, the best at each event; at most three passes."""
        score = self.evaluate(best)
        for _ in range(3):
            before, event = score, 0
            while event < len(best) and not stop():
                found = best
                for do, what in self._changes(best, event):
                    try:
                        schedule = Schedule.of_events(best.problem, do, what)
                        self.program.versions.to_original(schedule)
                    except NoScheduleError:
                        continue
                    candidate = self.evaluate(schedule)
                    if candidate < score:
                        score, found = candidate, schedule
                best = found
                event += 1
            if score == before:
                break
        return best

    def _changes(self, schedule: Schedule, event: int) -> Iterator[tuple[Ints, Ints]]:
        """Events of the schedule without a run, or with another variant of it."""
        if schedule.do[event] != RUN:
            return
        problem, variants = schedule.problem, schedule.variants
        op = problem.variants[variants[event]].op
        earlier = [problem.variants[v].op for v in variants[:event] if v >= 0]
        if op in earlier:
            yield np.delete(schedule.do, event), np.delete(schedule.what, event)
        latest = max([op, *earlier])
        for other in self.program.choices[op]:
            if other != variants[event] and (latest == op or self.program.until[other] >= latest):
                what = schedule.what.copy()
                what[event] = other
                yield schedule.do, what
