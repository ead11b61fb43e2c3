"""Where the time-point model begins to look: the first choice of time points."""

from itertools import pairwise

from planner.exact.live import live_bytes
from planner.exact.program import Program
from planner.methods.keep_all import keep_all_schedule


def initial_points(program: Program, capacity: int, count: int) -> list[int]:
    """
    At most `count` ops and the end of the step, in program order.

    Chosen among the ops at which keeping everything exceeds the capacity (bytes): as many groups of
    equal length, and of each group the op with the largest working set.
    """
    live = live_bytes(keep_all_schedule(program.problem))
    over = [op for op, used in enumerate(live) if used > capacity]
    groups = min(count, len(over))
    edges = [len(over) * group // groups for group in range(groups + 1)] if groups else []
    chosen = [max(over[low:high], key=program.touched) for low, high in pairwise(edges)]
    return [*chosen, program.n]
