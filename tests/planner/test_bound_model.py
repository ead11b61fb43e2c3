"""A bound is published only for what its model contains."""

import pytest

from coop_plan.planner import InfeasibleBudgetError, find_faults, plan
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from tests.planner.core.test_schedule import plan_of
from tests.support import make_graph

EXACT = ["optimal", "auto"]
MODELS = {"optimal": ("program-order",), "auto": ("program-order", "any")}
"""What the bounds of a method may be of, where there are no variants."""


def chain(device=None, **variant):
    """Four layers and back; op 1 has a variant."""
    tensors = {0: ("input", 1), 9: ("output", 1)}
    tensors |= dict.fromkeys(range(1, 9), ("activation", 10))
    ops = [{"inputs": [t - 1], "outputs": [t], "cost_us": 10.0} for t in range(1, 5)]
    ops += [{"inputs": [t - 1, 9 - t], "outputs": [t], "cost_us": 10.0} for t in range(5, 9)]
    ops.append({"inputs": [8], "outputs": [9], "cost_us": 10.0})
    if variant:
        ops[1]["variants"] = [{"name": "other", "inputs": [1], "outputs": [2], **variant}]
    return make_graph(tensors, ops, **({} if device is None else {"device": device}))


@pytest.mark.parametrize("method", EXACT)
def test_a_cheaper_variant_is_in_the_bound(method):
    graph = chain(cost_us=1.0)
    made = plan(graph, 42, method=method, alignment=1, time_limit=5)
    assert made.lower_bound_model == "program-order"
    assert made.lower_bound_us <= made.cost_us
    problem = Problem.from_graph(graph, 1)
    variant = {op: op for op in range(9)} | {1: 9}
    variants = [
        variant[graph.ops.index(next(o for o in graph.ops if o.id == step.op))]
        for step in made.steps
        if step.do == "compute"
    ]
    cheaper = plan_of(Schedule.of(problem, variants), budget=42)
    assert find_faults(graph, cheaper) == []
    assert made.lower_bound_us <= cheaper.cost_us
    assert made.cost_us <= cheaper.cost_us


@pytest.mark.parametrize("method", EXACT)
def test_a_link_to_the_host_is_in_the_bound(method):
    """With one that costs nothing nothing is proved beyond the base cost; without, more is."""
    device = {"kind": "cuda", "h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9}
    made = plan(chain(device), 42, method=method, alignment=1, time_limit=20)
    assert made.lower_bound_model in MODELS[method]
    assert made.lower_bound_us < 99.0


@pytest.mark.parametrize("method", EXACT)
def test_a_request_without_transfers_gets_the_bound_without(method):
    device = {"kind": "cuda", "h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9}
    graph = chain(device)
    made = plan(graph, 42, method=method, alignment=1, time_limit=20, host_budget=0)
    assert made.status == "optimal"
    assert made.lower_bound_model in MODELS[method]
    assert made.lower_bound_us == pytest.approx(100.0)
    assert made.host_budget_bytes == 0


@pytest.mark.parametrize("method", EXACT)
def test_a_link_is_unused_only_by_methods_without_transfers(method):
    device = {"kind": "cuda", "h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9}
    with pytest.raises(InfeasibleBudgetError) as reported:
        plan(chain(device), 20, method=method, alignment=1, time_limit=20)
    assert reported.value.unused == ()
    with pytest.raises(InfeasibleBudgetError, match="does not use the graph's transfers"):
        plan(chain(device), 20, method="checkmate", alignment=1, time_limit=20)


@pytest.mark.parametrize("method", EXACT)
def test_without_either_the_bound_is_that_of_the_method(method):
    made = plan(chain(), 42, method=method, alignment=1, time_limit=20)
    assert made.status == "optimal"
    assert made.lower_bound_model in MODELS[method]


@pytest.mark.parametrize(("cost", "status"), [(11.0, "optimal"), (1.0, "feasible")])
def test_keep_everything_is_optimal_unless_a_variant_is_cheaper(cost, status):
    made = plan(chain(cost_us=cost), "100%", method="keep-all", alignment=1)
    assert made.status == status
    assert made.lower_bound_model == ("any" if status == "optimal" else None)
    assert (made.lower_bound_us is None) == (status == "feasible")


def test_the_smallest_budget_is_that_of_the_method():
    with pytest.raises(InfeasibleBudgetError, match="does not use the graph's variants"):
        plan(chain(cost_us=1.0), 20, method="checkmate", alignment=1, time_limit=20)
