"""A clock that goes on only when it is looked at, and what the exact methods are tested with."""

import pytest

from coop_plan.planner import method
from coop_plan.planner.exact.solver.process import SolverProcess
from coop_plan.planner.heuristic import coop_offline
from coop_plan.planner.search import annealing


class TickingClock:
    """
    Stands for the module `time`: every look at it is a tick (s) after the one before.

    What ends at a deadline then ends after steps.
    """

    TICK = 0.01

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += self.TICK
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock that coop-offline and requests look at."""
    ticking = TickingClock()
    for module in (method, annealing, coop_offline):
        monkeypatch.setattr(module, "time", ticking)
    return ticking


@pytest.fixture(scope="module")
def process():
    """One worker for all models of a module."""
    with SolverProcess() as running:
        yield running
