"""Progress of long work on stderr: a bar, or lines without a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from coop_plan.planner import Progress

SECONDS_A_LINE = 10
"""Seconds between lines of progress if stderr is no terminal."""


@contextlib.contextmanager
def show_progress() -> Iterator["Callable[[Progress], None]"]:
    """Context with the callback of a progress line; without a terminal, one each ten seconds."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("planning", total=None)

        def show(progress: "Progress") -> None:
            bars.update(
                task,
                description=progress.message,
                total=None if progress.fraction is None else 1.0,
                completed=progress.fraction or 0.0,
            )

        yield show


def _lines() -> "Callable[[Progress], None]":
    """Callback that prints a line if the last one, or the start, is ten seconds ago."""
    started = printed = time.monotonic()

    def show(progress: "Progress") -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= SECONDS_A_LINE:
            printed = now
            done = "" if progress.fraction is None else f" ({progress.fraction:.0%})"
            click.echo(f"{now - started:.0f} s: {progress.message}{done}", err=True)

    return show
