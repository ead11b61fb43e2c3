"""The exact planners: against exhaustive search, against each other, and at the edges."""

import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from coop_plan.planner import InfeasibleBudgetError, Problem, find_faults, plan
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.checkmate import MAX_VARIABLES, CheckmateModel, solve_checkmate
from coop_plan.planner.exact.model import paths
from coop_plan.planner.exact.model.milp import Milp, Outcome
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.optimal import solve_optimal
from coop_plan.planner.exact.params import ExactParams
from coop_plan.planner.exact.solver.process import Child, SolverError, SolverProcess, require
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.registry import Request
from coop_plan.schemas import InvalidInputError
from tests.params import slow_after
from tests.planner.brute_force import cheapest
from tests.planner.core.test_schedule import plan_of
from tests.planner.intervals import schedule_intervals
from tests.planner.models import SECONDS, readout_of
from tests.strategies import graphs
from tests.support import make_graph

SETTINGS = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
OUTPUTS = st.sampled_from(["outside", "arena", "gradients"])
BUDGETS = {"outputs": OUTPUTS, "share": st.floats(0, 1), "alignment": st.sampled_from([1, 8])}


def tight(graph, outputs, share, alignment):
    """
    A problem without transfers, and an arena between its largest working set and what keeping all
    needs.
    """
    problem = Problem.from_graph(graph, alignment, outputs, host_budget=0)
    assume(problem.op_count > 0 and problem.tensor_count <= 14)
    most = int(keep_all_schedule(problem).live_bytes().max(initial=0))
    least = largest_working_set(problem).bytes
    assume(least < most)
    arena = least + int((most - 1 - least) * share)
    return problem, -(-arena // alignment) * alignment


def cost_of(solve, problem, arena, **switches):
    """The cost of the method's schedule, None when it finds none."""
    off = frozenset(switches)
    try:
        return solve(problem, Request(arena, off, time.monotonic() + SECONDS)).placed.cost_us
    except DoesNotFitError:
        return None


@settings(SETTINGS, max_examples=40)
@given(graph=graphs(max_ops=9, mutates=False), **BUDGETS)
def test_optimal_agrees_with_exhaustive_search(graph, outputs, share, alignment):
    """The bound never exceeds the true optimum, the plan never undercuts it, a proof is right."""
    problem, arena = tight(graph, outputs, share, alignment)
    best = cheapest(problem, arena)
    try:
        solution = solve_optimal(problem, Request(arena, deadline=time.monotonic() + SECONDS))
    except DoesNotFitError:  # only fragmentation can be in the way of what fits logically
        if schedule_intervals(Program.of(problem), arena, 1.0, joint=True)[1] is None:
            return
        # Such plans are found sooner or later, by luck: then there must be one given time.
        until = time.monotonic() + 4 * SECONDS
        solution = solve_optimal(problem, Request(arena, deadline=until))
    assert best is not None
    assert solution.lower_bound_us <= best * (1 + 1e-6)
    assert solution.placed.cost_us >= best * (1 - 1e-9)
    if solution.status == "optimal":
        assert solution.placed.cost_us == pytest.approx(best, rel=1e-6)


@settings(SETTINGS, max_examples=25)
@given(graph=graphs(max_ops=9), **BUDGETS)
def test_path_cuts_agree_with_exhaustive_search(graph, outputs, share, alignment):
    """As if every model were hard: no cut cuts off a schedule."""
    problem, arena = tight(graph, outputs, share, alignment)
    best = cheapest(problem, arena)
    reported = []
    request = Request(arena, deadline=time.monotonic() + SECONDS, progress=reported.append)
    hard = ExactParams(
        easy_share=0.0,
        easy_seconds=0.0,
        first_points=6,
        min_violation=-1.0,  # every cut, tight or not
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "_slack", lambda *_: -2.0)
        try:
            solution = solve_optimal(problem, request, hard)
        except DoesNotFitError:
            return
    assert not any("discarded" in progress.message for progress in reported)
    assert best is not None
    assert solution.lower_bound_us <= best * (1 + 1e-6)
    assert solution.placed.cost_us >= best * (1 - 1e-9)


@settings(SETTINGS, max_examples=60)
@given(graph=graphs(max_ops=9), point=st.integers(0, 8), **BUDGETS)
def test_a_solution_is_read_out_as_a_schedule(process, graph, point, outputs, share, alignment):
    """With next to no time points it may overflow; if it fits, it costs no less than the best."""
    problem, arena = tight(graph, outputs, share, alignment)
    program, best = Program.of(problem), cheapest(problem, arena)
    readout = readout_of(process, program, arena, point)
    assert bool(readout.overflows) == (not readout.schedule.fits(arena))
    if not readout.overflows:
        assert readout.schedule.cost_us >= best * (1 - 1e-9)
    made = plan_of(program.versions.to_original(readout.schedule))
    assert find_faults(graph, made) == []


@settings(SETTINGS, max_examples=15)
@given(graph=graphs(max_ops=9), **BUDGETS)
def test_bounds_hold_where_tensors_are_overwritten(graph, outputs, share, alignment):
    """Overwritten tensors are relaxed, so the bound holds for them too."""
    problem, arena = tight(graph, outputs, share, alignment)
    assume(any(op.mutates for op in graph.ops))
    best = cheapest(problem, arena)
    try:
        solution = solve_optimal(problem, Request(arena, deadline=time.monotonic() + SECONDS))
    except DoesNotFitError:
        return
    assert best is not None
    assert solution.lower_bound_us <= best * (1 + 1e-6)
    assert solution.placed.cost_us >= best * (1 - 1e-9)


@settings(SETTINGS, max_examples=25)
@given(graph=graphs(max_ops=8, mutates=False), **BUDGETS)
def test_checkmate_and_intervals_agree_with_exhaustive_search(graph, outputs, share, alignment):
    """CP-SAT finds the optimum of all schedules, Checkmate that of its class."""
    problem, arena = tight(graph, outputs, share, alignment)
    best = cheapest(problem, arena)
    for copies in (3, 5):
        outcome, schedule = schedule_intervals(Program.of(problem), arena, SECONDS, copies=copies)
        if schedule is not None:
            assert schedule.cost_us >= best * (1 - 1e-6)
            assert schedule.live_bytes().max(initial=0) <= arena
        if best is None or (schedule and schedule.cost_us <= best * (1 + 1e-6)):
            break  # some optima need an op more often than others
    assert outcome is (Outcome.INFEASIBLE if best is None else Outcome.OPTIMAL)
    if best is not None:
        assert schedule.cost_us == pytest.approx(best, rel=1e-6)
    staged = cheapest(problem, arena, staged=True)
    found = cost_of(solve_checkmate, problem, arena)
    if found is not None:
        assert found == pytest.approx(staged, rel=1e-6)
    rounded = cost_of(solve_checkmate, problem, arena, integral=False)
    if rounded is not None:
        assert rounded >= staged * (1 - 1e-9)


def _same_class(method):
    """Options for coop-offline to do what a method does: `optimal` keeps the program's order."""
    return {"switches": {"reorder": False}} if method == "optimal" else {}


@settings(SETTINGS, max_examples=12)
@given(
    graph=graphs(max_ops=12),
    outputs=OUTPUTS,
    budget=st.sampled_from(["90%", "60%", "30%"]),
)
@pytest.mark.parametrize("method", slow_after(1, ["auto", "optimal"]))
def test_plans_are_valid_and_no_worse_than_the_heuristic(method, graph, outputs, budget):
    """Whatever the budget: a valid plan, not above coop-offline's, with a bound below its cost."""
    assume(sum(t.bytes for t in graph.tensors))
    options = {"outputs": outputs, "alignment": 1}
    try:
        heuristic = plan(graph, budget, method="coop-offline", **options, **_same_class(method))
    except InfeasibleBudgetError:
        return
    # Where there is a link not all is proved, and the time is spent.
    made = plan(graph, budget, method=method, time_limit=3.0, **options)
    assert find_faults(graph, made) == []
    assert made.cost_us <= heuristic.cost_us * (1 + 1e-9)
    if made.lower_bound_us is None:
        assert Problem.from_graph(graph, 1).beyond_recomputation
        assert (made.status, made.lower_bound_model) == ("feasible", None)
        return
    assert made.lower_bound_us <= made.cost_us * (1 + 1e-9)
    assert made.lower_bound_model in ("program-order", "any")


def test_in_place_pairs_save_the_most_bytes():
    """The larger output takes the input that both could; and moves on where it has another."""
    tensors = {t: ("activation", size) for t, size in enumerate([16, 16, 4, 16, 8])}
    reads = [{"outputs": [0, 1]}]
    writes = {"inputs": [0, 1], "outputs": [2, 3, 4]}
    wide = Problem.from_graph(
        make_graph(tensors, [*reads, {**writes, "inplace": [[2, 0], [3, 0], [3, 1], [4, 0]]}]), 1
    )
    shares = Schedule.of(wide, [0, 1]).trace.shares
    assert shares.tolist() == [-1, -1, -1, 1, 0]  # buffers 3 and 4 lie where 1 and 0 did
    assert largest_working_set(wide) == (1, 36)
    narrow = make_graph(tensors, [*reads, {**writes, "inplace": [[2, 0], [3, 0]]}])
    for method in ("keep-all", "optimal", "checkmate"):
        made = plan(narrow, 44, method=method, alignment=1, time_limit=SECONDS)
        assert find_faults(narrow, made) == []


def test_an_output_larger_than_its_input_takes_no_address():
    """Although both are as large when rounded up to the alignment."""
    graph = make_graph(
        {0: ("activation", 9), 1: ("activation", 10)},
        [{"outputs": [0]}, {"inputs": [0], "outputs": [1], "inplace": [[1, 0]]}],
    )
    for method in ("keep-all", "coop", "coop-offline", "optimal"):
        assert find_faults(graph, plan(graph, 64, method=method, alignment=8)) == []


def chain(length, cost=1.0, size=1):
    """`length` tensors in a row, then read in reverse."""
    tensors = dict.fromkeys(range(2 * length), ("activation", size))
    ops = [{"inputs": [i - 1] if i else [], "outputs": [i]} for i in range(length)]
    for back in range(length):
        reads = [length - 1 - back] + ([length - 1 + back] if back else [])
        ops.append({"inputs": reads, "outputs": [length + back]})
    return make_graph(tensors, [{**op, "cost_us": cost} for op in ops])


@pytest.mark.parametrize("method", ["optimal", "checkmate", "auto"])
def test_a_chain_at_half_its_peak(method):
    """All exact methods find the same cost; those with a bound prove it."""
    made = plan(chain(10), "50%", method=method, alignment=1, time_limit=SECONDS)
    assert made.cost_us == pytest.approx(26.0)
    if method != "checkmate":
        assert (made.status, made.lower_bound_us) == ("optimal", pytest.approx(26.0))


@pytest.mark.parametrize("method", ["optimal", "auto", "checkmate"])
def test_a_budget_that_needs_nothing(monkeypatch, method):
    """At keep-everything's peak: no overhead, proved, without a solver."""
    monkeypatch.setattr(Child, "send", None)
    made = plan(chain(10), "100%", method=method, alignment=1)
    assert (made.overhead, made.status, made.lower_bound_us) == (0, "optimal", 20)


@pytest.mark.parametrize("method", ["optimal", "auto"])
@pytest.mark.parametrize(
    "graph",
    [
        make_graph({0: ("output", 5)}, [{"outputs": [0]}]),
        chain(6, cost=0.0),
        chain(6, cost=1e12),
        chain(6, cost=1e-9),
        chain(6, size=1 << 40),
        chain(6, size=0),
    ],
    ids=["single op", "no cost", "huge cost", "tiny cost", "huge tensors", "no bytes"],
)
def test_edges(method, graph):
    """Degenerate graphs get a proved plan at the smallest budget."""
    budget = "min" if sum(t.bytes for t in graph.tensors) else 1
    made = plan(graph, budget, method=method, alignment=1, time_limit=SECONDS)
    assert find_faults(graph, made) == []
    assert made.status == "optimal"


def test_no_time_at_all_returns_the_heuristic():
    """A time limit of 0 is coop-offline's plan with what is known without solving."""
    heuristic = plan(chain(12), "50%", method="coop-offline", alignment=1, time_limit=0)
    made = plan(chain(12), "50%", method="optimal", alignment=1, time_limit=0)
    assert made.cost_us <= heuristic.cost_us
    assert made.lower_bound_us >= made.base_cost_us


def test_no_job_may_go_on_beyond_the_deadline(monkeypatch):
    """Whatever is asked of the solver for a model that cannot be solved in time."""
    deadlines = []
    messages = SolverProcess._messages

    def spy(process, job, deadline):
        deadlines.append(deadline)
        return messages(process, job, deadline)

    monkeypatch.setattr(SolverProcess, "_messages", spy)
    problem = Problem.from_graph(chain(120), 1)
    solve_optimal(problem, Request(12, deadline=time.monotonic() + 1))  # compiles what it takes
    for seconds in (10, 60):  # on a machine that is busy, the first may pass before any job
        deadlines.clear()
        deadline = time.monotonic() + seconds
        solution = solve_optimal(problem, Request(12, deadline=deadline))
        assert solution.lower_bound_us <= solution.placed.cost_us
        if deadlines:
            break
    assert deadlines
    assert max(deadlines) <= deadline


def test_a_late_worker_is_killed(monkeypatch, process):
    """What does not answer by the deadline has no answer, and is gone."""
    process.kill()
    asleep = [sys.executable, "-c", "import time; time.sleep(1e6)"]
    monkeypatch.setattr(process, "_command", asleep)
    answer = process.solve(knapsack(), time.monotonic() + 1)
    assert (answer.outcome, answer.values) == (Outcome.UNKNOWN, None)
    assert process._process is None


def test_progress_reports_plan_bound_and_gap():
    """While it runs: the best overhead, what it is at least, and the gap."""
    messages = []
    plan(
        chain(30),
        "20%",
        method="optimal",
        alignment=1,
        time_limit=5,
        progress=lambda progress: messages.append(progress.message),
    )
    assert any("at least" in message and "gap" in message for message in messages)


def test_too_many_variables_are_refused_at_once(monkeypatch):
    """Checkmate names the number of its variables instead of building and solving them."""
    monkeypatch.setattr(CheckmateModel, "__post_init__", None)
    with pytest.raises(InvalidInputError, match=f"variables on this graph.*{MAX_VARIABLES}"):
        plan(chain(200), "50%", method="checkmate", alignment=1)


def test_rounding_the_relaxation_is_no_better_than_the_program():
    """`--ablate integral` gives a valid plan that costs at least the optimum."""
    options = {"method": "checkmate", "alignment": 1, "time_limit": SECONDS}
    rounded = plan(chain(8), "60%", switches={"integral": False}, **options)
    assert rounded.cost_us >= plan(chain(8), "60%", **options).cost_us


def test_an_unknown_solver_is_named():
    """A PuLP solver that is not installed is refused with those that are."""
    with pytest.raises(InvalidInputError, match="PULP_CBC_CMD"):
        solve_checkmate(Problem.from_graph(chain(4), 1), Request(4, solver="GUROBI_CMD"))


def test_a_missing_package_is_named_with_its_extra():
    """One sentence that says what to install."""
    with pytest.raises(InvalidInputError, match=r"pip install '\.\[exact\]'"):
        require("a_package_that_does_not_exist")


def knapsack():
    """Minimise −Σ x over Σ x ≤ 2.5: the optimum is −2."""
    milp = Milp()
    columns = [milp.binary(-1.0) for _ in range(4)]
    milp.row([(column, 1.0) for column in columns], 0.0, 2.5)
    return milp


@pytest.mark.parametrize("solver", ["highs", "scip", "cp-sat"])
def test_every_solver_answers(process, solver):
    """The same model, the same optimum."""
    answer = process.solve(knapsack(), time.monotonic() + SECONDS, solver=solver)
    assert (answer.outcome, round(answer.objective)) == (Outcome.OPTIMAL, -2)
    assert answer.bound == pytest.approx(-2)


def test_a_worker_that_fails_says_so_and_one_that_is_killed_is_replaced(process):
    """Neither an exception nor a kill is taken for an answer; the next solve works."""
    with pytest.raises(SolverError):
        process.solve(knapsack(), time.monotonic() + SECONDS, solver="no such solver")
    process.kill()
    assert process.solve(knapsack(), time.monotonic()).outcome is Outcome.UNKNOWN
    assert process.solve(knapsack(), time.monotonic() + SECONDS).outcome is Outcome.OPTIMAL


@pytest.mark.parametrize("module", ["ortools", "pickle", "resource", "coop_plan"])
def test_a_folder_of_the_users_takes_no_modules_place(monkeypatch, tmp_path, module):
    """Neither one in the current folder nor, for the standard library, one found before it."""
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    if module in sys.stdlib_module_names:
        monkeypatch.syspath_prepend(tmp_path)
    with SolverProcess() as process:
        answer = process.solve(knapsack(), time.monotonic() + SECONDS)
    assert answer.outcome is Outcome.OPTIMAL


def test_the_worker_starts_without_what_it_does_not_need():
    """No kernel, no NumPy, nothing of the planner but what jobs are made of."""
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, coop_plan.planner.exact.solver.worker; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"numba", "numpy", "msgspec", "ortools"}.intersection(loaded)
    ours = {name for name in loaded if name.startswith("coop_plan.planner.exact.")}
    assert {name.rpartition(".")[2] for name in ours} == {
        "model",
        "milp",
        "solver",
        "jobs",
        "worker",
    }
