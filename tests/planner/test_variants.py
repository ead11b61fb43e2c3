"""Variants are chosen jointly with the schedule, run by run, and bounds hold with them."""

import heapq
import itertools
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coop_plan.planner import InfeasibleBudgetError, find_faults, plan
from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import NoScheduleError, Schedule
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.model.timepoint import TimePointModel
from coop_plan.planner.exact.model.variants import fix_variants, restore_variants
from coop_plan.planner.exact.monet import solve_monet
from coop_plan.planner.exact.primal.lns import neighbourhood
from coop_plan.planner.exact.primal.warm_start import warm_start
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.method import Request
from coop_plan.planner.online.methods import run_coop
from coop_plan.planner.smallest_budget import SMALL_PROBLEM_OPS
from tests.strategies import graphs
from tests.support import make_graph

pytest.importorskip("ortools")

SECONDS = 20.0
"""Enough for the smallest programs on a busy machine."""


def masks(cost=12.0):
    """Two layers and back: relu 1 may make a mask that its backward reads instead of its input."""
    tensors = {0: ("input", 1), 9: ("output", 1), 7: ("activation", 1)}
    tensors |= dict.fromkeys((1, 2, 3, 5, 6), ("activation", 8))
    ops = [
        {"inputs": [0], "outputs": [1], "cost_us": 50.0},
        {"inputs": [1], "outputs": [2], "cost_us": 10.0},
        {"inputs": [2], "outputs": [3], "cost_us": 50.0},
        {"inputs": [3], "outputs": [5], "cost_us": 10.0},
        {"inputs": [5, 1], "outputs": [6], "cost_us": 10.0, "inplace": [[6, 5]]},
        {"inputs": [6], "outputs": [9], "cost_us": 10.0},
    ]
    ops[1]["variants"] = [{"name": "bits", "inputs": [1], "outputs": [2, 7], "cost_us": cost}]
    lean = {"name": "bits", "inputs": [5, 7], "outputs": [6], "inplace": [[6, 5]]}
    ops[4]["variants"] = [lean | {"cost_us": cost}]
    return make_graph(tensors, ops)


def names(made):
    return [step.variant for step in made.steps if step.do == "compute"]


@pytest.mark.parametrize("method", ["coop-offline", "optimal", "auto"])
def test_a_mask_is_made_where_it_is_read(method):
    """Keeping the input takes 26 bytes; the mask is cheaper than the input made again."""
    graph = masks()
    assert set(names(plan(graph, 27, method=method, alignment=1, time_limit=10))) == {None}
    made = plan(graph, 19, method=method, alignment=1, time_limit=10)
    assert names(made) == [None, "bits", None, None, "bits", None]
    assert made.cost_us == pytest.approx(144.0)
    assert find_faults(graph, made) == []


def test_monet_chooses_variants_by_the_run():
    made = plan(masks(), 19, method="monet", alignment=1, time_limit=SECONDS)
    assert names(made) == [None, "bits", None, None, "bits", None]
    assert (made.status, made.lower_bound_us) == ("feasible", None)
    made = plan(workspaces(), 18, method="monet", alignment=1, time_limit=SECONDS)
    assert names(made) == [None, None, None, "lean", None]


def test_a_dear_mask_is_not():
    graph = masks(cost=80.0)
    made = plan(graph, 19, method="optimal", alignment=1, time_limit=10)
    assert set(names(made)) == {None}
    assert (made.status, made.recomputed_ops) == ("optimal", 1)


def workspaces():
    """One op, run twice: there is room for the fast variant's workspace the first time alone."""
    tensors = {0: ("input", 1), 8: ("output", 1)}
    tensors |= {1: ("activation", 6), 2: ("activation", 6), 3: ("activation", 4)}
    ops = [
        {"inputs": [0], "outputs": [1], "cost_us": 10.0, "workspace_bytes": 10},
        {"inputs": [1], "outputs": [3], "cost_us": 50.0, "workspace_bytes": 6},
        {"inputs": [3], "outputs": [2], "cost_us": 50.0, "workspace_bytes": 6},
        {"inputs": [1, 2], "outputs": [8], "cost_us": 10.0},
    ]
    ops[0]["variants"] = [{"name": "lean", "inputs": [0], "outputs": [1], "cost_us": 12.0}]
    return make_graph(tensors, ops)


