"""One notion of bytes: what a plan says it needs is what its method can be asked for."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from coop_plan.planner import METHODS, InfeasibleBudgetError, find_faults, plan
from tests.strategies import graphs
from tests.support import make_graph

NOSHRINK = [Phase.explicit, Phase.reuse, Phase.generate]
SLOW = [HealthCheck.too_slow]
HEURISTICS = [name for name, info in METHODS.items() if not info.anytime]
OPTIONS = st.fixed_dictionaries(
    {
        "outputs": st.sampled_from(["outside", "arena", "gradients"]),
        "alignment": st.sampled_from([1, 8, 512]),
    }
)
TIME_LIMIT = 60.0
"""Seconds, for a method that has no end of its own; tiny graphs take a fraction of one."""


def check_the_minimum(graph, **options):
    """The smallest budget found is met when asked for in bytes, and names itself when undercut."""
    least = plan(graph, "min", **options)
    assert least.peak_bytes <= max(1, least.budget_bytes)
    again = plan(graph, max(1, least.budget_bytes), **options)
    assert find_faults(graph, again) == []
    assert again.peak_bytes <= max(1, least.budget_bytes)
    if least.budget_bytes > 1:
        check_what_is_named(graph, least.budget_bytes - 1, **options)


def check_what_is_named(graph, budget, **options):
    """A budget is met, or the budget that the refusal names is."""
    try:
        made = plan(graph, budget, smallest=True, **options)
    except InfeasibleBudgetError as error:
        budget = max(1, error.min_feasible_bytes)
        assert budget > error.budget_bytes
        made = plan(graph, budget, **options)
    assert find_faults(graph, made) == []
    assert made.peak_bytes <= made.budget_bytes <= budget


@pytest.mark.parametrize("method", HEURISTICS)
@settings(max_examples=30, deadline=None, phases=NOSHRINK, suppress_health_check=SLOW)
@given(graph=graphs(max_ops=12), options=OPTIONS)
def test_the_budget_of_min_is_a_budget(method, graph, options):
    check_the_minimum(graph, method=method, **options)


@settings(max_examples=10, deadline=None, phases=NOSHRINK, suppress_health_check=SLOW)
@given(graph=graphs(max_ops=4, variants=False, bandwidth=False), options=OPTIONS)
def test_the_budget_of_min_is_a_budget_of_the_exact_method(graph, options):
    check_the_minimum(graph, method="optimal", time_limit=TIME_LIMIT, **options)


@pytest.mark.parametrize("method", HEURISTICS)
@settings(max_examples=30, deadline=None, phases=NOSHRINK, suppress_health_check=SLOW)
@given(graph=graphs(max_ops=12), options=OPTIONS, share=st.floats(0.2, 1.0))
def test_what_a_refusal_names_is_a_budget(method, graph, options, share):
    peak = plan(graph, "min", method="keep-all", **options).peak_bytes
    check_what_is_named(graph, max(1, int(share * peak)), method=method, **options)


@pytest.mark.parametrize("method", sorted(set(HEURISTICS) - {"keep-all", "swap-only"}))
def test_the_topmost_tensor_is_not_rounded_up(method):
    """
    Two tensors of 100 bytes on boundaries of 512 end at byte 612, and so may the budget.

    The first tensor has to go while the second and third are there.
    """
    ops = [{"outputs": [0]}, {"outputs": [1]}, {"inputs": [1], "outputs": [2]}]
    ops += [{"inputs": [2], "outputs": []}, {"inputs": [0], "outputs": []}]
    graph = make_graph(dict.fromkeys(range(3), ("activation", 100)), ops)
    assert plan(graph, "100%").peak_bytes == 1124
    assert plan(graph, "min", method=method).peak_bytes == 612
    assert plan(graph, 612, method=method).peak_bytes == 612
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 611, method=method, smallest=True)
    assert caught.value.min_feasible_bytes == 612


@pytest.mark.parametrize("method", ["optimal", "auto", "checkmate", "coop", "keep-all"])
def test_a_budget_just_below_what_is_resident_is_refused(method):
    """The arena would have −1 byte, which rounded up is 0, and more the step does not need."""
    tensors = {0: ("parameter", 8), 1: ("parameter", 0)}
    graph = make_graph(tensors, [{"inputs": [1], "outputs": []}])
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 7, method=method, alignment=8, smallest=True)
    assert caught.value.min_feasible_bytes == 8


def test_an_arena_of_one_byte_is_refused():
    """A smaller one, within which the exact method tries again, has none."""
    tensors = {0: ("input", 0), 1: ("activation", 2), 2: ("activation", 0)}
    graph = make_graph(tensors, [{"inputs": [0], "outputs": [1, 2], "cost_us": 0.0}])
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 1, method="optimal", time_limit=TIME_LIMIT, smallest=True)
    assert caught.value.min_feasible_bytes == 2
