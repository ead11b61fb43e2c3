"""Caches that another user could have written, or that cannot be written, cost time and a line."""

import contextlib
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from coop_plan.runtime.cache import plans, profiles
from coop_plan.runtime.cache.files import LOCK_SECONDS
from coop_plan.runtime.device import build
from coop_plan.runtime.errors import BuildError
from tests.support import run_together

ROOT = Path(__file__).parents[2]
NOBODY = 65534

two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The cache folder of a new home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home/coop-plan"


@pytest.fixture
def source(tmp_path):
    """A library that compiles at once."""
    path = tmp_path / "small.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


def library(source):
    return build.compiled(source, "small", link=())


def lines(caplog):
    return [r.getMessage() for r in caplog.records if "without the cache" in r.getMessage()]


def poison(path):
    """Replace the content of a library, and its digest, as whoever can write there would."""
    path.write_bytes(b"another's code")
    path.with_suffix(".sha256").write_text(hashlib.sha256(b"another's code").hexdigest())


def foreign_home(home, path):
    for each in (home, *home.rglob("*")):
        os.chown(each, NOBODY, NOBODY)


def foreign_folder(home, path):
    for each in (path.parent, *path.parent.iterdir()):
        os.chown(each, NOBODY, NOBODY)


def foreign_file(home, path):
    os.chown(path, NOBODY, NOBODY)


def writable_file(home, path):
    path.chmod(0o666)


def group_file(home, path):
    path.chmod(0o660)


def foreign_link(home, path):
    (home / "elsewhere").mkdir()
    other = home / "elsewhere" / path.name
    path.rename(other)
    other.chmod(0o666)
    path.symlink_to(other)


@two_users
@pytest.mark.parametrize(
    "access",
    [foreign_home, foreign_folder, foreign_file, writable_file, group_file, foreign_link],
)
def test_a_library_that_others_could_write_is_not_loaded(access, home, source, caplog):
    path = library(source)
    poison(path)
    access(home, path)
    found = library(source)
    assert b"another's" not in found.read_bytes()
    assert found.stat().st_uid == 0
    assert len(lines(caplog)) == 1
    caplog.clear()
    assert b"another's" not in library(source).read_bytes()
    assert lines(caplog) == []


@two_users
def test_a_parent_folder_that_all_can_write_is_refused(home, source, caplog, monkeypatch):
    """Whoever can rename the cache can put another one in its place between check and load."""
    poison(library(source))
    home.parent.chmod(0o777)
    assert b"another's" not in library(source).read_bytes()
    assert str(home.parent) in lines(caplog)[0]
    home.parent.chmod(0o1777)  # as /tmp: nobody can rename what others own there
    path = home.parent / "coop-plan"
    assert library(source).is_relative_to(path)


FILL = """
import os, sys
os.umask(0)
from pathlib import Path
from coop_plan.planner.core.jit import njit
from coop_plan.runtime.cache import plans, profiles
from coop_plan.runtime.cache.files import LOCK_SECONDS
from coop_plan.runtime.device import build

build.compiled(Path(sys.argv[1]), "small", link=())
with profiles.profile_session():
    profiles.session().put("signature", "record")
plans._open().__enter__().close()

@njit
def double(x):
    return 2 * x

double(2)
"""


@pytest.mark.parametrize("kernels", ["NUMBA_CACHE_DIR", "in tree", "at home"])
def test_with_umask_0_nothing_can_be_written_by_others(kernels, home, source, tmp_path):
    script = tmp_path / "tree/fill.py"
    script.parent.mkdir(mode=0o755)
    script.write_text(FILL)
    if kernels == "at home":
        (script.parent / "__pycache__").mkdir()
        (script.parent / "__pycache__").chmod(0o777)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if kernels == "NUMBA_CACHE_DIR":
        environment["NUMBA_CACHE_DIR"] = str(home.parent / "kernels")
    subprocess.run([sys.executable, script, source], env=environment, check=True)
    where = script.parent if kernels == "in tree" else home.parent
    assert list(where.rglob("*.nbc"))
    made = [home.parent, *home.parent.rglob("*"), *script.parent.rglob("*.nb?")]
    assert {path.name for path in made} >= {"small.so", "profiles.sqlite3", "step_plans.sqlite3"}
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    assert home.stat().st_mode & 0o777 == 0o700


@two_users
@pytest.mark.parametrize("cache", ["profiles", "step_plans"])
@pytest.mark.parametrize("access", [foreign_home, foreign_file, writable_file])
def test_profiles_and_plans_that_others_could_write_are_not_read(access, cache, home, caplog):
    def kept():
        if cache == "step_plans":
            return plans.find("key", None, None)
        with profiles.profile_session():
            return profiles.session().get("signature")

    with profiles.profile_session():
        profiles.session().put("signature", "record")
    plans._open().__enter__().close()
    access(home, home / f"{cache}.sqlite3")
    assert kept() is None
    assert len(lines(caplog)) == 1
    kept()
    assert len(lines(caplog)) == 1


