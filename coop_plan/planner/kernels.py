"""Compilation of kernels before they are needed, so that no clock or time limit contains it.

Only kernels that are not in the cache are compiled; the others are loaded at their first call. A
wheel has them compiled.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coop_plan.planner.cache_files import file_lock
from coop_plan.planner.core.jit import EXTENSION
from coop_plan.planner.method import Progress

PLACEMENT = tuple(
    f"placement.{name}"
    for name in ("canonical", "first_fit", "instance", "restarts", "skyline", "windows")
)
LAYOUT = ("core.inplace", "core.lifetimes", *PLACEMENT)
ONLINE = (*LAYOUT, "online.simulator")
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
    if EXTENSION or modules in _compiled:
        return 0
    from coop_plan.planner.core.kernel_types import entries, interpreted
    from coop_plan.planner.core.numba_jit import log_compilation

    if interpreted():
        return 0
    lacking = [
        (kernel, signature)
        for module in modules
        for kernel, signature in entries(module)
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
    return file_lock(Path(folder) / f"{kernel.__name__}.lock", 600.0, waiting)


def can_keep() -> bool:
    """True if compiled kernels are kept on disk; False if no folder for them can be written."""
    if EXTENSION:
        return True
    from coop_plan.planner.core.kernel_types import entries

    return all(hasattr(kernel._cache, "has") for kernel, _ in entries(LAYOUT[0]))


_compiled: set[tuple[str, ...]] = set()
"""Modules that were compiled in this process."""
