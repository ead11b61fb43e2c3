"""All updates of an iteration, or none: signals wait for the last one, an error among them tells.

Python code of a signal's handler runs between any two ops of the main thread. If it raises, or
saves the parameters, it must find those of before or of after the iteration.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from coop_plan.runtime.errors import PartlyUpdatedError


class AllOrNone(AbstractContextManager["AllOrNone", None]):
    """Context of the updates of a call, which ends with `finish` if all of them ran.

    In the main thread, handlers of signals run after that, if the signals arrive after `begin`.

    Raises:
        PartlyUpdatedError: at the end, if an error left some updates out.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._updates = 0
        self._begun = 0
        self._ended = 0
        self._handlers: dict[int, Any] = {}
        self._noted: set[int] = set()

    def begin(self, updates: int) -> None:
        """Begin one of the updates of a plan."""
        if not self._begun and threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, lambda number, _: self._noted.add(number))
        self._updates = updates
        self._begun += 1

    def end(self) -> None:
        """Note that the update is done."""
        self._ended += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as last:  # which goes on if a handler raises
            for number in self._handlers:
                last.callback(self._raise_noted, number)
            for number, handler in self._handlers.items():
                last.callback(signal.signal, number, handler)
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

    def _raise_noted(self, number: int) -> None:
        if number in self._noted:
            signal.raise_signal(number)
