"""Infeasible budgets are answered by what is proved; the smallest is searched only if asked for."""

import gc
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from benchmarks.hard_graphs import parse_name
from benchmarks.synthetic import gpt
from coop_plan.planner import (
    METHODS,
    InfeasibleBudgetError,
    Problem,
    TimeLimitError,
    find_faults,
    plan,
)
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.lifetimes import PREFETCH, RUN
from coop_plan.planner.core.memory_bounds import budget_lower_bound
from coop_plan.planner.heuristic.coop_offline import in_any_order
from coop_plan.planner.heuristic.eviction_run import Runner
from coop_plan.planner.heuristic.params import DEFAULTS
from coop_plan.planner.heuristic.portfolio import Portfolio
from coop_plan.planner.keep_all import keep_all_schedule, lay_out_everything
from coop_plan.planner.method import Request
from coop_plan.planner.placement.layout import lay_out_host
from coop_plan.planner.search.compute.annealing import START_DIVISOR, SequenceAnnealing
from coop_plan.planner.search.makespan.annealing import MOVES, MakespanSearch
from coop_plan.planner.search.makespan.metropolis import evaluate_sequence
from coop_plan.planner.search.makespan.sequence import (
    new_state,
    set_sequence,
    to_closed_program,
    to_sequence,
)
from coop_plan.planner.smallest_budget import (
    COARSE_PROBES,
    Task,
    common_divisor,
)
from coop_plan.schemas import Device, parse_graph
from tests.strategies import graphs
from tests.support import make_graph

NOSHRINK = [Phase.explicit, Phase.reuse, Phase.generate]
SLOW = [HealthCheck.too_slow]
HEURISTICS = [name for name, info in METHODS.items() if not info.anytime]


def never(*_args, **_more):
    raise AssertionError("nothing may be searched")


def stacked(count, *, pairs=False):
    """A chain whose results are read in reverse; bytes differ, so that layouts are not trivial.

    With `pairs` gradients may share the address of the one before.
    """
    tensors = {t: ("activation", 512 * (1 + t % 7)) for t in range(2 * count)}
    ops = [{"inputs": [t - 1] if t else [], "outputs": [t]} for t in range(count)]
    ops += [
        {"inputs": [2 * count - 1 - t, *([t - 1] if t > count else [])], "outputs": [t]}
        for t in range(count, 2 * count)
    ]
    for t, op in enumerate(ops):
        op["inplace"] = [[t, t - 1]] if pairs and t > count and t % 7 else []
    return make_graph(tensors, ops)


@pytest.mark.parametrize("time_limit", [None, 1e-6])
@settings(max_examples=40, deadline=None, phases=NOSHRINK)
@given(graph=graphs(max_ops=10), method=st.sampled_from(sorted(METHODS)), data=st.data())
def test_what_is_proved_infeasible_is_searched_by_no_method(time_limit, graph, method, data):
    """It is exit code 3 with a time limit, too."""
    least = budget_lower_bound(Problem.from_graph(graph, 8))
    if least < 2:
        return
    budget = data.draw(st.integers(1, least - 1))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InfeasibleBudgetError) as refused:
        patch.setattr(Task, "solve", never)
        plan(graph, budget, method=method, alignment=8, time_limit=time_limit)
    assert refused.value.min_feasible_bytes is None
    assert refused.value.budget_lower_bound_bytes == least


@settings(max_examples=60, deadline=None, phases=NOSHRINK, suppress_health_check=SLOW)
@given(graph=graphs(max_ops=10), method=st.sampled_from(HEURISTICS), share=st.floats(0.3, 1.0))
def test_a_refusal_names_what_is_met_and_searches_nothing(graph, method, share):
    options = {"method": method, "alignment": 8}
    kept = plan(graph, "min", method="keep-all", alignment=8)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Task, "smallest", never)
            plan(graph, max(1, int(share * kept.peak_bytes)), **options)
    except InfeasibleBudgetError as error:
        assert error.min_feasible_bytes is None
        assert f"it meets {error.met_bytes} bytes" in str(error)
        assert plan(graph, error.met_bytes, **options).peak_bytes <= error.met_bytes


def test_the_smallest_budget_is_searched_where_it_is_asked_for():
    graph = stacked(8)
    least = plan(graph, "min")
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(graph, least.budget_bytes - 1, smallest=True)
    assert refused.value.min_feasible_bytes == least.budget_bytes
    assert f"the smallest it can meet is {least.budget_bytes} bytes" in str(refused.value)
    assert plan(graph, least.budget_bytes, smallest=True).peak_bytes <= least.budget_bytes


