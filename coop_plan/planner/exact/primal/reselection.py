"""Re-selection of the variant of each run of a schedule."""

from collections.abc import Iterable, Sequence

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, Schedule
from coop_plan.planner.exact.model.program import Program


class Reselection:
    """Local search over the variants of a schedule's runs, and over dropping runs.

    Schedules are compared by their bytes above the capacity, then by cost.
    """

    def __init__(self, program: Program, capacity: int) -> None:
        self.program, self.capacity = program, capacity

    def evaluate(self, schedule: Schedule) -> tuple[int, float]:
        """Bytes above the capacity, summed over all events, and the cost (µs)."""
        over = schedule.live_bytes() - self.capacity
        return int(over[over > 0].sum()), schedule.cost_us

    def improve(self, variants: Sequence[int], rounds: int = 3) -> Schedule:
        """Local optimum of single changes, the best at each event; at most `rounds` passes."""
        problem: Problem = self.program.problem
        runs = list(variants)
        best = Schedule.of(problem, runs)
        score = self.evaluate(best)
        for _ in range(rounds):
            before = score
            event = 0
            while event < len(runs):
                found: tuple[tuple[int, float], list[int], Schedule] | None = None
                for candidate in self._changes(runs, event):
                    try:
                        schedule = Schedule.of(problem, candidate)
                        self.program.versions.to_original(schedule)
                    except NoScheduleError:
                        continue
                    candidate_score = self.evaluate(schedule)
                    if candidate_score < score and (found is None or candidate_score < found[0]):
                        found = candidate_score, candidate, schedule
                if found is not None:
                    score, runs, best = found
                event += 1
            if score == before:
                break
        return best

    def _changes(self, runs: list[int], event: int) -> Iterable[list[int]]:
        problem, variant = self.program.problem, runs[event]
        op = problem.variants[variant].op
        if op in (problem.variants[b].op for b in runs[:event]):
            yield [*runs[:event], *runs[event + 1 :]]
        latest = max(problem.variants[b].op for b in runs[: event + 1])
        for other in self.program.choices[op]:
            if other != variant and (latest == op or self.program.until[other] >= latest):
                yield [*runs[:event], other, *runs[event + 1 :]]
