"""Depth-first search of canonical placements: the compiled part of `restarts`.

After Moffitt, *MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine
Learning* (ASPLOS 2023), with the schedule-or-postpone branching of Carlier and of Le Pape. A
placement is canonical if every buffer is at offset 0 or directly above another one. Pushing buffers
down makes every placement canonical without raising it. So a buffer is at the bottom of its lowest
gap among the placed ones, or an unplaced buffer occupies part of that gap. A node of the search
chooses a buffer and tries the first case, then the second. The lowest unplaced buffer is in its
gap, unless windows of gaps let buffers hold up each other; `restarts` knows where that may be.

Addresses are in units of the instance, times in sections.
"""

from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Floats, Ints
from coop_plan.planner.core.jit import inlined, linked, njit
from coop_plan.planner.placement.task import Task, aligned, high_end, low_end

FOUND, IMPOSSIBLE, UNKNOWN = 1, 0, -1


class PartialPlacement(NamedTuple):
    """State of the search: bounds of the unplaced buffers, with a trail to undo changes."""

    gap: Ints
    """Bottom of the lowest gap among the placed buffers, per buffer."""
    lower: Ints
    """Lower bound on the offset, at least `gap`."""
    postponed: Ints
    """The gap that this buffer was decided not to take, or -1."""
    value: Ints
    """The three arrays above as one, so that one trail restores them."""
    trail_at: Ints
    trail_old: Ints
    """Trail: index in `value` and old value of each change."""
    top: Ints
    """[number of entries of the trail]."""
    placed: Ints
    offset: Ints
    after: Ints
    before: Ints
    """Unplaced buffers as a circular doubly linked list with sentinel n."""
    units_left: Ints
    left: Ints
    """Units and number of the unplaced buffers, per section."""
    crossing: Ints
    """Unplaced buffers over the boundary after each section."""
    dirty: Ints
    """[from, to): sections in which a bound has risen since the last check."""
    failures: Ints
    """Dead ends per section."""
    sorted_at: Ints
    sorted_height: Ints
    """Scratch of `_sections_fit`."""


@inlined
def _set(s: PartialPlacement, index: int, value: int | np.int64) -> None:
    """Set an entry of `value` and record the old one on the trail."""
    s.trail_at[s.top[0]] = index
    s.trail_old[s.top[0]] = s.value[index]
    s.top[0] += 1
    s.value[index] = value


@inlined
def _mark_dirty(task: Task, s: PartialPlacement, i: int) -> None:
    """Add the sections of buffer i to `dirty`."""
    s.dirty[0] = min(s.dirty[0], task.first[i])
    s.dirty[1] = max(s.dirty[1], task.last[i])


@inlined
def _mark_placed(task: Task, s: PartialPlacement, i: int) -> None:
    """Unlink buffer i from the unplaced ones."""
    s.placed[i] = 1
    s.after[s.before[i]] = s.after[i]
    s.before[s.after[i]] = s.before[i]
    for t in range(task.first[i], task.last[i]):
        s.units_left[t] -= task.height[i]
        s.left[t] -= 1
        if t + 1 < task.last[i]:
            s.crossing[t] -= 1


@inlined
def _mark_unplaced(task: Task, s: PartialPlacement, i: int) -> None:
    """Undo the last `_mark_placed`; links are restored in reverse order (dancing links)."""
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
    """Undo all changes of `value` after the trail had `mark` entries."""
    while s.top[0] > mark:
        s.top[0] -= 1
        s.value[s.trail_at[s.top[0]]] = s.trail_old[s.top[0]]


@inlined
def _occupied(task: Task, s: PartialPlacement, k: int) -> tuple[int, int]:
    """Lowest bottom and height of member k of a section."""
    i = task.member[k]
    at = s.offset[i] if s.placed[i] else s.lower[i]
    if task.windows.present:
        return at + task.windows.member_low[k], task.windows.member_height[k]
    return at, task.height[i]


