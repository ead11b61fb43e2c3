"""Torch on one thread (two contend with the other test process), a clean slate for each test."""

import pytest

torch = pytest.importorskip("torch")
import runtime  # noqa: E402


@pytest.fixture(autouse=True)
def clean_slate(tmp_path_factory):
    torch.set_num_threads(1)
    torch._dynamo.reset()
    runtime.clear_reports()
    torch.manual_seed(0)
    return
