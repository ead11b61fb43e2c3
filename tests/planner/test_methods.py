"""Every method, on random graphs: what it returns is valid, within the budget, and honest."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from coop_plan.planner import METHODS, InfeasibleBudgetError, Problem, find_faults, plan
from coop_plan.planner.keep_all import keep_all_schedule
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.placement.layout import lay_out
from coop_plan.planner.plan_cache.record import StoredRefusal
from tests.strategies import graphs
from tests.support import make_graph

NOSHRINK = [Phase.explicit, Phase.reuse, Phase.generate]
HEURISTICS = [name for name, info in METHODS.items() if info.anytime is False]
OUTPUTS = st.sampled_from(["outside", "arena", "gradients"])
SHARES = st.sampled_from(["100%", "90%", "70%", "50%", "30%", "min"])


@pytest.mark.parametrize("method", HEURISTICS)
@settings(max_examples=60, deadline=None, phases=NOSHRINK)
@given(
    graph=graphs(max_ops=14),
    outputs=OUTPUTS,
    budget=SHARES,
    alignment=st.sampled_from([1, 8]),
)
def test_plan_is_valid_or_the_minimum_is_feasible(method, graph, outputs, budget, alignment):
    """A plan passes the verifier; an infeasible answer names a budget that works."""
    if budget != "min" and not sum(t.bytes for t in graph.tensors):
        budget = 1
    options = {"method": method, "outputs": outputs, "alignment": alignment, "smallest": True}
    try:
        made = plan(graph, budget, **options)
    except InfeasibleBudgetError as error:
        assert error.min_feasible_bytes > error.budget_bytes
        assert error.budget_lower_bound_bytes is not None
        assert error.budget_lower_bound_bytes <= error.min_feasible_bytes
        made = plan(graph, max(1, error.min_feasible_bytes), **options)
        assert made.peak_bytes <= max(1, error.min_feasible_bytes)
    assert find_faults(graph, made) == []
    assert made.peak_bytes <= made.budget_bytes
    variants = [min(f.cost_us for f in (op, *op.variants)) for op in graph.ops]
    assert made.cost_us >= sum(variants) * (1 - 1e-9)


@pytest.mark.parametrize("method", HEURISTICS)
def test_a_long_row_of_writes_in_place(method):
    """What lies in one place for 1 500 ops is followed by no recursion."""
    n = 1500
    tensors = {0: ("input", 8), n + 1: ("output", 8)}
    tensors |= dict.fromkeys(range(1, n + 1), ("activation", 8))
    ops = [{"inputs": [i], "outputs": [i + 1], "inplace": [[i + 1, i]]} for i in range(n)]
    graph = make_graph(tensors, [*ops, {"inputs": [n, 1, 700], "outputs": [n + 1]}])
    made = plan(graph, "100%" if method == "keep-all" else "min", method=method, alignment=1)
    assert find_faults(graph, made) == []


@settings(max_examples=60, deadline=None, phases=NOSHRINK)
@given(graph=graphs(max_ops=14), outputs=OUTPUTS, budget=SHARES)
def test_offline_is_never_worse_than_the_methods_it_stands_beside(graph, outputs, budget):
    """coop-offline costs no more than coop and keep-all, and meets what they meet."""
    if budget != "min" and not sum(t.bytes for t in graph.tensors):
        budget = 1
    for other in ("keep-all", "coop"):
        try:
            reference = plan(graph, budget, method=other, outputs=outputs, alignment=1)
        except InfeasibleBudgetError:
            continue
        within = max(1, reference.budget_bytes)
        ours = plan(graph, within, method="coop-offline", outputs=outputs, alignment=1)
        assert ours.cost_us <= reference.cost_us * (1 + 1e-9)


@given(graph=graphs(max_ops=14), alignment=st.sampled_from([1, 8]))
def test_a_budget_that_needs_nothing_costs_nothing(graph, alignment):
    """At keep-everything's peak every method returns it, proved optimal, or cheaper variants."""
    problem = Problem.from_graph(graph, alignment)
    schedule = keep_all_schedule(problem)
    placed, placement = lay_out(schedule)
    assert placement.lower_bound <= placement.peak == placed.arena_bytes
    peak = problem.fixed_bytes + placed.arena_bytes
    for method in HEURISTICS:
        made = plan(graph, max(1, peak), method=method, alignment=alignment)
        cheaper = problem.floor_us < problem.base_cost_us
        assert made.status == "optimal" or cheaper
        if not (cheaper and METHODS[method].variants):
            assert (made.overhead, made.recomputed_ops) == (0, 0)
        assert made.overhead <= 0


