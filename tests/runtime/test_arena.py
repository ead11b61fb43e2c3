"""The allocator serves planned addresses, and lets everything else pass."""

import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coop_plan.runtime import BuildError
from coop_plan.runtime.device import build
from coop_plan.runtime.device.arena import (
    MAX_COPIES,
    SERVED_OUTSIDE,
    Arena,
    Memory,
    Run,
    aligned,
    packed,
    process_bytes,
    reset_peak,
)
from coop_plan.runtime.execute.arena_pool import ArenaPool

SIZE = 4000
"""Bytes of a tensor of a thousand floats."""


def settle():
    """Let go of what earlier tests left, and of what that held, before bytes are counted."""
    for _ in range(3):
        gc.collect()


@pytest.fixture
def x():
    settle()
    return torch.ones(1000)


def run_in(run, memory, number, function):
    run.begin(memory, fresh=True)
    try:
        run.arena.enter(number)
        return function()
    finally:
        run.arena.leave()


def test_a_slot_is_served_at_its_address(x):
    memory, run = Memory(), Run(Arena(3 * 4096, [[(SIZE, 4096)], [(SIZE, 8192)]], [False, False]))
    first = run_in(run, memory, 0, lambda: x + x)
    second = run_in(run, memory, 1, lambda: x + x)
    assert second.data_ptr() - first.data_ptr() == 4096
    assert run.counters().high_water_bytes == 8192 + SIZE
    assert run.counters().outside_bytes == 0
    assert torch.equal(first, torch.full((1000,), 2.0))


def test_live_counts_until_the_tensor_dies(x):
    memory, run = Memory(), Run(Arena(4096, [[(SIZE, 0)]], [False]))
    y = run_in(run, memory, 0, lambda: x + x)
    view = y[10:]
    del y
    assert memory.live_offsets == [0]
    del view
    assert memory.live_offsets == []


def test_an_unplanned_allocation_goes_outside_and_is_counted(x):
    memory, run = Memory(), Run(Arena(4096, [[(SIZE - 4, 0)]], [False]))
    y = run_in(run, memory, 0, lambda: x + x)
    assert memory.live_offsets == []
    assert run.counters().outside_bytes == SIZE
    assert torch.equal(y, x + x)


def test_a_slot_serves_smaller_allocations_if_it_says_so(x):
    arena = Arena(2 * 4096, [[(4096, 0), (SIZE, 4096)]], [False], smaller=True)
    memory, run = Memory(), Run(arena)
    first, second, third = run_in(run, memory, 0, lambda: (x + x, x[:10] + x[:10], x[:9] + x[:9]))
    assert memory.live_offsets == [0, 4096]
    assert second.data_ptr() - first.data_ptr() == 4096
    assert run.counters().high_water_bytes == 4096 + second.nbytes
    assert run.counters().outside_bytes == third.nbytes
    larger = Run(Arena(4096, [[(SIZE - 4, 0)]], [False], smaller=True))
    y = run_in(larger, Memory(), 0, lambda: x + x)
    assert larger.counters().outside_bytes == y.nbytes


def test_a_slot_planned_outside_is_not_counted(x):
    memory, run = Memory(), Run(Arena(4096, [[(SIZE, SERVED_OUTSIDE)]], [False]))
    run_in(run, memory, 0, lambda: x + x)
    counters = run.counters()
    assert (counters.outside_bytes, counters.high_water_bytes, memory.live_offsets) == (0, 0, [])


def test_tensors_outlive_their_arena(x):
    memory, run = Memory(), Run(Arena(4096, [[(SIZE, 0)]], [False]))
    y = run_in(run, memory, 0, lambda: x + x)
    del run, memory
    gc.collect()
    assert torch.equal(y, x + x)


def test_what_is_held_keeps_its_pages_and_the_rest_goes_back(x):
    memory, run = Memory(), Run(Arena(64 * 4096, [[(SIZE, 40 * 4096)]], [False]))
    before, _ = process_bytes()
    held = run_in(run, memory, 0, lambda: x + x)
    assert process_bytes()[0] - before == 64 * 4096
    memory.detach_live()
    assert process_bytes()[0] - before == 4096
    other = run_in(run, memory, 0, lambda: x * 3)
    assert torch.equal(held, x + x)
    assert torch.equal(other, x * 3)
    del held
    assert process_bytes()[0] - before == 64 * 4096


def test_the_extension_loads_before_pytorch():
    code = "from coop_plan.runtime.device import build; build.arena()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_memory_is_shared_and_grows(x):
    memory = Memory()
    small = Run(Arena(4096, [[(SIZE, 0)]], [False]))
    large = Run(Arena(8192, [[(SIZE, 4096)]], [False]))
    before, _ = process_bytes()
    for run, size in ((small, 4096), (large, 8192), (small, 4096)):
        run_in(run, memory, 0, lambda: x + x)
        assert process_bytes()[0] - before == size  # the pages that a run does not use go back


def test_time_is_split_by_class(x):
    memory, run = Memory(), Run(Arena(4096, [[(SIZE, 0)], [(SIZE, 0)]], [False, True]))
    for op in (0, 1):
        run_in(run, memory, op, x.sum)
        counters = run.counters()
        assert (counters.compute_us > 0, counters.recompute_us > 0) == (op == 0, op == 1)


