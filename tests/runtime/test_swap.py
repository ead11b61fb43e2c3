"""Steps whose tensors go to the host and come back: eager's numbers, whatever the link does."""

import copy
import functools
import gc
import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coop_plan import runtime
from coop_plan.planner import plan
from coop_plan.runtime.device import build
from coop_plan.runtime.device.arena import process_bytes
from coop_plan.runtime.device.copy_engines import FROM_HOST, TO_HOST, CpuCopyEngines, cpu_engines
from coop_plan.runtime.execute import find_plan
from coop_plan.schemas import Prefetch
from tests.runtime.networks import Mlp
from tests.runtime.swapping import swap_plan
from tests.runtime.test_training import CASES, assert_same, compiled, train

LINK = "20MB/s"
"""Slow: the copies of these small networks are in flight for milliseconds."""


@pytest.fixture(autouse=True)
def swapping(monkeypatch):
    monkeypatch.setattr(find_plan, "plan", swap_plan)


def pair(case="mlp", link=LINK, outputs="outside"):
    """A model in eager, the same one with copies, and a batch."""
    make, batch = CASES[case]
    model = make()
    other = copy.deepcopy(model)
    return model, other, compiled(other, "100%", link=link, outputs=outputs), batch()


def one_step(step, batch):
    loss = step(batch)
    loss.backward()
    return loss.detach().clone()


@pytest.mark.parametrize("case", ["dropout", "convolution", "tied"])
def test_losses_and_parameters_equal_eager(case):
    """Bit for bit, at the planned addresses on the device and on the host."""
    model, other, step, batch = pair(case)
    losses = train(model, model, batch)
    assert_same(model, losses, other, train(other, step, batch))
    (report,) = runtime.reports()
    plan = report.plan
    assert plan.swapped_bytes > 0
    assert (report.measured_arena_bytes, report.outside_bytes) == (plan.arena_bytes, 0)
    assert report.measured_host_arena_bytes == plan.host_arena_bytes
    assert report.measured_makespan_us >= report.last_step_us
    assert sum(span.bytes for span in report.copies) == plan.swapped_bytes


@pytest.mark.parametrize("case", ["dropout", "convolution", "tied"])
def test_gradients_may_be_away_until_the_step_ends(case, monkeypatch):
    monkeypatch.setattr(find_plan, "plan", functools.partial(swap_plan, gradients=True))
    model, other, step, batch = pair(case, outputs="gradients")
    losses = train(model, model, batch)
    assert_same(model, losses, other, train(other, step, batch))
    (report,) = runtime.reports()
    kinds = {tensor.id: tensor.kind for tensor in report.graph.tensors}
    back = [s for s in report.plan.steps if isinstance(s, Prefetch)]
    assert [s for s in back if kinds[s.tensor] == "output"]
    assert (report.measured_arena_bytes, report.outside_bytes) == (report.plan.arena_bytes, 0)


def test_gradients_that_were_away_before_they_are_added_lie_outside_the_arena(monkeypatch):
    """Kept by the user there, they would be where the next step has its tensors."""
    monkeypatch.setattr(find_plan, "plan", functools.partial(swap_plan, added=True))
    model, batch = Mlp(), torch.randn(256, 64)
    eager = copy.deepcopy(model)
    step = torch.compile(model, backend="coop", options={"budget": "100%", "link": "1GB/s"})
    for _ in range(3):
        for part in (batch, batch + 1):
            step(part).backward()
            eager(part).backward()
            (report,) = runtime.reports()
            assert report.outside_bytes == 0
            assert report.measured_peak_bytes <= report.budget_bytes
        expected = [parameter.grad for parameter in eager.parameters()]
        assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
        model.zero_grad()
        eager.zero_grad()


def test_the_slab_is_the_hosts_whatever_the_default_device():
    links = CpuCopyEngines()
    with torch.device("meta"):
        links.reserve(64)
    assert links._slab.device.type == "cpu"


