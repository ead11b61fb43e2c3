"""Random questions end in a verified plan or a documented error; see `benchmarks.questions`."""

import time

import pytest

from benchmarks.questions import answer, time_limit
from coop_plan.planner import METHODS

pytest.importorskip("ortools")

QUESTIONS = 60
SECONDS = 20.0
"""For all questions to one method; the first ten are asked in any case."""


@pytest.mark.parametrize("method", METHODS)
def test_questions_end_in_a_plan_or_a_documented_error(method):
    begin = time.monotonic()
    failures = {}
    for seed in range(QUESTIONS):
        if seed >= 10 and time.monotonic() - begin > SECONDS:
            break
        try:
            answer(seed, method, time_limit(seed, method, 0.5))
        except Exception as error:
            failures[seed] = repr(error)
    assert failures == {}


def test_an_arena_of_no_bytes_is_a_limit_too():
    """Only tensors of no bytes and copies fit; the model's memory rows are scaled by the arena."""
    assert answer(101789, "optimal", 1.0) in ("plan", "infeasible", "time limit")
