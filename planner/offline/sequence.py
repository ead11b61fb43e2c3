"""
A schedule as nothing but the ops in the order they run.

Every sequence in which first runs come in program order is a schedule: an op reads the latest copy
of each input, and a copy lives until its last read. `planner.offline.metropolis` changes sequences.
"""

from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from coop_plan.planner.core.arrays import Arrays, Flags, Ints
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.offline.params import DEFAULTS, MetropolisParams

NEVER = 1 << 40
"""The first run of an op that is not in the window."""

# Rows of `MetropolisState.tensor`: copy that is read now; made before the window, or left the arena
# by then; needed after it; needed later; left the arena; and lists: there when it begins, needed
# after it.
CURRENT, READY, GONE, NEEDED, ALIVE, LEFT, READY_LIST, NEEDED_LIST = range(8)
# Rows of `MetropolisState.op`: event of the first run, -1 before the window; whether it ran; marks.
FIRST, RAN, SEEN = range(3)
# Rows of `MetropolisState.copy`; events are the window's, -1 for what is there when it begins.
TENSOR, BEGIN, END = range(3)
# Entries of `MetropolisState.counts`.
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


class MetropolisNumbers(NamedTuple):
    """`MetropolisParams` for compiled code; see there."""

    repairs: int
    least_excess: float
    spread: float
    mend_chance: float
    recompute_chance: float
    move_chance: float
    tries: int
    removed_block: float
    moved_block: float
    moved_block_chance: float
    furthest: float
    later_chance: float
    earliest: float
    early_chance: float
    usually: float
    kept_usually: float
    kept_rarely: float
    gone_usually: float
    gone_rarely: float
    insertion: int
    margins: int


class MetropolisState(NamedTuple):
    """
    Where the Metropolis walk is, and what it needs besides.

    `ops` is the sequence, of which `counts[LENGTH]` are in use; `window` a part of it, and `trial`
    what that may become. `inserted` lists what one change puts in.
    `again` says of an op whether it may be put in anywhere after its first run. `margin` lists
    (position, op, bytes to leave free while it runs between the first runs before and of that
    position), and `tight` flags the positions in it.
    """

    numbers: MetropolisNumbers
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
    inserted: Ints
    margin: Ints
    tight: Flags
    counts: Ints


def start(
    problem: Problem, arrays: Arrays, room: int, params: MetropolisParams = DEFAULTS.metropolis
) -> MetropolisState:
    """A Metropolis walk at no sequence yet, with room for so many events."""
    n, count = arrays.ops, arrays.size.size
    makes = 1 + int(np.diff(arrays.makes_ptr).max(initial=1))
    numbers = MetropolisNumbers(**asdict(params))
    return MetropolisState(
        numbers=numbers,
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
        inserted=np.zeros(params.insertion, dtype=np.int64),
        margin=np.zeros((3, params.margins), dtype=np.int64),
        tight=np.zeros(n + 1, dtype=np.uint8),
        counts=np.zeros(11, dtype=np.int64),
    )


def go_to(state: MetropolisState, ops: Ints) -> None:
    """Be at the sequence `ops`."""
    state.ops[: ops.size] = ops
    state.counts[LENGTH] = ops.size


def leave_room(state: MetropolisState, event: int, margin: int) -> None:
    """From now on leave so many bytes free when the event's op runs for the same position."""
    position, op = np.unique(state.ops[:event]).size, state.ops[event]
    known = state.margin[:, : state.counts[MARGINS]]
    same = np.flatnonzero((known[0] == position) & (known[1] == op))
    if same.size:
        known[2, same[0]] = margin
    elif known.shape[1] < state.margin.shape[1]:
        state.margin[:, known.shape[1]] = position, op, margin
        state.tight[position] = 1
        state.counts[MARGINS] += 1
