"""Bounds carried to other costs hold for every schedule."""

import math
import random

import pytest

from coop_plan.planner.core.timeline import Timeline, plan_timeline, step_costs
from coop_plan.planner.plan_cache.cost_rule import (
    all_costs,
    carried_bound,
    cost_class,
    least_cost,
)
from coop_plan.planner.plan_cache.record import StoredPlan
from coop_plan.schemas import Variant
from tests.planner.test_plan_cache import graph, swapped, with_device  # noqa: F401 - a fixture
from tests.support import make_graph


def priced(made, rng, base=None, spread=1.0):
    """The graph with random costs, or with costs near those of `base`."""
    ops = []
    for n, op in enumerate(made.ops):
        scale = 1.0 if base is None else base.ops[n].cost_us
        costs = [scale * 10 ** rng.uniform(-spread, spread) for _ in range(1 + len(op.variants))]
        variants = [
            v.model_copy({"cost_us": c}) for v, c in zip(op.variants, costs[1:], strict=True)
        ]
        ops.append(op.model_copy({"cost_us": costs[0], "variants": variants}))
    return made.model_copy({"ops": ops})


@pytest.mark.parametrize("variants", [0, 2])
@pytest.mark.parametrize("spread", [0.01, 0.5, 2.0])
def test_a_carried_bound_holds_for_every_schedule(variants, spread):
    rng = random.Random(variants)
    tensors = {0: ("input", 1)} | dict.fromkeys(range(1, 7), ("activation", 9))
    made = make_graph(tensors, [{"inputs": [0], "outputs": [n]} for n in range(1, 7)])

    def more(op):
        same = {"cost_us": 1.0, "workspace_bytes": 0, "inputs": [0], "outputs": op.outputs}
        return [Variant(name=str(n), inplace=[], **same) for n in range(variants)]

    made = made.model_copy({"ops": [op.model_copy({"variants": more(op)}) for op in made.ops]})
    for _ in range(300):
        theirs = priced(made, rng)
        mine = priced(made, rng, theirs, spread)
        most = rng.randrange(9)
        runs = [rng.choices(range(1 + variants), k=1 + rng.randint(0, most)) for _ in made.ops]

        def cost(priced_as, runs=runs):
            return math.fsum(
                [op.cost_us, *(v.cost_us for v in op.variants)][choice]
                for op, choices in zip(priced_as.ops, runs, strict=True)
                for choice in choices
            )

        for recomputes in (most, math.inf):
            bound = carried_bound(
                mine, all_costs(theirs), cost(theirs), link=False, recomputes=recomputes
            )
            assert least_cost(mine) <= bound <= cost(mine) * (1 + 1e-9)


def test_a_carried_bound_holds_for_makespans(graph):  # noqa: F811
    rng = random.Random(0)
    rates = [1e6, 3e6, 9e6]
    for _ in range(300):
        devices = [
            {"d2h_bytes_per_s": rng.choice(rates), "h2d_bytes_per_s": rng.choice(rates)}
            | launches(rng)
            for _ in range(2)
        ]
        theirs = with_device(priced(graph, rng), **devices[0])
        mine = with_device(
            priced(graph, rng, theirs, rng.choice([0.01, 1.0])), **rng.choice(devices)
        )
        made = swapped(theirs)
        bound = carried_bound(mine, all_costs(theirs), made.cost_us, link=True)
        assert bound <= plan_timeline(mine, made).end_us * (1 + 1e-9)


@pytest.mark.parametrize("spread", [0.01, 0.5])
def test_a_carried_bound_holds_for_steps_that_the_host_limits(spread):
    """Op by op, some of them twice, without copies."""
    rng = random.Random(3)
    tensors = {0: ("input", 1)} | dict.fromkeys(range(1, 7), ("activation", 9))
    made = make_graph(tensors, [{"inputs": [0], "outputs": [n]} for n in range(1, 7)])
    for _ in range(300):
        theirs = with_device(priced(made, rng), **launches(rng))
        mine = with_device(priced(made, rng, theirs, spread), **launches(rng))
        free = rng.choice([None, *range(6)])  # an op of no cost, which costs no launch
        costs = [0.0 if op.id == free else op.cost_us for op in mine.ops]
        ops = [op.model_copy({"cost_us": c}) for op, c in zip(mine.ops, costs, strict=True)]
        mine = mine.model_copy({"ops": ops})
        runs = [op.id for op in made.ops for _ in range(rng.choice([1, 1, 2]))]

        def cost(priced_as, runs=runs):
            line, costs = Timeline(priced_as.device), step_costs(priced_as)
            for op in runs:
                line.compute(costs[op, None])
            return line.end_us

        bound = carried_bound(mine, all_costs(theirs), cost(theirs), link=False, recomputes=1)
        assert least_cost(mine) <= bound <= cost(mine) * (1 + 1e-9)


def launches(rng):
    kinds, some = ["cpu", "cuda"], [0.0, 0.5, 2.0]
    one = {"launch_us": rng.choice(some), "copy_launch_us": rng.choice(some)}
    return one | {"kind": rng.choice(kinds)}


def test_measurements_of_one_machine_are_one_class():
    rng = random.Random(1)
    costs = [2e10, 2e10, 5.0, *(10 ** rng.uniform(0, 3) for _ in range(300))]
    noisy = [*costs[:3], *(cost * rng.uniform(0.98, 1.02) for cost in costs[3:])]
    assert cost_class(costs) == cost_class(noisy)
    assert cost_class(costs) != cost_class([*costs[:3], *sorted(costs[3:])])
    assert cost_class([0.0, 0.0, 0.0]) == cost_class([0.0] * 9)


def test_noise_suits_and_a_tenth_of_the_time_moved_does_not(graph):  # noqa: F811
    """The plan recomputes an op whose caller has it dearer than whoever made the plan."""
    from coop_plan.planner import plan

    tensors = {0: ("input", 10), 9: ("output", 8)}
    tensors |= dict.fromkeys(range(1, 9), ("activation", 100))
    ops = [{"inputs": [n], "outputs": [n + 1]} for n in range(4)]
    ops += [{"inputs": [n, 8 - n], "outputs": [n + 1]} for n in range(4, 8)]
    made = make_graph(tensors, [*ops, {"inputs": [8], "outputs": [9]}])
    rng = random.Random(2)
    theirs = priced(made, rng, spread=0.3)
    stored = StoredPlan.of(plan(theirs, "75%", alignment=1), theirs)
    noisy = priced(made, rng, theirs, 0.005)
    assert stored.is_answer(noisy, stored.for_graph(noisy))
    recomputed = [step.op for step in stored.plan.steps if getattr(step, "op", None) is not None]
    again = {op for op in recomputed if recomputed.count(op) > 1}
    assert again
    total = math.fsum(op.cost_us for op in theirs.ops)
    dearer = [
        op.model_copy({"cost_us": op.cost_us + (0.1 * total if op.id in again else 0.0)})
        for op in theirs.ops
    ]
    mine = theirs.model_copy({"ops": dearer})
    assert not stored.is_answer(mine, stored.for_graph(mine))
