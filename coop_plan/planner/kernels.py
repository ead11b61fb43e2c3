"""Compilation of kernels before they are needed, so that no clock or time limit contains it.

A kernel is compiled for the types of its arguments, which its annotations give. Only kernels that
are not in the cache are compiled; the others are loaded at their first call.
"""

import contextlib
import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numba
import numpy as np
from numba.core import config, types

from coop_plan.planner.cache_files import file_lock
from coop_plan.planner.core.jit import ENTRIES, log_compilation
from coop_plan.planner.core.params import Params, values_class
from coop_plan.planner.method import Progress

PLACEMENT = tuple(
    f"placement.{name}"
    for name in ("canonical", "first_fit", "instance", "restarts", "skyline", "windows")
)
LAYOUT = ("core.inplace", "core.lifetimes", *PLACEMENT)
ONLINE = (*LAYOUT, "online.run", "online.simulator")
OFFLINE = (*ONLINE, "heuristic.eviction", "search.compute.metropolis")
TRANSFERS = "search.makespan.metropolis"
EXACT = "exact.model.separation"

MODULES = {
    **dict.fromkeys(("coop", "dtr", "dte", "delta", "swap-only"), ONLINE),
    **dict.fromkeys(("coop-offline", "checkmate", "monet"), OFFLINE),
    **dict.fromkeys(("optimal", "auto"), (*OFFLINE, EXACT)),
}
"""By method, the modules in `planner` with the kernels that it calls, without a link.

Other methods call those of layouts alone.
"""

ALL = (*OFFLINE, TRANSFERS, EXACT)

COMPILE_SECONDS = 600.0
"""Time that a process waits for another one's compilation."""

NUMBERS: dict[Any, Any] = {int: types.int64, float: types.float64, bool: types.boolean}

Report = Callable[[Progress], None]
"""Called before each kernel is compiled."""


def compile_method(method: str, *, linked: bool, progress: Report | None = None) -> None:
    """Compile the kernels of a method that the cache lacks; `linked` if it may copy to the host."""
    modules = MODULES.get(method, LAYOUT)
    if linked and method in ("coop-offline", "optimal", "auto"):
        modules = (*modules, TRANSFERS)
    compile_modules(modules, progress)


def compile_modules(modules: tuple[str, ...] = ALL, progress: Report | None = None) -> int:
    """Compile the kernels of modules in `planner` that the cache lacks; returns their number."""
    if modules in _compiled or _interpreted():
        return 0
    lacking = [
        (kernel, signature)
        for module in modules
        for kernel, signature in _entries(module)
        if _is_lacking(kernel, signature)
    ]
    count = 0
    for number, (kernel, signature) in enumerate(lacking):
        with _lock(kernel):
            if _is_lacking(kernel, signature):  # no other process compiled it meanwhile
                log_compilation()
                if progress is not None:
                    message = f"compiling kernel {number + 1} of {len(lacking)} ({kernel.__name__})"
                    progress(Progress(message, number / len(lacking)))
                kernel.compile(signature)
                count += 1
    _compiled.add(modules)
    return count


def _is_lacking(kernel: Any, signature: tuple[Any, ...]) -> bool:
    """True if a kernel is neither loaded nor in the cache."""
    kept = hasattr(kernel._cache, "has") and kernel._cache.has(signature, kernel.targetctx)
    return signature not in kernel.overloads and not kept


def _lock(kernel: Any) -> contextlib.AbstractContextManager[None]:
    """The lock of the process that compiles a kernel on this machine; without a cache, none."""
    folder = kernel._cache.cache_path
    if folder is None:
        return contextlib.nullcontext()
    waiting = "waiting for another process that compiles the planner's kernels"
    return file_lock(Path(folder) / f"{kernel.__name__}.lock", COMPILE_SECONDS, waiting)


def _interpreted() -> bool:
    settings: Any = config
    return bool(settings.DISABLE_JIT)


def can_keep() -> bool:
    """True if compiled kernels are kept on disk; False if no folder for them can be written."""
    return all(hasattr(kernel._cache, "has") for kernel, _ in _entries(LAYOUT[0]))


_compiled: set[tuple[str, ...]] = set()
"""Modules that were compiled in this process."""


@functools.cache
def _entries(module: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """The kernels of a module that Python calls, each with the types of its arguments."""
    name = f"coop_plan.planner.{module}"
    import_module(name)
    found = []
    for kernel in ENTRIES[name]:
        hints = get_type_hints(kernel.py_func, include_extras=True)
        hints.pop("return")
        found.append((kernel, tuple(map(_type, hints.values()))))
    return found


def _type(hint: Any) -> Any:
    """Type of an argument for numba: a number, a contiguous array, or a named tuple of them."""
    dimensions = 1
    if get_origin(hint) is Annotated:
        hint, dimensions = get_args(hint)
    if hint in NUMBERS:
        return NUMBERS[hint]
    if get_origin(hint) is np.ndarray:
        dtype = get_args(get_args(hint)[1])[0]
        return types.Array(numba.from_dtype(np.dtype(dtype)), dimensions, "C")
    return _tuple_type(hint)


@functools.cache
def _tuple_type(kind: Any) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    made: Any = values_class(kind) if issubclass(kind, Params) else kind
    parts = tuple(_type(hints[name]) for name in made._fields)
    named: Any = types.BaseTuple
    return named.from_types(parts, made)