@pytest.mark.parametrize("method", ["coop-offline", "coop", "dtr"])
def test_the_search_takes_ten_plans_at_most(method, monkeypatch):
    """With progress, from above and below: each probe is within the interval of those before."""
    failed, messages, solve = [], [], Task.solve

    def counted(task, arena, **more):
        try:
            return solve(task, arena, **more)
        except DoesNotFitError:
            failed.append(arena)
            raise

    monkeypatch.setattr(Task, "solve", counted)
    graph = stacked(55)
    made = plan(graph, "min", method=method, progress=lambda p: messages.append(p.message))
    assert find_faults(graph, made) == []
    assert len(failed) <= COARSE_PROBES + 1
    assert any("smallest budget" in message for message in messages)
    monkeypatch.undo()
    # That budget is met when asked for in bytes, without the start that its search had.
    assert plan(graph, made.budget_bytes, method=method).cost_us <= made.cost_us * 1.01


@pytest.fixture
def requests(monkeypatch):
    """Each request of a search, in order."""
    asked, solve = [], METHODS["coop-offline"].solve

    def recorded(problem, request):
        asked.append(request)
        return solve(problem, request)

    monkeypatch.setitem(METHODS, "coop-offline", replace(METHODS["coop-offline"], solve=recorded))
    return asked


def test_probes_of_a_larger_graph_start_from_the_least_schedule_before_one_full_search(
    requests, monkeypatch
):
    """The full search starts from it too; in-place pairs make no second one, nor is it probed."""
    sweep, swept = Portfolio.sweep, []

    def recorded(portfolio):
        swept.append(portfolio.request)
        sweep(portfolio)

    monkeypatch.setattr(Portfolio, "sweep", recorded)
    plan(stacked(55, pairs=True), "min")
    *probes, full = requests
    assert full not in swept  # no scoring rule needs as little memory as that schedule
    assert all(request.any_schedule for request in probes)
    assert not full.any_schedule
    assert full.larger is not None and full.larger.arena_bytes == full.arena_bytes
    starts = [request.larger.arena_bytes for request in requests if request.larger is not None]
    assert starts == sorted(starts, reverse=True) != []


@pytest.mark.parametrize("count", [55, 70, 100])
def test_the_annealing_from_a_schedule_of_many_runs_is_no_longer_than_that_of_a_plan(
    count, monkeypatch
):
    """A step and a layout take as many times longer as the schedule has runs an op."""
    graph, found = stacked(count), []
    run = SequenceAnnealing.run

    def recorded(annealing, *, divisor):
        found.append((annealing.start.size / len(graph.ops), divisor))
        run(annealing, divisor=divisor)

    monkeypatch.setattr(SequenceAnnealing, "run", recorded)
    plan(graph, "min")
    assert found
    for runs_per_op, divisor in found:
        assert runs_per_op > 2
        assert divisor >= START_DIVISOR * int(runs_per_op) ** 2


def test_a_small_graph_meets_its_smallest_budget_without_a_start(requests):
    plan(stacked(8), "min")
    assert {request.larger for request in requests} == {None}


@pytest.mark.parametrize(
    ("name", "most"), [("gpt:2", 18), ("hard:recurrent:2:70", 36), ("hard:tiny:1:40", 36)]
)
def test_the_smallest_budget_of_a_small_graph_takes_few_probes(name, most, requests, monkeypatch):
    """With few repairs of a candidate, and one whole search in the end."""
    repairs, search = set(), SequenceAnnealing.find_feasible

    def recorded(annealing):
        repairs.add(annealing.state.params.max_repairs)
        search(annealing)

    monkeypatch.setattr(SequenceAnnealing, "find_feasible", recorded)
    graph = gpt(2) if name == "gpt:2" else parse_name(name)
    made = plan(graph, "min")
    assert repairs == {3}
    whole = {request.arena_bytes for request in requests if not request.any_schedule}
    probes = {request.arena_bytes for request in requests if request.any_schedule}
    assert len(whole) <= 1
    assert len(probes) <= most
    assert plan(graph, made.budget_bytes).cost_us <= made.cost_us


