"""Compiles the planner's kernels into an extension module, when a wheel is built.

    python -m coop_plan.planner.build_kernels FOLDER

numba compiles each kernel for the types of its annotations and for any CPU of this architecture;
a C compiler links them. Where the module is installed it needs neither.
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from numba.core import config
from numba.core.compiler import Flags

from coop_plan.planner.core.jit import extension_name, kernel_name
from coop_plan.planner.core.kernel_types import entries, result_type
from coop_plan.planner.kernels import ALL


def build(folder: Path, modules: tuple[str, ...] = ALL) -> Path:
    """Compile the kernels of modules in `planner`; returns the extension module's path."""
    from numba.pycc import cc, compiler  # its import warns that numba will replace it

    settings: Any = config
    settings.CPU_NAME, settings.CPU_FEATURES = "generic", ""  # of functions that kernels call
    library: Any = cc
    target = library.CC(extension_name())
    target.output_dir = str(folder)
    for module in modules:
        for kernel, arguments in entries(module):
            declared = result_type(kernel)(*arguments)
            target.export(kernel_name(kernel.py_func), declared)(kernel.py_func)
    with mock.patch.object(compiler, "Flags", _flags):
        target.compile()
    return folder / str(target.output_file)


def _flags() -> Any:
    """Options of a kernel's compilation: it releases Python's lock. `CC` has no way to say so."""
    flags: Any = Flags()  # type: ignore[no-untyped-call]
    flags.release_gil = True
    return flags


if __name__ == "__main__":
    sys.stdout.write(f"{build(Path(sys.argv[1]))}\n")
