"""Decorators of the planner's kernels, which are compiled when a wheel is built or at first use.

A wheel has the kernels in an extension module (`planner.build_kernels`), so that an installed
planner needs neither a compiler nor numba. Other installations, and one whose sources were edited,
compile by numba.
"""

import hashlib
import os
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

PLANNER = Path(__file__).parents[1]

P = ParamSpec("P")
R = TypeVar("R")


def usable_cpus() -> int:
    """Number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def extension_name() -> str:
    """Name of the extension module of these sources; edited sources have none.

    Compiled code of other sources would read and write arrays where they no longer are.
    """
    digest = hashlib.sha256()
    for path in sorted(PLANNER.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"_kernels_{digest.hexdigest()[:16]}"


def kernel_name(function: Callable[..., object]) -> str:
    """Name of a kernel in the extension module."""
    return f"{function.__module__}.{function.__name__}".replace(".", "_")


def _extension() -> ModuleType | None:
    """The compiled kernels of these sources, if installed; NUMBA_DISABLE_JIT hides them."""
    kept = [path.name for path in PLANNER.glob(f"_kernels_*{EXTENSION_SUFFIXES[0]}")]
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0" or not kept:
        return None
    name = extension_name()
    current = f"{name}{EXTENSION_SUFFIXES[0]}" in kept
    return import_module(f"coop_plan.planner.{name}") if current else None


EXTENSION = _extension()


def njit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function`, which Python calls and no kernel does."""
    return _compiled(function) if EXTENSION else _numba().njit(function)


def linked(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function`, which Python and other kernels call."""
    return _compiled(function) if EXTENSION else _numba().linked(function)


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function`, which only kernels call and which allocates no array.

    Arrays of a state are not reference-counted, which costs short functions more than their work.
    """
    return function if EXTENSION else _numba().inner(function)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """As `inner`, and inlined: a call would pass every array of a state as an argument."""
    return function if EXTENSION else _numba().inlined(function)


def _compiled(function: Callable[P, R]) -> Callable[P, R]:
    return cast("Callable[P, R]", getattr(EXTENSION, kernel_name(function)))


def _numba() -> Any:
    return import_module("coop_plan.planner.core.numba_jit")
