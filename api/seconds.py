"""The type of `--time-limit`."""

import math
from typing import Any

import click

MAX_SECONDS = 1e9


class Seconds(click.FloatRange):
    """Seconds from 0 up; infinity and nan are no limits."""

    def __init__(self) -> None:
        super().__init__(min=0, max=MAX_SECONDS)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number of a text."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail("nan is not a number of seconds", param, ctx)
        return seconds
