"""Inductor's C++ kernels of several graphs, compiled as one file.

Half of the time of a call of the compiler is that of PyTorch's header, and of the linker. Kernels
are found on disk by their source and the compiler's command, whatever file they were compiled in.
"""

import hashlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coop_plan.planner.cache_files import file_lock

COMPILE_SECONDS = 600
"""Longest wait for another process that compiles kernels."""

_HEADERS = """#include <torch/csrc/inductor/cpp_prefix.h>
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sstream>
#include <cstdlib>
#include <cerrno>
"""


@dataclass(frozen=True)
class _Source:
    """Source of a kernel in C++, the function `kernel` of these types of arguments."""

    types: tuple[str, ...]
    text: str

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError("a kernel of Inductor runs before it is compiled")

    def name(self, command: str) -> str:
        """Name of the function that a compiler's command makes of it."""
        digest = hashlib.sha256("\n".join((command, *self.types, self.text)).encode())
        return f"kernel_{digest.hexdigest()[:32]}"


@contextmanager
def sources_kept() -> Iterator[None]:
    """Wrappers that Inductor makes or loads on this thread have sources for their C++ kernels.

    Assumed: the module of a wrapper calls `AsyncCompile.cpp_pybinding` for each kernel, and its
    functions find the result in their globals.
    """
    from torch._inductor.async_compile import AsyncCompile

    compiler: Any = AsyncCompile
    thread, compile_now = threading.get_ident(), compiler.cpp_pybinding

    def keep(self: Any, types: Sequence[str], text: str) -> Any:
        if threading.get_ident() != thread:
            return compile_now(self, types, text)
        return _Source(tuple(types), text)

    compiler.cpp_pybinding = keep
    try:
        yield
    finally:
        compiler.cpp_pybinding = compile_now


def compile_sources(wrappers: Sequence[Callable[..., Any]]) -> None:
    """Compile the C++ kernels of some wrappers, all that are not on disk by one call.

    Assumed: includes of a kernel have guards, and its module's name ends with its function's.

    Raises:
        Exception: of any type, if the compiler fails.
    """
    places = [
        (scope, name, value)
        for scope in (wrapper.__globals__ for wrapper in wrappers)
        for name, value in scope.items()
        if isinstance(value, _Source)
    ]
    if not places:
        return
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder, command = Path(cache_dir(), "coop_plan"), _command()
    names = {source: source.name(command) for _, _, source in places}

    def missing() -> dict[_Source, str]:
        return {s: name for s, name in names.items() if not _library(folder, name).exists()}

    if missing():
        folder.mkdir(parents=True, exist_ok=True)
        waiting = "waiting for another process that compiles fused kernels"
        with file_lock(folder / "lock", COMPILE_SECONDS, waiting):
            if new := missing():  # otherwise another process has compiled them
                built = _build(new)
                for name in new.values():
                    link = folder / str(uuid.uuid4())
                    link.symlink_to(built)
                    link.replace(_library(folder, name))
    for scope, name, source in places:
        scope[name] = _loaded(names[source], _library(folder, names[source]))


def _library(folder: Path, name: str) -> Path:
    return folder / f"{name}.so"


def _command() -> str:
    """The compiler's command for kernels, without the names of files."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(), device_type="cpu", include_pytorch=False, shared=True
    )
    return CppBuilder("o", "i", options).get_command_line()


def _build(names: dict[_Source, str]) -> Path:
    """Compile some kernels into one library; each is a Python module in it.

    The file has a name of its own: a compiler that is killed leaves half a file, which may end the
    process that loads it.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Binding

    text, first = _HEADERS, next(iter(names.values()))
    for source, name in names.items():
        arguments = ", ".join(
            f"parse_arg<{kind.replace('const ', '')}>(args, {i})"
            for i, kind in enumerate(source.types)
        )
        suffix = Binding.suffix_template.format(
            arg_len=len(source.types),
            call_entry_func=Binding.call_entry_function.format(arguments),
            entry_func=name,
            extra_parse_arg="",
        )
        text += (
            f"#define kernel {name}\nnamespace of_{name} {{{source.text}{suffix}}}\n#undef kernel\n"
        )
    module = _binding(first).load(f"{text}// {uuid.uuid4()}\n", "cpu")
    return Path(module.__file__)


def _binding(name: str) -> Any:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return type(name, (CppPythonBindingsCodeCache,), {"entry_function": name, "cache": {}})


def _loaded(name: str, path: Path) -> Callable[..., Any]:
    """The function of a kernel in a library.

    Assumed: `_load_library_inner` loads the module of a key once in a process.
    """
    kernel: Callable[..., Any] = getattr(_binding(name)._load_library_inner(str(path), name), name)
    return kernel
