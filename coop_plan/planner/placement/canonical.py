"""
Canonical placements searched depth first: the compiled part of `restarts`.

After Moffitt, *MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine
Learning* (ASPLOS 2023), with the branching of Carlier's and Le Pape's schedule-or-postpone. A
placement is canonical when every buffer lies on the floor or on top of another; pushing down makes
every placement canonical without raising it. So a buffer lies at the bottom of its lowest gap among
those placed already, or some buffer still to be placed keeps it out of there. A node of the search
takes the first of these for one buffer, and the second when the first fails.

Units throughout: addresses in units of the instance, times in sections.
"""

from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.jit import inlined, linked, njit
from coop_plan.planner.placement.instance import Floats, Ints

FOUND, IMPOSSIBLE, UNKNOWN = 1, 0, -1

_CHOOSE, _BRANCH, _RETREAT = 0, 1, 2
_HERE, _HIGHER, _ONLY = 0, 1, 2


class Task(NamedTuple):
    """A component of an instance, with the conflicts spelled out."""

    first: Ints
    last: Ints
    height: Ints
    highest: Ints
    """The highest offset each buffer may have."""
    capacity: int
    fixed: Ints
    """The given offset, or -1."""
    near_start: Ints
    near: Ints
    """Buffers that may not overlap i in address: `near[near_start[i]:near_start[i + 1]]`."""
    member_start: Ints
    member: Ints
    """Buffers live in each section."""
    bridge: Ints
    """Per boundary between sections: pairs across it that conflict without a common section."""


class PartialPlacement(NamedTuple):
    gap: Ints
    """Bottom of the lowest gap among the placed buffers."""
    least: Ints
    """Lower bound of the offset, never below `gap`."""
    refused: Ints
    """The gap this buffer was decided not to take, or -1."""
    value: Ints
    """The three above in one, so that one trail restores them."""
    trail_at: Ints
    trail_old: Ints
    top: Ints
    """[entries of the trail]."""
    placed: Ints
    offset: Ints
    after: Ints
    before: Ints
    """Unplaced buffers as a ring around index n."""
    units_left: Ints
    left: Ints
    """Unplaced buffers and their units, per section."""
    crossing: Ints
    """Unplaced buffers, and bridges, over the boundary after each section."""
    touched: Ints
    """[from, to): sections in which a bound has risen since the last check."""
    failures: Ints
    """Dead ends per section."""
    sorted_at: Ints
    sorted_height: Ints


@inlined
def _set(s: PartialPlacement, where: int, to: int | np.int64) -> None:
    s.trail_at[s.top[0]] = where
    s.trail_old[s.top[0]] = s.value[where]
    s.top[0] += 1
    s.value[where] = to


@inlined
def _touch(task: Task, s: PartialPlacement, i: int) -> None:
    s.touched[0] = min(s.touched[0], task.first[i])
    s.touched[1] = max(s.touched[1], task.last[i])


@inlined
def _take_out(task: Task, s: PartialPlacement, i: int) -> None:
    """Buffer i counts as placed."""
    s.placed[i] = 1
    s.after[s.before[i]] = s.after[i]
    s.before[s.after[i]] = s.before[i]
    for t in range(task.first[i], task.last[i]):
        s.units_left[t] -= task.height[i]
        s.left[t] -= 1
        if t + 1 < task.last[i]:
            s.crossing[t] -= 1


@inlined
def _put_back(task: Task, s: PartialPlacement, i: int) -> None:
    """Undo the last `_take_out`."""
    s.placed[i] = 0
    s.after[s.before[i]] = i
    s.before[s.after[i]] = i
    for t in range(task.first[i], task.last[i]):
        s.units_left[t] += task.height[i]
        s.left[t] += 1
        if t + 1 < task.last[i]:
            s.crossing[t] += 1


@inlined
def _rewind(s: PartialPlacement, mark: int) -> None:
    while s.top[0] > mark:
        s.top[0] -= 1
        s.value[s.trail_at[s.top[0]]] = s.trail_old[s.top[0]]