@two_users
def test_a_shared_cache_is_one_that_only_root_can_write(home, source, caplog, monkeypatch):
    made = library(source)
    shared = home.with_name("shared")
    shutil.copytree(home, shared)
    shutil.rmtree(home)
    monkeypatch.setenv("COOP_SHARED_CACHE", str(shared))
    assert library(source) == shared / made.relative_to(home)
    assert not home.exists()
    os.chown(shared, NOBODY, NOBODY)
    assert library(source) == made
    assert len(lines(caplog)) == 1


def test_without_a_compiler_a_library_of_any_is_loaded(home, source, monkeypatch):
    """As in an image that was built in another one."""
    made = library(source)
    monkeypatch.setenv("CXX", "env g++")
    assert library(source) != made
    shutil.rmtree(library(source).parent)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert library(source) == made


@contextlib.contextmanager
def disk_of(folder, size):
    """A disk of `size` bytes mounted at a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder]
    if os.geteuid() or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("only root mounts a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_costs_a_line_with_its_name(home, source, caplog):
    with disk_of(home, 4096 * 6):
        (home / "filler").write_bytes(bytes(4096 * 4))
        found = library(source)
        assert not found.is_relative_to(home)
        with profiles.profile_session():
            for row in range(100):
                profiles.session().put(str(row), "x" * 1000)
        plans.find("key", None, None)
    said = lines(caplog)
    assert str(home) in said[0]
    assert "No space left" in said[0]
    assert len(said) == 3
    assert "ld returned" not in caplog.text


def test_disks_that_are_all_full_are_named(home, source, tmp_path, monkeypatch):
    with disk_of(home, 4096 * 6), disk_of(tmp_path / "tmp", 4096 * 6):
        for folder in (home, tmp_path / "tmp"):
            (folder / "filler").write_bytes(bytes(4096 * 4))
        monkeypatch.setattr(build, "_temporary_folders", lambda: [str(tmp_path / "tmp")])
        with pytest.raises(BuildError, match="No space left on device") as error:
            library(source)
    assert str(home) in str(error.value)


@pytest.mark.parametrize("cache", ["profiles", "step_plans"])
def test_a_database_of_another_kind_is_set_aside(cache, home, caplog):
    home.mkdir(parents=True, mode=0o700)
    path = home / f"{cache}.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table answer (another text)")
        connection.execute("create table profile (another text)")

    def use():
        if cache == "step_plans":
            assert plans.find("key", None, None) is None
        else:
            with profiles.profile_session():
                profiles.session().put("signature", "record")

    use()
    assert len(lines(caplog)) == 1
    assert path.with_name(f"{path.name}.damaged").exists()
    use()
    use()
    assert len(lines(caplog)) == 1
    assert path.exists()


def test_a_locked_cache_costs_one_wait_and_a_line_each(home, caplog, monkeypatch):
    with profiles.profile_session():
        profiles.session().put("signature", "record")
    plans._open().__enter__().close()
    with contextlib.ExitStack() as held:
        for name in ("profiles", "step_plans"):
            path = home / f"{name}.sqlite3"
            connection = held.enter_context(contextlib.closing(sqlite3.connect(path)))
            connection.execute("begin exclusive")
        connected = mock.Mock(side_effect=sqlite3.connect)
        monkeypatch.setattr(sqlite3, "connect", connected)
        for _ in range(3):
            with profiles.profile_session():
                profiles.session().get("signature")
                profiles.session().put("another", "record")
            plans.find("key", None, None)
            with plans.tolerate_failures(plans._path()), plans._open():
                pass
    assert [call.kwargs["timeout"] for call in connected.call_args_list] == [LOCK_SECONDS] * 2
    assert len(lines(caplog)) == 2


AT_ONCE = """
import resource, sys, time
from pathlib import Path
from coop_plan.runtime.device import build

build._compiler_version()
print("ready", flush=True)
sys.stdin.readline()
began = time.process_time()
build.compiled(Path(sys.argv[1]), "small", link=())
waited = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
print(time.process_time() - began + waited)
"""

COMPILER = """#!/bin/sh
if [ "$1" != --version ]; then echo compiled >> {log}; sleep 4; fi
exec g++ "$@"
"""


def test_processes_that_start_at_once_compile_once(home, source, tmp_path):
    """The others wait without processor time."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(log=tmp_path / "log"))
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler)}
    results = run_together(["-c", AT_ONCE, str(source)], 3, ROOT, environment)
    seconds = sorted(float(out) for out, _ in results)
    assert (tmp_path / "log").read_text().split() == ["compiled"]
    assert seconds[1] < 2
