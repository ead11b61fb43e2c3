"""Whole iterations on a CUDA device. Without one, test_cuda.py runs these on a pretended one."""

import contextlib
import ctypes

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from coop_plan.runtime.torch_internals import cuda as library
from tests.runtime.iterating import OPTIMIZERS
from tests.runtime.strict_plans import check_plans
from tests.runtime.test_homes import Gpt, Mlp, Pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def checked_plans(monkeypatch):
    if torch.cuda.get_device_name() == "Pretended":
        check_plans(monkeypatch)

SEARCH = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@contextlib.contextmanager
def copies_that_wait(late):
    """Of a pretended device; another one decides for itself."""
    if torch.cuda.get_device_name() != "Pretended":
        yield
        return
    device = ctypes.CDLL(str(library.CUDA_LIBRARY))
    device.pretended_late(late)
    try:
        yield
    finally:
        device.pretended_late(False)


@SEARCH
@given(
    kind=st.sampled_from([Mlp, Gpt]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    clip_norm=st.sampled_from([None, 0.05]),
    budget=st.sampled_from(["90%", "min"]),
    count=st.integers(1, 3),
)
@example(Mlp, "adamw", None, "min", 1)
@example(Mlp, "adamw-fused", 0.05, "min", 2)
def test_any_iteration_is_the_loops(kind, optimizer, clip_norm, budget, count):
    """Updates run within the arena, also those that make states."""
    torch._dynamo.reset()
    pair = Pair(kind, optimizer, budget, clip_norm, link=0, device="cuda")
    pair.run(0, 1, 2, count=count)


@SEARCH
@given(
    kind=st.sampled_from([Mlp, Gpt]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    clip_norm=st.sampled_from([None, 0.05]),
    link=st.sampled_from(["100MB/s", "8GB/s", None]),
    budget=st.sampled_from(["60%", "min"]),
    count=st.integers(1, 3),
    late=st.booleans(),
)
@example(Mlp, "adamw", None, "8GB/s", "min", 1, True)
@example(Gpt, "adamw-fused", 0.05, "8GB/s", "min", 2, True)
@example(Mlp, "momentum", None, None, "min", 1, False)
def test_any_iteration_with_homes_is_the_loops(
    kind, optimizer, clip_norm, link, budget, count, late
):
    """Copies are made at once, or when the device waits for them."""
    torch._dynamo.reset()
    with copies_that_wait(late):
        pair = Pair(kind, optimizer, budget, clip_norm, link, device="cuda")
        report = pair.run(0, 1, 2, count=count)
    assert report.plan.homes or (budget, link) != ("min", "8GB/s")
