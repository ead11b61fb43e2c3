"""numba's decorators for an installation without compiled kernels, and the cache of its kernels.

The decorators keep the decorated function's signature for mypy. Kernels are cached next to their
source, so a machine compiles them once.
"""

import contextlib
import functools
import hashlib
import logging
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import llvmlite.binding

from coop_plan.planner.cache_files import (
    UntrustedFileError,
    cache_dir,
    check_trusted,
    continue_without,
    private_folder,
    replacing,
    shared_dir,
)
from coop_plan.planner.core.jit import P, R


@contextlib.contextmanager
def _without(*names: str) -> Iterator[None]:
    """Make imports of these modules fail within the block, unless other threads are running."""
    names = tuple(name for name in names if name not in sys.modules)
    if threading.active_count() > 1:
        names = ()
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: import fails
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


# numba imports coverage.py and yaml in case they are needed, which costs 0.1 s.
with _without("coverage", *(() if Path(".numba_config.yaml").exists() else ("yaml",))):
    import numba
    from numba.core.caching import (
        CompileResultCacheImpl,
        FunctionCache,
        IndexDataCacheFile,
        InTreeCacheLocator,
        NullCache,
        UserProvidedCacheLocator,
        UserWideCacheLocator,
    )
    from numba.core.runtime import nrt

log = logging.getLogger("coop-plan")

SHARED = (
    "arrays.py",
    "numba_jit.py",
    "inplace.py",
    "lifetimes.py",
    "records.py",
    "../search/compute/*.py",
)
"""Modules, relative to this folder, whose functions kernels of other folders compile in."""


class _Folder:
    """Cache folder of a kernel that no other user can write; numba asks each class in turn.

    A folder that this process cannot write either, as of an image, has a kernel of these sources.
    """

    _mode = 0o755

    def ensure_cache_path(self) -> None:
        given: Any = self
        folder, source = Path(given.get_cache_path()), Path(given._py_file)
        if folder.is_dir():
            check_trusted(folder)
        else:
            private_folder(folder, self._mode)
        if not os.access(folder, os.W_OK):
            digest = _sources(source.parent).encode()
            indexes = folder.glob(f"{source.stem}.*-{given._lineno}.py*.nbi")
            if not any(digest in index.read_bytes() for index in indexes):
                raise PermissionError(f"{folder} cannot be written")


class _NamedFolder(_Folder, UserProvidedCacheLocator):
    """A folder in `NUMBA_CACHE_DIR`."""

    def ensure_cache_path(self) -> None:
        try:
            super().ensure_cache_path()
        except OSError as error:
            continue_without(Path(self._cache_path), error)
            raise


class _SharedFolder(_Folder, UserWideCacheLocator):
    """A folder in `COOP_SHARED_CACHE`."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self._py_file, self._lineno = source, function.__code__.co_firstlineno
        folder = self.get_suitable_cache_subpath(source)  # type: ignore[no-untyped-call]
        self._cache_path = str(self._base() / "kernels" / folder)

    def _base(self) -> Path:
        return shared_dir() or Path(os.devnull)

    def ensure_cache_path(self) -> None:
        try:
            check_trusted(Path(self._cache_path), root_only=True)
        except UntrustedFileError as error:
            continue_without(self._base(), error)
            raise
        super().ensure_cache_path()


class _SourceFolder(_Folder, InTreeCacheLocator):
    """`__pycache__` beside the source."""


class _OwnFolder(_SharedFolder):
    """A folder in the user's cache."""

    _mode = 0o700

    def _base(self) -> Path:
        return cache_dir()

    def ensure_cache_path(self) -> None:
        try:
            private_folder(self._base())
            _Folder.ensure_cache_path(self)
        except OSError as error:
            continue_without(self._base(), error)
            raise


class _Files(IndexDataCacheFile):
    """Files of a kernel's cache: read if no other user could have written them."""

    def _load_index(self) -> Any:
        if not _trusted(self._index_path):
            return {}
        return super()._load_index()  # type: ignore[no-untyped-call]

    def _load_data(self, name: str) -> Any:
        path = str(Path(self._cache_path, name))
        return super()._load_data(name) if _trusted(path) else None  # type: ignore[no-untyped-call]

    def _open_for_write(self, path: str) -> Any:
        return replacing(Path(path), 0o644)


def _trusted(path: str) -> bool:
    """True if a file can be loaded; logs why another user's cannot."""
    try:
        check_trusted(Path(path))
    except FileNotFoundError:
        return False
    except OSError as error:
        continue_without(Path(path), error)
        return False
    return True


class _Serializer(CompileResultCacheImpl):
    """numba's cache entry of a kernel, without empty environments.

    numba stores an environment for each function that was compiled in, and to load it imports that
    function's module. Compiled code uses only the constants of an environment.
    """

    _locator_classes: list[type[object]] = [
        _NamedFolder,
        _SharedFolder,
        _SourceFolder,
        _OwnFolder,
    ]

    def reduce(self, cres: Any) -> Any:
        *rest, environments = super().reduce(cres)  # type: ignore[no-untyped-call]
        return (*rest, tuple(each for each in environments if each.consts))