@pytest.mark.parametrize("method", ["coop-offline", "auto"])
def test_orders_other_than_the_programs_have_the_bodies_that_were_chosen(method):
    tensors = {0: ("input", 4), 5: ("output", 8)} | dict.fromkeys((3, 4), ("activation", 8))
    tensors |= dict.fromkeys((1, 2), ("activation", 400))
    last = {"inputs": [3, 4], "outputs": [5], "workspace_bytes": 900}
    last["variants"] = [last | {"name": "lean", "cost_us": 2.0, "workspace_bytes": 0}]
    sides = [{"inputs": [i], "outputs": [o]} for i, o in ((0, 1), (0, 2), (1, 3), (2, 4))]
    graph = make_graph(tensors, [*sides, last])
    made = plan(graph, 428, method=method, alignment=1, time_limit=SECONDS)
    assert (made.recomputed_ops, names(made)[-1], made.lower_bound_model) in (
        (0, "lean", None),  # coop-offline proves nothing
        (0, "lean", "any"),
    )
    held = plan(graph, 428, method=method, alignment=1, time_limit=4.0, switches={"reorder": False})
    assert (held.recomputed_ops, names(held)[-1]) == (2, "lean")


def test_each_run_has_its_own_body():
    graph = workspaces()
    made = plan(graph, 18, method="optimal", alignment=1, time_limit=10)
    assert names(made) == [None, None, None, "lean", None]
    assert made.lower_bound_model == "program-order"


def test_the_bound_knows_what_a_recompute_needs():
    """The fast variant fits nowhere again: the program learns it from a run that was too full."""
    made = plan(workspaces(), 18, method="optimal", alignment=1, time_limit=SECONDS)
    assert made.cost_us == pytest.approx(132.0)
    assert (made.status, made.lower_bound_us) == ("optimal", pytest.approx(132.0))


def test_the_smallest_budget_counts_the_leanest_body():
    graph = make_graph(
        {0: ("input", 1), 1: ("output", 1)},
        [
            {
                "inputs": [0],
                "outputs": [1],
                "workspace_bytes": 100,
                "variants": [
                    {"name": "lean", "inputs": [0], "outputs": [1], "cost_us": 9.0},
                    {
                        "name": "rough",
                        "inputs": [0],
                        "outputs": [1],
                        "cost_us": 1.0,
                        "approximate": True,
                    },
                ],
            }
        ],
    )
    assert plan(graph, "min", method="coop-offline", alignment=1).peak_bytes == 2
    assert names(plan(graph, 2, method="auto", alignment=1, time_limit=5)) == ["lean"]
    with pytest.raises(InfeasibleBudgetError) as reported:
        plan(graph, 2, method="coop", alignment=1, smallest=True)
    assert (reported.value.min_feasible_bytes, reported.value.unused) == (102, ("variants",))


def test_bodies_are_lean_where_outputs_take_the_room():
    """On a step too long for every exchange, in haste as well."""
    tensors = {0: ("input", 1), 1: ("output", 100), 2: ("output", 1)}
    tensors |= dict.fromkeys(range(3, 83), ("activation", 1))
    chain = [{"inputs": [max(t - 1, 3) if t > 3 else 0], "outputs": [t]} for t in range(3, 83)]
    last = {"inputs": [82], "outputs": [2], "workspace_bytes": 70}
    last["variants"] = [last | {"name": "lean", "cost_us": 9.0, "workspace_bytes": 48}]
    graph = make_graph(tensors, [{"inputs": [0], "outputs": [1]}, *chain, last])
    asked = {"alignment": 1, "outputs": "arena", "switches": {"reorder": False}}
    made = plan(graph, "min", method="coop-offline", **asked)
    assert made.arena_bytes == 150
    assert names(made)[-1] == "lean"