def test_a_wait_for_a_processor_is_no_time_of_an_op(x):
    """Another process may have the processor: a plan is held against its own ops' times."""
    memory, run = Memory(), Run(Arena(4096, [[(SIZE, 0)]], [False]))
    run_in(run, memory, 0, lambda: time.sleep(0.05) or x.sum())
    assert 0 < run.counters().compute_us < 10_000


def test_process_bytes_follow_allocations():
    settle()
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


def test_half_a_library_in_the_cache_is_compiled_anew(cache):
    """Loading it would end the process."""
    library = build.compiled(build.SOURCE, build.NAME, build.HEADERS)
    whole = library.read_bytes()
    library.parent.unlink()  # the test's link to the folder that tests share
    library.parent.mkdir()
    library.write_bytes(whole[:20_000])
    library.with_suffix(".sha256").write_text(build._digest_of(whole))
    assert build.compiled(build.SOURCE, build.NAME, build.HEADERS) == library
    assert len(library.read_bytes()) == len(whole)


def test_a_cache_that_cannot_be_written_is_gone_without(tmp_path, monkeypatch, caplog):
    (tmp_path / "coop-plan").write_text("a file in the place of the folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build.compiled(build.SOURCE, build.NAME, build.HEADERS)
    assert library.exists()
    assert "continuing without the cache" in caplog.text


def test_a_compiler_may_be_a_command_with_arguments(cache, monkeypatch):
    monkeypatch.setenv("CXX", "env g++")
    library = build.compiled(build.SOURCE, "another_name", build.HEADERS)
    assert library.exists()
    for wrong in ("no-such-compiler -x", "g++ 'unclosed"):
        monkeypatch.setenv("CXX", wrong)
        with pytest.raises(BuildError, match="CXX"):
            build.compiled(build.SOURCE, "a_third", build.HEADERS)


FORKS = """
import os, threading, torch
from coop_plan.runtime.device.build import arena

arena()
torch.set_num_threads(1)
done = threading.Event()

def allocate():
    while not done.is_set():
        torch.empty(64)

threads = [threading.Thread(target=allocate) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(300):
    child = os.fork()
    if not child:
        torch.empty(64)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
done.set()
"""


def test_a_child_forked_while_others_allocate_can_allocate(cache):
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True, timeout=300)


def test_what_an_ended_thread_took_is_not_of_the_thread_after_it(x):
    """The system gives the number of an ended thread to a later one."""
    earlier = {}

    def take():
        earlier[threading.get_ident()] = torch.ones(100_000)

    def step():
        if threading.get_ident() not in earlier:
            return None
        run, memory = Run(Arena(4096, [[]], [False])), Memory()
        run.begin(memory, fresh=True)
        run.arena.leave()
        earlier.clear()
        made = x + x
        run.end()
        return run.counters().process_bytes - made.nbytes

    def in_a_thread(function):
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(function).result()

    in_a_thread(take)
    more = next(filter(lambda seen: seen is not None, map(in_a_thread, 100 * [step])))
    assert more == 4096


def trained():
    """A step that ran twice, its model, and the process's bytes before."""
    options = {"budget": "100%", "method": "keep-all"}
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU())
    step = torch.compile(model, backend="coop", options=options)
    settle()
    before = process_bytes()[0]
    for _ in range(2):
        step(torch.ones(512, 64)).square().mean().backward()
        model.zero_grad()
    return step, model, before


def test_the_arena_is_given_back_when_the_model_is_deleted(own_cache):
    """Dynamo keeps the compiled steps of a model that is gone."""
    step, model, before = trained()
    assert process_bytes()[0] - before > 512 * 512 * 4
    del model, step
    settle()
    assert process_bytes()[0] < before


def test_the_arena_is_given_back_after_a_step_that_could_not_begin(own_cache, monkeypatch):
    """A step that raises before it runs leaves no invocation that is waited for."""
    step, model, before = trained()
    pools = []  # kept, as by other steps with these options

    def fail(pool: ArenaPool, _: object) -> bool:
        pools.append(pool)
        raise RuntimeError("no place")

    with monkeypatch.context() as patch:
        patch.setattr(ArenaPool, "place", fail)
        with pytest.raises(RuntimeError, match="no place"):
            step(torch.ones(512, 64))
    del model, step
    settle()
    assert process_bytes()[0] - before < 512 * 512 * 4


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20_000)), max_size=12),
    st.integers(0, 60_000),
)
def test_packed_tensors_leave_one_gap(drawn, rest):
    """No move reaches a tensor that has not moved, and no large gap is left before the last one."""
    places, sizes, end = [], [], 0
    for gap, size in drawn:
        places.append(end + 512 * gap)
        sizes.append(size)
        end = aligned(places[-1] + size)
    now = dict(enumerate(places))
    moves = list(packed(places, sizes, end + rest))
    for number, to in moves:
        assert to % 512 == 0
        assert to < now[number]
        others = {i: at for i, at in now.items() if i != number}
        assert all(at + sizes[i] <= to or at >= to + sizes[number] for i, at in others.items())
        now[number] = to
    gaps, end = [], 0
    for number, at in now.items():
        gaps.append(at - end)
        end = aligned(at + sizes[number])
    largest = max([*gaps, rest, 0])
    assert largest >= 2 * sum(sizes) or all(
        gap * MAX_COPIES < size for gap, size in zip(gaps, sizes, strict=True)
    )
