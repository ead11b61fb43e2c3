"""Adds the planner's compiled kernels to a wheel. All else is in pyproject.toml.

Without a C compiler, with COOP_PLAN_KERNELS=0, and in an editable installation, the kernels are
compiled at their first use.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PLANNER = "coop_plan/planner"


class BuildKernels(build_ext):
    """Compiles the kernels by `coop_plan.planner.build_kernels`."""

    def run(self) -> None:
        if not self.editable_mode:
            super().run()

    def build_extension(self, ext: Extension) -> None:
        folder = Path(self.build_lib, PLANNER).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        command = (sys.executable, "-m", "coop_plan.planner.build_kernels", str(folder))
        cache = {"NUMBA_CACHE_DIR": str(Path(self.build_temp).resolve()), "NUMBA_DISABLE_JIT": "0"}
        try:
            subprocess.run(command, env=os.environ | cache, check=True)  # noqa: S603
        except subprocess.CalledProcessError as error:
            raise CompileError("the planner's kernels are not compiled (see above)") from error

    def get_outputs(self) -> list[str]:
        return [str(path) for path in Path(self.build_lib, PLANNER).glob("_kernels_*")]


extensions = [Extension(f"{PLANNER}/_kernels".replace("/", "."), sources=[], optional=True)]
setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=extensions if os.environ.get("COOP_PLAN_KERNELS") != "0" else [],
)