def test_the_smallest_budget_is_as_fine_as_what_is_needed():
    """However much there is with everything kept; nothing says below where none is found."""
    held, chain = range(10), range(20, 120)
    tensors = {200: ("input", 1), 201: ("output", 1), 202: ("activation", 30)}
    tensors |= dict.fromkeys(held, ("activation", 1000)) | dict.fromkeys(chain, ("activation", 1))
    early = [{"inputs": [200], "outputs": [i]} for i in held]
    ops = [{"inputs": [200], "outputs": [202], "recomputable": False}, *early]
    ops += [{"inputs": [t - 1] if t > 20 else [200], "outputs": [t]} for t in chain]
    last = {"inputs": [119], "outputs": [201], "workspace_bytes": 1720}
    last["variants"] = [last | {"name": "lean", "cost_us": 9.0, "workspace_bytes": 1700}]
    ends = [{"inputs": [i], "outputs": [210 + i]} for i in held]
    ends += [{"inputs": [202], "outputs": [220]}]
    tensors |= dict.fromkeys(range(210, 221), ("output", 1))
    graph = make_graph(tensors, [*ops, last, *ends])
    made = plan(graph, "min", method="coop-offline", alignment=1, switches={"reorder": False})
    assert made.arena_bytes == 1731
    assert "lean" in names(made)


def reruns_in_another_variant():
    """Op 0 runs again to make what only the cheap variant of the last op reads."""
    tensors = {0: ("input", 1), 1: ("activation", 10), 2: ("activation", 10)}
    tensors |= {3: ("activation", 1), 4: ("activation", 1), 5: ("output", 1)}
    ops = [
        {"inputs": [0], "outputs": [1], "cost_us": 10.0},
        {"inputs": [1], "outputs": [3], "cost_us": 5.0, "workspace_bytes": 85},
        {"inputs": [3], "outputs": [4], "cost_us": 5.0, "workspace_bytes": 95},
        {"inputs": [1, 4], "outputs": [5], "cost_us": 100.0, "phase": "backward"},
    ]
    ops[0]["variants"] = [ops[0] | {"name": "both", "outputs": [1, 2], "cost_us": 11.0}]
    cheap = {"name": "cheap", "inputs": [2, 4], "outputs": [5], "cost_us": 1.0}
    ops[3]["variants"] = [cheap]
    return make_graph(tensors, ops)


@pytest.mark.parametrize("method", ["coop-offline", "auto"])
@pytest.mark.parametrize("seconds", [None, 6.0])
def test_an_op_runs_again_in_another_variant(method, seconds):
    made = plan(reruns_in_another_variant(), 102, method=method, alignment=1, time_limit=seconds)
    assert (made.cost_us, names(made)) == (32.0, [None, None, None, "both", "cheap"])


def masks_of_approximate_variants():
    """As `masks`, but the mask is made by an approximate variant alone."""
    graph = masks(cost=1.0)
    rough = graph.ops[1].variants[0].model_copy({"approximate": True})
    ops = [graph.ops[0], graph.ops[1].model_copy({"variants": [rough]}), *graph.ops[2:]]
    return graph.model_copy({"ops": ops})


@pytest.mark.parametrize("method", ["keep-all", "coop-offline", "monet", "optimal", "auto"])
def test_variants_that_cannot_run_are_left_out(method):
    """They read what an approximate variant alone makes."""
    graph = masks_of_approximate_variants()
    assert Problem.from_graph(graph, 1).beyond_recomputation == []
    made = plan(graph, 27, method=method, alignment=1, time_limit=SECONDS)
    assert set(names(made)) == {None}


def test_variants_that_do_not_read_what_their_op_overwrites_are_left_out():
    lazy = {"name": "lazy", "cost_us": 0.0, "inputs": [], "outputs": [1]}
    op = {"inputs": [0], "outputs": [1], "mutates": [0], "variants": [lazy]}
    graph = make_graph({0: ("buffer", 4), 1: ("output", 4)}, [op])
    made = plan(graph, "100%", method="coop-offline", alignment=1)
    assert names(made) == [None]


