"""Placement with gaps and with an alignment per buffer, against sets of occupied cells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coop_plan.planner.placement import FixedOverlapError, place
from coop_plan.planner.verifier import placement_fault


@st.composite
def instances(draw, most=8, *, windows=True, largest=9):
    """Arguments of `place`: gaps inside the lifetimes, and alignments that are not nested."""
    count = draw(st.integers(0, most))
    numbers = {"min_size": count, "max_size": count}
    lower = draw(st.lists(st.integers(0, 6), **numbers))
    width = draw(st.lists(st.integers(1, 8), **numbers))
    size = draw(st.lists(st.integers(0, largest), **numbers))
    gaps = []
    for i in range(count):
        now, end = lower[i], lower[i] + width[i]
        for _ in range(draw(st.integers(0, 2))):
            begin = draw(st.integers(now, end))
            now = draw(st.integers(begin, end))
            low, high = sorted(draw(st.tuples(*[st.integers(0, size[i])] * 2)))
            if begin < now:
                gaps.append((i, begin, now, *((low, high) if windows else (0, 0))))
    upper = [a + w for a, w in zip(lower, width, strict=True)]
    alignment = draw(st.lists(st.sampled_from([1, 2, 3, 4]), **numbers))
    return {"lower": lower, "upper": upper, "size": size, "alignment": alignment, "gaps": gaps}


def cells(problem, i):
    """The (time, byte from its offset) pairs that buffer i occupies."""
    held = dict.fromkeys(range(problem["lower"][i], problem["upper"][i]), (0, problem["size"][i]))
    for buffer, begin, end, low, high in problem["gaps"]:
        if buffer == i:
            held.update(dict.fromkeys(range(begin, end), (low, high)))
    return {(t, byte) for t, (low, high) in held.items() for byte in range(low, high)}


def is_valid(problem, offsets):
    taken = set()
    for i, offset in enumerate(offsets):
        mine = {(t, byte + offset) for t, byte in cells(problem, i)}
        if taken & mine or offset < 0 or offset % problem["alignment"][i]:
            return False
        taken |= mine
    return True


def brute_force(problem):
    """The smallest peak over all offsets below the sum of the aligned sizes."""
    shapes = [cells(problem, i) for i in range(len(problem["size"]))]

    def solve(i, taken, peak, best):
        if i == len(shapes):
            return peak
        offset = 0
        while max(peak, offset + problem["size"][i]) < best:
            mine = {(t, byte + offset) for t, byte in shapes[i]}
            if not taken & mine:
                top = max(peak, offset + problem["size"][i])
                best = min(best, solve(i + 1, taken | mine, top, best))
            offset += problem["alignment"][i]
        return best

    return solve(0, set(), 0, 1 << 40) if shapes else 0


def check(problem, made):
    offsets = made.offsets.tolist()
    assert is_valid(problem, offsets)
    assert placement_fault(**problem, offset=offsets) is None
    assert made.peak == max(
        (o + s for o, s in zip(offsets, problem["size"], strict=True)), default=0
    )
    assert made.lower_bound <= made.peak
    assert made.optimal == (made.lower_bound == made.peak)


@settings(deadline=None)
@given(instances(12), st.booleans())
def test_gaps_and_alignments_are_kept(problem, quick):
    check(problem, place(**problem, work=0 if quick else None))


@settings(deadline=None)
@given(instances(12), st.integers(0, 40))
def test_under_a_capacity(problem, capacity):
    made = place(**problem, capacity=capacity)
    check(problem, made)
    assert made.fits == (made.peak <= capacity)
    assert not (made.fits and made.proved_impossible)


@settings(max_examples=60, deadline=None)
@given(instances(4, windows=False, largest=6))
def test_brute_force_agrees_on_gaps(problem):
    best, made = brute_force(problem), place(**problem)
    assert made.peak == made.lower_bound == best
    if best:
        assert place(**problem, capacity=best - 1).proved_impossible


@settings(max_examples=60, deadline=None)
@given(instances(4, largest=6))
def test_brute_force_agrees_on_windows(problem):
    best, made = brute_force(problem), place(**problem)
    assert made.lower_bound <= best == made.peak


@settings(deadline=None)
@given(instances(6), st.lists(st.integers(0, 12), min_size=6, max_size=6))
def test_the_verifier_finds_what_cells_find(problem, offsets):
    offsets = offsets[: len(problem["size"])]
    assert (placement_fault(**problem, offset=offsets) is None) == is_valid(problem, offsets)


@settings(deadline=None)
@given(instances(6), st.lists(st.integers(-1, 6), min_size=6, max_size=6))
def test_fixed_offsets_are_kept_or_refused(problem, steps):
    fixed = [max(-1, s * a) for s, a in zip(steps, problem["alignment"], strict=False)]
    given_ = [i for i, offset in enumerate(fixed) if offset >= 0]
    part = {
        **{key: [problem[key][i] for i in given_] for key in ("lower", "upper", "size")},
        "alignment": [problem["alignment"][i] for i in given_],
        "gaps": [(given_.index(g[0]), *g[1:]) for g in problem["gaps"] if g[0] in given_],
    }
    if not is_valid(part, [fixed[i] for i in given_]):
        with pytest.raises(FixedOverlapError):
            place(**problem, fixed=fixed)
        return
    made = place(**problem, fixed=fixed)
    check(problem, made)
    assert [made.offsets[i] for i in given_] == [fixed[i] for i in given_]


def test_gaps_of_equal_alignment_are_exact_in_bytes():
    """Windows that end inside a unit still leave its other bytes to a neighbour's window."""
    problem = {"lower": [0, 0], "upper": [2, 2], "size": [8, 8], "alignment": [4, 4]}
    problem["gaps"] = [(0, 0, 2, 0, 3), (1, 0, 2, 3, 8)]
    made = place(**problem)
    check(problem, made)
    assert (made.peak, made.optimal) == (8, True)


