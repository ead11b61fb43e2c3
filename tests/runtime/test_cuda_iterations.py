"""Whole iterations on a CUDA device. Without one, test_cuda.py runs these on a pretended one."""

import contextlib
import copy
import ctypes
import gc

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch.optim import swa_utils

import coop_plan
from coop_plan.runtime import CudaGraphError, RuntimeRefusalError
from coop_plan.runtime.device import copy_engines
from coop_plan.runtime.device.copy_engines import CudaCopyEngines
from coop_plan.runtime.torch_internals import cuda as library
from coop_plan.runtime.torch_internals.ops import storage_expiry
from tests.runtime.iterating import OPTIMIZERS, eager, state_of
from tests.runtime.strict_plans import check_plans
from tests.runtime.test_homes import (
    CHANGES,
    Gpt,
    Mlp,
    Pair,
    Pixels,
    check_changes,
    check_failure,
    checked,
    flatten,
    forget,
    hold,
    remember,
    renew,
)

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


@pytest.mark.slow
@SEARCH
@given(
    kind=st.sampled_from([Mlp, Gpt, Pixels]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    clip_norm=st.sampled_from([None, 0.05]),
    budget=st.sampled_from(["90%", "min"]),
    count=st.integers(1, 3),
)
@example(Mlp, "adamw", None, "min", 1)
@example(Mlp, "adamw-fused", 0.05, "min", 2)
@example(Pixels, "momentum", None, "min", 1)
def test_any_iteration_is_the_loops(kind, optimizer, clip_norm, budget, count):
    """Updates run within the arena, also those that make states."""
    torch._dynamo.reset()
    pair = Pair(kind, optimizer, budget, clip_norm, link=0, device="cuda")
    pair.run(0, 1, 2, count=count)


@pytest.mark.slow
@SEARCH
@given(
    kind=st.sampled_from([Mlp, Gpt, Pixels]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    clip_norm=st.sampled_from([None, 0.05]),
    link=st.sampled_from(["100MB/s", "8GB/s"]),
    budget=st.sampled_from(["60%", "min"]),
    count=st.integers(1, 3),
    late=st.booleans(),
)
@example(Mlp, "adamw", None, "8GB/s", "min", 1, True)
@example(Gpt, "adamw-fused", 0.05, "8GB/s", "min", 2, True)
@example(Mlp, "momentum", None, "100MB/s", "min", 1, False)
@example(Pixels, "adamw", 0.05, "8GB/s", "min", 2, True)
def test_any_iteration_with_homes_is_the_loops(
    kind, optimizer, clip_norm, link, budget, count, late
):
    """Copies are made at once, or when the device waits for them."""
    torch._dynamo.reset()
    with copies_that_wait(late):
        pair = Pair(kind, optimizer, budget, clip_norm, link, device="cuda")
        report = pair.run(0, 1, 2, count=count)
    assert report.plan.homes or budget != "min"


def requested(which):
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


@pytest.mark.parametrize("kind", [Mlp, Gpt])
def test_the_device_has_no_memory_for_homes(kind):
    """By the counters of PyTorch's allocator: the iteration takes its budget, at rest nothing."""
    pair = Pair(kind, "adamw", "min", device="cuda")
    gc.collect()  # of earlier tests
    before = requested("current")
    report = pair.run(0)
    for step in (1, 2):
        batch = pair.batch(step)
        coop_plan.release()
        gc.collect()
        base = requested("current")
        torch.cuda.reset_peak_memory_stats()
        loss = pair.iteration(batch)
        assert requested("peak") - base <= report.budget_bytes - report.resident_bytes
    own = sum(parameter.nbytes for parameter in pair.ours.parameters())
    del loss, batch
    coop_plan.release()
    gc.collect()
    theirs = sum(v.nbytes for v in state_of(pair.theirs, pair.other) if v.is_cuda) - own
    assert requested("current") - before == theirs - own
    checked(report)


def test_a_parameter_at_home_is_a_tensor_of_the_device(tmp_path):
    """It is evaluated, averaged, printed, saved and loaded there as without homes."""
    pair = Pair(Gpt, "adamw", "min", 0.05, device="cuda")
    averages = [swa_utils.AveragedModel(model) for model in (pair.ours, pair.theirs)]
    pair.run(0)
    places = [parameter.data_ptr() for parameter in pair.ours.parameters()]
    for step in (1, 2):
        pair.run(step)
        batch = pair.batch(step + 50)
        with torch.no_grad():
            assert torch.equal(pair.ours.loss(batch), pair.theirs.loss(batch))
        for average, model in zip(averages, (pair.ours, pair.theirs), strict=True):
            average.update_parameters(model)
    assert places == [parameter.data_ptr() for parameter in pair.ours.parameters()]
    values = [v for v in state_of(pair.ours, pair.mine) if v.dim()]
    assert {value.device for value in values} == {torch.device("cuda", 0)}
    ours, theirs = (model.state_dict() for model in averages)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert repr(pair.ours.words.weight) == repr(pair.theirs.words.weight)
    torch.save((pair.ours.state_dict(), pair.mine.state_dict()), tmp_path / "saved")
    pair.run(3)
    saved = torch.load(tmp_path / "saved", map_location="cpu")
    for model, optimizer in ((pair.ours, pair.mine), (pair.theirs, pair.other)):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    pair.run(4, 5)
    pair.run(6, rows=16)
    batch = pair.batch(7)  # a step in eager
    for model, optimizer in ((pair.ours, pair.mine), (pair.theirs, pair.other)):
        eager(model.loss, optimizer, [batch], None)
    assert pair.equal()
    pair.run(8)


@pytest.mark.slow
@SEARCH
@given(
    optimizer=st.sampled_from(["momentum", "adamw"]),
    changes=st.lists(
        st.tuples(
            st.sampled_from([c for c in CHANGES if c is not renew]), st.sampled_from([8, 16])
        ),
        max_size=4,
    ),
    late=st.booleans(),
)
@example("adamw", [(forget, 8), (remember, 8)], True)
@example("momentum", [(flatten, 8), (hold, 16)], True)
def test_what_the_user_does_between_iterations_is_as_in_eager(optimizer, changes, late):
    torch._dynamo.reset()
    with copies_that_wait(late):
        check_changes(Pair(Mlp, optimizer, "min", device="cuda"), changes)


@pytest.mark.slow
@SEARCH
@given(
    optimizer=st.sampled_from(["momentum", "adamw"]),
    budget=st.sampled_from(["60%", "min"]),
    calls=st.integers(0, 1),
    at=st.integers(0, 11),
    place=st.sampled_from(["before", "within", "copying"]),
    late=st.booleans(),
)
@example("adamw", "min", 1, 5, "within", True)
@example("adamw", "min", 1, 5, "copying", True)
def test_each_parameter_is_that_of_before_or_of_after(optimizer, budget, calls, at, place, late):
    torch._dynamo.reset()
    with copies_that_wait(late):
        pair = Pair(Mlp, optimizer, budget, device="cuda")
        pair.run(*range(calls))
        check_failure(pair, calls, at, place, CudaCopyEngines)


def test_the_slab_is_freed_after_the_work_of_the_device(monkeypatch):
    """Kernels may read it until then."""
    made, pinned, freed = [], copy_engines.pinned, []

    def noted(size):
        slab = pinned(size)
        made.append(storage_expiry(slab))
        return slab

    monkeypatch.setattr(copy_engines, "pinned", noted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: freed.append(made[-1]()))
    pair = Pair(Mlp, "momentum", "min", device="cuda")
    pair.run(0)
    freed.clear()
    pair.iteration = None
    gc.collect()
    assert pair.equal() and not freed
    del pair
    coop_plan.clear_reports()
    torch._dynamo.reset()
    gc.collect()
    assert freed == [False] and made[-1]()


def test_a_device_without_the_host_s_addresses_is_refused(monkeypatch):
    monkeypatch.setattr(copy_engines, "address_on_device", lambda _: None)
    pair = Pair(Mlp, "momentum", "min", device="cuda")
    with pytest.raises(RuntimeRefusalError, match="keep them on the device: leave link out"):
        pair.iteration(pair.batch(0))
    assert pair.equal()
    monkeypatch.undo()
    pair.run(1)


def test_a_graph_cannot_have_homes(monkeypatch):
    pair = Pair(Mlp, "momentum", "min", device="cuda")
    pair.run(0)
    batch = pair.batch(1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(CudaGraphError, match="outside of the capture"):
            pair.iteration(batch)
    pair.run(1)