def test_an_assignment_makes_all_that_default_variants_read():
    """The cheap variant of op 0 omits what op 1, which has no other variant, reads."""
    tensors = {0: ("input", 1), 1: ("activation", 8), 2: ("activation", 8), 3: ("output", 1)}
    first = {"inputs": [0], "outputs": [1, 2], "cost_us": 9.0}
    first["variants"] = [first | {"name": "half", "outputs": [1], "cost_us": 1.0}]
    last = {"inputs": [1, 2], "outputs": [3]}
    made = plan(make_graph(tensors, [first, last]), "min", method="coop-offline", alignment=1)
    assert names(made) == [None, None]


def test_runs_that_omit_an_output_of_the_step_are_no_schedule():
    op = {"inputs": [0], "outputs": [1, 2]}
    half = {"name": "half", "inputs": [0], "outputs": [1], "cost_us": 0.0}
    tensors = {0: ("input", 1), 1: ("output", 8), 2: ("output", 8)}
    problem = Problem.from_graph(make_graph(tensors, [op | {"variants": [half]}]), 1)
    assert Schedule.of(problem, [1, 0]).cost_us == 1.0
    with pytest.raises(NoScheduleError, match="no run makes tensor 2, an output of the step"):
        Schedule.of(problem, [1])


def cheapest(problem, arena, *, monet=False):
    """
    The least cost of a schedule in program order, by uniform-cost search over what is there.

    Memory is what lives at once, in-place pairs apart; None where nothing fits. A tensor that is
    read may be dropped at any time, and everything may be made again; with `monet` in program order
    between two first runs, and of the forward pass alone, in the backward pass.
    """
    phases = [op.phase for op in problem.graph.ops]
    turn = phases.index("backward") if "backward" in phases else 0
    n, size = problem.op_count, problem.size
    ends = frozenset(t for t in range(problem.tensor_count) if problem.is_output[t])

    def room(tensors):
        return sum(size[t] for t in tensors)

    @cache
    def moves(done, last, here):
        found = []
        for b in problem.variants:
            again = b.op < done
            if (
                monet
                and again
                and (b.op <= last or done < turn or b.op >= (turn or n) or done == n)
            ):
                continue
            if b.op > done or (again and not problem.graph.ops[b.op].recomputable):
                continue
            if not set(b.reads) <= here or (again and set(b.outputs) <= here):
                continue
            after = here | set(b.makes)
            if room(after) + problem.rounded(b.workspace_bytes) <= arena:
                found.append((b.cost_us, max(done, b.op + 1), b.op if again else -1, after))
        found += [(0.0, done, last, here - {t}) for t in here]
        return found

    best = {(0, -1, frozenset()): 0.0}
    queue = [(0.0, 0, 0, -1, frozenset())]
    count = itertools.count(1)
    while queue:
        cost, _, done, last, here = heapq.heappop(queue)
        if done == n and ends <= here:
            return cost
        if cost > best[done, last, here]:
            continue
        for more, *state in moves(done, last if monet else -1, here):
            if cost + more < best.get(tuple(state), float("inf")):
                best[tuple(state)] = cost + more
                heapq.heappush(queue, (cost + more, next(count), *state))
    return None


@settings(max_examples=12, deadline=None)
@given(graph=graphs(max_ops=5, mutates=False, inplace=False, rng=False, bandwidth=False))
def test_brute_force_over_bodies_agrees(graph):
    """The bound is below, and a proof is the cost, of the cheapest schedule by enumeration."""
    problem = Problem.from_graph(graph, 1, "arena")
    if not any(op.variants for op in graph.ops):
        return
    everything = int(Schedule.of(problem, range(problem.op_count)).live_bytes().max(initial=0))
    arena = everything * 3 // 4
    budget = arena + problem.fixed_bytes
    if budget == 0:
        return
    least = cheapest(problem, arena)
    try:
        made = plan(graph, budget, method="optimal", alignment=1, outputs="arena", time_limit=3)
    except InfeasibleBudgetError:
        return
    assert least is not None
    assert made.cost_us >= least - 1e-6
    if made.lower_bound_us is not None:
        assert made.lower_bound_us <= least + 1e-4
    if made.status == "optimal":
        assert made.cost_us == pytest.approx(least)