@inlined
def _gap(task: Task, s: PartialPlacement, i: int, offset: int) -> int:
    """Bottom of the lowest gap for i at or above `offset`."""
    again = True
    while again:
        again = False
        for k in range(task.near_start[i], task.near_start[i + 1]):
            j = task.near[k]
            if s.placed[j] and s.offset[j] < offset + task.height[i]:
                end = s.offset[j] + task.height[j]
                if end > offset:
                    offset = end
                    again = True
    return offset


@inlined
def _ready(s: PartialPlacement, i: int) -> bool:
    return bool(s.gap[i] == s.least[i] and s.refused[i] != s.gap[i])


@inlined
def _lower(s: PartialPlacement, rank: Ints, i: int, j: int) -> bool:
    """Whether i comes before j: lower gap first, then the portfolio's order."""
    return j < 0 or s.gap[i] < s.gap[j] or (s.gap[i] == s.gap[j] and rank[i] < rank[j])


@inlined
def _choose(
    task: Task, s: PartialPlacement, rank: Ints, weight: Floats, focus: int, low: int, high: int
) -> int:
    """
    The next buffer to branch on in sections [low, high), -1 when none may go to its gap.

    The lowest of all, or with `focus` a lowest one (among its own neighbours) near the section with
    the most dead ends so far. In every canonical completion the lowest unplaced buffer lies in its
    gap, so with none left there is no completion.
    """
    count = len(task.first)
    best = -1
    if focus:
        busiest, most = -1, -1.0
        for t in range(low, high):
            if s.left[t] > 0 and weight[t] > most:
                busiest, most = t, weight[t]
        for k in range(task.member_start[busiest], task.member_start[busiest + 1]):
            i = task.member[k]
            if not s.placed[i] and _ready(s, i) and _lower(s, rank, i, best):
                best = i
        start = -1
        while best != start:
            start = best
            for k in range(task.near_start[start], task.near_start[start + 1]):
                i = task.near[k]
                if not s.placed[i] and _ready(s, i) and _lower(s, rank, i, best):
                    best = i
    if best < 0:
        i = s.after[count]
        while i != count:
            inside = task.first[i] >= low and task.first[i] < high
            if inside and _ready(s, i) and _lower(s, rank, i, best):
                best = i
            i = s.after[i]
    return best


@inlined
def _put(task: Task, s: PartialPlacement, i: int) -> int:
    """
    Place i in its gap and raise the bounds around it.

    0: a neighbour is pushed too high; 1: fine; 2: fine, and i has no unplaced neighbours, so that
    nothing is gained by putting it elsewhere.
    """
    count = len(task.first)
    offset = s.gap[i]
    end = offset + task.height[i]
    s.offset[i] = offset
    _take_out(task, s, i)
    _touch(task, s, i)
    result = 2
    for k in range(task.near_start[i], task.near_start[i + 1]):
        j = task.near[k]
        if s.placed[j]:
            continue
        result = min(result, 1)
        least = s.least[j]
        if least < end and least + task.height[j] > offset:
            least = end
        if s.gap[j] < end and s.gap[j] + task.height[j] > offset:
            gap = _gap(task, s, j, end)
            _set(s, j, gap)
            least = max(least, gap)
        if least > s.least[j]:
            _set(s, count + j, least)
            _touch(task, s, j)
            if least > task.highest[j]:
                for t in range(max(task.first[i], task.first[j]), min(task.last[i], task.last[j])):
                    s.failures[t] += 1
                return 0
    return result


