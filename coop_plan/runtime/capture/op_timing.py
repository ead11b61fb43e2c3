"""The times of an op as a step has it, on real tensors.

The op runs several times with its allocations served from memory touched before, as in an arena, so
that its time contains no page faults. In a step its operands come from other ops and are not in the
processor's own caches. The code of its kernel is there if one of its kind ran shortly before. So an
op has two times: that of a run on emptied caches, and that of the next run with the time added that
its operands take to arrive.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import SERVED_OUTSIDE, Arena, Memory, Run, Slots
from coop_plan.runtime.op_profile import Allocation

MIN_REPEATS = 5
MAX_REPEATS = 9
REPEAT_US = 4_000.0
"""Time after which an op is not repeated any more, within the two counts above."""

CACHE_BYTES = 16 << 20
"""Bytes that are read before an op is timed on the CPU: more than a core's own caches have, and so
much of the shared one that an op costs what it does in a step, between others and other processes.
"""


CODE_US = 500.0
"""Time of an op beside which loading its code into the caches counts for little, µs."""


class OpTimes(NamedTuple):
    """Times of an op, µs: if its kernel's code is not in the caches, and if it is there."""

    first_us: float
    again_us: float


def time_op(run_op: Callable[[], object], slots: Slots, read: int, device: int | None) -> OpTimes:
    """Median times of an op; its allocations are served from an arena at these slots.

    `read` are the bytes of its arguments. `device` is the index of a CUDA device; None: the op runs
    on the CPU.
    """
    size = max((offset + need for need, offset in slots), default=0)
    arena, memory = Arena(size, [slots], [False], device), Memory()
    run = Run(arena)

    def timed() -> float:
        run.begin(memory, fresh=False)
        try:
            arena.enter(0)
            return cpu_us(run_op) if device is None else cuda.device_us(device, run_op)
        finally:
            arena.leave()

    times: list[float] = []
    again: list[float] = []
    others: list[float] = []
    while len(times) < MIN_REPEATS or (sum(times) < REPEAT_US and len(times) < MAX_REPEATS):
        if device is None:
            others.append(cpu_us(empty_caches))
        times.append(timed())
        if device is None and times[-1] < CODE_US:
            again.append(timed())
    first = statistics.median(times[1:])
    if len(again) < MIN_REPEATS:
        return OpTimes(first, first)
    arrival = (read + size) * statistics.median(others) / CACHE_BYTES
    return OpTimes(first, min(first, statistics.median(again) + arrival))


def slots_alone(allocations: Sequence[Allocation], workspace: int, alignment: int) -> Slots:
    """Slots of an op alone: its workspace, and its outputs behind that."""
    slots, end = [], -(-workspace // alignment) * alignment
    for allocation in allocations:
        offset = allocation.offset
        if allocation.output == -2:
            offset = SERVED_OUTSIDE
        elif allocation.output >= 0:
            offset = end
            end += -(-allocation.bytes // alignment) * alignment
        slots.append((allocation.bytes, offset))
    return slots


def empty_caches() -> None:
    """Read other memory, as the ops between two runs of an op in a step do.

    In a loop an op finds all its arguments in the caches. Ops that are bound by memory would look
    several times too cheap beside products, which are not.
    """
    _library_pages().sum()


@functools.cache
def _library_pages() -> Any:
    """Pages of PyTorch's largest library, which are in memory anyway: reading takes none."""
    files = filter(Path.is_file, Path(torch.__file__).with_name("lib").iterdir())
    size, largest = max((path.stat().st_size, path) for path in files)
    return np.memmap(largest, np.int64, "r", shape=(min(CACHE_BYTES, size) // 8,))


def cpu_us(run: Callable[[], object]) -> float:
    """Time of one run without waits for a processor that another process has.

    It is the thread's processor time, or that of an op's threads on average if that is more.
    """
    threads, all_threads = torch.get_num_threads(), time.process_time_ns()
    wall, own = time.perf_counter_ns(), time.thread_time_ns()
    result = run()
    own = time.thread_time_ns() - own
    wall = time.perf_counter_ns() - wall
    if threads > 1:
        own = min(wall, max(own, (time.process_time_ns() - all_threads) // threads))
    del result  # not part of the op's time
    return own / 1e3
