import fcntl

import numba
import pytest
from hypothesis import settings

from coop_plan.planner import plan
from tests.support import make_graph

settings.register_profile("any machine", deadline=None)  # no test asserts seconds
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(tmp_path_factory):
    """Compile (or load) the kernels before the first test, which then says nothing of it."""
    if numba.config.DISABLE_JIT:
        return
    tensors = {0: ("input", 1), 9: ("output", 1)} | dict.fromkeys(range(1, 9), ("activation", 9))
    ops = [{"inputs": [t - 1], "outputs": [t]} for t in range(1, 5)]
    ops += [{"inputs": [t - 1, 9 - t], "outputs": [t]} for t in range(5, 10)]
    graph = make_graph(tensors, ops)
    # One worker compiles them, and the other loads what it has written.
    with (tmp_path_factory.getbasetemp().parent / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for method in ("coop", "coop-offline"):
            plan(graph, "min", method=method)
        plan(graph, "min", method="coop-offline", time_limit=1)  # what a deadline alone runs


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """Profiles and plans of this test only; the extension stays in the user's cache."""
    pytest.importorskip("torch")
    from coop_plan.runtime.device import build

    build.arena()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
