"""Progress of captures and first steps: to a callback, or to the log if stderr is a terminal."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from coop_plan.planner.method import Progress

log = logging.getLogger("coop-plan")

SECONDS_A_LINE = 10.0
"""Least time between lines of the log, and before the first one, s."""

T = TypeVar("T")

_listener: ContextVar[Callable[[Progress], None] | None] = ContextVar("listener", default=None)
_last_line = float("-inf")


@contextlib.contextmanager
def progress_to(listener: Callable[[Progress], None]) -> Iterator[None]:
    """Context in which progress of this thread goes to a callback."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Work:
    """Work that began now; a line of the log says how far it is, at most once in ten seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def report(self, progress: Progress) -> None:
        """Report the state of the work."""
        global _last_line
        listener = _listener.get()
        if listener is not None:
            listener(progress)
            return
        now = time.monotonic()
        if now - max(self._began, _last_line) < SECONDS_A_LINE or not sys.stderr.isatty():
            return
        _last_line = now
        left = ""
        if progress.fraction:
            seconds = (now - self._began) * (1 / progress.fraction - 1)
            left = f": about {seconds:.0f} s left"
        log.warning("%s%s", progress.message, left)


def log_duration(message: str, seconds: float) -> None:
    """Log the duration of work that took long enough for a line, if stderr is a terminal."""
    if _listener.get() is None and seconds >= SECONDS_A_LINE and sys.stderr.isatty():
        log.warning("%s %.0f s", message, seconds)


def counted(items: Iterable[T], count: int, message: str) -> Iterator[T]:
    """The items; before each, the share of `count` that is done is reported."""
    work = Work()
    for number, item in enumerate(items):
        work.report(Progress(message, number / max(1, count)))
        yield item