def test_copies_take_as_long_as_the_link_says():
    """In each direction one after the other."""
    _, other, step, batch = pair("mlp", "200MB/s")
    train(other, step, batch)
    (report,) = runtime.reports()
    for away in (True, False):
        spans = [span for span in report.copies if span.away is away]
        for span in spans:
            assert span.end_us - span.begin_us >= span.bytes / 200e6 * 1e6 - 1e-3
        for one, following in itertools.pairwise(spans):
            assert following.begin_us >= one.begin_us + one.bytes / 200e6 * 1e6 - 1e-3
    stalls = report.measured_offload_stall_us + report.measured_prefetch_stall_us
    times = report.last_step_us, report.measured_copies_us, stalls
    assert report.measured_makespan_us == pytest.approx(sum(times))
    assert report.measured_copies_us > 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1 << 17), st.integers(0, 300)), min_size=1, max_size=8))
def test_copies_of_any_size_are_complete_after_their_time(copies):
    """Each of some bytes takes some µs, after the one before it, a small one too."""
    links, total = CpuCopyEngines(), sum(size for size, _ in copies)
    slab, values = links.reserve(total), torch.randint(0, 255, (total,), dtype=torch.uint8)
    parts, place = [part.clone() for part in values.split([size for size, _ in copies])], 0
    handles = []
    for part, (size, least_us) in zip(parts, copies, strict=True):
        there = slab.data_ptr() + place
        handles.append(links.copy(TO_HOST, part.data_ptr(), there, size, least_us, part))
        place += size
    spans = [links.wait(handle) for handle in handles]
    assert torch.equal(slab[:total], values)
    timed = [(span, least_us) for span, (_, least_us) in zip(spans, copies, strict=True)]
    assert all(span.end_us - span.begin_us >= least_us - 1e-3 for span, least_us in timed)
    for (one, least_us), (following, _) in itertools.pairwise(timed):
        assert following.begin_us >= one.begin_us + least_us - 1e-3


def test_waits_for_copies_are_without_those_for_a_processor():
    """A copy of 1 ms is due 1 ms after its begin, whenever a thread ran again."""
    links, size = CpuCopyEngines(), 1 << 17
    slab, value = links.reserve(size), torch.zeros(size, dtype=torch.uint8)
    waited = []
    for _ in range(10):
        handle = links.copy(TO_HOST, value.data_ptr(), slab.data_ptr(), size, 1000.0, value)
        began = time.monotonic() * 1e6
        span = links.wait(handle)
        waited.append(span.waited_us)
        assert 0 <= span.waited_us <= max(0, span.begin_us + 1000 - began)
    assert any(waited)


def fails_once(monkeypatch, direction):
    """The next copy in a direction has a fault in its thread."""
    begin = CpuCopyEngines._begin
    left = [direction]

    def broken(links, towards, target, source, size, least_us):
        if towards not in left:
            return begin(links, towards, target, source, size, least_us)
        left.clear()
        engine = cpu_engines()[towards]
        return engine, build.copy_engines().ask(engine, 0, 0, size, least_us)

    monkeypatch.setattr(CpuCopyEngines, "_begin", broken)


@pytest.mark.parametrize("direction", [TO_HOST, FROM_HOST], ids=["away", "back"])
def test_a_fault_in_a_copy_gives_up_the_step_and_no_other(direction, monkeypatch):
    model, other, step, batch = pair()
    losses = [one_step(model, batch) for _ in range(2)]
    assert torch.equal(one_step(step, batch), losses[0])
    gradients = [parameter.grad.clone() for parameter in other.parameters()]
    fails_once(monkeypatch, direction)
    with pytest.raises(runtime.CopyError, match="a copy failed: a copy from or to a null pointer"):
        one_step(step, batch)
    for parameter, gradient in zip(other.parameters(), gradients, strict=True):
        parameter.grad = gradient
    assert torch.equal(one_step(step, batch), losses[1])
    assert_same(model, losses, other, losses)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, another.grad)


