"""A component of an instance as arrays, and its conflicts, for the compiled exact search."""

from typing import NamedTuple

from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.core.jit import inlined


class Windows(NamedTuple):
    """Shapes of buffers with gaps; the arrays are empty if all buffers are rectangles."""

    present: bool
    near_low: Ints
    near_high: Ints
    """Per conflict the forbidden interval of the offset, from that of the other buffer."""
    member_low: Ints
    member_height: Ints
    """Units that a member of a section occupies there, from its offset."""


class Task(NamedTuple):
    """A component of an instance, with explicit conflicts."""

    first: Ints
    last: Ints
    height: Ints
    highest: Ints
    """Upper bound on the offset of each buffer, from the capacity."""
    capacity: int
    fixed: Ints
    """Fixed offset, or -1."""
    multiple: Ints
    """Each offset is a multiple of this."""
    near_start: Ints
    near: Ints
    """Conflicts of buffer i: `near[near_start[i]:near_start[i + 1]]`."""
    member_start: Ints
    member: Ints
    """Buffers live in each section, as pointer and index arrays."""
    windows: Windows


@inlined
def low_end(task: Task, i: int, k: int) -> int:
    """Lower end of the open interval that conflict k forbids for i, from the other's offset."""
    return int(task.windows.near_low[k] if task.windows.present else -task.height[i])


@inlined
def high_end(task: Task, k: int) -> int:
    """Upper end of that interval."""
    windows = task.windows
    return int(windows.near_high[k] if windows.present else task.height[task.near[k]])


@inlined
def aligned(task: Task, i: int, offset: int) -> int:
    """The lowest offset of i that is not below `offset`."""
    unit = task.multiple[i]
    return offset if unit == 1 else int(-(-offset // unit) * unit)
