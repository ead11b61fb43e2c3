"""Types that kernels are compiled for, which their annotations give."""

import functools
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numba
import numpy as np
from numba.core import config, types

from coop_plan.planner.core.numba_jit import ENTRIES
from coop_plan.planner.core.records import Record, Table


def interpreted() -> bool:
    """True if kernels run as Python."""
    settings: Any = config
    return bool(settings.DISABLE_JIT)


@functools.cache
def entries(module: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """The kernels of a module that Python calls, each with the types of its arguments."""
    name = f"coop_plan.planner.{module}"
    import_module(name)
    found = []
    for kernel in ENTRIES[name]:
        hints = get_type_hints(kernel.py_func, include_extras=True)
        hints.pop("return")
        found.append((kernel, tuple(map(type_of, hints.values()))))
    return found


def result_type(kernel: Any) -> Any:
    """Type of a kernel's result for numba, as its annotation gives it."""
    return type_of(get_type_hints(kernel.py_func, include_extras=True)["return"])


def type_of(hint: Any) -> Any:
    """Type of an argument for numba: a number, a contiguous array, a record, or a tuple of them."""
    dimensions = 1
    if get_origin(hint) is Annotated:
        hint, dimensions = get_args(hint)
    alias = get_origin(hint)
    if hasattr(alias, "__value__"):  # NumPy's NDArray from Python 3.12 on
        hint = alias.__value__[get_args(hint)]
    numbers = {int: types.int64, float: types.float64, bool: types.boolean, type(None): types.none}
    if hint in numbers:
        return numbers[hint]
    if get_origin(hint) is tuple:
        return types.Tuple(tuple(map(type_of, get_args(hint))))  # type: ignore[no-untyped-call]
    if get_origin(hint) is np.ndarray:
        dtype = get_args(get_args(hint)[1])[0]
        return types.Array(numba.from_dtype(np.dtype(dtype)), dimensions, "C")
    if get_origin(hint) is Table:
        return types.Array(type_of(get_args(hint)[0]), 1, "C")
    if issubclass(hint, Record):
        return numba.from_dtype(hint.dtype)
    return _tuple_type(hint)


@functools.cache
def _tuple_type(kind: Any) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    parts = tuple(type_of(hints[name]) for name in kind._fields)
    named: Any = types.BaseTuple
    return named.from_types(parts, kind)