@inlined
def _gap(task: Task, s: PartialPlacement, i: int, offset: int) -> int:
    """Bottom of the lowest gap for i at or above `offset`."""
    # A conflict that raises the offset may uncover conflicts passed over before, so repeat.
    raised = True
    while raised:
        raised = False
        for k in range(task.near_start[i], task.near_start[i + 1]):
            j = task.near[k]
            if s.placed[j] and s.offset[j] + low_end(task, i, k) < offset:
                end = s.offset[j] + high_end(task, k)
                if end > offset:
                    offset = aligned(task, i, end)
                    raised = True
    return offset


@inlined
def _may_branch(s: PartialPlacement, i: int) -> bool:
    """True if i may be placed in its gap: no bound forbids it and it was not postponed there."""
    return bool(s.gap[i] == s.lower[i] and s.postponed[i] != s.gap[i])


@inlined
def _precedes(s: PartialPlacement, rank: Ints, i: int, j: int) -> bool:
    """True if i is branched on before j: lower gap first, then by rank; j = -1 is none."""
    return j < 0 or s.gap[i] < s.gap[j] or (s.gap[i] == s.gap[j] and rank[i] < rank[j])


@inlined
def _choose(
    task: Task, s: PartialPlacement, rank: Ints, weight: Floats, focus: int, low: int, high: int
) -> int:
    """The next buffer to branch on in sections [low, high), or -1 if none may take its gap.

    It is the one with the lowest gap, or with `focus` one with the lowest gap among its own
    neighbours, near the section with the most dead ends. In every canonical completion the lowest
    unplaced buffer is in its gap, so -1 means a dead end.
    """
    count = len(task.first)
    best = -1
    if focus:
        hardest, largest = -1, -1.0
        for t in range(low, high):
            if s.left[t] > 0 and weight[t] > largest:
                hardest, largest = t, weight[t]
        for k in range(task.member_start[hardest], task.member_start[hardest + 1]):
            i = task.member[k]
            if not s.placed[i] and _may_branch(s, i) and _precedes(s, rank, i, best):
                best = i
        # Descend from neighbour to neighbour to a local minimum of the gap.
        start = -1
        while best != start:
            start = best
            for k in range(task.near_start[start], task.near_start[start + 1]):
                i = task.near[k]
                if not s.placed[i] and _may_branch(s, i) and _precedes(s, rank, i, best):
                    best = i
    if best < 0:
        i = s.after[count]
        while i != count:
            inside = task.first[i] >= low and task.first[i] < high
            if inside and _may_branch(s, i) and _precedes(s, rank, i, best):
                best = i
            i = s.after[i]
    return best


@inlined
def _place(task: Task, s: PartialPlacement, i: int) -> int:
    """Place i in its gap and raise the bounds of its neighbours.

    Returns 0 if a neighbour's bound exceeds its limit, else 1, or 2 if i has no unplaced neighbour,
    so that no other offset of i can be better.
    """
    count = len(task.first)
    offset = s.gap[i]
    s.offset[i] = offset
    _mark_placed(task, s, i)
    _mark_dirty(task, s, i)
    result = 2
    for k in range(task.near_start[i], task.near_start[i + 1]):
        j = task.near[k]
        if s.placed[j]:
            continue
        result = min(result, 1)
        # A bound or gap at which j would overlap i moves up, the gap to the next free one.
        begin = offset - high_end(task, k)
        end = offset - low_end(task, i, k)
        lower = s.lower[j]
        if lower < end and lower > begin:
            lower = aligned(task, j, end)
        if s.gap[j] < end and s.gap[j] > begin:
            gap = _gap(task, s, j, aligned(task, j, end))
            _set(s, j, gap)
            lower = max(lower, gap)
        if lower > s.lower[j]:
            _set(s, count + j, lower)
            _mark_dirty(task, s, j)
            if lower > task.highest[j]:
                for t in range(max(task.first[i], task.first[j]), min(task.last[i], task.last[j])):
                    s.failures[t] += 1
                return 0
    return result