@inlined
def _postponed_fit(task: Task, s: PartialPlacement, low: int, high: int) -> bool:
    """
    Raise the bounds of the buffers that refused their gap.

    Something unplaced must reach into that gap (else pushing down would fill it), and the refuser
    lies above it: not below the lowest top any such neighbour can have.
    """
    count = len(task.first)
    i = s.after[count]
    while i != count:
        inside = task.first[i] >= low and task.first[i] < high
        near = task.first[i] < s.touched[1] and task.last[i] > s.touched[0]
        if s.refused[i] == s.gap[i] and inside and near:
            ceiling = s.gap[i] + task.height[i]
            lowest_top = np.int64(1) << 60
            for k in range(task.near_start[i], task.near_start[i + 1]):
                j = task.near[k]
                if not s.placed[j] and s.least[j] < ceiling:
                    lowest_top = min(lowest_top, s.least[j] + task.height[j])
            if lowest_top > s.least[i]:
                if lowest_top > task.highest[i]:
                    for t in range(task.first[i], task.last[i]):
                        s.failures[t] += 1
                    return False
                _set(s, count + i, lowest_top)
                _touch(task, s, i)
        i = s.after[i]
    return True


@inlined
def _sections_fit(task: Task, s: PartialPlacement) -> bool:
    """
    Section inference: in each touched section what lies at or above a bound must fit above it.

    Buffers are sorted by bound, highest first; their heights add up from the top.
    """
    for t in range(s.touched[0], s.touched[1]):
        if s.left[t] == 0:
            continue
        lowest, highest = task.capacity, 0
        for k in range(task.member_start[t], task.member_start[t + 1]):
            i = task.member[k]
            if not s.placed[i]:
                lowest = min(lowest, s.least[i])
                highest = max(highest, s.least[i])
        total = s.units_left[t]
        for k in range(task.member_start[t], task.member_start[t + 1]):
            i = task.member[k]
            if s.placed[i] and s.offset[i] >= lowest:
                total += task.height[i]
                highest = max(highest, s.offset[i])
        if highest + total <= task.capacity:
            continue  # cannot fail: most sections end here, unsorted
        sorted_count = 0
        for k in range(task.member_start[t], task.member_start[t + 1]):
            i = task.member[k]
            at = s.offset[i] if s.placed[i] else s.least[i]
            if at < lowest:
                continue
            m = sorted_count
            while m > 0 and s.sorted_at[m - 1] < at:
                s.sorted_at[m] = s.sorted_at[m - 1]
                s.sorted_height[m] = s.sorted_height[m - 1]
                m -= 1
            s.sorted_at[m] = at
            s.sorted_height[m] = task.height[i]
            sorted_count += 1
        above = 0
        for m in range(sorted_count):
            above += s.sorted_height[m]
            if s.sorted_at[m] + above > task.capacity:
                s.failures[t] += 1
                return False
    return True


@linked
def _root(task: Task, failures: Ints) -> PartialPlacement:
    """The root: only the fixed buffers are placed."""
    count, sections = len(task.first), len(task.member_start) - 1
    value = np.zeros(3 * count, np.int64)
    value[2 * count :] = -1
    trail = 4 * len(task.near) + 40 * count + 64
    s = PartialPlacement(
        value[:count],
        value[count : 2 * count],
        value[2 * count :],
        value,
        np.empty(trail, np.int64),
        np.empty(trail, np.int64),
        np.zeros(1, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        (np.arange(count + 1) + 1) % (count + 1),
        (np.arange(count + 1) - 1) % (count + 1),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.int64),
        task.bridge.copy(),
        np.array([0, sections]),
        failures,
        np.empty(count + 1, np.int64),
        np.empty(count + 1, np.int64),
    )
    for i in range(count):
        _put_back(task, s, i)  # the ring is whole already: this only counts i in its sections
    for i in range(count):
        if task.fixed[i] >= 0:
            s.offset[i] = task.fixed[i]
            _take_out(task, s, i)
    for i in range(count):
        if not s.placed[i]:
            s.gap[i] = _gap(task, s, i, 0)
            s.least[i] = s.gap[i]
    return s