@settings(max_examples=25, deadline=None)
@given(graph=graphs(max_ops=5, mutates=False, inplace=False, rng=False, bandwidth=False))
def test_monet_agrees_with_brute_force_over_its_class(graph):
    problem = Problem.from_graph(graph, 1, "arena")
    everything = int(Schedule.of(problem, range(problem.op_count)).live_bytes().max(initial=0))
    arena = everything * 3 // 4
    least = cheapest(problem, arena, monet=True)
    try:
        solution = solve_monet(problem, Request(arena, deadline=time.monotonic() + SECONDS))
    except DoesNotFitError:
        solution = None
    # Of an op with several outputs, those that are there are made beside themselves.
    if all(len(variant.outputs) == 1 for variant in problem.variants):
        assert (solution is None) == (least is None)
    if solution is not None:
        assert least is not None
        assert solution.placed.cost_us >= least - 1e-6
        if all(len(variant.outputs) == 1 for variant in problem.variants):
            assert solution.placed.cost_us == pytest.approx(least)


def test_a_neighbourhood_frees_its_segments_and_relaxes_memory_rows_that_are_violated():
    problem = Problem.from_graph(workspaces(), 1, "arena")
    program, n = Program.of(problem, variants=True), problem.op_count
    schedule = Schedule.of(problem, [variants[0] for variants in program.choices])
    model = TimePointModel(program, int(schedule.live_bytes().max()) - 1, list(range(n + 1)))
    values = warm_start(model, schedule)
    loose = neighbourhood(model, values, range(0), range(0))
    rows = [each[0] for each in model.memory]
    full = [k for k, row in enumerate(rows) if loose.row_upper[row] > model.milp.row_upper[row]]
    assert 0 < len(full) < len(rows)
    k = full[0]
    free = neighbourhood(model, values, range(0), range(k, k + 1))
    reported = [c for c in (*model.x[k].values(), *model.y[k].values()) if c is not None]
    assert all(free.upper[c] == model.milp.upper[c] for c in reported)
    assert all(loose.lower[c] == loose.upper[c] == values[c] for c in reported)


def assert_meets_all_rows(milp, values):
    sums = [0.0] * len(milp.row_lower)
    for row, column, value in zip(milp.entry_row, milp.entry_column, milp.entry_value, strict=True):
        sums[row] += value * values[column]
    for low, value, high in zip(milp.row_lower, sums, milp.row_upper, strict=True):
        assert low - 1e-6 <= value <= high + 1e-6


@settings(max_examples=25, deadline=None)
@given(graph=graphs(max_ops=8, mutates=False, rng=False, bandwidth=False))
def test_every_schedule_is_a_solution_of_the_program(graph):
    """Keep-everything meets all rows of the program at its own peak, and costs what it says."""
    problem = Problem.from_graph(graph, 1, "arena")
    program = Program.of(problem, variants=True)
    schedule = Schedule.of(problem, [variants[0] for variants in program.choices])
    peak = int(schedule.live_bytes().max(initial=0))
    model = TimePointModel(program, max(peak, 1), list(range(problem.op_count + 1)))
    values = warm_start(model, schedule)
    milp = model.milp
    assert_meets_all_rows(milp, values)
    cost = sum(c * v for c, v in zip(milp.cost, values, strict=True))
    assert model.bound_us(cost) == pytest.approx(schedule.cost_us)


@settings(max_examples=40, deadline=None)
@given(
    graph=graphs(max_ops=10, mutates=False, rng=False, bandwidth=False),
    share=st.sampled_from([0.9, 0.7, 0.5]),
    every=st.integers(1, 4),
)
def test_cuts_leave_every_schedule_in(graph, share, every):
    """A schedule with recomputes meets all rows at its own peak, whatever is looked at closely."""
    problem = Problem.from_graph(graph, 1, "arena")
    program, n = Program.of(problem, variants=True), problem.op_count
    arena = int(share * int(keep_all_schedule(problem).live_bytes().max(initial=0)))
    try:
        placed = run_coop(fix_variants(problem, range(n)), Request(arena)).placed
    except DoesNotFitError:
        return
    runs = restore_variants(problem, range(n), placed).schedule.variants
    schedule = Schedule.of(problem, list(runs))
    peak = int(schedule.live_bytes().max(initial=0))
    points = [*range(0, n, every), n]
    cuts = frozenset(itertools.product(range(n), range(n)))
    model = TimePointModel(program, max(peak, 1), points, cuts)
    values = warm_start(model, schedule)
    assert_meets_all_rows(model.milp, values)


