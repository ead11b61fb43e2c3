"""Updates on the host: iterations are the loop's to the bit, by a thread beside the step."""

import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import coop_plan
from coop_plan.planner.homes import search
from coop_plan.runtime import PartlyUpdatedError
from coop_plan.runtime.device import build
from coop_plan.runtime.device.copy_engines import TO_HOST, CpuCopyEngines, cpu_engines
from coop_plan.runtime.execute.host_updates import HostUpdates
from coop_plan.runtime.whole_iteration import updates
from tests.runtime.iterating import OPTIMIZERS, preferring_host, runs_on_host
from tests.runtime.test_homes import WIDTH, Gpt, Mlp, Pair, Pixels, Waves, copying


@pytest.fixture(autouse=True)
def prefer_host(monkeypatch):
    preferring_host(monkeypatch)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from([Mlp, Gpt, Pixels]),
    optimizer=st.sampled_from(["sgd", "momentum", "adam", "adamw"]),
    clip_norm=st.sampled_from([None, 0.05]),
    link=st.sampled_from(["0", "2GB/s", "8GB/s"]),
    budget=st.sampled_from(["90%", "50%", "min"]),
    count=st.integers(1, 2),
)
@example(Gpt, "adamw", 0.05, "8GB/s", "min", 2)
@example(Pixels, "adam", None, "2GB/s", "min", 1)
def test_an_iteration_with_updates_on_the_host_is_the_loops(
    kind, optimizer, clip_norm, link, budget, count
):
    torch._dynamo.reset()
    report = Pair(kind, optimizer, budget, clip_norm, link).run(0, 1, 2, count=count)
    assert runs_on_host(report) or link == "0" or budget != "min"
    measured = report.measured_host_us, report.planned_host_us
    assert all(measured) if runs_on_host(report) else not any(measured)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_may_update_on_the_host(optimizer):
    report = Pair(Mlp, optimizer, "min", 0.05).run(0, 1, 2)
    assert len(runs_on_host(report)) == 2 * 6


def test_complex_weights_may_update_on_the_host():
    pair = Pair(Waves, "sgd", "min")
    for step in range(3):
        pair.compare(pair.ours.batch(step))
    assert runs_on_host(coop_plan.reports()[-1])


def test_sizes_and_micro_batches_share_the_homes():
    """Also iterations whose updates are on the device."""
    pair = Pair(Mlp, "adamw", "min")
    on_device = coop_plan.train_iteration(pair.ours.loss, pair.mine, "90%")
    on_host, on_any = pair.iteration, set()
    for step, (rows, count) in enumerate([(8, 1), (16, 1), (8, 2), (8, 1), (16, 1)]):
        pair.iteration = on_device if step == 3 else on_host
        on_any.add(bool(runs_on_host(pair.run(step, rows=rows, count=count))))
    assert on_any == {True, False}


@pytest.mark.parametrize("link", [None, "8GB/s"])
def test_variants_have_their_measured_cost_if_there_is_a_link(link, monkeypatch):
    monkeypatch.setattr(updates, "host_us", lambda *_: 7.0)
    ops = Pair(Mlp, "adamw", "90%", link=link).run(0).graph.ops
    found = [(v.engine, v.cost_us) for op in ops for v in op.variants if v.engine == "host"]
    assert found == ([("host", 7.0)] * 12 if link else [])


