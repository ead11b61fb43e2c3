"""
A typed door to numba, which ships no types.

`njit` keeps the decorated function's signature for mypy. Kernels are cached beside their source, so
a machine compiles them once.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def njit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` to machine code at its first call and keep the result on disk."""
    return cast("Callable[P, R]", numba.njit(cache=True, nogil=True)(function))
