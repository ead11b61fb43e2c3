"""The type of options that are seconds."""

import math
from typing import Any

import click

MAX_SECONDS = 1e9


class Seconds(click.FloatRange):
    """Seconds within a range; infinity and nan are no limits."""

    def __init__(self, least: float = 0, most: float = MAX_SECONDS) -> None:
        super().__init__(min=least, max=most)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number of a text."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail("nan is not a number of seconds", param, ctx)
        return seconds
