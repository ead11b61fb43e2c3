"""Compiles the arena extension at first use and caches it for this torch, Python and source."""

import atexit
import functools
import hashlib
import importlib.util
import logging
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from coop_plan.planner.cache_files import (
    cache_dir,
    check_trusted,
    continue_without,
    file_lock,
    private_folder,
    reason_of,
    shared_dir,
)
from coop_plan.runtime.errors import BuildError

SOURCE = Path(__file__).with_name("arena.cpp")
HEADERS = tuple(
    Path(__file__).with_name(name) for name in ("arena.h", "accounting.h", "allocator_hook.h")
)
NAME = "coop_plan_arena"
COMPILE_SECONDS = 300.0
"""Time that a process waits for another one's compilation."""

COMPILE_BYTES = 16 << 20
"""Bytes that a compilation may write."""

log = logging.getLogger("coop-plan")


@functools.cache
def torch_folder() -> Path:
    """The folder of PyTorch, which need not be imported: that takes a second."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@functools.cache
def arena() -> ModuleType:
    """The extension module, compiled if it is not in the cache, installed as CPU allocator.

    Raises:
        BuildError: no compiler, no Python headers, or a failed compilation.
    """
    module = _load(SOURCE, NAME, HEADERS)
    module.install((str(torch_folder()), str(Path(__file__).parents[1])))
    return module


@functools.cache
def copy_engines() -> ModuleType:
    """The extension module of the copy engines, compiled if it is not in the cache.

    Raises:
        BuildError: as `arena` does.
    """
    return _load(SOURCE.with_name("copy_engines.cpp"), "coop_plan_copy_engines", link=())


def _load(
    source: Path,
    name: str,
    headers: Sequence[Path] = (),
    link: Sequence[str] = ("c10", "torch_cpu"),
) -> ModuleType:
    import torch  # noqa: F401  # which loads the libraries that the module links

    spec = importlib.util.spec_from_file_location(name, compiled(source, name, headers, link))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(
    source: Path,
    name: str,
    headers: Sequence[Path] = (),
    link: Sequence[str] = ("c10", "torch_cpu"),
) -> Path:
    """The library `name` of `source`, from the cache or compiled into it.

    Raises:
        BuildError: as `arena` does.
    """
    include = sysconfig.get_paths()["include"]
    torch_dir = torch_folder()
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", "-Wno-attributes"]
    flags += ["-D_GLIBCXX_USE_CXX11_ABI=1"]  # as all builds of the supported versions
    flags += _node_pointer(torch_dir / "include")
    version = runpy.run_path(str(torch_dir / "version.py"))["__version__"]
    system = (version, sys.version, sysconfig.get_platform(), flags, link)
    texts = [path.read_bytes() for path in (source, *headers)]
    key = hashlib.sha256(b"\0".join([*texts, repr(system).encode()])).hexdigest()[:24]
    include_dirs = [include, torch_dir / "include", *{path.parent for path in headers}]
    flags += [f"-I{folder}" for folder in include_dirs]
    link_flags = [f"-L{torch_dir / 'lib'}", *(f"-l{lib}" for lib in link)]
    shared = shared_dir()
    for library in sorted(shared.glob(f"{key}-*/{name}.so")) if shared else ():
        if _is_usable(library, root_only=True):
            return library
    folder = cache_dir() / f"{key}-{_compiler_version()}"
    try:
        private_folder(cache_dir())
        if not _compiler_version():  # as in an image: a library of any compiler
            folder = next(
                (found.parent for found in cache_dir().glob(f"{key}-*/{name}.so")), folder
            )
        library = private_folder(folder) / f"{name}.so"
        waiting = f"waiting for another process that compiles {name}"
        with file_lock(library.with_suffix(".lock"), COMPILE_SECONDS, waiting):
            if not _is_usable(library):
                _compile(source, library, flags, link_flags)
    except OSError as error:
        continue_without(folder, error)
        return _compiled_for_process(source, name, flags, link_flags, error)
    return library


def _node_pointer(include: Path) -> list[str]:
    """Compiler flag for this PyTorch's type of pointers to autograd nodes; none if unknown."""
    header = include / "torch/csrc/autograd/python_cpp_function.h"
    text = header.read_text() if header.exists() else ""
    if "std::shared_ptr<Node> cdata;" in text:
        return ["-DCOOP_NODE_SHARED"]
    return ["-DCOOP_NODE_INTRUSIVE"] if "c10::intrusive_ptr<Node> cdata;" in text else []