def test_an_interrupt_while_a_copy_is_waited_for_leaves_nothing_behind():
    model, other, step, batch = pair("mlp", "1MB/s")  # every copy takes 66 ms
    loss = one_step(model, batch)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        assert torch.equal(one_step(step, batch), loss)
        live = process_bytes()[0]
        gc.disable()  # an interrupt in one of its callbacks is swallowed
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):  # as it is in a destructor, then the step ends well
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                one_step(step, batch)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    other.zero_grad()
    model.zero_grad()
    assert torch.equal(one_step(step, batch), one_step(model, batch))
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, another.grad)
    gc.collect()
    assert process_bytes()[0] <= live


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_a_wait_is_interrupted_before_the_copy_ends(size):
    """Also for a copy that is carried out at once, and ends when its link allows it."""
    interrupted = []

    def interrupt(*_):
        interrupted.append(time.monotonic() * 1e6)
        raise KeyboardInterrupt

    engines = CpuCopyEngines()
    slab, source = engines.reserve(size), torch.zeros(size, dtype=torch.uint8)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        copied = engines.copy(TO_HOST, source.data_ptr(), slab.data_ptr(), size, 1e6, source)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            engines.wait(copied)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted[0] < engines.wait(copied).end_us


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_in_flight_have_their_copies_apart(reverse):
    """One is dropped with copies in flight; of two others each backward gets its own tensors."""
    model, other, step, batch = pair()
    batches = [batch, batch * 2 + 1]
    step(batch)  # no backward
    losses = [step(x) for x in batches]
    expected = [model(x) for x in batches]
    order = list(zip(losses, expected, strict=True))[:: -1 if reverse else 1]
    for loss, another in order:
        assert torch.equal(loss, another)
        loss.backward()
        another.backward()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, another.grad)


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def test_the_slab_goes_with_the_step_and_two_threads_are_all():
    cpu_engines()
    before, live = threads(), process_bytes()[0]
    model, other, step, batch = pair()
    step(batch)  # a copy is in flight
    assert threads() == before
    del step, other, batch, model
    runtime.clear_reports()
    torch._dynamo.reset()
    gc.collect()
    assert process_bytes()[0] <= live


FORK = """
import os, torch
from coop_plan.runtime.execute import find_plan
from tests.runtime.swapping import swap_plan
from tests.runtime.test_swap import one_step, pair

find_plan.plan = swap_plan
torch.set_num_threads(1)
model, _, step, batch = pair()
expected = one_step(model, batch)
assert torch.equal(one_step(step, batch), expected)
child = os.fork()
if not child:
    failed = True
    try:
        failed = not torch.equal(one_step(step, batch), expected)
    finally:
        os._exit(failed)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_copies_by_threads_of_its_own(cache):
    """In a process of its own: where fake CUDA tensors came first, autograd refuses to fork.

    With one thread: OpenMP's do not outlive a fork.
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=300)


def test_an_engine_takes_its_copies_in_order_and_says_when():
    ext = build.copy_engines()
    link = ext.open()
    source = torch.arange(1 << 16, dtype=torch.uint8)
    targets = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(3)]
    ask = functools.partial(ext.ask, link)
    tickets = [ask(t.data_ptr(), source.data_ptr(), t.numel(), 2000.0) for t in targets]
    spans = [ext.wait(link, ticket)[1:] for ticket in tickets]
    assert all(torch.equal(target, source) for target in targets)
    assert all(end - begin >= 2000 for begin, end in spans)
    assert all(b[0] >= a[0] + 2000 - 1e-3 for a, b in itertools.pairwise(spans))
    with pytest.raises(KeyError, match="no copy"):
        ext.wait(link, tickets[0])
    bad = ask(targets[0].data_ptr(), 0, 8, 0.0)
    good = ask(targets[0].data_ptr(), source.data_ptr() + 1, 8, 0.0)
    with pytest.raises(RuntimeError, match="from or to a null pointer"):
        ext.wait(link, bad)
    ext.wait(link, good)
    assert targets[0][:8].tolist() == list(range(1, 9))
    ext.settle(link)
    ext.close(link)


def test_the_planners_own_transfers_run(monkeypatch):
    """What coop-offline moves within a budget, where a link makes it worth while."""
    monkeypatch.setattr(find_plan, "plan", plan)
    model = CASES["dropout"][0]()
    other, batch = copy.deepcopy(model), CASES["dropout"][1]()
    losses = train(model, model, batch)
    step = compiled(other, "60%", link="100GB/s")
    assert_same(model, losses, other, train(other, step, batch))
    (report,) = runtime.reports()
    assert report.plan.swapped_bytes > 0
    assert report.measured_peak_bytes <= report.budget_bytes + report.plan.host_arena_bytes
    assert (report.measured_arena_bytes, report.outside_bytes) == (report.plan.arena_bytes, 0)
    assert report.measured_host_arena_bytes == report.plan.host_arena_bytes
