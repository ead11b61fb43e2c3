"""
A schedule as nothing but the ops in the order they run.

Every sequence in which first runs come in program order is a schedule: an op reads the latest copy
of each input, and a copy lives until its last read. `planner.offline.metropolis` changes sequences.
"""

from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Flags, Ints
from coop_plan.planner.core.problem import Problem

CHAIN = 64
"""Ops that one change puts in at most."""

NEVER = 1 << 40
"""The first run of an op that is not in the window."""

MOST_MARGINS = 256
"""Places at which memory may be asked to stay free."""

# Rows of `Walk.tensor`: copy that is read now; made before the window, or left the arena by then;
# needed after it; needed later; left the arena; and lists: there when it begins, needed after it.
CURRENT, READY, GONE, NEEDED, ALIVE, LEFT, READY_LIST, NEEDED_LIST = range(8)
# Rows of `Walk.op`: event of the first run, -1 before the window; whether it ran; for marks.
FIRST, RAN, SEEN = range(3)
# Rows of `Walk.copy`; events are those of the window, -1 for what is there when it begins.
TENSOR, BEGIN, END = range(3)
# Entries of `Walk.counts`.
(
    LENGTH,
    WINDOW,
    TRIAL,
    ROOM,
    READY_COUNT,
    NEEDED_COUNT,
    COPIES,
    WORST,
    OVER,
    POSITION,
    MARGINS,
) = range(11)


class Walk(NamedTuple):
    """
    Where the walk is (`ops`, of which `counts[LENGTH]` are in use), and what it needs besides.

    `again` says of an op whether it may be put in anywhere after its first run. `margin` lists
    (position, op, bytes to leave free while it runs between the first runs before and of that
    position), and `tight` flags the positions in it.
    """

    again: Flags
    ops: Ints
    window: Ints
    trial: Ints
    is_first: Flags
    stay: Flags
    live: Ints
    tensor: Ints
    op: Ints
    copy: Ints
    chain: Ints
    margin: Ints
    tight: Flags
    counts: Ints


def start(problem: Problem, arrays: Arrays, room: int) -> Walk:
    """An empty walk with room for so many events."""
    n, count = arrays.ops, arrays.size.size
    makes = 1 + int(np.diff(arrays.makes_ptr).max(initial=1))
    return Walk(
        again=np.array(problem.repeatable, dtype=np.uint8),
        ops=np.zeros(room, dtype=np.int64),
        window=np.zeros(room, dtype=np.int64),
        trial=np.zeros(room, dtype=np.int64),
        is_first=np.zeros(room, dtype=np.uint8),
        stay=np.zeros(room, dtype=np.uint8),
        live=np.zeros(room + 2, dtype=np.int64),
        tensor=np.zeros((8, count), dtype=np.int64),
        op=np.zeros((3, n), dtype=np.int64),
        copy=np.zeros((3, room * makes + count), dtype=np.int64),
        chain=np.zeros(CHAIN, dtype=np.int64),
        margin=np.zeros((3, MOST_MARGINS), dtype=np.int64),
        tight=np.zeros(n + 1, dtype=np.uint8),
        counts=np.zeros(11, dtype=np.int64),
    )


def go_to(walk: Walk, ops: Ints) -> None:
    """Be at the sequence `ops`."""
    walk.ops[: ops.size] = ops
    walk.counts[LENGTH] = ops.size


def leave_room(walk: Walk, event: int, margin: int) -> None:
    """From now on leave so many bytes free when the event's op runs for the same position."""
    position, op = np.unique(walk.ops[:event]).size, walk.ops[event]
    known = walk.margin[:, : walk.counts[MARGINS]]
    same = np.flatnonzero((known[0] == position) & (known[1] == op))
    if same.size:
        known[2, same[0]] = margin
    elif known.shape[1] < MOST_MARGINS:
        walk.margin[:, known.shape[1]] = position, op, margin
        walk.tight[position] = 1
        walk.counts[MARGINS] += 1
