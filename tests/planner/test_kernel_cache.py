"""Compiled kernels are kept, but never older than what they are made of."""

import ast
import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import pytest
import typing_extensions

import coop_plan.planner
import coop_plan.planner.core.numba_jit as kernels
from coop_plan.planner import Progress, plan
from coop_plan.planner.core.kernel_types import entries, type_of
from coop_plan.planner.exact.model.separation import RelaxedSolution
from coop_plan.planner.kernels import ALL, LAYOUT, MODULES, TRANSFERS
from coop_plan.planner.placement import place
from tests.support import make_graph, run_together

ROOT = Path(__file__).parents[2]


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


def chain_of_layers():
    """Eight layers, whose backward reads each activation again."""
    tensors = {0: ("input", 8), 17: ("output", 8)} | dict.fromkeys(range(1, 17), ("activation", 99))
    ops = [{"inputs": [t - 1], "outputs": [t]} for t in range(1, 9)]
    ops += [{"inputs": [t - 1, 17 - t], "outputs": [t]} for t in range(9, 18)]
    return make_graph(tensors, ops)


@pytest.fixture
def chain():
    return chain_of_layers()


def compiled_for_other_types():
    """Kernels that the planner's calls compiled for other types than those of their annotations."""
    graph = chain_of_layers()
    for method in ("keep-all", "coop", "dtr", "delta", "coop-offline"):
        plan(graph, "min", method=method, link="1GB/s")
    plan(graph, "60%", method="coop-offline", link="1GB/s", time_limit=1)
    place([0, 1, 2], [2, 3, 4], [5, 6, 7], time_limit=1, fixed=[0, -1, -1])
    found = [entry for name in ALL for entry in entries(name) if entry[0].overloads]
    assert len(found) > 10
    return [k.__name__ for k, of in found if k.__name__ != "_root" and set(k.overloads) != {of}]


def test_a_kernel_is_compiled_for_the_types_of_its_annotations():
    """Compiled for other types before its call, it would be compiled again inside the clock.

    In a process of its own: other tests call kernels with other types.
    """
    code = f"from {__name__} import compiled_for_other_types as found; print(found())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stderr
    model = RelaxedSolution(
        *(np.zeros(1, np.int64), *(np.zeros((1, 1)) for _ in range(5))),
        np.zeros((1, 1), np.bool_),
        *(np.zeros(1, np.int64) for _ in range(3)),
    )
    assert numba.typeof(model) == type_of(RelaxedSolution)


def test_numpys_array_type_may_be_an_alias():
    """From Python 3.12 on `NDArray` is made by a `type` statement."""
    kind = TypeVar("kind", bound=np.generic)
    value = np.ndarray[tuple[Any, ...], np.dtype[kind]]
    alias = typing_extensions.TypeAliasType("NDArray", value, type_params=(kind,))
    assert type_of(alias[np.int64]) == type_of(npt.NDArray[np.int64])
    assert type_of(Annotated[alias[np.float64], 2]) == numba.float64[:, ::1]


PLANNED = """
import sys
from coop_plan.planner import plan
from coop_plan.planner.core.numba_jit import ENTRIES
from coop_plan.schemas import load_graph

plan(load_graph(sys.argv[1]), "60%", method=sys.argv[2], time_limit=3, link=sys.argv[3] or None)
print(*(name for name, found in ENTRIES.items() if any(k.overloads for k in found)))
"""


@pytest.mark.parametrize(
    ("method", "link"),
    [("keep-all", ""), ("coop", ""), ("coop-offline", ""), ("coop-offline", "1GB/s"), ("auto", "")],
)
def test_a_method_calls_no_kernels_but_those_that_are_compiled_for_it(
    method, link, chain, tmp_path
):
    (tmp_path / "graph.json").write_text(chain.to_json())
    done = subprocess.run(
        [sys.executable, "-c", PLANNED, tmp_path / "graph.json", method, link],
        capture_output=True, text=True, check=method != "keep-all",
    )  # fmt: skip
    called = {name.removeprefix("coop_plan.planner.") for name in done.stdout.split()}
    assert called <= {*MODULES.get(method, LAYOUT), *([TRANSFERS] if link else [])}


