"""Bounds from relaxations in the background."""

import sys
import time
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import gpt
from coop_plan.planner import Problem
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.exact import refine
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.exact.dual.bounding import Bounding
from coop_plan.planner.exact.model import paths
from coop_plan.planner.exact.model.milp import Milp
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.separation import RelaxedSolution, most_violated
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.params import DEFAULTS, ExactParams
from coop_plan.planner.exact.solver.pdlp import lagrangian_bound
from coop_plan.planner.exact.solver.process import SolverError, SolverProcess
from tests.planner.brute_force import cheapest
from tests.planner.test_exact import BUDGETS, SETTINGS, tight
from tests.strategies import graphs

LAYERS = 6


@pytest.fixture(scope="module")
def program():
    """A GPT of a few layers."""
    return Program.of(Problem.from_graph(gpt(LAYERS)))


@pytest.fixture
def capacity(program):
    """Bytes just above its largest working set."""
    return program.problem.rounded(int(1.3 * largest_working_set(program.problem).bytes))


@pytest.mark.parametrize("seed", range(10))
def test_cuts_are_violated_by_what_they_are_ranked_by(program, seed):
    """Whatever the values: those of a path's cut sum up to what the shortest path promised."""
    random = np.random.default_rng(seed)
    chosen = sorted({*random.choice(program.n, 8).tolist(), program.n})
    model = TimePointModel(program, 1 << 30, chosen, ())
    values = random.random(len(model.milp.lower)) ** random.integers(1, 9)
    short, least = [], DEFAULTS.min_violation
    for low, start in enumerate(chosen[:-2]):
        amounts, cuts, tensors = most_violated(RelaxedSolution.of(model, values), low, least)
        for amount, (high, first, begin), (_, _, end) in zip(amounts, cuts, cuts[1:], strict=False):
            at = None if first else chosen[high]
            path = paths.Path(start, chosen[high], at, tuple(tensors[begin:end].tolist()))
            assert amount > least
            assert amount == pytest.approx(-paths._slack(model, path, values))
            short.append(amount)
    chosen_ones = paths._violated(model, values, (), inf, least)
    worst = sorted(short, reverse=True)[: paths.MAX_CUTS]
    assert [-paths._slack(model, path, values) for path in chosen_ones] == pytest.approx(worst)


@settings(SETTINGS, max_examples=60)
@given(graph=graphs(max_ops=9), **BUDGETS)
def test_no_bound_exceeds_the_optimum(graph, outputs, share, alignment):
    """With every op a time point at last, and all the steps before."""
    problem, arena = tight(graph, outputs, share, alignment)
    best = cheapest(problem, arena)
    assume(best is not None)
    reported = []
    program = Program.of(problem)
    params = ExactParams(first_spread=1)
    Bounding(program, program.problem.rounded(arena), set(), reported.append, params).run()
    assert reported
    assert max(reported) <= best * (1 + 1e-6)


@st.composite
def programs(draw):
    """A small program with a solution that is known to be feasible, and multipliers."""
    columns, rows = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    number = st.integers(-5, 5).map(float)
    milp, solution = Milp(), []
    for _ in range(columns):
        low = draw(number)
        milp.column(low, low + draw(st.integers(0, 3)), draw(number), integer=False)
        solution.append(draw(st.floats(low, milp.upper[-1])))
    for _ in range(rows):
        terms = [(column, draw(number)) for column in range(columns)]
        activity = sum(value * solution[column] for column, value in terms)
        low = draw(st.sampled_from([-inf, activity - 1.0, activity]))
        milp.row(terms, low, draw(st.sampled_from([activity, activity + 1.0, inf])))
    multipliers = draw(st.lists(number, min_size=rows, max_size=rows))
    return milp, solution, np.array(multipliers)


@given(programs())
def test_any_multipliers_give_a_bound(drawn):
    milp, solution, multipliers = drawn
    cost = sum(price * value for price, value in zip(milp.cost, solution, strict=True))
    assert lagrangian_bound(milp, multipliers) <= cost + 1e-9


def test_a_relaxation_is_solved_and_goes_on_from_an_answer():
    milp = Milp()
    x, y = (milp.column(0.0, 1.0, cost, integer=True) for cost in (1.0, 3.0))
    milp.row([(x, 1.0), (y, 1.0)], 1.5, inf)
    with SolverProcess() as process:
        first = process.relax(milp, time.monotonic() + 10, 1e-6)
        assert first.bound == pytest.approx(2.5, abs=1e-3)
        assert first.values == pytest.approx([1.0, 0.5], abs=1e-3)
        milp.row([(y, 1.0)], 1.0, inf)
        second = process.relax(milp, time.monotonic() + 10, 1e-6, first)
        assert second.bound == pytest.approx(3.5, abs=1e-3)
        milp.row([(y, 1.0)], -inf, 0.5)
        assert process.relax(milp, time.monotonic() + 10, 1e-6).values is None  # infeasible
        assert process.relax(milp, time.monotonic(), 1e-6).bound == -inf  # no time


def test_bounds_come_while_the_process_runs_and_end_with_it(program, capacity):
    with BoundingProcess() as process:
        assert process.proved() == -inf
        process.begin(program, capacity, set())
        bound = process.proved(time.monotonic() + 60)
        base = program.problem.base_cost_us
        assert base < bound < 2 * base
        process.kill()
        assert process.proved(time.monotonic() + 60) == -inf


def test_a_message_does_not_wait_for_a_process_to_start(monkeypatch):
    """Nor to read it: a job is larger than a pipe, and a deadline may pass meanwhile."""
    with BoundingProcess() as process:
        monkeypatch.setattr(
            process, "_command", [sys.executable, "-c", "__import__('time').sleep(9)"]
        )
        process.send(bytes(1 << 20))
        assert process._process.poll() is None


def test_a_process_that_fails_says_so(capacity):
    with BoundingProcess() as process:
        process.begin(None, capacity, set())
        with pytest.raises(SolverError, match="AttributeError"):
            process.proved(time.monotonic() + 60)


@pytest.mark.parametrize(("linked", "gap"), [(True, 1.0), (True, 0.0), (False, 1.0)])
def test_rounds_yield_once_if_there_are_transfers_and_a_gap(monkeypatch, capacity, linked, gap):
    graph = gpt(LAYERS)
    device = graph.device.with_link(int(linked) * 10**9)
    program = Program.of(Problem.from_graph(graph.model_copy({"device": device})))
    monkeypatch.setattr(refine, "usable_cpus", lambda: 2)
    begun = []
    bounding = SimpleNamespace(begin=lambda *job: begun.append(job))
    incumbent = SimpleNamespace(problem=program.problem, gap=gap, solution=object())
    rounds = refine.Refinement(program, None, bounding, incumbent, capacity, inf)
    assert rounds._yields_to_bounding() == bool(begun) == (linked and gap > 0)
    assert not rounds._yields_to_bounding()
