"""Updates on the host: iterations are the loop's, and errors and signals as with other updates."""

import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import coop_plan
from coop_plan.runtime import PartlyUpdatedError
from coop_plan.runtime.device.copy_engines import CpuCopyEngines
from coop_plan.runtime.whole_iteration import updates
from tests.runtime.iterating import OPTIMIZERS, eager, equal, state_of
from tests.runtime.test_homes import Failure, Gpt, Mlp, Pair, Pixels, by_parameter

KINDS = [Mlp, Gpt, Pixels]


def runs_on_host(report):
    """The updates that a plan runs on the host."""
    return [step.op for step in report.plan.steps if getattr(step, "variant", None) == "host"]


@pytest.fixture
def free(monkeypatch):
    """Updates on the host seem to take no time, so that plans have them."""
    monkeypatch.setattr(updates, "host_us", lambda *_: 0.1)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    optimizer=st.sampled_from(["sgd", "momentum", "adam", "adamw"]),
    clip_norm=st.sampled_from([None, 0.05]),
    link=st.sampled_from(["100MB/s", "2GB/s", "8GB/s"]),
    budget=st.sampled_from(["90%", "50%", "min"]),
    count=st.integers(1, 2),
)
def test_an_iteration_with_updates_on_the_host_is_the_loops(
    free, kind, optimizer, clip_norm, link, budget, count
):
    torch._dynamo.reset()
    report = Pair(kind, optimizer, budget, clip_norm, link).run(0, 1, 2, count=count)
    print(kind.__name__, optimizer, clip_norm, link, budget, count, len(runs_on_host(report)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_may_update_on_the_host(free, optimizer):
    report = Pair(Mlp, optimizer, "min", 0.05).run(0, 1, 2)
    print(optimizer, len(runs_on_host(report)), len(report.plan.homes))
