"""Torch on one thread (two contend with the other test process), a clean slate for each test."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

torch = pytest.importorskip("torch")
from coop_plan import runtime  # noqa: E402
from coop_plan.planner.cache_files import cache_dir  # noqa: E402
from coop_plan.runtime.capture import op_timing  # noqa: E402
from coop_plan.runtime.device import build  # noqa: E402
from coop_plan.runtime.offline_capture import fake_device  # noqa: E402
from tests.runtime import forked  # noqa: E402

SERVE = "from coop_plan.runtime.offline_capture import fake_device; fake_device.serve_captures()"


def pytest_collection_modifyitems(items):
    """A machine with five times its load still has the time that child processes are given."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(autouse=True)
def clean_slate(own_cache, monkeypatch):
    # Dynamo measures the time of a step's guards for its log, after it has emptied the caches.
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    runtime.clear_reports()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def brief_timing(monkeypatch):
    """Two warm runs time an op: no test but those of the timing itself needs more."""
    monkeypatch.setattr(op_timing, "MIN_REPEATS", 2)
    monkeypatch.setattr(op_timing, "REPEAT_US", 0.0)
    monkeypatch.setattr(op_timing, "empty_caches", lambda: None)


@pytest.fixture(autouse=True)
def forked_captures(monkeypatch):
    """Processes that capture for absent devices are forks, which need not import PyTorch."""

    def child(self, spec):
        if spec.kind not in self._children:
            libraries = fake_device.preload_libraries(spec)
            self._children[spec.kind] = forked.Forked(SERVE, libraries=libraries)
        return self._children[spec.kind]

    monkeypatch.setattr(fake_device.OfflineCapture, "_child", child)


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """Make a module of a text, which this process and those it starts can import."""

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        sys.modules.pop(name, None)
        return name

    return make


@pytest.fixture
def cache(clean_slate):
    """The test's cache folder, for child processes too: they find the extension in it."""
    folder = cache_dir()
    folder.mkdir(exist_ok=True)
    built = build.Path(build.arena().__file__).parent
    (folder / built.name).symlink_to(built)
    return folder


@pytest.fixture
def alone():
    """A process group of this process."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
