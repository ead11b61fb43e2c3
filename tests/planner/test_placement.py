"""Placement: what every answer must satisfy, what small and known instances must give."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement import training_like
from coop_plan.planner.placement import place
from coop_plan.planner.placement.first_fit import first_fit
from coop_plan.planner.placement.instance import build

DATA = Path(__file__).parents[3] / "shared/data/allocation"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data/allocation")
CAPACITY = 1_048_576


@st.composite
def instances(draw, most=12, *, constrained=True):
    """Arguments of `place`, with constraints that do not contradict each other."""
    count = draw(st.integers(0, most))
    lower = draw(st.lists(st.integers(0, 10), min_size=count, max_size=count))
    width = draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))
    size = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    problem = {"lower": lower, "upper": [a + w for a, w in zip(lower, width, strict=True)]}
    problem["size"] = size
    if not constrained:
        return problem
    problem["alignment"] = draw(st.sampled_from([1, 1, 2, 3, 4]))
    fixed = [-1] * count
    for i in range(count):
        if draw(st.integers(0, 5)) == 0:
            fixed[i] = problem["alignment"] * draw(st.integers(0, 6))
            if any(clash({**problem, "fixed": fixed}, fixed, i, j) for j in range(i)):
                fixed[i] = -1
    problem["fixed"] = fixed
    return problem


def clash(problem, offsets, i, j):
    """Whether buffers i and j, both with an offset, are where they may not be."""
    unit = problem.get("alignment", 1)
    (a, b), (s, t) = (offsets[i], offsets[j]), (-(-problem["size"][k] // unit) for k in (i, j))
    if a < 0 or b < 0 or not (a < b + t * unit and b < a + s * unit) or not s or not t:
        return False
    return problem["lower"][i] < problem["upper"][j] and problem["lower"][j] < problem["upper"][i]


def check(problem, placement):
    """The placement keeps every promise it makes."""
    offsets, size = placement.offsets.tolist(), problem["size"]
    count = len(size)
    assert len(offsets) == count
    assert not any(clash(problem, offsets, i, j) for i in range(count) for j in range(i))
    assert all(offset >= 0 and offset % problem.get("alignment", 1) == 0 for offset in offsets)
    given_offsets = problem.get("fixed", [-1] * count)
    assert all(f in (-1, offset) for f, offset in zip(given_offsets, offsets, strict=True))
    assert placement.peak == max((o + s for o, s in zip(offsets, size, strict=True)), default=0)
    assert placement.peak >= placement.lower_bound
    assert placement.optimal == (placement.peak <= placement.lower_bound)
    assert sorted(placement.order.tolist()) == list(range(count))


def brute_force(problem):
    """The smallest peak: every order, each buffer in its lowest gap."""
    count, unit = len(problem["size"]), problem.get("alignment", 1)
    fixed = problem.get("fixed", [-1] * count)

    def top(i, offsets):
        return offsets[i] + problem["size"][i]

    def fits(i, offset, offsets):
        trial = {**offsets, i: offset}
        return not any(clash(problem, trial, i, j) for j in offsets)

    def solve(offsets, peak, best):
        if peak >= best:
            return best
        left = [i for i in range(count) if i not in offsets]
        if not left:
            return peak
        for i in left:
            ends = {0} | {-(-top(j, offsets) // unit) * unit for j in offsets}
            gap = min(end for end in ends if fits(i, end, offsets))
            trial = {**offsets, i: gap}
            best = min(best, solve(trial, max(peak, top(i, trial)), best))
        return best

    start = {i: f for i, f in enumerate(fixed) if f >= 0}
    return solve(start, max((top(i, start) for i in start), default=0), 1 << 40)


def read(name):
    table = np.loadtxt(DATA / name, delimiter=",", skiprows=1, dtype=np.int64)
    return {"lower": table[:, 1], "upper": table[:, 2], "size": table[:, 3]}


def overlaps(problem, offsets):
    """As `clash` for large instances of lifetimes only: whether any two buffers overlap."""
    lower, upper, size = (np.asarray(problem[key]) for key in ("lower", "upper", "size"))
    for i in range(len(size)):
        meet = (lower < upper[i]) & (upper > lower[i]) & (size > 0)
        meet &= (offsets < offsets[i] + size[i]) & (offsets + size > offsets[i])
        if meet.sum() > 1:
            return True
    return False


@settings(deadline=None)
@given(instances())
def test_every_constraint_is_kept(problem):
    check(problem, place(**problem))


@settings(deadline=None)
@given(instances(), st.integers(0, 40))
def test_under_a_capacity(problem, capacity):
    placement = place(**problem, capacity=capacity)
    check(problem, placement)
    assert placement.fits == (placement.peak <= capacity)
    assert not (placement.fits and placement.proved_impossible)


@settings(max_examples=100, deadline=None)
@given(instances(6))
def test_brute_force_agrees(problem):
    best, placement = brute_force(problem), place(**problem)
    assert placement.peak == best
    assert placement.optimal
    assert place(**problem, capacity=best).fits
    if best:
        assert place(**problem, capacity=best - 1).proved_impossible


@settings(max_examples=10, deadline=None)
@given(instances(7, constrained=False))
def test_brute_force_agrees_on_seven(problem):
    assert place(**problem).peak == brute_force(problem)


@settings(deadline=None)
@given(instances(), st.integers(0, 3))
def test_same_answer_twice(problem, seed):
    one, two = place(**problem, seed=seed), place(**problem, seed=seed)
    assert one.offsets.tolist() == two.offsets.tolist()


@settings(deadline=None)
@given(instances(20), st.data())
def test_a_subset_is_never_higher(problem, data):
    """Given the order of the whole, any part of it needs no more than the whole did."""
    count = len(problem["size"])
    whole = place(**problem, work=0)
    kept = data.draw(st.lists(st.integers(0, max(0, count - 1)), unique=True)) if count else []
    number = {old: new for new, old in enumerate(kept)}
    part = {key: [problem[key][i] for i in kept] for key in ("lower", "upper", "size", "fixed")}
    part["alignment"] = problem["alignment"]
    hint = [number[i] for i in whole.order.tolist() if i in number]
    placement = place(**part, order_hint=hint)
    check(part, placement)
    assert placement.peak <= whole.peak


@settings(deadline=None)
@given(instances(30), st.integers(1, 40))
def test_a_time_limit_always_brings_an_answer(problem, capacity):
    check(problem, place(**problem, capacity=capacity, time_limit=0.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lower": [0, 5]}, "buffer 1 has an empty lifetime"),
        ({"size": [1, -1]}, "buffer 1 has a negative size"),
        ({"alignment": 0}, "alignment must be at least 1"),
        ({"fixed": [0, 1], "alignment": 2}, "multiple of the alignment"),
        ({"fixed": [0, 3]}, "buffers 0 and 1 overlap at their fixed offsets"),
        ({"order_hint": [0, 0]}, "order_hint"),
    ],
)
def test_bad_arguments(change, message):
    problem = {"lower": [0, 1], "upper": [3, 4], "size": [4, 4]}
    with pytest.raises(ValueError, match=message):
        place(**{**problem, **change})


def test_an_impossible_capacity_is_refuted_beyond_the_bound():
    """A buffer in the middle splits the rest: live sum 4, arena 5."""
    split = {"lower": [0, 0], "upper": [1, 1], "size": [2, 2], "fixed": [1, -1]}
    placement = place(**split, capacity=4)
    assert placement.proved_impossible
    assert not placement.fits
    assert place(**split, capacity=5).fits


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_training_like_instances(count):
    problem = training_like(count, seed=1)
    placement = place(**problem)
    assert not overlaps(problem, placement.offsets)
    assert placement.peak <= 1.001 * placement.lower_bound


@pytest.mark.parametrize("kind", ["random", "training", "nested"])
@pytest.mark.parametrize("limits", [{}, {"time_limit": 10.0}])
def test_simple_orders_are_never_better(kind, limits):
    """Best fit and first fit by size, area, lifetime and birth, as plain code has them."""
    random = np.random.default_rng(5)
    count = 5_000
    problem = training_like(count, seed=4)
    problem["size"] = problem["size"] + random.integers(0, 900, count)
    if kind != "training":
        problem["lower"] = random.integers(0, 2 * count, count)
        width = 1 + (random.pareto(1.0, count) * 20).astype(np.int64)
        problem["upper"] = problem["lower"] + width
    if kind == "nested":
        problem["upper"] = np.maximum(4 * count - problem["lower"], problem["lower"] + 1)
    lower, upper, size = (problem[key] for key in ("lower", "upper", "size"))
    made = place(**problem, **limits)
    life = upper - lower
    keys = [(-life, -size), (-size, -life * size), (-size, -life), (-life, lower)]
    for order in map(np.lexsort, keys):
        for best in (False, True):
            assert made.peak <= plain_fit(lower, upper, size, order, best)


def plain_fit(lower, upper, size, order, best):
    """The peak of first fit or best fit, by the gaps among the buffers live at the same time."""
    offset = np.full(len(size), -1)
    for i in order.tolist():
        near = np.flatnonzero((offset >= 0) & (lower < upper[i]) & (upper > lower[i]))
        near = near[np.argsort(offset[near])]
        top = np.maximum.accumulate(np.append(0, offset[near] + size[near]))
        room = np.append(offset[near], 1 << 60) - top
        fits = np.flatnonzero(room >= size[i])
        offset[i] = top[fits[np.argmin(room[fits])] if best else fits[0]]
    return int((offset + size).max())


def test_an_order_hint_repeats_a_placement():
    problem = training_like(3_000, seed=2)
    problem["size"] = problem["size"] + np.random.default_rng(3).integers(0, 900, 3_000)
    whole = place(**problem)
    again = place(**problem, capacity=whole.peak, order_hint=whole.order)
    assert again.fits


@needs_data
@pytest.mark.parametrize("name", "ABCDEF")
def test_challenging_instances_fit(name):
    problem = read(f"{name}.{CAPACITY}.csv")
    placement = place(**problem, capacity=CAPACITY, time_limit=60)
    assert placement.fits
    assert not overlaps(problem, placement.offsets)


@needs_data
@pytest.mark.parametrize("name", ["A", "B", "C", "E", "F"])
def test_challenging_instances_minimised(name):
    problem = read(f"{name}.{CAPACITY}.csv")
    placement = place(**problem, time_limit=60)
    assert placement.optimal
    assert not overlaps(problem, placement.offsets)
    assert placement.peak == {"C": 1_039_360}.get(name, CAPACITY)


@needs_data
@pytest.mark.parametrize("name", ["resnet50", "G_1"])
def test_real_traces_reach_the_bound(name):
    problem = read(f"{name}.csv")
    placement = place(**problem)
    assert placement.optimal
    assert not overlaps(problem, placement.offsets)


def gaps_of(taken):
    """The gaps (offset, length) below, between and above intervals of addresses."""
    found, at = [], 0
    for low, high in sorted(taken):
        if low > at:
            found.append((at, low - at))
        at = max(at, high)
    return [*found, (at, math.inf)]


@pytest.mark.parametrize("best", [False, True])
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 40, 600]))
def test_first_fit_takes_the_lowest_gap_and_best_fit_the_smallest(best, seed, longest):
    """Among all buffers placed before, however short or long they live."""
    random = np.random.default_rng(seed)
    lower = random.integers(0, 600, 200)
    upper = lower + random.integers(1, longest, 200, endpoint=True)
    instance = build(lower, upper, random.integers(0, 30, 200), 1)
    order = random.permutation(200)
    offsets = first_fit(instance, order, best=best)
    for position, i in enumerate(order):
        height = instance.height[i]
        meets = [j for j in order[:position] if lower[i] < upper[j] and lower[j] < upper[i]]
        gaps = gaps_of((offsets[j], offsets[j] + instance.height[j]) for j in meets)
        large = [(at, length) for at, length in gaps if length >= height]
        if height:
            lowest = min(large, key=lambda gap: gap[1] if best else gap[0])
            assert offsets[i] == lowest[0]


def test_placement_searches_as_far_as_its_work_allows():
    """A buffer in the middle: only the search sees that the live sum is not enough."""
    split = {"lower": [0, 0], "upper": [1, 1], "size": [2, 2], "fixed": [1, -1], "capacity": 4}
    assert place(**split).proved_impossible
    assert not place(**split, work=0).proved_impossible