@settings(max_examples=60, deadline=None, phases=NOSHRINK)
@given(graph=graphs(max_ops=20), alignment=st.sampled_from([1, 8, 512]))
def test_every_live_sum_is_a_multiple_of_the_step_of_a_small_graph(graph, alignment):
    problem = Problem.from_graph(graph, alignment)
    step = common_divisor(problem)
    assert step % alignment == 0
    assert not (keep_all_schedule(problem).live_bytes() % step).any()


def best_of_sweep(problem, request):
    portfolio = Portfolio(problem, request)
    portfolio.sweep()
    found, lowest = portfolio.best.found, portfolio.lowest_peak
    return (
        None if found is None else (found.cost_us, found.run.ops.tolist()),
        None if lowest is None else lowest.run.ops.tolist(),
    )


@settings(max_examples=40, deadline=None, phases=NOSHRINK, suppress_health_check=SLOW)
@given(
    graph=graphs(max_ops=30),
    shares=st.lists(st.floats(0.2, 1.0), min_size=2, max_size=4),
    any_schedule=st.booleans(),
)
def test_a_sweep_finds_the_same_after_sweeps_of_other_arenas(graph, shares, any_schedule):
    problem = Problem.from_graph(graph, 8)
    most = lay_out_everything(problem).placed.arena_bytes
    for share in shares:
        request = Request(int(share * most), any_schedule=any_schedule)
        fresh = Problem.from_graph(graph, 8)
        assert best_of_sweep(problem, request) == best_of_sweep(fresh, request)


