"""Updates on the host: a thread computes them at their homes, while the step goes on."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from coop_plan.runtime.capture.op_timing import cpu_us

Copied = Callable[[], tuple[torch.Tensor, float]]
"""A wait for the copy of a gradient; returns the copy and the time waited, µs."""


class _Ran(NamedTuple):
    """An update that ran: its end (seconds, of `perf_counter`), its time and its wait, µs."""

    end: float
    busy_us: float
    waited_us: float


class HostUpdates(AbstractContextManager["HostUpdates", None]):
    """Updates of one iteration on the host, one after the other; its context ends after them.

    The thread begins with the first update, so that it has the state of the processor of the thread
    that calls, and it computes with as many threads: results are equal to the bit.

    Raises:
        BaseException: at the end, that of the first update that failed.
    """

    def __init__(self) -> None:
        self.busy_us = 0.0
        """Time in the updates, without waits for gradients."""
        self.stall_us = 0.0
        """Time in which the end of the context waited, without waits for a processor."""
        self._thread: ThreadPoolExecutor | None = None
        self._begun: list[Future[_Ran]] = []

    def start(self, copied: Copied, update: Callable[[torch.Tensor], None]) -> None:
        """Start an update; `copied` waits for the gradient."""
        if self._thread is None:
            number = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(1, "coop-plan host", _use_threads, (number,))

        def run() -> _Ran:
            gradient, waited_us = copied()
            busy_us = cpu_us(lambda: update(gradient))
            return _Ran(time.perf_counter(), busy_us, waited_us)

        self._begun.append(self._thread.submit(run))

    def wait(self) -> None:
        """Wait for all updates that began; no other follows."""
        if self._thread is not None:
            self._thread.shutdown()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._thread is None:
            return
        began = time.perf_counter()
        self.wait()
        most_us, left_us = (time.perf_counter() - began) * 1e6, 0.0
        faults = []
        for future in self._begun:
            fault = future.exception()
            if fault is None:
                ran = future.result()
                self.busy_us += ran.busy_us
                left_us += ran.busy_us + ran.waited_us if ran.end > began else 0.0
            else:
                faults.append(fault)
        self.stall_us = min(most_us, left_us)
        if faults and error is None:
            raise faults[0]
        if faults and error is not None:
            error.add_note(f"an update on the host failed, too: {faults[0]!r}")


def _use_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)
