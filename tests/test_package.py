"""What is built from the repository: one package, and nothing that a user's folders shadow."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from coop_plan.schemas import load_graph, load_plan

ROOT = Path(__file__).parents[1]
FOLDERS = ("api", "planner", "runtime", "schemas", "web")
SHIPPED = {".css", ".cpp", ".h", ".js", ".json", ".py", ".typed"}

pytestmark = pytest.mark.timeout(1800)


def run(*command, **options):
    """The finished process; its output is in the failure's message."""
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of what is in the working tree, committed, in which links are text files.

    So are they after a clone on Windows, or of any repository with `core.symlinks=false`.
    """
    from tests.mutations import copy_repository

    folder = tmp_path_factory.mktemp("clone")
    tree, made = folder / "tree", folder / "clone"
    tree.mkdir()
    copy_repository(tree)
    git = ("git", "-c", "user.name=tests", "-c", "user.email=tests@localhost")
    run(*git, "init", "--quiet", cwd=tree)
    run(*git, "add", "--all", cwd=tree)
    run(*git, "commit", "--quiet", "--message", "tree", cwd=tree)
    run("git", "clone", "--quiet", "-c", "core.symlinks=false", tree, made)
    assert (made / "planner").read_text() == "coop_plan/planner"
    return made


@pytest.fixture(scope="module")
def sources(clone, tmp_path_factory):
    """The sources as `git archive --format=zip` packs them, as "Download ZIP" of a forge does."""
    folder = tmp_path_factory.mktemp("zip")
    run("git", "archive", "--format=zip", "--prefix=repository/", "-o", folder / "main.zip", "HEAD",
        cwd=clone)  # fmt: skip
    with zipfile.ZipFile(folder / "main.zip") as archive:
        archive.extractall(folder)  # which makes no links
    return folder / "repository"


def build_wheel(sources, to, kernels="0", **environment):
    """The path of the wheel built from `sources`; kernels take two minutes to compile."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--wheel-dir", to, sources,
        env=os.environ | {"COOP_PLAN_KERNELS": kernels} | environment)  # fmt: skip
    [wheel] = to.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(sources, tmp_path_factory):
    """The path of the source distribution."""
    to = tmp_path_factory.mktemp("sdist")
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(to)!r})"
    run(sys.executable, "-c", script, cwd=sources)
    [path] = to.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sources, sdist, tmp_path_factory):
    """The path of the wheel; after `sdist`, as both write to the folder of the sources."""
    return build_wheel(sources, tmp_path_factory.mktemp("wheel"), kernels="1")


def sources_in(wheel):
    """Names of the files in a wheel, without those of its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def expected():
    """The files of the package."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "coop_plan").rglob("*")
        if path.is_file() and path.suffix in SHIPPED
    }


def test_the_names_at_the_top_are_links_into_the_package():
    for folder in FOLDERS:
        assert (ROOT / folder).is_symlink()
        assert (ROOT / folder).samefile(ROOT / "coop_plan" / folder)


def test_of_a_clone_without_links_and_a_compiler_a_wheel_has_the_sources_alone(clone, tmp_path):
    wheel = build_wheel(clone, tmp_path, kernels="1", PATH="/nowhere")
    assert sources_in(wheel) == expected()


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_metadata_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    info = metadata.partition("/")[0]
    files = {name for name in names if not name.startswith(f"{info}/")}
    [kernels] = files - expected()
    assert re.fullmatch(r"coop_plan/planner/_kernels_\w{16}\.cpython-.*\.so", kernels)
    files.remove(kernels)
    assert files == expected()
    assert {Path(name).suffix for name in files} == SHIPPED
    assert f"{info}/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0\n" in text


