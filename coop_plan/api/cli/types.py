"""Types of the command's options."""

import math
from typing import Any

import click

MAX_SECONDS = 1e9


class Seconds(click.FloatRange):
    """Seconds within a range; nan and infinity are refused."""

    def __init__(self, minimum: float = 0, maximum: float = MAX_SECONDS) -> None:
        super().__init__(min=minimum, max=maximum)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The parsed option."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail("nan is not a number of seconds", param, ctx)
        return seconds
