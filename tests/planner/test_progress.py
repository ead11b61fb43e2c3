"""Progress of a first step: to a callback, or at most a line in ten seconds on a terminal."""

import sys

import pytest

from coop_plan.planner import Progress, progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves; stderr is a terminal."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_last_line", float("-inf"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    return now


def profile(clock, ops, seconds):
    for _ in progress.counted(range(ops), ops, f"profiling {ops} ops"):
        clock[0] += seconds


def test_a_long_profile_says_how_long_it_still_takes(clock, caplog):
    profile(clock, 30, 1.0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["profiling 30 ops: about 20 s left", "profiling 30 ops: about 10 s left"]


def test_a_short_one_is_silent_and_so_is_a_pipe(clock, caplog, monkeypatch):
    profile(clock, 30, 0.1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    profile(clock, 30, 1.0)
    assert caplog.records == []


def test_a_listener_gets_all_of_it(clock, caplog):
    heard = []
    with progress.progress_to(heard.append):
        profile(clock, 4, 20.0)
    assert heard == [Progress("profiling 4 ops", n / 4) for n in range(4)]
    assert caplog.records == []


def test_long_work_ends_with_a_line_of_its_duration(clock, caplog, monkeypatch):
    progress.log_duration("compiled in", 9.0)
    progress.log_duration("compiled in", 41.2)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    progress.log_duration("compiled in", 50.0)
    assert [record.getMessage() for record in caplog.records] == ["compiled in 41 s"]