@njit
def depth_first(
    task: Task,
    rank: Ints,
    weight: Floats,
    focus: int,
    max_nodes: int,
    offset: Ints,
    failures: Ints,
) -> tuple[int, int]:
    """
    FOUND (fills `offset`), IMPOSSIBLE, or UNKNOWN after `max_nodes`; and the nodes spent.

    The unplaced buffers fall apart into stretches of sections that nothing crosses; these are
    solved one after the other, and a dead end in one goes back to the decision that split it off,
    past all that was decided in its siblings.
    """
    count = len(task.first)
    s = _root(task, failures)
    for i in range(count):
        if not s.placed[i] and s.least[i] > task.highest[i]:
            return IMPOSSIBLE, 0
    if not _sections_fit(task, s):
        return IMPOSSIBLE, 0
    levels = 6 * count + 10
    low, high = np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    back = np.zeros(levels, np.int64)  # the level a dead end here returns to
    queue = np.zeros(levels, np.int64)  # the stretches still to solve after this one, a list
    chosen, branch = np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    trail_mark, stretch_mark = np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    stretch = np.empty((4 * count + 4, 4), np.int64)  # low, high, back, next in the list
    stretches, nodes, depth, step = 0, 0, -1, _CHOOSE
    while True:
        if depth >= 0:
            if step == _CHOOSE:
                i = _choose(task, s, rank, weight, focus, low[depth], high[depth])
                chosen[depth] = i
                branch[depth] = _HERE
                trail_mark[depth] = s.top[0]
                step = _BRANCH if i >= 0 else _RETREAT
            if step == _RETREAT:
                to = back[depth]
                if to < 0:
                    return IMPOSSIBLE, nodes
                for level in range(depth - 1, to - 1, -1):
                    _rewind(s, trail_mark[level])
                    if branch[level] != _HIGHER:
                        _put_back(task, s, chosen[level])
                depth = to
                stretches = stretch_mark[depth]
                if branch[depth] != _HERE:
                    continue
                branch[depth] = _HIGHER
                step = _BRANCH
            nodes += 1
            if nodes > max_nodes or depth > levels - 3 or s.top[0] + 3 * count > len(s.trail_at):
                return UNKNOWN, nodes
            i = chosen[depth]
            s.touched[0], s.touched[1] = task.first[i], task.last[i]
            fine = True
            if branch[depth] == _HIGHER:
                _set(s, 2 * count + i, s.gap[i])
            else:
                put = _put(task, s, i)
                fine = put > 0
                if put == 2:
                    branch[depth] = _ONLY
            fine = fine and _postponed_fit(task, s, low[depth], high[depth])
            fine = fine and _sections_fit(task, s)
            if not fine:
                _rewind(s, trail_mark[depth])
                step = _RETREAT
                if branch[depth] != _HIGHER:
                    _put_back(task, s, i)
                if branch[depth] == _HERE:
                    branch[depth] = _HIGHER
                    step = _BRANCH
                continue
            step = _CHOOSE
            if branch[depth] == _HIGHER:
                low[depth + 1], high[depth + 1] = low[depth], high[depth]
                back[depth + 1], queue[depth + 1] = depth, queue[depth]
                depth += 1
                stretch_mark[depth] = stretches
                continue
        # What is left of this stretch, cut where nothing unplaced crosses, goes before the queue.
        ahead, pieces = -1, 0
        begin, end = 0, len(s.left)
        if depth >= 0:
            ahead, begin, end = queue[depth], low[depth], high[depth]
        t = end - 1
        while t >= begin:
            stop = t + 1
            some = s.left[t]
            while t > begin and s.crossing[t - 1] > 0:
                t -= 1
                some += s.left[t]
            if some > 0:
                stretch[stretches] = t, stop, depth, ahead
                ahead = stretches
                stretches += 1
                pieces += 1
            t -= 1
        if ahead < 0:
            offset[:] = s.offset
            return FOUND, nodes
        low[depth + 1], high[depth + 1] = stretch[ahead, 0], stretch[ahead, 1]
        back[depth + 1], queue[depth + 1] = stretch[ahead, 2], stretch[ahead, 3]
        if pieces == 1 and depth >= 0:
            stretches -= 1  # a lone piece needs no entry
        depth += 1
        stretch_mark[depth] = stretches
