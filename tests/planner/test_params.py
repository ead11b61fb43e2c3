"""Parameters: every one has a range, and what is outside of it is refused by name."""

from dataclasses import fields, is_dataclass, replace

import pytest

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.exact.params import ExactParams
from coop_plan.planner.heuristic.params import DEFAULTS, CoopOfflineParams
from coop_plan.planner.method import Request
from coop_plan.planner.online import run
from coop_plan.planner.online.methods import solve_coop
from coop_plan.planner.placement import place
from coop_plan.planner.search.compute.params import MoveParams
from tests.support import make_graph


def groups(params):
    """The dataclass and those in it."""
    yield params
    for field in fields(params):
        if is_dataclass(value := getattr(params, field.name)):
            yield from groups(value)


NUMBERS = [
    pytest.param(group, field.name, id=f"{type(group).__name__}.{field.name}")
    for params in (DEFAULTS, ExactParams())
    for group in groups(params)
    for field in fields(group)
    if field.name != "min_violation"  # may be negative
    if not is_dataclass(value := getattr(group, field.name))
    if isinstance(value, (int, float)) or isinstance(value[0], (int, float))
]


@pytest.mark.parametrize("bad", [-1, float("nan")])
@pytest.mark.parametrize(("group", "name"), NUMBERS)
def test_a_number_outside_its_range_is_refused_by_name(group, name, bad):
    value = (bad,) * 2 if isinstance(getattr(group, name), tuple) else bad
    with pytest.raises(ValueError, match=name):
        replace(group, **{name: value})


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (CoopOfflineParams, {"rules": ()}),
        (CoopOfflineParams, {"rules": ((0.0, True),)}),
        (MoveParams, {"recompute_chance": 0.9}),
        (MoveParams, {"drift_chance": 1.1}),
        (MoveParams, {"recompute_chance": 0.5, "prefetch_chance": 0.4}),
    ],
)
def test_what_does_not_go_together_is_refused(kind, bad):
    with pytest.raises(ValueError):
        kind(**bad)


def test_an_online_run_that_may_not_recompute_does_not_fit(monkeypatch):
    tensors = {0: ("input", 8), 1: ("activation", 9), 2: ("activation", 9), 3: ("output", 8)}
    ops = [{"inputs": [0], "outputs": [1]}, {"inputs": [0], "outputs": [2], "workspace_bytes": 9}]
    ops.append({"inputs": [1, 2], "outputs": [3]})
    problem = Problem.from_graph(make_graph(tensors, ops), 1)
    assert solve_coop(problem, Request(18)).placed.cost_us == 4
    monkeypatch.setattr(run, "MAX_RECOMPUTES_PER_OP", 0)
    with pytest.raises(DoesNotFitError):
        solve_coop(problem, Request(18))


def test_placement_searches_as_far_as_its_work_allows():
    """A buffer in the middle: only the search sees that the live sum is not enough."""
    split = {"lower": [0, 0], "upper": [1, 1], "size": [2, 2], "fixed": [1, -1], "capacity": 4}
    assert place(**split).proved_impossible
    assert not place(**split, work=0).proved_impossible
