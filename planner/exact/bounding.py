"""
A bound for hard models: their relaxation with path cuts, at many more time points than they have.

Where blocks repeat, the time points are the same op in every copy: which op is learned from a few
of the copies, then all of them have it. Elsewhere they are spread over the program. It runs in a
process of its own, beside the search for plans, and never ends before everything is a time point.
"""

import os
import pickle
import queue
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from planner.exact.blocks import repetitions
from planner.exact.live import live_bytes
from planner.exact.milp import INFINITY, Milp, Relaxation
from planner.exact.paths import PathCuts
from planner.exact.points import initial_points
from planner.exact.program import Program
from planner.exact.solving import MEMORY_BYTES, Child
from planner.exact.timepoint import TimePointModel
from planner.exact.worker_lp import relax
from planner.methods.keep_all import keep_all_schedule

SPREAD = 10
"""Time points of the first step where nothing repeats; each step has twice as many."""

SAMPLES = 4
"""Copies of a block from which the choice of an op is learned."""

TRIED = 4
"""How many ops are tried beside those that were chosen before."""

MOSTLY = 0.5
"""Blocks are used if so much of where keeping everything does not fit lies in them."""


@dataclass
class Bounding:
    """
    Better and better relaxations at one capacity (bytes).

    `points` are the time points so far; they begin with some that are known to matter. `tell` hears
    of every bound: what recomputes cost at least, in µs.
    """

    program: Program
    capacity: int
    points: set[int]
    tell: Callable[[float], None]
    paths: PathCuts = field(default_factory=PathCuts)
    _spread: int = SPREAD
    _ranked: list[list[int]] = field(default_factory=list)
    _chosen: list[list[int]] = field(default_factory=list)

    def run(self) -> None:
        """One step after the other, as long as there are time points to add."""
        self._ranked = self._candidates()
        while len(self.points) <= self.program.n:
            if self._ranked:
                found = self._next_copies()
                if len(self._chosen) == 2:
                    # Alone it is solved sooner, and its cuts are of use in what follows.
                    alone = PathCuts()
                    self._relax(set(found), alone, self.tell)
                    self.paths.paths += alone.paths
            else:
                found = self._next_spread()
            if not self.points.issuperset(found):
                self.points.update(found)
                self._relax(self.points, self.paths, self.tell)

    def _relax(
        self, points: set[int], paths: PathCuts, tell: Callable[[float], None] | None = None
    ) -> float:
        chosen = sorted({*points, self.program.n})
        model = TimePointModel(self.program, self.capacity, chosen, ())
        unit = model.cost_unit
        return paths.strengthen(
            _Relaxer(), model, INFINITY, tell and (lambda bound: tell(bound * unit))
        )

    def _next_spread(self) -> list[int]:
        points = initial_points(self.program, self.capacity, self._spread)
        self._spread *= 2
        if self.points.issuperset(points) and self._spread > self.program.n:
            return list(range(self.program.n + 1))
        return points

    def _next_copies(self) -> list[int]:
        """The op of a block that raises the bound most beside those chosen before, by samples."""
        if not self._chosen:
            self._rank()
            tried = [0]
        else:
            tried = list(range(min(len(self._ranked), TRIED)))
        before = {point for copies in self._chosen for point in _sample(copies)}
        best = max(
            tried,
            key=lambda i: self._relax(before.union(_sample(self._ranked[i])), PathCuts(quick=True)),
        )
        self._chosen.append(self._ranked.pop(best))
        return self._chosen[-1]

    def _rank(self) -> None:
        """Ops that alone prove most come first, but those next to better ones last."""
        alone = [
            self._relax(set(_sample(copies)), PathCuts(quick=True, rounds=1))
            for copies in self._ranked
        ]
        beside = [-INFINITY, *alone, -INFINITY]
        order = sorted(
            range(len(alone)),
            key=lambda i: (alone[i] < max(beside[i], beside[i + 2]), -alone[i], i),
        )
        self._ranked = [self._ranked[i] for i in order]

    def _candidates(self) -> list[list[int]]:
        """Every op of every repeated block as its copies, where keeping everything is too much."""
        live = live_bytes(keep_all_schedule(self.program.problem))
        over = {op for op, used in enumerate(live) if used > self.capacity}
        classes = []
        for run in repetitions(self.program):
            for offset in range(run.period):
                copies = [op for op in run.copies(offset) if op in over]
                if len(copies) > 1:
                    classes.append(copies)
        if sum(len(copies) for copies in classes) < MOSTLY * len(over):
            return []
        return classes


def _sample(copies: list[int]) -> list[int]:
    """Some of the copies, evenly spread, the first and the last among them."""
    if len(copies) <= SAMPLES:
        return copies
    return [copies[i * (len(copies) - 1) // (SAMPLES - 1)] for i in range(SAMPLES)]


class _Relaxer:
    def relax(
        self, milp: Milp, deadline: float, accuracy: float, start: Relaxation | None
    ) -> Relaxation:
        known = None if start is None else (start.values, start.multipliers)
        job = dict(vars(milp)) | {"accuracy": accuracy, "start": known, "seconds": deadline}
        _, bound, values, multipliers = relax(job)
        return Relaxation(bound, values, multipliers)


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class BoundingProcess(Child):
    """A process that runs `Bounding`; what it has proved can be asked for at any time."""

    def __init__(self) -> None:
        paths = os.pathsep.join(filter(None, sys.path))
        super().__init__(
            [sys.executable, "-P", "-m", "planner.exact.bounding"],
            os.environ | {"PYTHONPATH": paths},
        )
        self.running = self._begun = False

    def kill(self) -> None:
        """End it for good: there will be no more news."""
        self.running = False
        super().kill()

    def begin(self, program: Program, capacity: int, points: set[int]) -> None:
        """Start, with time points that are known to matter; once only."""
        if not self._begun:
            self._begun = self.running = self.send((program, capacity, points))

    def proved(self, until: float = 0.0) -> float:
        """
        What recomputes cost at least (µs), −∞ if nothing new was proved.

        Waits for news until then (a `time.monotonic` value, s).

        Raises:
            SolverError: the process raised an exception.
        """
        best = -INFINITY
        while self.running:
            try:
                news = self.receive(until if best == -INFINITY else 0.0)
            except queue.Empty:
                break
            if news is None:
                self.running = False
            else:
                best = max(best, news)
        return best


def main() -> None:
    """The process: a program, a capacity and time points come in, bounds go out."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    messages = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def send(message: object) -> None:
        pickle.dump(message, messages)
        messages.flush()

    program, capacity, points = pickle.load(sys.stdin.buffer)  # noqa: S301  (from our parent)
    try:
        Bounding(program, capacity, points, send).run()
    except MemoryError:
        return
    except Exception as error:
        send(("failure", f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