class _Cache(FunctionCache):
    """
    numba's cache, keyed by all sources of a kernel; an index that cannot be read counts as empty.

    numba's key has a function's own file only. Constants and functions of other modules are
    compiled in as well, and an old copy of them would write out of bounds. The index names the
    classes of the arguments: without the second rule one that has moved raises an import error at
    every call.
    """

    _impl_class = _Serializer

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        impl: Any = self._impl
        stamp = impl.locator.get_source_stamp()
        self._cache_file = _Files(self._cache_path, impl.filename_base, stamp)  # type: ignore[no-untyped-call]

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        key = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return (*key, _sources(Path(self._py_func.__code__.co_filename).parent))

    def has(self, sig: Any, target_context: Any) -> bool:
        """True if the kernel is in the cache for arguments of these types; it is not loaded."""
        file: Any = self._cache_file
        try:
            name = file._load_index().get(self._index_key(sig, target_context.codegen()))
            return name is not None and _trusted(file._data_path(name))
        except Exception:  # an index that cannot be read counts as empty
            return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """As numba's, without `target_context.refresh()`, which only compilation needs."""
        try:
            _link_runtime()
            with self._guard_against_spurious_io_errors():
                found = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            found = None
        if found is None:
            log_compilation()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """As numba's; a kernel that cannot be kept, or of sources that have changed, is used."""
        folder = Path(self._py_func.__code__.co_filename).parent
        if _sources.__wrapped__(folder) != _sources(folder):
            return
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            continue_without(Path(self._cache_path), error)


class _MachineCodeSerializer(_Serializer):
    """
    Cache entry of a kernel that only Python calls: machine code, and bitcode with its name alone.

    numba stores the full bitcode for kernels that call this one, and parses it at every load, which
    takes half of the time of a load. It looks up only the name of the entry point there.
    """

    def reduce(self, cres: Any) -> Any:
        (name, kind, (code, _)), *rest = super().reduce(cres)
        defined = f'define void @"{cres.fndesc.llvm_cpython_wrapper_name}"() {{ ret void }}'
        bitcode = llvmlite.binding.parse_assembly(defined).as_bitcode()
        return ((name, kind, (code, bitcode)), *rest)


class _EntryCache(_Cache):
    _impl_class = _MachineCodeSerializer


class _LateCache:
    """Opens the cache at its first use; most kernels are only called by others and need none."""

    def __init__(self, function: Callable[..., Any], kind: type[_Cache]) -> None:
        self._function, self._kind = function, kind

    @functools.cached_property
    def _cache(self) -> Any:
        try:
            return self._kind(self._function)
        except RuntimeError:
            # Neither the source's folder nor the user's cache is writable: kernels are compiled
            # once per process.
            return NullCache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@functools.cache
def _link_runtime() -> None:
    """Register the addresses of numba's runtime for compiled code.

    The first half of `rtsys.initialize`; the second compiles functions that cached code contains.
    """
    runtime: Any = nrt
    if not runtime.rtsys._init:
        for name, address in runtime._nrt.c_helpers.items():
            full = name if name.startswith("_") else f"NRT_{name}"
            llvmlite.binding.add_symbol(full, address)


@functools.cache
def _sources(folder: Path) -> str:
    """Digest of the sources of kernels in `folder`: the folder's modules and `SHARED`.

    It is taken when the first of them is imported.
    """
    core = Path(__file__).resolve().parent
    shared = (path.resolve() for name in SHARED for path in core.glob(name))
    digest = hashlib.sha256()
    for path in sorted({*folder.resolve().glob("*.py"), *shared}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def log_compilation() -> None:
    """Say once that kernels are compiled."""
    log.warning(
        "compiling the planner's kernels, once on this machine: up to a minute"
        " (`coop-plan warm` compiles all)"
    )


def _compile(
    function: Callable[P, R], cache: type[_Cache] = _Cache, **options: bool
) -> Callable[P, R]:
    _sources(Path(function.__code__.co_filename).parent)
    library: Any = numba
    dispatcher = library.njit(nogil=True, **options)(function)
    if not library.config.DISABLE_JIT:
        dispatcher._cache = _LateCache(function, cache)
    return cast("Callable[P, R]", dispatcher)


ENTRIES: dict[str, list[Any]] = defaultdict(list)
"""Kernels that Python calls, by module."""


def _entry(kernel: Callable[P, R]) -> Callable[P, R]:
    if isinstance(kernel, numba.core.dispatcher.Dispatcher):
        ENTRIES[kernel.__module__].append(kernel)
    return kernel


def njit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function`, which no kernel calls, at its first call; cache the result on disk."""
    return _entry(_compile(function, _EntryCache))


def linked(function: Callable[P, R]) -> Callable[P, R]:
    """As `njit`, for functions that other kernels call, too."""
    return _entry(_compile(function))


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """As `linked`, for functions that only compiled code calls and that allocate no array.

    Arrays of a state are not reference-counted, which costs short functions more than their work.
    """
    return _compile(function, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """As `inner`, and inlined: a call would pass every array of a state as an argument."""
    return _compile(
        function, _nrt=False, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
    )
