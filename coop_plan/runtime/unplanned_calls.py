"""Warnings about calls of compiled functions in which nothing was planned.

Dynamo may run a frame eagerly without asking the backend, for example because of a graph break in a
loop. A compiled function may also never be called.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from coop_plan.runtime.device.arena import process_bytes
from coop_plan.runtime.reports import REPORT, StepReport
from coop_plan.runtime.source_lines import user_call
from coop_plan.runtime.torch_internals.dynamo import (
    compile_whole_models,
    graph_break_counts,
    ignore_once_loggers,
    recorded_nodes,
    refusal_counts,
    restore_top_frame,
    share_recompile_limit,
    watch_calls,
)

log = logging.getLogger("coop-plan")

STATE = "coop_calls"
"""Attribute of a `torch.compile` call with its `_State`."""


@dataclass
class _State:
    """Calls so far, and True if a warning was logged, and if the planned shares were measured."""

    calls: int = 0
    logged: bool = False
    measured: bool = False


class _Counts:
    """Functions compiled in this process, and calls of them."""

    compiled = 0
    calls = 0


class _Thread(threading.local):
    planned = 0
    unplanned = 0
    breaks = 0
    prepared = False  # Dynamo's settings belong to a thread
    measured: list[tuple[StepReport, int]] | None = None
    """Planned forwards of the call that is measured, with the bytes that each has left."""


_thread = _Thread()


def planned_forwards() -> int:
    """Number of planned forwards that this thread has begun."""
    return _thread.planned


def count_planned(
    planned: Callable[..., Any], report: StepReport, returned: Callable[[Any], None]
) -> Callable[..., Any]:
    """Wrap a planned step: counts its calls, and passes the outputs of each to `returned`."""

    def run(*args: Any) -> Any:
        _thread.planned += 1
        before = 0 if _thread.measured is None else process_bytes()[0]
        outputs = planned(*args)
        if _thread.measured is not None:
            _thread.measured.append((report, process_bytes()[0] - before))
        returned(outputs)
        return outputs

    setattr(run, REPORT, report)
    return run


def count_unplanned(unplanned: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a graph that runs unplanned and whose reason was logged."""

    def run(*args: Any) -> Any:
        _thread.unplanned += 1
        return unplanned(*args)

    return run


def graph_break_logged() -> None:
    """Note that the graph break that ends a graph of this thread was logged."""
    _thread.breaks += 1


def install(backend: Any) -> None:
    """Observe the calls of all functions compiled with `backend` from now on."""
    watch_calls(backend, _compiled, _Call)


def _compiled(call: Any) -> None:
    """Note a compiled function; if none is called before an optimizer step, a warning is logged."""
    _Counts.compiled += 1
    if _Counts.compiled > 1:
        return

    @cache
    def first_step() -> None:
        if not _Counts.calls:
            log.warning(
                "nothing was planned: %d function(s) compiled with this backend, and an optimizer"
                " made its first step before one of them was called: compile what the loop calls"
                " (Lightning calls training_step: coop_plan.runtime.integrations.lightning)",
                _Counts.compiled,
            )

    # Not removed: PyTorch iterates over all such hooks while one is called.
    register_optimizer_step_post_hook(lambda *_: first_step())


class _Call:
    """Context of one call of a function compiled by `compiled`, a `torch.compile` call."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __enter__(self) -> None:
        self._restore = compile_whole_models()
        if not _thread.prepared:
            ignore_once_loggers()
            _thread.prepared = True
        restore_top_frame()
        self._state = state = vars(self._compiled).setdefault(STATE, _State())
        if not state.calls:
            share_recompile_limit()
        state.calls += 1
        _Counts.calls += 1
        self._before, self._logged = sys.exception(), _thread.unplanned
        self._breaks = _thread.breaks
        self._planned, self._nodes = planned_forwards(), recorded_nodes()
        self._known = {} if state.logged else graph_break_counts()
        self._refused = {} if state.logged else refusal_counts()
        measures = state.calls > 1 and not state.measured and self._planned > 0
        self._outer, _thread.measured = _thread.measured, [] if measures else None
        self._bytes = process_bytes()[0] if measures else 0

    def __exit__(self, *_: object) -> None:
        self._restore()
        state, measured, _thread.measured = self._state, _thread.measured, self._outer
        if sys.exception() is not self._before or _thread.unplanned != self._logged:
            return  # Dynamo ends the context in a `finally`, without the exception
        if not torch.is_grad_enabled():
            return
        if measured:
            self._measure(measured)
        if state.logged:
            return
        reasons = _new(graph_break_counts(), self._known)
        if planned_forwards() != self._planned:
            if reasons and _thread.breaks == self._breaks:
                state.logged = True
                log.warning(
                    "%s: a graph break (%s): code that Dynamo leaves to eager autograd, possibly"
                    " whole functions, is not within the budget; fullgraph=True makes this an error"
                    " that names the line",
                    *(user_call(), _in_a_line(reasons)),
                )
            return
        if recorded_nodes() == self._nodes:
            return
        state.logged = True
        reasons = reasons or _new(refusal_counts(), self._refused)
        log.warning(
            "%s: nothing was planned: a compiled function ran as eager autograd, not within the"
            " budget%s; fullgraph=True makes this an error that names the line",
            *(user_call(), f" ({_in_a_line(reasons)})" if reasons else ""),
        )

    def _measure(self, measured: Sequence[tuple[StepReport, int]]) -> None:
        """Report the shares of a call's ops and bytes that are planned, if it compiled nothing."""
        reports = [report for report, _ in measured]
        if not all(report.steps_run for report in reports):
            return  # a trace records nodes of its own
        self._state.measured = True
        eager_ops = recorded_nodes() - self._nodes - len(measured)  # a planned forward is one node
        eager_bytes = process_bytes()[0] - self._bytes - sum(left for _, left in measured)
        ops = sum(op.phase == "forward" for report in reports for op in report.graph.ops)
        planned = sum(report.peak_bytes - report.resident_bytes for report in reports)
        for report in reports:
            report.planned_ops_share = ops / max(1, ops + max(0, eager_ops))
            report.planned_bytes_share = planned / max(1, planned + max(0, eager_bytes))


def _new(counts: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """Reasons that were counted since they were `known`."""
    return [why for why, times in counts.items() if times > known.get(why, 0)]


def _in_a_line(reasons: Iterable[str]) -> str:
    """Dynamo's reasons in one line: the first two lines of its texts."""
    lines = (line.strip() for line in "\n".join(reasons).splitlines())
    return " ".join([line for line in lines if line][:2])
