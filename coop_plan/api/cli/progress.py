"""Progress of long work on stderr: a bar with the time left, or lines without a terminal."""

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
def show_progress(
    limit_seconds: float | None = None, message: str = "planning"
) -> Iterator["Callable[[Progress], None]"]:
    """Context with the callback of a progress line; without a terminal, one each ten seconds.

    With a limit, in seconds, the bar is the part of it that has passed.
    """
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as Bars
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    class Bar(BarColumn):
        def render(self, task: Task) -> ProgressBar:
            if limit_seconds is not None:
                done = min(task.elapsed or 0.0, limit_seconds)
                return ProgressBar(total=limit_seconds, completed=done, width=self.bar_width)
            return super().render(task)

    class Left(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            return Text(_time(task.elapsed or 0.0, task.fields["share"], limit_seconds))

    columns = (TextColumn("{task.description}"), Bar(), Left())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(message, total=None, share=None)

        def show(progress: "Progress") -> None:
            bars.update(
                task,
                description=progress.message,
                total=None if progress.fraction is None else 1.0,
                completed=progress.fraction or 0.0,
                share=progress.fraction,
            )

        yield show


def _time(elapsed: float, share: float | None, limit: float | None) -> str:
    """Elapsed seconds with the time left: of the limit, or estimated by the share that is done."""
    if limit is not None:
        return f"{elapsed:.0f} of {limit:g} s, {max(0.0, limit - elapsed):.0f} s left"
    if share:
        return f"{elapsed:.0f} s, about {elapsed * (1 / share - 1):.0f} s left"
    return f"{elapsed:.0f} s"


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