def test_the_source_distribution_holds_the_package_and_makes_its_wheel(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers()}
        assert not [name for name, m in members.items() if m.issym() or m.islnk()]
        archive.extractall(tmp_path, filter="data")
    files = {name for name, member in members.items() if member.isfile()}
    assert {name for name in files if name.startswith("coop_plan/")} == expected()
    rest = {name.partition("/")[0] for name in files} - {"coop_plan", "coop_plan.egg-info"}
    assert rest == {
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
        "setup.py",
    }
    [unpacked] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert sources_in(build_wheel(unpacked, tmp_path)) == expected()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the wheel in it; what it needs is taken from this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-index",
        "--no-deps", "--no-compile", wheel)  # fmt: skip
    place = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    found = {path.name for path in Path(place).iterdir()}
    assert sorted(re.sub(r"-[^-]*\.dist-info$", "", name) for name in found) == ["coop_plan"] * 2
    # .pth files in a folder named by a .pth file are not read: our editable install stays outside.
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(place) / "needs.pth").write_text("\n".join(sorted(packages)))
    return folder / "bin"


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    """A training script's folder with packages named as our folders are."""
    folder = tmp_path_factory.mktemp("users")
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('the user\\'s {name}')\n")
    shutil.copy(ROOT / "examples" / "graph.json", folder)
    return folder


@pytest.fixture
def call(installed, users):
    """Run a command of the environment in the user's folder, which Python searches first."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def call(command, *arguments, **options):
        return run(installed / command, *arguments, cwd=users, env=environment | options).stdout

    return call


@pytest.mark.slow
def test_the_users_packages_are_the_first_to_be_found(call, users):
    script = users / "which.py"
    script.write_text(
        "import importlib.util as u, coop_plan, json\n"
        f"homes = [u.find_spec(name).origin for name in {FOLDERS}]\n"
        "print(json.dumps([coop_plan.__file__, *homes]))\n"
    )
    ours, *homes = json.loads(call("python", script))
    assert "site-packages" in ours
    assert [Path(home).parent for home in homes] == [users / name for name in FOLDERS]


@pytest.mark.slow
def test_the_command_plans_and_verifies_beside_a_users_packages(call, users):
    paths = {"PYTHONPATH": str(users)}
    assert re.fullmatch(
        r"coop-plan, version \d+\.\d+\.\d+\n", call("coop-plan", "--version", **paths)
    )
    shown = call(
        "coop-plan", "graph.json", "--budget", "90%", "--method", "coop", "-o", "plan.json", **paths
    )
    assert shown.startswith("method ")
    assert call("coop-plan", "verify", "graph.json", "plan.json", **paths).startswith("valid: ")
    plan = load_plan(users / "plan.json")
    assert plan.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_python_plans_beside_a_users_packages(call, users):
    script = users / "planning.py"
    script.write_text(
        "import coop_plan\n"
        "made = coop_plan.plan(coop_plan.load_graph('graph.json'), '90%', method='coop')\n"
        "coop_plan.verify(coop_plan.load_graph('graph.json'), made)\n"
        "print(made.method, len(made.steps))\n"
    )
    method, steps = call("python", script).split()
    assert method == "coop"
    assert int(steps) >= len(load_graph(users / "graph.json").ops)


COMPARE = """
import sys, coop_plan
graph = coop_plan.load_graph("graph.json")
for method in ("coop-offline", "delta", "dtr", "optimal"):
    made = coop_plan.plan(graph, "70%", method=method, link="16GB/s")
    print(method, made.overhead, made.arena_bytes)
made = coop_plan.plan(graph, "min")
print(made.budget_bytes, "numba" in sys.modules, "llvmlite" in sys.modules)
"""


@pytest.mark.slow
def test_an_installed_planner_needs_no_numba_and_plans_as_one_that_compiles(call, users):
    (users / "compare.py").write_text(COMPARE)
    *plans, last = call("python", "compare.py", PATH="/nowhere").splitlines()
    *ours, same = run(sys.executable, "compare.py", cwd=users).stdout.splitlines()
    assert plans == ours
    assert last.split() == [same.split()[0], "False", "False"]
    assert same.endswith("True True")
    assert call("coop-plan", "warm") == "all are compiled\n"


IMPORT_TORCH = "import torch; print(torch.nn.Module.__call__.__code__.co_filename)"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_torch_is_imported_with_a_budget(call):
    planned = call("python", "-c", IMPORT_TORCH, COOP_BUDGET="1GiB")
    assert planned.endswith("site-packages/coop_plan/runtime/integrations/autoload.py\n")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_an_editable_installation_is_whole(clone, installed, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    python = tmp_path / "bin" / "python"
    place = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path)}))
    shutil.copy(next(installed.parent.rglob("needs.pth")), place)
    run(sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-index",
        "--no-deps", "--no-build-isolation", "--ignore-installed", "--editable", clone)  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = (python, "-c", "import coop_plan; print(coop_plan.__file__, coop_plan.incomplete())")
    shown = run(*command, cwd=tmp_path, env=environment).stdout
    assert shown == f"{clone / 'coop_plan' / '__init__.py'} \n"
    shown = run(python, "-c", IMPORT_TORCH, cwd=tmp_path, env=environment | {"COOP_BUDGET": "1GiB"})
    autoload = clone / "coop_plan" / "runtime" / "integrations" / "autoload.py"
    assert shown.stdout == f"{autoload}\n"


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
@pytest.mark.parametrize("missing", FOLDERS)
def test_an_incomplete_installation_is_one_line_and_never_breaks_torch(missing, tmp_path):
    """As old zips made them: links became text files, which no installer takes along."""
    ignore = shutil.ignore_patterns("__pycache__", missing)
    shutil.copytree(ROOT / "coop_plan", tmp_path / "coop_plan", ignore=ignore)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1"}
    says = f"incomplete installation: {tmp_path / 'coop_plan'} lacks {missing}; install coop-plan"

    def end(*arguments, **more):
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True, text=True, cwd=tmp_path, env=environment | more, check=False,
        )  # fmt: skip

    command = end("-m", "coop_plan", "--help")
    assert command.returncode == 1
    assert command.stderr == f"coop-plan: error: {says} again\n"
    torch = end("-c", "import torch; print('imported')", COOP_BUDGET="1GiB")
    assert torch.stdout == "imported\n"
    assert len(torch.stderr.splitlines()) == 1
    assert f"COOP_BUDGET: nothing is planned: {says}" in torch.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_torch_finds_the_backend_beside_a_users_packages(call, users, tmp_path):
    script = users / "training.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))\n"
        "loss = lambda x: model(x).square().mean()\n"
        "step = torch.compile(loss, backend='coop', options={'budget': '100%'})\n"
        "batch = torch.randn(8, 16)\n"
        "made = step(batch)\n"
        "made.backward()\n"
        "assert made.equal(loss(batch))\n"
        "import coop_plan\n"
        "print(coop_plan.reports()[0].steps_run, coop_plan.reports()[0].outside_bytes)\n"
    )
    cache = {"XDG_CACHE_HOME": str(tmp_path)}  # so that the wheel's own C++ sources are compiled
    assert call("python", script, **cache) == "1 0\n"