def test_compilation_is_outside_of_the_clock_and_of_the_time_limit(chain, monkeypatch):
    late = 0.0
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + late)
    seen = []

    def compile_slowly(method, *, linked, progress):
        nonlocal late
        progress(Progress("compiling kernel 1 of 1", 0.0))
        late += 1e6

    monkeypatch.setattr("coop_plan.planner.planning.compile_method", compile_slowly)
    made = plan(chain, "60%", time_limit=2, progress=lambda p: seen.append(p.message))
    assert made.solve_seconds < 1e6
    assert seen[0] == "compiling kernel 1 of 1"
    assert made.overhead < 1


def test_warm_compiles_every_kernel_that_python_calls():
    for module in pkgutil.walk_packages(coop_plan.planner.__path__, "coop_plan.planner."):
        import_module(module.name)
    ours = {name for name in kernels.ENTRIES if name.startswith("coop_plan.")}  # not those of tests
    assert {name.removeprefix("coop_plan.planner.") for name in ours} == set(ALL)


@pytest.mark.slow
def test_after_warm_no_command_compiles(chain, tmp_path):
    """No kernel is written to a cache after `coop-plan warm`, which compiles those that it lacks.

    The cache has this checkout's kernels but for one file, as all take two minutes.
    """
    (tmp_path / "graph.json").write_text(chain.to_json())
    (tmp_path / "buffers.csv").write_text("id,lower,upper,size\na,0,2,5\nb,1,3,7\nc,2,4,5\n")
    gaps = "id,lower,upper,size,alignment,gaps\na,0,9,8,4,2-5\nb,1,4,8,1,\nc,5,9,8,1,\n"
    (tmp_path / "gaps.csv").write_text(gaps)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for source in Path(coop_plan.planner.__file__).parent.rglob("*.nb?"):
        if not source.name.startswith("windows."):
            named = kernels._NamedFolder.get_suitable_cache_subpath(source.parents[1] / "x.py")
            (tmp_path / "cache" / named).mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tmp_path / "cache" / named)

    def run(*arguments):
        command = [sys.executable, "-m", "coop_plan", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    code, out, err = run("warm")
    assert (code, "kernels compiled in" in out) == (0, True)
    assert err.startswith("compiling the planner's kernels")
    assert run("warm") == (0, "all are compiled\n", "")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    for method in ("coop-offline", "auto", "optimal", "dtr", "dte", "coop", "delta", "swap-only"):
        for link in ("0", "1GB/s"):
            options = ["--budget", "60%", "--method", method, "--time-limit", "5", "--link", link]
            assert "compil" not in run("graph.json", *options)[2]
    assert run("graph.json", "--budget", "min", "--time-limit", "5")[0] == 0
    assert run("place", "buffers.csv", "--time-limit", "2")[0] == 0
    assert run("place", "gaps.csv")[0] == 0
    assert run("explain", "graph.json")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == written


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


EDITED = """
import sys
from pathlib import Path
import kernel

if sys.argv[1:]:
    changed = Path(sys.argv[1])
    changed.write_text(changed.read_text().replace("= 1", "= 2"))
print(kernel.number(0))
"""


@pytest.mark.parametrize("changed", ["kernel.py", "row.py"])
def test_a_process_whose_sources_changed_keeps_no_kernel_for_those_of_now(changed, tmp_path):
    """An upgrade, or an edit, while a process runs: it compiles what it has imported."""
    (tmp_path / "row.py").write_text("ROW = 1\n")
    (tmp_path / "kernel.py").write_text(
        "from coop_plan.planner.core.jit import njit\nfrom row import ROW\nCOLUMN = 1\n"
        "@njit\ndef number(_):\n    return 10 * ROW + COLUMN\n"
    )
    (tmp_path / "edited.py").write_text(EDITED)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    before, after = (
        subprocess.run(
            [sys.executable, "edited.py", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
        ).stdout.strip()
        for arguments in ([changed], [])
    )  # fmt: skip
    assert before == "11"
    assert after == {"kernel.py": "12", "row.py": "21"}[changed]


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


BACK = """
import sys
sys.path.insert(0, ".")
from kernel import double
print(double(2), sum(double.stats.cache_hits.values()))
"""
KEPT = """
from coop_plan.planner.core.jit import njit

@njit
def double(x):
    return 2 * x
"""


def kernel_process(folder, prefix=(), **environment):
    """Calls of a kernel in `folder` in a new process: its output and what it logs."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", BACK],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split(), done.stderr.splitlines()


@pytest.fixture
def kernel(tmp_path):
    """A folder with the source of a kernel, and the arguments of a cache at home."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "kernel.py").write_text(KEPT)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
@pytest.mark.parametrize("changed", ["index", "data", "folder", "mode"])
def test_a_kernel_that_others_could_write_is_not_loaded(changed, kernel, tmp_path):
    """It is a pickle, which runs code when it is read."""
    home = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    assert kernel_process(kernel, **home)[0] == ["4", "0"]
    cache = kernel / "__pycache__"
    path = {"index": next(cache.glob("*.nbi")), "folder": cache}.get(
        changed, next(cache.glob("*.nbc"))
    )
    if changed == "mode":
        path.chmod(0o666)
    else:
        os.chown(path, 65534, 65534)
    (found, hits), said = kernel_process(kernel, **home)
    assert (found, hits) == ("4", "0")
    lines = [line for line in said if "without the cache" in line]
    assert len(lines) == (changed != "folder")  # in that case the cache at home is used
    assert kernel_process(kernel, **home)[0] == ["4", "1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_kernels_of_a_folder_that_cannot_be_written_are_loaded(kernel, tmp_path):
    """As of an image: a folder of root's, named by an option."""
    named = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    cache = kernel / "__pycache__"
    cache.touch()  # no folder beside the source
    kernel_process(kernel, **named)
    shared = {"COOP_SHARED_CACHE": str(tmp_path / "shared"), "XDG_CACHE_HOME": str(cache)}
    (tmp_path / "home/coop-plan").rename(tmp_path / "shared")
    folder = next((tmp_path / "shared/kernels").iterdir())
    folder.chmod(0o500)
    obey = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    assert kernel_process(kernel, obey, **shared) == (["4", "1"], [])
    (kernel / "kernel.py").write_text(KEPT.replace("2 * x", "x + x"))
    found, said = kernel_process(kernel, obey, **shared)
    assert found == ["4", "0"]
    assert any("without the cache" in line for line in said)


def test_kernels_on_a_full_disk_are_used(kernel, tmp_path):
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n" + KEPT
    (kernel / "kernel.py").write_text(script)
    found, said = kernel_process(kernel, XDG_CACHE_HOME=str(tmp_path / "home"))
    assert found == ["4", "0"]
    assert any("File too large" in line for line in said)


AT_ONCE = """
import sys, time
from numba import int64
sys.path.insert(0, ".")
import coop_plan.planner.core.kernel_types as types
import coop_plan.planner.kernels as kernels
from kernel import double

compile_it = double.compile
double.compile = lambda signature: (time.sleep(3), compile_it(signature))[1]
types.entries = lambda module: [(double, (int64,))]
print("ready", flush=True)
sys.stdin.readline()
print(kernels.compile_modules(("some",)), double(2))
"""


def test_processes_compile_the_kernels_once(kernel):
    """The others wait for the first, and then load what it wrote."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    results = run_together(["-c", AT_ONCE], 3, kernel, environment)
    assert sorted(out for out, _ in results) == ["0 4\n", "0 4\n", "1 4\n"]
    assert sum("waiting for another process" in said for _, said in results) == 2
