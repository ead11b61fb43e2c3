import fcntl
import gc
import os
import shutil
from collections import Counter
from types import CodeType

import pytest
from hypothesis import settings

from coop_plan.planner.kernels import ALL, compile_modules

# No test asserts seconds. `pytest --hypothesis-profile=fresh` tries other examples each time.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("fresh", deadline=None)
settings.load_profile("fixed")


MEASURES = {"process_bytes", "process_time", "getrusage", "measured_peak_bytes"}
"""Names of measurements. Threads of libraries, garbage of earlier tests and other processes of the
machine disturb them: a test that reads one itself may fail twice before it counts as failed."""


LONGEST = (
    "tests/runtime/test_fit_budget.py",
    "tests/runtime/test_cuda.py",
    "tests/runtime/test_fake_device.py",
    "tests/test_package.py",
    "tests/planner/test_exact.py",
    "tests/runtime/test_fused.py",
    "tests/runtime/test_inductor_budget.py",
    "tests/runtime/test_linear_cross_entropy.py",
    "tests/runtime/test_homes.py",
    "tests/runtime/test_train_iteration.py",
    "tests/runtime/test_iterations.py",
    "tests/runtime/test_loops.py",
)
"""Files of a minute or more, the longest first. Started last, one keeps a core busy while the other
waits; the number of tests, by which xdist would order files, says nothing of their time."""


def pytest_collection_modifyitems(items):
    """Long files first, then those with the most tests (`--no-loadscope-reorder` keeps this)."""
    rank = {name: i for i, name in enumerate(LONGEST)}
    files = [item.nodeid.partition("::")[0] for item in items]
    tests = Counter(files)
    places = {name: (rank.get(name, len(rank)), -tests[name], name) for name in tests}
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])
    for item in items:
        if MEASURES & names(item.function.__code__):
            item.add_marker(pytest.mark.flaky(reruns=2))


def names(code):
    """Names that a function and the functions in it read."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*map(names, inner))


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels():
    """Compile the kernels before the first test, which then says nothing of it.

    Two workers begin at the two ends; none compiles what another one does.
    """
    first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    compile_modules(ALL if first else ALL[::-1])


@pytest.fixture(scope="session", autouse=True)
def frozen_modules(compiled_kernels):
    """Collections need not visit what was imported: 0.2 s each, of which a test may ask many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def browser():
    """Chromium, if it is installed."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        # In a container there is no sandbox for root.
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def no_device(tmp_path_factory):
    """The folder of the library that stands for a device, compiled once for all workers."""
    pytest.importorskip("torch")
    from coop_plan.runtime.errors import CaptureError
    from coop_plan.runtime.offline_capture.devices import device
    from coop_plan.runtime.offline_capture.fake_device import preload_libraries

    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "no_device.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("XDG_CACHE_HOME", str(shared / "no_device"))
        try:
            return preload_libraries(device("l4"))[-1].parent
        except CaptureError:  # PyTorch is built for CUDA
            return None


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch, no_device):
    """Profiles and plans of this test only; the extension stays in the user's cache."""
    from coop_plan.runtime.device import build

    build.arena()
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    if no_device is not None:
        (folder / "coop-plan").mkdir()
        (folder / "coop-plan" / no_device.name).symlink_to(no_device)
