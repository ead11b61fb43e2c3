"""Values of tests' parameters."""

from collections.abc import Iterable

import pytest


def slow_after(count: int, values: Iterable[object]) -> list[object]:
    """`values` for `parametrize`; all but the first `count` are for `make test-slow`."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [[] if place < count else [pytest.mark.slow] for place in range(len(rows))]
    return [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]