@pytest.fixture
def chain():
    """Ten unit tensors in a row, then read in reverse: recomputation at any budget below ten."""
    tensors = dict.fromkeys(range(10), ("activation", 1)) | {
        10 + i: ("activation", 1) for i in range(10)
    }
    ops = [{"inputs": [i - 1] if i else [], "outputs": [i]} for i in range(10)]
    for back in range(10):
        reads = [9 - back] + ([9 + back] if back else [])
        ops.append({"inputs": reads, "outputs": [10 + back]})
    return make_graph(tensors, ops)


@pytest.mark.parametrize("method", [m for m in HEURISTICS if m not in ("keep-all", "swap-only")])
def test_a_chain_is_recomputed_within_half_its_peak(chain, method):
    """Half the peak of a chain takes recomputation, and the plan says how much."""
    made = plan(chain, "50%", method=method, alignment=1)
    assert made.recomputed_ops > 0
    assert made.cost_us == pytest.approx(made.base_cost_us + made.recomputed_ops)
    assert made.peak_bytes <= 6


def test_ops_that_run_once_run_once():
    """What a non-recomputable op made is kept, at the price of other tensors."""
    tensors = dict.fromkeys(range(8), ("activation", 1))
    ops = [{"inputs": [i - 1] if i else [], "outputs": [i]} for i in range(4)]
    ops[0]["recomputable"] = False
    ops += [{"inputs": [3 - i] + ([3 + i] if i else []), "outputs": [4 + i]} for i in range(4)]
    graph = make_graph(tensors, ops)
    for method in HEURISTICS:
        made = plan(graph, "min", method=method, alignment=1)
        assert [s.op for s in made.steps if s.do == "compute"].count(0) == 1


def test_the_blocking_op_is_named():
    """An impossible budget names the op with its working set."""
    tensors = {0: ("activation", 10), 1: ("activation", 100), 2: ("activation", 10)}
    ops = [{"inputs": [], "outputs": [0]}, {"inputs": [0], "outputs": [1]}]
    ops.append({"inputs": [1], "outputs": [2]})
    graph = make_graph(tensors, ops)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 50, alignment=1, smallest=True)
    assert (caught.value.blocking_op, caught.value.working_set_bytes) == (1, 110)
    assert caught.value.min_feasible_bytes == 110


@pytest.mark.parametrize("method", ["coop", "coop-offline"])
def test_an_overwritten_input_is_named_where_it_keeps_what_was_made_of_it(method):
    """The op in whose way a tensor is, which nothing can make again, is not the cause alone."""
    tensors = {0: ("input", 8), 1: ("activation", 100), 2: ("activation", 60)}
    tensors |= {3: ("activation", 1), 4: ("output", 1)}
    ops = [{"inputs": [0], "outputs": [1], "name": "make"}]
    ops.append({"inputs": [0], "outputs": [], "mutates": [0], "name": "overwrite"})
    ops.append({"inputs": [], "outputs": [2], "recomputable": False})  # in its place
    ops.append({"inputs": [2], "outputs": [3], "name": "innocent"})
    ops.append({"inputs": [3, 1], "outputs": [4]})
    graph = make_graph(tensors, ops)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 150, method=method, alignment=1)
    said = caught.value.held
    assert "100 bytes" in said
    assert "op 0 (make) cannot run again once op 1 (overwrite) has overwritten tensor 0" in said
    asked = PlanOptions.given(150, {"method": method, "alignment": 1})
    answered = StoredRefusal.of(caught.value, graph).for_request(graph, asked)
    assert str(answered) == str(caught.value)
