"""How the command ends: its exit codes, and one line on stderr."""

import contextlib
import errno
import io
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import click

EXIT_ERROR, EXIT_INVALID, EXIT_INFEASIBLE, EXIT_TIME, EXIT_INTERRUPTED = 1, 2, 3, 4, 130


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""What says that stdout does not take what is written to it."""


class ClosedOutput(io.TextIOBase):
    """Stands where the shell has closed stdout: an answer that nobody gets is an error."""

    def write(self, text: str) -> int:
        """Raise `OSError`."""
        raise OSError(errno.EBADF, "it is closed")


def printable(text: str) -> str:
    """`text` for a terminal: names come from files, and may hold what moves a cursor."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def fail(message: object, code: int) -> NoReturn:
    """End with one line on stderr."""
    click.echo(f"coop-plan: error: {printable(' '.join(str(message).split()))}", err=True)
    sys.exit(code)


@contextlib.contextmanager
def interruptions() -> Iterator[list[int]]:
    """While this lasts, what a Ctrl-C raises gets through; its signals are in the list.

    Python drops what is raised in a callback of the import system or a finalizer, and the imports
    of the planners take a second: then it is raised again. A method may take an interruption as
    "enough" and answer; the command says 130 all the same.
    """
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    def dropped(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            hook(unraisable)

    hook, alarm = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    interrupt = signal.getsignal(signal.SIGINT)
    sys.unraisablehook = dropped
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = hook
