"""Readout of the program with variants, and re-selection of the variant of each run."""

from collections.abc import Iterable, Sequence

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, Schedule
from coop_plan.planner.exact.model.variant_timepoint import VariantModel
from coop_plan.planner.exact.model.variants import VariantChoices


def read_out(model: VariantModel, values: list[float]) -> list[tuple[int, int]] | None:
    """The runs of a solution: variant, and the position whose first run it serves.

    Within a segment a tensor is recomputed as late as possible and evicted after its last access,
    unless it is resident at the next time point. None if a tensor cannot be recomputed at that
    point, as an input has been overwritten.
    """
    reader = _Reader(model, values)
    return reader.runs if reader.read() else None


class _Reader:
    def __init__(self, model: VariantModel, values: list[float]) -> None:
        self.model, self.values = model, values
        self.choices, self.problem = model.choices, model.choices.problem
        self.first = model.chosen(values)
        self.resident: set[int] = set()
        self.runs: list[tuple[int, int]] = []

    def read(self) -> bool:
        model, choices = self.model, self.choices
        for k, point in enumerate(model.points):
            columns = model.x[k].items()
            resident = {t for t, c in columns if c is None or self.values[c] > 0.5}
            for op in range(model.start(k) + 1, point + 1):
                targets = choices.outputs if op == choices.n else choices.reads[self.first[op]]
                also = resident if op == point else frozenset[int]()
                if not self._compute({*targets, *also}, op, k):
                    return False
                if op < choices.n:
                    self._run(self.first[op], op)
            taken = {pair[1] for pair, c in model.z[k].items() if self.values[c] > 0.5}
            if point < choices.n:
                made = self.problem.variants[self.first[point]].outputs
                stays = {t for t in self.resident if choices.unconstrained[t]}
                self.resident &= (resident - taken) | set(made) | stays
        return True

    def _run(self, variant: int, position: int) -> None:
        self.runs.append((variant, position))
        self.resident.update(self.problem.variants[variant].outputs)

    def _compute(self, targets: Iterable[int], position: int, k: int) -> bool:
        stack = [t for t in sorted(targets, reverse=True) if t not in self.resident]
        while stack:
            t = stack[-1]
            if t in self.resident:
                stack.pop()
                continue
            variant = self._maker(t, position, k)
            if variant is None:
                return False
            missing = [x for x in sorted(self.choices.reads[variant]) if x not in self.resident]
            if missing:
                stack += missing
            else:
                self._run(variant, position)
        return True

    def _maker(self, t: int, position: int, k: int) -> int | None:
        """The variant that recomputes t: the one in the solution, or else the cheapest."""
        choices, y = self.choices, self.model.y[k]
        op = self.problem.producer[t]
        makers = [
            v
            for v in choices.of[op]
            if t in self.problem.variants[v].outputs and choices.until[v] >= position
        ]

        def rank(v: int) -> tuple[bool, bool, float]:
            in_solution = v in y and self.values[y[v]] > 0.5
            return not in_solution, v != self.first[op], self.problem.variants[v].cost_us

        return min(makers, key=rank, default=None)


class Reselection:
    """Local search over the variants of a schedule's runs, and over dropping runs.

    Schedules are compared by their bytes above the capacity, then by cost.
    """

    def __init__(self, choices: VariantChoices, capacity: int) -> None:
        self.choices, self.capacity = choices, capacity

    def evaluate(self, schedule: Schedule) -> tuple[int, float]:
        """Bytes above the capacity, summed over all events, and the cost (µs)."""
        over = schedule.live_bytes() - self.capacity
        return int(over[over > 0].sum()), schedule.cost_us

    def improve(self, variants: Sequence[int], rounds: int = 3) -> Schedule:
        """Local optimum of single changes, the best at each event; at most `rounds` passes."""
        problem: Problem = self.choices.problem
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
        problem, variant = self.choices.problem, runs[event]
        op = problem.variants[variant].op
        if op in (problem.variants[b].op for b in runs[:event]):
            yield [*runs[:event], *runs[event + 1 :]]
        latest = max(problem.variants[b].op for b in runs[: event + 1])
        for other in self.choices.of[op]:
            if other != variant and (latest == op or self.choices.until[other] >= latest):
                yield [*runs[:event], other, *runs[event + 1 :]]
