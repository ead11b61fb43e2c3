"""
A plugin of pytest for `make coverage`: the planner's tests where kernels run as Python.

Properties are tried on a few examples (`COOP_PLAN_EXAMPLES`), whatever their settings say. A test
that takes longer than `COOP_PLAN_SECONDS` is ended there as skipped: the lines that it ran count.
Solvers' processes, which are killed otherwise, are given the time to write down what they ran.
"""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import numba
import pytest
from hypothesis import settings

from coop_plan.planner.exact.solver.process import Child

EXAMPLES = int(os.environ.get("COOP_PLAN_EXAMPLES", "5"))
SECONDS = float(os.environ.get("COOP_PLAN_SECONDS", "30"))

GOODBYE = 3.0
"""How long a solver's process may take to end, s; one that is still solving does not."""

MEANS_COMPILED_CODE = "test_kernel_cache.py"

assert numba.config.DISABLE_JIT, "set NUMBA_DISABLE_JIT=1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if MEANS_COMPILED_CODE in item.nodeid]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        test = getattr(item, "obj", None)
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > EXAMPLES:
            fewer = settings(own, max_examples=EXAMPLES, deadline=None)
            test._hypothesis_internal_use_settings = fewer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    def end(_, frame):
        if "coverage" in Path(frame.f_code.co_filename).parts:
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # it may hold its lock
            return
        pytest.skip(f"longer than {SECONDS} s without compiled kernels")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_configure():
    kill = Child.kill

    def end_then_kill(child):
        process = child._process
        if process is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(GOODBYE)
        kill(child)

    Child.kill = end_then_kill
