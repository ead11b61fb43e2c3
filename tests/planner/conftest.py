"""A clock that goes on only when it is looked at: what ends at a deadline then ends after steps."""

import pytest

from coop_plan.planner import method
from coop_plan.planner.offline import anneal, resequence, solve


class TickingClock:
    """Stands for the module `time`: every look at it is a tick (s) after the one before."""

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
    for module in (anneal, method, resequence, solve):
        monkeypatch.setattr(module, "time", ticking)
    return ticking
