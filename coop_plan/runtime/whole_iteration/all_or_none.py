"""All updates of an iteration, or none: signals wait for the last one, an error among them tells.

Python code of a signal's handler runs between any two ops of the main thread. If it raises, or
saves the parameters, it must find those of before or of after the iteration.
"""

import ctypes
import inspect
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self

from coop_plan.runtime.errors import PartlyUpdatedError

_sigaction = ctypes.CDLL(None).sigaction


class AllOrNone(AbstractContextManager["AllOrNone", None]):
    """Context of the updates of a call, which ends with `finish` if all of them ran.

    In the main thread, handlers of signals run after that, if the signals arrive after `begin`.

    Raises:
        PartlyUpdatedError: at the end, if an error left some updates out.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self.is_running = False
        """True from the begin of the call until its updates are done."""
        self._finish = finish
        self._updates = 0
        self._begun = 0
        self._ended = 0
        self._handlers: dict[int, Any] = {}
        self._noted: set[int] = set()
        self._over = False

    def __enter__(self) -> Self:
        self.is_running = True
        return self

    def begin(self, updates: int) -> None:
        """Begin one of the updates of a plan."""
        if not self._begun and threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _exchange(number, self._note)
        self._updates = updates
        self._begun += 1

    def end(self) -> None:
        """Note that the update is done."""
        self._ended += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.is_running = False
        with ExitStack() as last:  # which goes on if a handler raises
            for number in self._handlers:
                last.callback(self._run_noted, number)
            last.callback(self._restore)
            if self._begun == 0:
                return
            if self._ended == self._updates:
                self._finish()
            elif error is not None:
                raise PartlyUpdatedError(
                    f"after {self._ended} of {self._updates} parameters were updated, the iteration"
                    f" failed with {type(error).__name__}: load the state of before, as from a"
                    " checkpoint, and continue from it"
                ) from error

    def _note(self, number: int, frame: Any) -> None:
        if self._over:  # a handler raised amid `_restore`
            self._handlers[number](number, frame)
        else:
            self._noted.add(number)

    def _restore(self) -> None:
        self._over = True
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:  # else a hook installed another
                _exchange(number, handler)

    def _run_noted(self, number: int) -> None:
        if number in self._noted:
            self._handlers[number](number, inspect.currentframe())


def _exchange(number: int, handler: Any) -> None:
    """Exchange Python's handler, and leave the action that C code or `siginterrupt` has set."""
    action = ctypes.create_string_buffer(256)  # no smaller than C's
    _sigaction(number, None, action)
    signal.signal(number, handler)
    _sigaction(number, action, None)