def test_gaps_lower_the_peak_of_a_large_instance():
    random = np.random.default_rng(1)
    count = 800
    lower = random.integers(0, 1_600, count)
    upper = lower + random.integers(4, 200, count)
    size = random.integers(1, 1 << 20, count)
    rows = np.stack([np.arange(count), lower + 1, upper - 1, 0 * size, size // 2], axis=1)
    problem = {"lower": lower, "upper": upper, "size": size}
    problem["alignment"] = 2 ** random.integers(0, 9, count)
    made = place(**problem, gaps=rows, work=0)
    assert placement_fault(**problem, gaps=rows, offset=made.offsets) is None
    assert made.peak < 0.9 * place(**problem, work=0).peak


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gaps": [(2, 1, 2, 0, 0)]}, "gap 0 names buffer 2"),
        ({"gaps": [(0, 2, 1, 0, 0)]}, "gap 0 of buffer 0 has an empty time"),
        ({"gaps": [(0, 0, 4, 0, 0)]}, "gap 0 of buffer 0 is not within the buffer's lifetime"),
        ({"gaps": [(0, 1, 2, 1, 5)]}, "gap 0 of buffer 0 keeps bytes outside the buffer"),
        ({"gaps": [(0, 0, 2, 0, 0), (0, 1, 3, 0, 0)]}, "two gaps of buffer 0 overlap"),
        ({"alignment": [1, 0]}, "alignment must be at least 1"),
        ({"alignment": [1, 2, 3]}, "alignment must be one number or one per buffer"),
        ({"alignment": [1, 4], "fixed": [0, 2]}, "multiple of the alignment"),
    ],
)
def test_bad_arguments(change, message):
    problem = {"lower": [0, 1], "upper": [3, 4], "size": [4, 4]}
    with pytest.raises(ValueError, match=message):
        place(**{**problem, **change})
