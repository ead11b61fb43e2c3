"""Compiles the arena extension at first use and caches it for this torch, Python and source."""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from coop_plan.runtime.cache.files import cache_dir
from coop_plan.runtime.errors import BuildError

SOURCE = Path(__file__).with_name("arena.cpp")
HEADERS = tuple(Path(__file__).with_name(name) for name in ("arena.h", "exchange.h"))
NAME = "coop_plan_arena"


@functools.cache
def arena() -> ModuleType:
    """The extension module, compiled if it is not in the cache, installed as CPU allocator.

    Raises:
        BuildError: no compiler, no Python headers, or a failed compilation.
    """
    library = compiled(SOURCE, NAME, HEADERS)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
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
    texts = [path.read_bytes() for path in (source, *headers)]
    key = hashlib.sha256(
        b"\0".join([*texts, repr((torch.__version__, sys.version, flags, link)).encode()])
    ).hexdigest()[:24]
    library = cache_dir() / key / f"{name}.so"
    if not library.exists():
        include_dirs = [include, torch_dir / "include", *{path.parent for path in headers}]
        flags += [f"-I{folder}" for folder in include_dirs]
        _compile(source, library, flags, [f"-L{torch_dir / 'lib'}", *(f"-l{lib}" for lib in link)])
    return library


def _compile(source: Path, library: Path, flags: list[str], link: list[str]) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError(
            "no C++ compiler found: the runtime compiles its allocator at first use; install g++"
            " (Debian: apt-get install g++) or set CXX"
        )
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise BuildError(
            "Python.h not found: the runtime compiles its allocator at first use; install the"
            " Python headers (Debian: apt-get install python3-dev)"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a kill leaves no half library, two processes do not collide.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *flags, str(source), "-o", str(made), *link]
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if result.returncode != 0:
            first = next(
                (line for line in result.stderr.splitlines() if "error" in line), result.stderr
            )
            raise BuildError(f"{source.name} did not compile with {compiler}: {first.strip()}")
        made.replace(library)
