"""Exit codes of the command, and its error line on stderr."""

import contextlib
import errno
import io
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import click

from coop_plan.schemas.errors import missing_package

EXIT_ERROR, EXIT_INVALID, EXIT_INFEASIBLE, EXIT_TIME, EXIT_INTERRUPTED = 1, 2, 3, 4, 130

WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""Errors of a stdout that cannot be written."""


class OutputError(Exception):
    """The output file cannot be written."""


class ClosedOutput(io.TextIOBase):
    """Stands for a stdout that the shell has closed, so that writing to it is an error."""

    def write(self, text: str) -> int:
        """Raise `OSError`."""
        raise OSError(errno.EBADF, "it is closed")


def printable(text: str) -> str:
    """`text` without control characters, which names from files may have."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def fail(message: object, code: int) -> NoReturn:
    """Exit with `code` after one line on stderr."""
    click.echo(f"coop-plan: error: {printable(' '.join(str(message).split()))}", err=True)
    sys.exit(code)


@contextlib.contextmanager
def needs_extra(user: str, extra: str) -> Iterator[None]:
    """Context of the imports of `user`; exits with the command that installs a missing extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        fail(missing_package(user, error.name, extra), EXIT_ERROR)


@contextlib.contextmanager
def interruptions() -> Iterator[list[int]]:
    """Context in which each Ctrl-C raises `KeyboardInterrupt`; its signals are in the list.

    Python drops an exception that is raised in a finalizer or an import hook, and importing the
    planner takes a second: the exception is then raised again. A method may catch it and return the
    best plan so far; the list still makes the exit code 130.
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