@inlined
def _postponed_fit(task: Task, s: PartialPlacement, low: int, high: int) -> bool:
    """Raise the bounds of postponed buffers; False at a dead end.

    An unplaced neighbour must reach into the gap of a postponed buffer, or pushing down would move
    the buffer into it. The buffer is above that neighbour, so the lowest top that any such
    neighbour can have is a lower bound on its offset. (With gaps: above the interval that the
    neighbour forbids.)
    """
    count = len(task.first)
    i = s.after[count]
    while i != count:
        inside = task.first[i] >= low and task.first[i] < high
        near = task.first[i] < s.dirty[1] and task.last[i] > s.dirty[0]
        if s.postponed[i] == s.gap[i] and inside and near:
            lowest_top = 1 << 60
            for k in range(task.near_start[i], task.near_start[i + 1]):
                j = task.near[k]
                if not s.placed[j] and s.lower[j] < s.gap[i] - low_end(task, i, k):
                    lowest_top = min(lowest_top, s.lower[j] + high_end(task, k))
            lowest_top = aligned(task, i, lowest_top)
            if lowest_top > s.lower[i]:
                if lowest_top > task.highest[i]:
                    for t in range(task.first[i], task.last[i]):
                        s.failures[t] += 1
                    return False
                _set(s, count + i, lowest_top)
                _mark_dirty(task, s, i)
        i = s.after[i]
    return True


