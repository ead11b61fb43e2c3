"""Compiled kernels are kept, but never older than what they are made of."""

import ast
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numba

import coop_plan.planner
import coop_plan.planner.core.jit as kernels


def test_the_key_changes_with_any_file_beside_the_kernel(tmp_path):
    (tmp_path / "state.py").write_text("ROW = 1\n")
    (tmp_path / "kernel.py").write_text("from state import ROW\n")
    before = kernels._sources.__wrapped__(tmp_path)
    assert kernels._sources.__wrapped__(tmp_path) == before
    (tmp_path / "state.py").write_text("ROW = 2\n")
    assert kernels._sources.__wrapped__(tmp_path) != before


def test_the_key_knows_kernels_that_other_folders_take():
    """They are compiled into the caller's: an old copy would write where lists lay before."""
    root = Path(coop_plan.planner.__file__).resolve().parent
    door = "from coop_plan.planner.core.jit import"
    texts = {path: path.read_text() for path in root.rglob("*.py")}
    have_kernels = {path for path, text in texts.items() if door in text}
    known = {path.resolve() for name in kernels.SHARED for path in (root / "core").glob(name)}
    taken = set()
    for path in have_kernels:
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coop_plan."):
                module = root.joinpath(*node.module.split(".")[2:]).with_suffix(".py")
                if module in have_kernels and module.parent != path.parent:
                    taken.add(module)
    assert taken
    for_python = {p for p, text in texts.items() if "@inner" not in text and "@linked" not in text}
    assert taken - for_python <= known


def test_an_index_that_names_a_class_that_moved_is_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    @kernels.njit
    def double(x):
        return 2 * x

    assert double(2) == 4
    (index,) = tmp_path.rglob("*.nbi")
    with index.open("rb") as file:
        pickle.load(file)  # numba's version, which stays
        head = index.read_bytes()[: file.tell()]
    index.write_bytes(head + b"cplanner.no_such_module\nGone\n.")

    @kernels.njit
    def double(x):
        return 2 * x

    assert double(2) == 4


def test_without_a_folder_to_write_kernels_still_compile(monkeypatch):
    def refuse(_):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(kernels, "_EntryCache", refuse)

    @kernels.njit
    def triple(x):
        return 3 * x

    assert triple(2) == 6


def test_a_kept_kernel_is_loaded_and_gives_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for hits in (0, 1):

        @kernels.njit
        def fourfold(x):
            return 4 * x

        assert fourfold(2) == 8
        assert sum(fourfold.stats.cache_hits.values()) == hits


KERNEL = """
import sys
import numpy as np
from coop_plan.planner.core.jit import njit

@njit
def between(low, high):
    if low > high:
        raise ValueError("low is above high")
    return np.arange(low, high)

print(*between(3, 6), sum(between.stats.cache_hits.values()), "numba.np.arrayobj" in sys.modules)
try:
    between(1, 0)
except ValueError as error:
    print(error)
try:
    between(0, 1 << 56)
except MemoryError:
    print("refused")
"""


def test_a_kept_kernel_is_loaded_without_the_compilers_modules_and_raises_as_before(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, then = (
        subprocess.run(
            [sys.executable, "kernel.py"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
        ).stdout.splitlines()
        for _ in range(2)
    )  # fmt: skip
    raised = ["low is above high", "refused"]
    assert first == ["3 4 5 0 True", *raised]
    assert then == ["3 4 5 1 False", *raised]


def test_no_kernel_calls_one_that_is_kept_for_python_alone():
    """Its bitcode is not kept, so what calls it could not be compiled with it."""
    calls, entries = defaultdict(set), set()
    for path in Path(coop_plan.planner.__file__).parent.rglob("*.py"):
        module = ast.parse(path.read_text())
        home = {
            alias.asname or alias.name: node.module
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        here = "coop_plan.planner." + ".".join(
            path.relative_to(Path(coop_plan.planner.__file__).parent).with_suffix("").parts
        )
        for function in ast.walk(module):
            if not isinstance(function, ast.FunctionDef):
                continue
            kinds = {d.id for d in function.decorator_list if isinstance(d, ast.Name)}
            if "njit" in kinds:
                entries.add((here, function.name))
            if kinds & {"njit", "linked", "inner", "inlined"}:
                for node in ast.walk(function):
                    if isinstance(node, ast.Name) and node.id != function.name:
                        calls[here, function.name].add((home.get(node.id, here), node.id))
    assert len(entries) > 10
    assert {caller: found & entries for caller, found in calls.items() if found & entries} == {}
