"""The layer rule: who may import whom, and what must not be installed to import what."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("schemas", "planner", "runtime", "api")
MAY_IMPORT = {
    "schemas": {"schemas"},
    "planner": {"planner", "schemas"},
    "runtime": {"runtime", "planner", "schemas"},
    "api": {"api", "planner", "schemas"},
}
DOORS = {
    ("api/cli/capture.py", "calibrate", "runtime"),
    ("api/cli/capture.py", "capture", "runtime"),
    ("api/cli/capture.py", "captured", "runtime"),
    ("api/cli/fit.py", "_row", "runtime"),
    ("runtime/execute/find_plan.py", "_from_server", "api"),
}
"""(file, function, package): imports across the rule, made only when the function is called."""


def imports(path):
    """(enclosing function or None, one of our packages or a top-level one) of each import."""

    def top(name):
        parts = name.split(".")
        return parts[1] if parts[0] == "coop_plan" else parts[0]

    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Import):
                yield from ((inside, top(alias.name)) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                names = (f"{child.module}.{alias.name}" for alias in child.names)
                yield from ((inside, top(name)) for name in names)
            yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text()), None)


@pytest.mark.parametrize("package", OURS)
def test_a_package_imports_only_what_lies_below_it(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        place = path.relative_to(ROOT).as_posix()
        for function, imported in imports(path):
            if imported in OURS and (place, function, imported) not in DOORS:
                assert imported in MAY_IMPORT[package], f"{place} imports {imported}"


def modules():
    """Every module of ours by its name, and the modules of ours that its file names."""
    names = {}
    for package in OURS:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names[".".join(("coop_plan", *parts)).removesuffix(".__init__")] = path
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
    for path in (ROOT / "planner").rglob("*.py"):
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
        (["api"], ["torch", "runtime"]),
    ],
)
def test_every_module_imports_without_what_it_must_not_need(packages, blocked):
    script = BLOCK.format(packages=packages, blocked=blocked)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def test_the_command_starts_without_loading_what_it_does_not_use():
    heavy = ("torch", "numba", "numpy", "fastapi", "rich")
    script = f"import sys, coop_plan.api.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