def _is_usable(library: Path, *, root_only: bool = False) -> bool:
    """True if no other user could have written a library, and it matches its digest.

    The digest shows damage: loading a truncated library would kill the process.
    """
    try:
        check_trusted(library, root_only=root_only)
        return _digest_file(library).read_bytes() == _digest_of(library.read_bytes()).encode()
    except FileNotFoundError:
        return False
    except OSError as error:
        continue_without(library, error)
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _compiled_for_process(
    source: Path, name: str, flags: list[str], link: list[str], failure: OSError
) -> Path:
    """A library of this process alone, where the cache failed."""
    failures = [failure]
    for base in _temporary_folders():
        try:
            library = Path(_process_folder(base), f"{name}.so")
            _compile(source, library, flags, link)
        except OSError as error:
            failures.append(error)
        else:
            return library
    reasons = [f"{each.filename or ''} {reason_of(each)}".strip() for each in failures]
    raise BuildError(
        f"{source.name} cannot be compiled, as no folder can be written: {'; '.join(reasons)}"
    )


def _temporary_folders() -> list[str]:
    return [*dict.fromkeys([tempfile.gettempdir(), "/dev/shm"])]  # noqa: S108


@functools.cache
def _process_folder(base: str) -> str:
    """A temporary folder, removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="coop-plan-", dir=base)
    atexit.register(folder.cleanup)
    return folder.name


def _compiler() -> list[str]:
    """Command of the C++ compiler; empty if there is none.

    Raises:
        BuildError: `CXX` is not a command.
    """
    setting = os.environ.get("CXX", "")
    try:
        command = shlex.split(setting)  # "ccache g++" is usual
    except ValueError as error:
        raise BuildError(f"CXX={setting} is not a command: {error}") from None
    return command or [found for name in ("g++", "c++") if (found := shutil.which(name))][:1]


def _compiler_version() -> str:
    """Digest of the compiler's version and platform; empty if there is no compiler."""
    command = _compiler()
    if not command or shutil.which(command[0]) is None:
        return ""
    return _version_of(tuple(command))


@functools.cache
def _version_of(command: tuple[str, ...]) -> str:
    asked = subprocess.run([*command, "--version"], capture_output=True, check=False)  # noqa: S603
    return _digest_of(b"\0".join([repr(command).encode(), asked.stdout]))[:8]


def _compile(source: Path, library: Path, flags: list[str], link: list[str]) -> None:
    """Compile a library in a temporary folder beside it, and rename it.

    Raises:
        BuildError: as `arena` does.
        OSError: the folder cannot be written.
    """
    compiler = _compiler()
    if not compiler or shutil.which(compiler[0]) is None:
        raise BuildError(
            f"no C++ compiler found{f': CXX is {shlex.join(compiler)}' if compiler else ''}: the"
            " runtime compiles its allocator at first use; install g++ (Debian: apt-get install"
            " g++) or set CXX"
        )
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise BuildError(
            "Python.h not found: the runtime compiles its allocator at first use; install the"
            " Python headers (Debian: apt-get install python3-dev)"
        )
    # Written aside and renamed: a kill leaves no partial file, and processes do not collide.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled_file = Path(folder) / library.name
        command = [*compiler, *flags, str(source), "-o", str(compiled_file), *link]
        environment = os.environ | {"TMPDIR": folder}
        result = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=False, env=environment
        )
        if result.returncode != 0:
            _check_space(library.parent)
            first = next(
                (line for line in result.stderr.splitlines() if "error" in line), result.stderr
            )
            raise BuildError(
                f"{source.name} did not compile with {shlex.join(compiler)}: {first.strip()}"
            )
        compiled_file.chmod(0o600)  # the linker's mode is of the umask
        digest = _digest_file(compiled_file)
        digest.write_text(_digest_of(compiled_file.read_bytes()))
        digest.chmod(0o600)
        compiled_file.replace(library)
        digest.replace(_digest_file(library))


def _check_space(folder: Path) -> None:
    """Raise the error of a folder without the space that a compilation needs.

    The compiler's own message of a full disk depends on its version and the language.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(COMPILE_BYTES))
    except OSError as error:
        error.filename = str(folder)
        raise