def test_a_run_that_cannot_help_is_not_repeated(monkeypatch):
    problem, runs, run = Problem.from_graph(stacked(60)), [], Runner.__call__
    monkeypatch.setattr(Runner, "__call__", lambda self, *a: runs.append(a) or run(self, *a))
    request = Request(lay_out_everything(problem).placed.arena_bytes // 3)
    counts = []
    for _ in range(2):
        runs.clear()
        Portfolio(problem, request).sweep()
        counts.append(len(runs))
    rules = len(DEFAULTS.rules)
    assert counts[1] < counts[0] / 2 and counts[1] >= rules  # the ranking runs each rule


def test_a_run_is_laid_out_once_without_a_search(monkeypatch):
    problem, layouts = Problem.from_graph(stacked(60)), []
    request = Request(lay_out_everything(problem).placed.arena_bytes // 3)
    portfolio = Portfolio(problem, request)
    portfolio.sweep()
    assert portfolio.lowest_peak is not None
    blocked = Portfolio(problem, replace(request, arena_bytes=portfolio.lowest_peak.peak))

    def failing(blocks, *_args, **_more):
        layouts.append(blocks)
        return SimpleNamespace(peak=request.arena_bytes * 9, order=np.arange(blocks.size.size))

    monkeypatch.setattr("coop_plan.planner.heuristic.portfolio.fit", failing)
    for _ in range(3):
        blocked.offer(portfolio.lowest_peak)
    assert len(layouts) == 1
    blocked.place_unplaced()
    assert len(layouts) == 2


@settings(max_examples=30, deadline=None, phases=NOSHRINK, suppress_health_check=SLOW)
@given(graph=graphs(max_ops=20), share=st.floats(0.1, 0.9), host=st.none() | st.integers(0, 4_000))
def test_a_failed_search_names_the_closest_schedule_with_transfers(graph, share, host):
    """It exceeds the arena, and its copies are within the host's budget."""
    device = Device(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
    problem = replace(
        Problem.from_graph(graph.model_copy(update={"device": device}), 8), host_budget=host
    )
    assume(problem.op_count)
    kept = lay_out_everything(problem).placed
    arena = int(share * kept.arena_bytes)
    request = Request(arena, any_schedule=True)
    start = [np.arange(problem.op_count)]
    search = MakespanSearch(problem, request, start, float("inf"))
    search.run(None, lambda: False)
    if search.placed is None:
        assert search.closest is None or search.closest.arena_bytes > arena
    for found in filter(None, (search.placed, search.closest)):
        assert host is None or lay_out_host(found.schedule).peak <= host


def test_a_probe_without_a_schedule_leaves_the_least_one_with_transfers():
    """No op can run again, so only transfers save memory."""
    graph = stacked(30)
    ops = [op.model_copy(update={"recomputable": False}) for op in graph.ops]
    device = Device(h2d_bytes_per_s=1e10, d2h_bytes_per_s=1e10)
    problem = Problem.from_graph(graph.model_copy(update={"device": device, "ops": ops}), 8)
    kept = lay_out_everything(problem).placed
    with pytest.raises(DoesNotFitError) as refused:
        METHODS["coop-offline"].solve(problem, Request(kept.arena_bytes // 9, any_schedule=True))
    closest = refused.value.closest
    assert closest is not None
    assert closest.arena_bytes < kept.arena_bytes / 2
    assert (closest.schedule.do == PREFETCH).any()


@pytest.mark.parametrize("linked", [False, True])
def test_a_sequence_repeats_the_runs_and_prefetches_of_its_schedule(linked):
    graph = stacked(12)
    rate = {"h2d_bytes_per_s": 1e10, "d2h_bytes_per_s": 1e10} if linked else {}
    problem = Problem.from_graph(graph.model_copy({"device": Device(**rate)}), 8)
    info, kept = METHODS["coop-offline"], lay_out_everything(problem).placed
    made = info.solve(problem, Request(int(0.6 * kept.arena_bytes))).placed.schedule
    state = new_state(problem, to_closed_program(problem), 400, MOVES)
    sequence = to_sequence(made)
    set_sequence(state, sequence)
    _, excess = evaluate_sequence(to_closed_program(problem), state, kept.arena_bytes)
    assert excess == 0
    runs = sequence[sequence < problem.op_count]
    assert runs.tolist() == made.what[made.do == RUN].tolist()
    assert (sequence > problem.op_count).sum() == (made.do == PREFETCH).sum()
    assert not linked or (made.do == PREFETCH).any()


def test_a_search_without_transfers_does_not_start_from_them():
    device = Device(h2d_bytes_per_s=1e10, d2h_bytes_per_s=1e10)
    problem = Problem.from_graph(stacked(12).model_copy({"device": device}), 8)
    request = Request(int(0.6 * lay_out_everything(problem).placed.arena_bytes))
    linked = METHODS["coop-offline"].solve(problem, request).placed
    assert (linked.schedule.do == PREFETCH).any()
    alone = in_any_order(problem, replace(request, larger=linked))
    assert (alone.schedule.do == RUN).all()


@pytest.mark.parametrize("method", ["auto", "optimal", "coop-offline", "monet", "checkmate"])
@settings(max_examples=6, deadline=None, phases=NOSHRINK, suppress_health_check=SLOW)
@given(graph=graphs(max_ops=12), time_limit=st.sampled_from([0.0, 0.05, 0.2, 1.0]))
def test_min_has_a_plan_within_any_time(method, graph, time_limit):
    """Keep-everything's is one."""
    made = plan(graph, "min", method=method, alignment=8, time_limit=time_limit)
    assert find_faults(graph, made) == []
    kept = plan(graph, "min", method="keep-all", alignment=8)
    assert made.budget_bytes <= kept.budget_bytes


@settings(max_examples=15, deadline=None, phases=NOSHRINK, suppress_health_check=SLOW)
@given(
    graph=graphs(max_ops=12),
    time_limit=st.sampled_from([0.05, 0.2, 1.0]),
    share=st.floats(0.05, 1.0),
)
def test_a_limit_ends_in_a_plan_or_a_documented_error(graph, time_limit, share):
    kept = plan(graph, "min", method="keep-all", alignment=8)
    options = {"method": "auto", "alignment": 8, "time_limit": time_limit}
    budget = max(1, int(share * kept.peak_bytes))
    try:
        made = plan(graph, budget, **options)
    except TimeLimitError:
        assert budget >= budget_lower_bound(Problem.from_graph(graph, 8))
    except InfeasibleBudgetError as error:
        assert error.met_bytes <= max(1, kept.peak_bytes)
        met = plan(graph, max(1, error.met_bytes), method="keep-all", alignment=8)
        assert find_faults(graph, met) == []
    else:
        assert find_faults(graph, made) == []


def test_an_infeasible_question_takes_three_times_the_reading():
    """CPU time, the least of five; collections would visit what other tests have left."""
    document = stacked(10_000).to_json()
    plan(stacked(4), "min")  # loads the kernels
    reading, answering = [], []
    gc.collect()
    for _ in range(5):
        gc.disable()
        moments = [time.process_time()]
        graph = parse_graph(document)
        moments.append(time.process_time())
        with pytest.raises(InfeasibleBudgetError):
            plan(graph, 512)
        moments.append(time.process_time())
        gc.enable()
        reading.append(moments[1] - moments[0])
        answering.append(moments[2] - moments[1])
    assert min(answering) <= 3 * min(reading)