def test_a_gradient_that_is_overwritten_keeps_its_update_on_the_device(monkeypatch):
    """The host has a copy of it, which is not what later ops would read."""

    class Doubling(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(2)
            super().step(closure)

    monkeypatch.setitem(OPTIMIZERS, "doubling", lambda p: Doubling(p, 0.05))
    report = Pair(Mlp, "doubling", "min").run(0, 1, 2)
    assert not runs_on_host(report)


class Lending(torch.optim.SGD):
    """All its parameters use one tensor for temporaries."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.05)
        self.temporary = torch.zeros(WIDTH * WIDTH)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own = self.temporary[: parameter.numel()].view(parameter.shape)
                    own.copy_(parameter.grad)
                    time.sleep(0.005)
                    parameter.data.sub_(own, alpha=0.05)


def test_an_optimizer_of_another_author_updates_one_parameter_at_a_time(monkeypatch):
    """Every second update is on the host."""
    monkeypatch.setitem(OPTIMIZERS, "lending", Lending)
    monkeypatch.setattr(search, "SHARES", [(0.5, 1.0)])
    monkeypatch.setattr(search, "REFINEMENTS", [])
    monkeypatch.setattr(search, "HOST_SHARES", [])
    monkeypatch.setattr(search, "HOST_REFINEMENTS", [])
    report = Pair(Mlp, "lending", "60%").run(0, 1)
    assert 0 < len(runs_on_host(report)) < 12


@pytest.mark.parametrize("threads", [1, 2])
def test_updates_on_the_host_have_the_threads_of_the_step(threads, monkeypatch):
    update, found = updates.ParameterUpdate.__call__, set()

    def noting(self, gradient):
        on_host = threading.current_thread() is not threading.main_thread()
        found.add((on_host, torch.get_num_threads()))
        update(self, gradient)

    monkeypatch.setattr(updates.ParameterUpdate, "__call__", noting)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        Pair(Mlp, "adamw", "min").run(0, 1)
    finally:
        torch.set_num_threads(before)
    assert found == {(True, threads)}


def test_updates_read_the_copies_of_gradients(monkeypatch):
    """Gradients that are not copied leave zeros, or numbers of before: not the loop's."""
    pair = Pair(Mlp, "sgd", "min")
    pair.run(0)
    before = [p.detach().clone() for p in pair.ours.parameters()]
    copying(monkeypatch, TO_HOST, torch.zeros(1 << 20, dtype=torch.uint8))
    pair.iteration(pair.ours.batch(1))
    assert all(map(torch.equal, before, pair.ours.parameters()))


def test_a_copy_that_fails_leaves_its_update_out(monkeypatch):
    """Both threads that wait for it are told."""
    pair = Pair(Mlp, "momentum", "min")
    pair.run(0)
    before = [p.detach().clone() for p in pair.ours.parameters()]
    begin, copied = CpuCopyEngines._begin, []

    def failing(links, direction, target, source, size, least_us):
        if (direction, size) == (TO_HOST, 4 * WIDTH * WIDTH):  # of a weight's gradient
            copied.append(source)
            source = 0 if len(copied) == 2 else source
        return begin(links, direction, target, source, size, least_us)

    monkeypatch.setattr(CpuCopyEngines, "_begin", failing)
    with pytest.raises(PartlyUpdatedError, match="CopyError") as found:
        pair.iteration(pair.ours.batch(1))
    after = pair.ours.parameters()
    updated = sum(not torch.equal(*one) for one in zip(before, after, strict=True))
    assert found.match(f"after {updated} of 12 parameters were updated")
    assert 0 < updated < 12


def test_the_wait_of_the_end_is_without_those_for_a_processor():
    """An update that sleeps has no processor; one that waits for its copy does not need one."""
    ended = []

    def update(gradient):
        time.sleep(0.05)
        ended.append(gradient)

    with HostUpdates() as host:
        for waited_us in (0.0, 7.0):
            copied = torch.zeros(1), waited_us
            host.start(lambda copied=copied: copied, update)
    assert len(ended) == 2
    assert 7.0 < host.stall_us == pytest.approx(host.busy_us + 7.0)


def test_two_threads_wait_for_a_copy():
    ext, (engine, _) = build.copy_engines(), cpu_engines()
    for source, error in ((torch.ones(1 << 16), None), (None, "null pointer")):
        target = torch.zeros(1 << 16)
        address = 0 if source is None else source.data_ptr()
        copy = ext.ask(engine, target.data_ptr(), address, target.nbytes, 100.0)
        ext.share(engine, copy)
        for _ in range(2):
            if error is None:
                ext.wait(engine, copy)
                assert torch.equal(target, source)
            else:
                with pytest.raises(RuntimeError, match=error):
                    ext.wait(engine, copy)
        with pytest.raises(KeyError):
            ext.wait(engine, copy)