@inlined
def _sections_fit(task: Task, s: PartialPlacement) -> bool:
    """
    Section inference: False if in a dirty section the buffers at or above a bound do not fit there.

    Buffers live in one section are disjoint. So for every bound b the heights of all buffers with a
    bound (or offset) of at least b sum to at most capacity - b.
    """
    for t in range(s.dirty[0], s.dirty[1]):
        if s.left[t] == 0:
            continue
        # Cheap test first: all relevant heights together on the highest bound.
        lowest, highest = task.capacity, 0
        for k in range(task.member_start[t], task.member_start[t + 1]):
            if not s.placed[task.member[k]]:
                at, _ = _occupied(task, s, k)
                lowest = min(lowest, at)
                highest = max(highest, at)
        total = s.units_left[t]
        for k in range(task.member_start[t], task.member_start[t + 1]):
            if s.placed[task.member[k]]:
                at, height = _occupied(task, s, k)
                if at >= lowest:
                    total += height
                    highest = max(highest, at)
        if highest + total <= task.capacity:
            continue  # the test below cannot fail; so it is for most sections
        # Insertion sort by bound, highest first, then sum the heights from the top.
        sorted_count = 0
        for k in range(task.member_start[t], task.member_start[t + 1]):
            at, height = _occupied(task, s, k)
            if at < lowest:
                continue
            m = sorted_count
            while m > 0 and s.sorted_at[m - 1] < at:
                s.sorted_at[m] = s.sorted_at[m - 1]
                s.sorted_height[m] = s.sorted_height[m - 1]
                m -= 1
            s.sorted_at[m] = at
            s.sorted_height[m] = height
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
    """The root of the search: only fixed buffers are placed."""
    count, sections = len(task.first), len(task.member_start) - 1
    value = np.zeros(3 * count, np.int64)
    value[2 * count :] = -1
    trail = 4 * len(task.near) + 40 * count + 64  # `depth_first` stops before it overflows
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
        np.zeros(sections, np.int64),
        np.array([0, sections]),
        failures,
        np.empty(count + 1, np.int64),
        np.empty(count + 1, np.int64),
    )
    for i in range(count):
        _mark_unplaced(task, s, i)  # all are linked already: this counts i in its sections
    for i in range(count):
        if task.fixed[i] >= 0:
            s.offset[i] = task.fixed[i]
            _mark_placed(task, s, i)
    for i in range(count):
        if not s.placed[i]:
            s.gap[i] = _gap(task, s, i, 0)
            s.lower[i] = s.gap[i]
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
    """Search for a placement; returns FOUND (fills `offset`), IMPOSSIBLE or UNKNOWN, and the nodes.

    UNKNOWN is returned after `max_nodes`. `rank` breaks ties of branching, `weight` (per section)
    and `focus` are those of `_choose`; `failures` counts dead ends per section.

    The unplaced buffers split into intervals of sections that no unplaced buffer crosses. These are
    independent and solved one after the other. A dead end in one backtracks to the decision that
    split it off, past all decisions in its siblings (backjumping).
    """
    count = len(task.first)
    s = _root(task, failures)
    for i in range(count):
        if not s.placed[i] and s.lower[i] > task.highest[i]:
            return IMPOSSIBLE, 0
    if not _sections_fit(task, s):
        return IMPOSSIBLE, 0
    choose, decide, backtrack = 0, 1, 2  # next step of the search
    # Branches of a node: in the gap; above it; in the gap, where the other branch is dominated.
    place, postpone, place_only = 0, 1, 2
    # Per level of the search: its interval, the chosen buffer with its branch, and marks to undo.
    levels = 6 * count + 10
    low, high = np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    back = np.zeros(levels, np.int64)  # the level that a dead end here backtracks to
    queue = np.zeros(levels, np.int64)  # head of the list of intervals to solve afterwards
    chosen, branch = np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    trail_mark, interval_mark = np.zeros(levels, np.int64), np.zeros(levels, np.int64)
    interval = np.empty((4 * count + 4, 4), np.int64)  # low, high, back, next in the list
    intervals, nodes, depth, step = 0, 0, -1, choose
    while True:
        if depth >= 0:
            if step == choose:
                i = _choose(task, s, rank, weight, focus, low[depth], high[depth])
                chosen[depth] = i
                branch[depth] = place
                trail_mark[depth] = s.top[0]
                step = decide if i >= 0 else backtrack
            if step == backtrack:
                # Undo all levels down to `to`, then try its other branch if there is one.
                to = back[depth]
                if to < 0:
                    return IMPOSSIBLE, nodes
                for level in range(depth - 1, to - 1, -1):
                    _rewind(s, trail_mark[level])
                    if branch[level] != postpone:
                        _mark_unplaced(task, s, chosen[level])
                depth = to
                intervals = interval_mark[depth]
                if branch[depth] != place:
                    continue
                branch[depth] = postpone
                step = decide
            nodes += 1
            if nodes > max_nodes or depth > levels - 3 or s.top[0] + 3 * count > len(s.trail_at):
                return UNKNOWN, nodes
            i = chosen[depth]
            s.dirty[0], s.dirty[1] = task.first[i], task.last[i]
            fits = True
            if branch[depth] == postpone:
                _set(s, 2 * count + i, s.gap[i])
            else:
                result = _place(task, s, i)
                fits = result > 0
                if result == 2:
                    branch[depth] = place_only
            fits = fits and _postponed_fit(task, s, low[depth], high[depth])
            fits = fits and _sections_fit(task, s)
            if not fits:
                # A dead end: the other branch of this node, else backtrack.
                _rewind(s, trail_mark[depth])
                step = backtrack
                if branch[depth] != postpone:
                    _mark_unplaced(task, s, i)
                if branch[depth] == place:
                    branch[depth] = postpone
                    step = decide
                continue
            step = choose
            if branch[depth] == postpone:
                # No buffer was placed, so the interval does not split.
                low[depth + 1], high[depth + 1] = low[depth], high[depth]
                back[depth + 1], queue[depth + 1] = depth, queue[depth]
                depth += 1
                interval_mark[depth] = intervals
                continue
        # Split the rest of this interval where no unplaced buffer crosses, and put the pieces in
        # front of the queue, the first one in time at its head. At depth -1 it is the whole task.
        ahead, pieces = -1, 0
        begin, end = 0, len(s.left)
        if depth >= 0:
            ahead, begin, end = queue[depth], low[depth], high[depth]
        t = end - 1
        while t >= begin:
            stop = t + 1
            unplaced = s.left[t]
            while t > begin and s.crossing[t - 1] > 0:
                t -= 1
                unplaced += s.left[t]
            if unplaced > 0:
                interval[intervals] = t, stop, depth, ahead
                ahead = intervals
                intervals += 1
                pieces += 1
            t -= 1
        if ahead < 0:
            offset[:] = s.offset
            return FOUND, nodes
        low[depth + 1], high[depth + 1] = interval[ahead, 0], interval[ahead, 1]
        back[depth + 1], queue[depth + 1] = interval[ahead, 2], interval[ahead, 3]
        if pieces == 1 and depth >= 0:
            intervals -= 1  # a single piece is entered at once and needs no entry in the list
        depth += 1
        interval_mark[depth] = intervals
