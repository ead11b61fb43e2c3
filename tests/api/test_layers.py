"""The layer rule: who may import whom, and what must not be installed to import what."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import coop_plan

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "coop_plan"
MAY_IMPORT = {
    "schemas": {"schemas"},
    "planner": {"planner", "schemas"},
    "client": {"client", "planner", "schemas"},
    "runtime": {"runtime", "client", "planner", "schemas"},
    "api": {"api", "client", "planner", "schemas"},
}
"""Packages that a package may import; the public names of `coop_plan` are any user's."""


def imports(path):
    """(whether it is at the top of the file, whole dotted name) of each import."""

    def walk(node, *, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((not inside, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                yield from ((not inside, f"{child.module}.{alias.name}") for alias in child.names)
            yield from walk(child, inside=inside or isinstance(child, ast.FunctionDef))

    yield from walk(ast.parse(path.read_text()), inside=False)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package):
    files = sorted((PACKAGE / package).rglob("*.py"))
    assert files
    for path in files:
        for at_top, name in imports(path):
            first, _, rest = name.partition(".")
            assert first not in MAY_IMPORT, f"{path} imports {name} outside coop_plan"
            if first != "coop_plan":
                continue
            other = rest.partition(".")[0]
            if other in MAY_IMPORT:
                assert other in MAY_IMPORT[package], f"{path} imports {name}"
            else:
                assert other in ("environment", "web") or (
                    rest in coop_plan.__all__ and not at_top
                ), f"{path} imports {name}: a public name, when a function is called"


@pytest.mark.parametrize("package", ["api", "planner", "runtime", "schemas", "web"])
def test_a_folder_of_a_checkout_is_no_second_package(package):
    """Every file has one name: `import planner` beside the links fails and says what to import."""
    script = f"import {package}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == f"ImportError: import coop_plan.{package}, not {package}"


def modules():
    """Every module of ours by its name, and the modules of ours that its file names."""
    names = {}
    for package in MAY_IMPORT:
        for path in (PACKAGE / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names[".".join(parts).removesuffix(".__init__")] = path
    found = {}
    for name, path in names.items():
        asked = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                asked.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    asked.add(whole if whole in names else node.module)
        found[name] = asked & names.keys()
    return found


def test_no_file_imports_itself_through_others():
    """Imports within functions and for type checkers count, the lists of public names do not."""
    graph = modules()
    for lazy in ("coop_plan.planner", "coop_plan.runtime"):
        graph.pop(lazy, None)
    order = graphlib.TopologicalSorter(
        {name: asked & graph.keys() for name, asked in graph.items()}
    )
    order.prepare()  # raises with the circle


def test_no_file_of_the_planner_is_long():
    for path in (PACKAGE / "planner").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path


BLOCK = """
import importlib, pkgutil, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.removeprefix("coop_plan.").partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name + " is not installed here", name=name)
sys.meta_path.insert(0, Block())
for package in {packages!r}:
    module = importlib.import_module("coop_plan." + package)
    for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
        importlib.import_module(found.name)
ours = tuple("coop_plan." + package + "." for package in {packages!r})
print(len([name for name in sys.modules if name.startswith(ours)]))
"""


@pytest.mark.parametrize(
    ("packages", "blocked"),
    [
        (["schemas"], ["torch", "fastapi", "numba", "planner", "api", "runtime"]),
        (["planner"], ["torch", "fastapi", "uvicorn", "api", "runtime"]),
        (["client"], ["torch", "fastapi", "api", "runtime"]),
        (["api"], ["torch", "runtime"]),
    ],
)
def test_every_module_imports_without_what_it_must_not_need(packages, blocked):
    script = BLOCK.format(packages=packages, blocked=blocked)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1


def test_the_command_starts_without_loading_what_it_does_not_use():
    heavy = ("torch", "numba", "numpy", "fastapi", "rich")
    names = "coop_plan.api.cli.main, coop_plan.__main__"
    script = f"import sys, {names}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
