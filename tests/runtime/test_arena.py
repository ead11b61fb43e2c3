"""The allocator serves planned addresses, and lets everything else pass."""

import gc

import pytest
import torch

from coop_plan.runtime import BuildError
from coop_plan.runtime.device import build
from coop_plan.runtime.device.arena import SERVED_OUTSIDE, Arena, Memory, process_bytes, reset_peak

SIZE = 4000
"""Bytes of a tensor of a thousand floats."""


@pytest.fixture
def x():
    return torch.ones(1000)


def run_in(arena, number, function):
    arena.begin(fresh=True)
    try:
        arena.enter(number)
        return function()
    finally:
        arena.leave()


def test_a_slot_is_served_at_its_address(x):
    arena = Arena(3 * 4096, [[(SIZE, 4096)], [(SIZE, 8192)]], [False, False], Memory())
    first = run_in(arena, 0, lambda: x + x)
    second = run_in(arena, 1, lambda: x + x)
    assert second.data_ptr() - first.data_ptr() == 4096
    assert arena.counters().high_water_bytes == 8192 + SIZE
    assert arena.counters().outside_bytes == 0
    assert torch.equal(first, torch.full((1000,), 2.0))


def test_live_counts_until_the_tensor_dies(x):
    arena = Arena(4096, [[(SIZE, 0)]], [False], Memory())
    y = run_in(arena, 0, lambda: x + x)
    view = y[10:]
    del y
    assert arena.memory.live == 1
    del view
    assert arena.memory.live == 0


def test_an_unplanned_allocation_goes_outside_and_is_counted(x):
    arena = Arena(4096, [[(SIZE - 4, 0)]], [False], Memory())
    y = run_in(arena, 0, lambda: x + x)
    assert arena.memory.live == 0
    assert arena.counters().outside_bytes == SIZE
    assert torch.equal(y, x + x)


def test_a_slot_planned_outside_is_not_counted(x):
    arena = Arena(4096, [[(SIZE, SERVED_OUTSIDE)]], [False], Memory())
    run_in(arena, 0, lambda: x + x)
    counters = arena.counters()
    assert (counters.outside_bytes, counters.high_water_bytes, arena.memory.live) == (0, 0, 0)


def test_tensors_outlive_their_arena(x):
    arena = Arena(4096, [[(SIZE, 0)]], [False], Memory())
    y = run_in(arena, 0, lambda: x + x)
    del arena
    gc.collect()
    assert torch.equal(y, x + x)


def test_what_is_held_keeps_its_pages_and_the_rest_goes_back(x):
    memory = Memory()
    arena = Arena(64 * 4096, [[(SIZE, 40 * 4096)]], [False], memory)
    before, _ = process_bytes()
    held = run_in(arena, 0, lambda: x + x)
    assert process_bytes()[0] - before == 64 * 4096
    memory.kept = [(40 * 4096, 40 * 4096 + SIZE)]
    memory.part()
    assert process_bytes()[0] - before == 4096
    other = run_in(arena, 0, lambda: x * 3)
    assert torch.equal(held, x + x)
    assert torch.equal(other, x * 3)
    del held
    assert process_bytes()[0] - before == 64 * 4096


def test_memory_is_shared_and_grows(x):
    memory = Memory()
    small = Arena(4096, [[(SIZE, 0)]], [False], memory)
    large = Arena(8192, [[(SIZE, 4096)]], [False], memory)
    before, _ = process_bytes()
    for arena in (small, large, small):
        run_in(arena, 0, lambda: x + x)
    assert process_bytes()[0] - before == 8192


def test_time_is_split_by_class(x):
    arena = Arena(4096, [[(SIZE, 0)], [(SIZE, 0)]], [False, True], Memory())
    for op in (0, 1):
        arena.begin(fresh=True)
        arena.enter(op)
        x.sum()
        arena.leave()
        counters = arena.counters()
        assert (counters.first_us > 0, counters.again_us > 0) == (op == 0, op == 1)


def test_process_bytes_follow_allocations():
    before, _ = process_bytes()
    reset_peak()
    y = torch.empty(1_000_000)
    current, peak = process_bytes()
    assert current - before == 4_000_000
    del y
    assert process_bytes()[0] < current
    assert peak >= current


def test_a_missing_compiler_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="install g"):
        build.arena.__wrapped__()


def test_a_failed_compilation_leaves_nothing_behind(monkeypatch, tmp_path):
    source = tmp_path / "arena.cpp"
    source.write_text("this is not C++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(BuildError, match="did not compile"):
        build.arena.__wrapped__()
    assert not list((tmp_path / "cache").rglob("*.so"))
