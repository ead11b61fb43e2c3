"""All updates of an iteration, or none: signals wait for the last one, an error among them tells.

Python code of a signal's handler runs between any two ops of the main thread. If it raises, or
saves the parameters, it must find those of before or of after the iteration.
"""

import ctypes
import inspect
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
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
        self._skipped = 0
        self._handlers: dict[int, Any] = {}
        self._unrestored: dict[int, Any] = {}
        """Python's handlers that are exchanged, and None or C's action to set again."""
        self._noted: list[int] = []
        self._raised: list[BaseException] = []

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
                    self._unrestored[number] = None
                    action = _action(number)
                    signal.signal(number, self._note)
                    _sigaction(number, action, None)
        self._updates = updates
        self._begun += 1

    def end(self) -> None:
        """Note that the update is done."""
        self._ended += 1

    def skip(self) -> None:
        """Note that the update that began is left out, and changes nothing."""
        self._skipped += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.is_running = False
        try:
            if self._begun and self._ended + self._skipped == self._updates:
                self._finish()
            elif self._begun > self._skipped and error is not None:
                raise PartlyUpdatedError(
                    f"after {self._ended} of {self._updates} parameters were updated, the iteration"
                    f" failed with {type(error).__name__}: load the state of before, as from a"
                    " checkpoint, and continue from it"
                ) from error
        finally:
            self._restore(4 * len(self._handlers))
            if self._raised:
                self._raise()

    def _note(self, number: int, _: Any) -> None:
        if number not in self._noted:
            self._noted = [*self._noted, number]

    def _restore(self, levels: int) -> None:
        """Restore all handlers, then run those of signals that were noted.

        A handler may raise at any call from its restoring on: then the next outer level continues,
        up to so many times. Nothing is called between taking a noted signal and its handler.
        """
        frame = inspect.currentframe()
        try:
            if levels:
                self._restore(levels - 1)
            for number in [*self._unrestored]:
                if signal.getsignal(number) == self._note:  # else a hook installed another
                    self._unrestored[number] = _action(number)
                    signal.signal(number, self._handlers[number])
                if self._unrestored[number] is not None:
                    _sigaction(number, self._unrestored[number], None)
                del self._unrestored[number]
            while self._noted:
                number, *self._noted = self._noted
                self._handlers[number](number, frame)
        except BaseException as error:
            self._raised = [*self._raised, error]
        finally:
            del frame  # which refers to itself, and so would keep the losses

    def _raise(self) -> None:
        """Raise the first error of a handler, with the others as its context."""
        first, *self._raised = self._raised
        try:
            if self._raised:
                self._raise()
        finally:
            try:
                raise first
            finally:
                del first  # whose frames contain this one


def _action(number: int) -> Any:
    """The process's action for a signal, as C code or `siginterrupt` has set it."""
    action = ctypes.create_string_buffer(256)  # no smaller than C's
    _sigaction(number, None, action)
    return action
