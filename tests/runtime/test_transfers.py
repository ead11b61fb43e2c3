"""Starts of copies: few calls each, and a time that the plan has."""

import sys

import pytest
import torch

import coop_plan
from coop_plan.runtime.execute.launch_times import measure_launches
from coop_plan.runtime.execute.transfers import TransferRunner
from coop_plan.schemas import Offload, Prefetch, Wait
from tests.runtime.test_homes import Gpt, Mlp, Pair

MOST_CALLS = 14
"""Most Python functions and methods in C that the start of a transfer calls, and the wait for it."""


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
    extra = 8 * (optimizer == "adamw")
    assert max(found) <= MOST_CALLS + extra, sorted(found)


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


def test_launches_are_measured_on_full_and_on_emptied_caches(monkeypatch):
    """Both are times of host code, so that none is without it."""
    with torch.no_grad():
        found = measure_launches()
    assert set(found) == {"launch_us", "copy_launch_us"}
    assert found["copy_launch_us"] > 0 <= found["launch_us"]