@settings(max_examples=60, deadline=None)
@given(graph=graphs(max_ops=14, bandwidth=False), share=st.sampled_from([0.9, 0.7, 0.5]))
def test_a_plan_of_one_body_an_op_keeps_its_lifetimes(graph, share):
    """What shares an address in place as the online method told does so among all variants, too."""
    problem = Problem.from_graph(graph, 512)
    chosen = range(problem.op_count)
    arena = int(share * int(keep_all_schedule(problem).live_bytes().max(initial=0)))
    try:
        placed = run_coop(fix_variants(problem, chosen), Request(arena)).placed
    except DoesNotFitError:
        return
    back = restore_variants(problem, chosen, placed)
    assert back.cost_us == placed.cost_us
    for mine, its in zip(back.schedule.trace, placed.schedule.trace, strict=True):
        assert mine.tolist() == its.tolist()


@settings(max_examples=8, deadline=None)
@given(graph=graphs(max_ops=10), outputs=st.sampled_from(["outside", "arena"]))
def test_plans_are_valid_and_no_dearer_than_coops(graph, outputs):
    """Whatever ops overwrite, repeat or move: within the smallest budget that coop can meet."""
    options = {"outputs": outputs, "alignment": 1}
    reference = plan(graph, "min", method="coop", **options)
    budget = max(1, reference.peak_bytes)
    made = plan(graph, budget, method="coop-offline", time_limit=2, **options)
    assert find_faults(graph, made) == []
    assert made.cost_us <= reference.cost_us * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(graph=graphs(max_ops=8, bandwidth=False), pairs=st.booleans())
def test_choices_never_need_or_cost_more(graph, pairs):
    """Than the same graph without variants, and without in-place pairs."""
    bare = {"variants": []} | ({} if pairs else {"inplace": []})
    ops = [op.model_copy(update=bare) for op in graph.ops]
    without = graph.model_copy(update={"ops": ops})
    options = {"method": "coop-offline", "alignment": 1}
    least = plan(without, "min", **options)
    assert plan(graph, "min", **options).peak_bytes <= least.peak_bytes
    if least.peak_bytes:
        within = [plan(g, least.peak_bytes, **options) for g in (graph, without)]
        assert within[0].cost_us <= within[1].cost_us * (1 + 1e-9)


def test_what_needs_less_without_pairs_is_found_by_every_search():
    """On a larger graph, where the search for the smallest budget is a coarse one."""
    count = SMALL_PROBLEM_OPS + 20
    tensors = {0: ("input", 1)} | dict.fromkeys(range(1, count), ("activation", 8))
    tensors[count] = ("output", 8)
    ops = [{"inputs": [t], "outputs": [t + 1], "inplace": [[t + 1, t]]} for t in range(count)]
    graph = make_graph(tensors, ops)
    assert plan(graph, "min", method="coop-offline", alignment=1).arena_bytes == 8
    made = plan(graph, "min", method="coop-offline", alignment=1, time_limit=5)
    assert made.arena_bytes == 8


def test_without_a_time_limit_work_is_counted():
    """A seed is a plan: nothing asks the clock, and a small step starts no solver's process."""
    graph = masks()
    made = plan(graph, 19, alignment=1)
    assert names(made) == [None, "bits", None, None, "bits", None]
    again = plan(graph, 19, alignment=1)
    assert again.steps == made.steps
    assert plan(workspaces(), 18, alignment=1).cost_us == pytest.approx(132.0)


def test_a_program_that_takes_too_long_is_given_up():
    """Of a large graph it takes longer to write it down than there is time."""
    problem = Problem.from_graph(masks(), 1, "arena")
    points = list(range(problem.op_count + 1))
    with pytest.raises(TimeLimitError, match="time limit reached"):
        TimePointModel(Program.of(problem, variants=True), 100, points, deadline=0.0)
