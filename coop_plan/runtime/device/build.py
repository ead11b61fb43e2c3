"""Compiles the arena extension at first use and caches it for this torch, Python and source."""

import atexit
import functools
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from coop_plan.planner.plan_cache.store import cache_dir
from coop_plan.runtime.errors import BuildError

SOURCE = Path(__file__).with_name("arena.cpp")
HEADERS = tuple(
    Path(__file__).with_name(name) for name in ("arena.h", "accounting.h", "allocator_hook.h")
)
NAME = "coop_plan_arena"
_LIBRARY_PATHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

log = logging.getLogger("coop-plan")


@functools.cache
def arena() -> ModuleType:
    """The extension module, compiled if it is not in the cache, installed as CPU allocator.

    Raises:
        BuildError: no compiler, no Python headers, or a failed compilation.
    """
    module = _load(SOURCE, NAME, HEADERS)
    module.install(_LIBRARY_PATHS)
    return module


@functools.cache
def copy_engines() -> ModuleType:
    """The extension module of the copy engines, compiled if it is not in the cache.

    Raises:
        BuildError: as `arena` does.
    """
    return _load(SOURCE.with_name("copy_engines.cpp"), "coop_plan_copy_engines", link=())


def _load(
    source: Path, name: str, headers: Sequence[Path] = (), link: Sequence[str] = ("c10",)
) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, compiled(source, name, headers, link))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(
    source: Path, name: str, headers: Sequence[Path] = (), link: Sequence[str] = ("c10",)
) -> Path:
    """The library `name` of `source`, from the cache or compiled into it.

    Raises:
        BuildError: as `arena` does.
    """
    include = sysconfig.get_paths()["include"]
    torch_dir = Path(torch.__file__).parent
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", "-Wno-attributes"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += _node_pointer(torch_dir / "include")
    texts = [path.read_bytes() for path in (source, *headers)]
    key = hashlib.sha256(
        b"\0".join([*texts, repr((torch.__version__, sys.version, flags, link)).encode()])
    ).hexdigest()[:24]
    include_dirs = [include, torch_dir / "include", *{path.parent for path in headers}]
    flags += [f"-I{folder}" for folder in include_dirs]
    link_flags = [f"-L{torch_dir / 'lib'}", *(f"-l{lib}" for lib in link)]
    library = cache_dir() / key / f"{name}.so"
    try:
        if not _is_intact(library):
            library.parent.mkdir(parents=True, exist_ok=True)
            _compile(source, library, flags, link_flags)
    except OSError as error:
        log.warning("continuing without the cache %s: %s", library.parent, error)
        library = Path(_process_folder(), f"{name}.so")
        _compile(source, library, flags, link_flags)
    return library


def _node_pointer(include: Path) -> list[str]:
    """Compiler flag for this PyTorch's type of pointers to autograd nodes; none if unknown."""
    header = include / "torch/csrc/autograd/python_cpp_function.h"
    text = header.read_text() if header.exists() else ""
    if "std::shared_ptr<Node> cdata;" in text:
        return ["-DCOOP_NODE_SHARED"]
    return ["-DCOOP_NODE_INTRUSIVE"] if "c10::intrusive_ptr<Node> cdata;" in text else []


def _is_intact(library: Path) -> bool:
    """True if a library matches its digest; loading a truncated one would kill the process."""
    try:
        return _digest_file(library).read_bytes() == _digest_of(library.read_bytes()).encode()
    except FileNotFoundError:
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def _process_folder() -> str:
    """A temporary folder, removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="coop-plan-")
    atexit.register(folder.cleanup)
    return folder.name


def _compile(source: Path, library: Path, flags: list[str], link: list[str]) -> None:
    setting = os.environ.get("CXX", "")
    try:
        compiler = shlex.split(setting)  # "ccache g++" is usual
    except ValueError as error:
        raise BuildError(f"CXX={setting} is not a command: {error}") from None
    compiler = compiler or [found for name in ("g++", "c++") if (found := shutil.which(name))][:1]
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
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if result.returncode != 0:
            first = next(
                (line for line in result.stderr.splitlines() if "error" in line), result.stderr
            )
            raise BuildError(
                f"{source.name} did not compile with {shlex.join(compiler)}: {first.strip()}"
            )
        digest = _digest_file(compiled_file)
        digest.write_text(_digest_of(compiled_file.read_bytes()))
        compiled_file.replace(library)
        digest.replace(_digest_file(library))
