"""All updates of an iteration, or none: signals wait for the last one, an error among them tells.

Python code of a signal's handler runs between any two ops of the main thread. If it raises, or
saves the parameters, it must find those of before or of after the iteration. After an error among
the updates, parameters are refused until they and their states are written, as from a checkpoint.
"""

import ctypes
import inspect
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import torch
from torch.optim import Optimizer

from coop_plan.runtime.errors import PartlyUpdatedError
from coop_plan.runtime.torch_internals.ops import tensor_versions
from coop_plan.runtime.whole_iteration.updates import ParameterUpdate, tensors_of

_sigaction = ctypes.CDLL(None).sigaction


class _Left(NamedTuple):
    """Error of an iteration that failed among its updates, and its tensors with their versions."""

    error: str
    tensors: Sequence[tuple["weakref.ref[torch.Tensor]", int]]


_left: "weakref.WeakKeyDictionary[Optimizer, _Left]" = weakref.WeakKeyDictionary()


def check_loaded(optimizers: Iterable[Optimizer]) -> None:
    """Check that what an iteration left partly updated was written since.

    Raises:
        PartlyUpdatedError: a parameter or state of the optimizers was not.
    """
    for optimizer in optimizers:
        if (left := _left.get(optimizer)) is None:
            continue
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        present = {id(tensor) for p in parameters for tensor in tensors_of(optimizer, p)}
        for reference, version in left.tensors:
            tensor = reference()
            if id(tensor) in present and tensor_versions([tensor]) == [version]:
                raise PartlyUpdatedError(left.error)
        del _left[optimizer]


class AllOrNone(AbstractContextManager["AllOrNone", None]):
    """Context of the updates of a call, which ends with `finish` if all of them ran.

    In the main thread, handlers of signals run after that, if the signals arrive after `begin`.

    Raises:
        PartlyUpdatedError: at the end, if an error left some updates of the optimizers out.
    """

    def __init__(self, finish: Callable[[], None], optimizers: Sequence[Optimizer]) -> None:
        self.is_running = False
        """True from the begin of the call until its updates are done."""
        self._finish = finish
        self._optimizers = optimizers
        self._updates = 0
        self._begun: list[ParameterUpdate] = []
        self._ended: list[ParameterUpdate] = []
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
        """Let signals wait from the first of a plan's `updates`, their number, on."""
        if not self._updates and threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    self._unrestored[number] = None
                    action = _action(number)
                    signal.signal(number, self._note)
                    _sigaction(number, action, None)
        self._updates = updates

    def run(self, update: ParameterUpdate, gradient: torch.Tensor) -> None:
        """Run one of the updates, in any thread."""
        self._begun.append(update)
        update(gradient)
        self._ended.append(update)

    def skip(self) -> None:
        """Note that one of the updates is left out, and changes nothing."""
        self._skipped += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.is_running = False
        try:
            if self._updates and len(self._ended) + self._skipped == self._updates:
                self._finish()
            elif self._begun and error is not None:
                raise self._partly_updated(error) from error
        finally:
            self._restore(4 * len(self._handlers))
            if self._raised:
                self._raise()

    def _partly_updated(self, error: BaseException) -> PartlyUpdatedError:
        """The error of an iteration that failed among its updates, which its next call repeats."""
        amid = [update for update in self._begun if update not in self._ended]
        text = (
            f"after {len(self._ended)} of {self._updates} parameters were updated, the iteration"
            f" failed with {type(error).__name__}: load the state of before, as from a"
            f" checkpoint, and continue from it (updated: {self._named(self._ended)}; amid their"
            f" update: {self._named(amid)})"
        )
        for optimizer in self._optimizers:
            changed = [update for update in self._begun if update.optimizer is optimizer]
            tensors = [t for one in changed for t in tensors_of(optimizer, one.parameter)]
            versions = tensor_versions(tensors)
            _left[optimizer] = _Left(text, [*zip(map(weakref.ref, tensors), versions, strict=True)])
        return PartlyUpdatedError(text)

    def _named(self, updates: Iterable[ParameterUpdate]) -> str:
        """Places of parameters in the groups of their optimizers."""
        found: dict[str, list[int]] = {}
        for update in updates:
            number, kind = self._optimizers.index(update.optimizer), type(update.optimizer).__name__
            group = f"optimizer {number} ({kind}), group {update.group}"
            found.setdefault(group, []).append(update.place)
        return ", ".join(f"{group}: {_spans(places)}" for group, places in found.items()) or "none"

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


def _spans(numbers: Iterable[int]) -> str:
    """Numbers in ascending order, neighbours as a span."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _action(number: int) -> Any:
    """The process's action for a signal, as C code or `siginterrupt` has set it."""
    action = ctypes.create_string_buffer(256)  # no smaller than C's
    _sigaction(number, None, action)
    return action
