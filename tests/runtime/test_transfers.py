"""Starts of copies: few calls each, and a time that the plan has."""

import sys

import pytest

import coop_plan
from coop_plan.runtime.capture import joint_graph
from coop_plan.runtime.execute.launch_times import measure_launches
from coop_plan.runtime.execute.transfers import TransferRunner
from coop_plan.runtime.whole_iteration import train_iteration
from coop_plan.schemas import Offload, Prefetch, Wait
from tests.runtime.test_homes import Gpt, Mlp, Pair

MOST_CALLS, MOST_CALLS_OF_PARTS = 20, 24
"""Most functions, in Python and C, that the start of a transfer or its wait calls: of a tensor, and
of the states of a parameter."""


def calls_of(functions, run):
    """Calls below each call of some functions while `run` runs, these included."""
    codes, found, depth = {each.__code__ for each in functions}, [], 0

    def note(frame, event, _):
        nonlocal depth
        if event == "call" and (depth or frame.f_code in codes):
            if not depth:
                found.append(0)
            depth += 1
        elif event == "return" and depth:
            depth -= 1
            return
        found[-1:] = [found[-1] + 1] if depth and event in ("call", "c_call") else found[-1:]

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", [Mlp, Gpt])
def test_a_transfer_takes_few_calls(kind, optimizer, monkeypatch):
    """All that is the same in each iteration is computed once a plan; states have three parts."""
    monkeypatch.setattr("coop_plan.runtime.whole_iteration.updates.host_us", lambda *_: None)
    pair = Pair(kind, optimizer, "min")
    pair.run(0, 1)
    functions = TransferRunner.offload, TransferRunner.prefetch, TransferRunner.wait
    found = calls_of(functions, lambda: pair.iteration(pair.ours.batch(2)))
    steps = coop_plan.reports()[-1].plan.steps
    assert len(found) == sum(isinstance(step, Offload | Prefetch | Wait) for step in steps)
    most = MOST_CALLS_OF_PARTS if optimizer == "adamw" else MOST_CALLS
    assert max(found) <= most, sorted(set(found))


def test_the_makespan_has_the_launches():
    """Of the plan, those that were measured; of the step, the time of its own."""
    pair = Pair(Mlp, "adamw", "min")
    report = pair.run(0, 1, 2)
    device = report.graph.device
    assert device.copy_launch_us > 0
    copies = sum(isinstance(step, Offload | Prefetch) for step in report.plan.steps)
    assert report.plan.cost_us >= copies * device.copy_launch_us
    times = report.last_step_us, report.measured_copies_us, report.measured_host_stall_us
    stalls = report.measured_offload_stall_us + report.measured_prefetch_stall_us
    assert report.measured_makespan_us == pytest.approx(sum(times) + stalls)
    assert report.measured_copies_us > 0


def test_launches_of_the_cpu_are_measured_once(own_cache, monkeypatch):
    """Later captures read them from the cache of profiles."""
    measured = []

    def measure():
        measured.append(measure_launches())
        return measured[-1]

    monkeypatch.setattr(train_iteration, "measure_launches", measure)
    for rows in (8, 16):
        joint_graph._measured.cache_clear()
        report = Pair(Mlp, "sgd", "90%").run(0, rows=rows)
        device = report.graph.device
        assert measured == [
            {"launch_us": device.launch_us, "copy_launch_us": device.copy_launch_us}
        ]
    joint_graph._measured.cache_clear()
