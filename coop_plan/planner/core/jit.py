"""
A typed door to numba.

The decorators keep the decorated function's signature for mypy. Kernels are cached beside their
source, so a machine compiles them once.
"""

import contextlib
import functools
import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite.binding


@contextlib.contextmanager
def _without(*names: str) -> Iterator[None]:
    """Modules that cannot be loaded meanwhile, unless other threads may want them."""
    names = tuple(name for name in names if name not in sys.modules)
    if threading.active_count() > 1:
        names = ()
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: import fails
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


# numba loads coverage.py in case it measures, and yaml for a file of settings: 0.1 s for neither.
with _without("coverage", *(() if Path(".numba_config.yaml").exists() else ("yaml",))):
    import numba
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
    from numba.core.runtime import nrt

log = logging.getLogger("coop-plan")

SHARED = ("arrays.py", "jit.py", "inplace.py", "lifetimes.py", "../search/compute/*.py")
"""From here, the modules that kernels elsewhere are made of."""

P = ParamSpec("P")
R = TypeVar("R")


class _Kept(CompileResultCacheImpl):
    """
    What is kept of a kernel, without environments that hold nothing.

    numba keeps one for each function that was compiled in, and to load it imports that function's
    module. Compiled code asks an environment for its constants alone.
    """

    def reduce(self, cres: Any) -> Any:
        *rest, environments = super().reduce(cres)  # type: ignore[no-untyped-call]
        return (*rest, tuple(each for each in environments if each.consts))


class _Cache(FunctionCache):
    """
    A cache that knows what else a kernel is made of, and counts an index it cannot read as empty.

    numba looks at a function's own file only; constants and functions it takes from its neighbours
    are compiled in, and an old copy of them would write out of bounds. The index names the classes
    of the arguments; one that has moved would otherwise end every call with an import error.
    """

    _impl_class = _Kept

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        key = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return (*key, _sources(Path(self._py_func.__code__.co_filename).parent))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """numba's, without `target_context.refresh()`: what is compiled needs no compiler."""
        try:
            _link_runtime()
            with self._guard_against_spurious_io_errors():
                found = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:
            self.flush()  # type: ignore[no-untyped-call]
            found = None
        if found is None:
            _say_that_it_compiles()
        return found


class _Entry(_Kept):
    """
    What is kept of a kernel that only Python calls: its machine code.

    numba keeps its bitcode, too, for kernels that call it, and parses that at every load: half the
    time of a load. Of the names that are defined there, it looks up the one it calls.
    """

    def reduce(self, cres: Any) -> Any:
        (name, kind, (code, _)), *rest = super().reduce(cres)
        defined = f'define void @"{cres.fndesc.llvm_cpython_wrapper_name}"() {{ ret void }}'
        bitcode = llvmlite.binding.parse_assembly(defined).as_bitcode()
        return ((name, kind, (code, bitcode)), *rest)


class _EntryCache(_Cache):
    _impl_class = _Entry


class _LateCache:
    """A cache from its first use on: most kernels are called by others only, which hold them."""

    def __init__(self, function: Callable[..., Any], kind: type[_Cache]) -> None:
        self._function, self._kind = function, kind

    @functools.cached_property
    def _cache(self) -> Any:
        try:
            return self._kind(self._function)
        except RuntimeError:
            # Neither the source's folder nor the user's cache can be written; the kernels then
            # live as long as the process.
            return NullCache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@functools.cache
def _link_runtime() -> None:
    """
    Give compiled code the addresses of numba's runtime.

    What `rtsys.initialize` does before it compiles its own share, which cached code contains.
    """
    runtime: Any = nrt
    if not runtime.rtsys._init:
        for name, address in runtime._nrt.c_helpers.items():
            full = name if name.startswith("_") else f"NRT_{name}"
            llvmlite.binding.add_symbol(full, address)


@functools.cache
def _sources(folder: Path) -> str:
    """Digest of what a kernel in `folder` may be made of: its neighbours, and what is shared."""
    core = Path(__file__).resolve().parent
    shared = (path.resolve() for name in SHARED for path in core.glob(name))
    digest = hashlib.sha256()
    for path in sorted({*folder.resolve().glob("*.py"), *shared}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _say_that_it_compiles() -> None:
    log.warning("compiling the planner's kernels, once on this machine: up to a minute")


def _compile(
    function: Callable[P, R], cache: type[_Cache] = _Cache, **options: bool
) -> Callable[P, R]:
    library: Any = numba
    dispatcher = library.njit(nogil=True, **options)(function)
    if not library.config.DISABLE_JIT:
        dispatcher._cache = _LateCache(function, cache)
    return cast("Callable[P, R]", dispatcher)


def njit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function`, which no kernel calls, at its first call; keep the result on disk."""
    return _compile(function, _EntryCache)


def linked(function: Callable[P, R]) -> Callable[P, R]:
    """As `njit`, for functions that other kernels call, too."""
    return _compile(function)


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """
    As `linked`, for functions that only compiled code calls and that allocate no array.

    Arrays taken from a state are not reference-counted, which in short functions costs several
    times the work itself.
    """
    return _compile(function, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """As `inner`, and inlined: a call would pass every array of a state, field by field."""
    return _compile(
        function, _nrt=False, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
    )
