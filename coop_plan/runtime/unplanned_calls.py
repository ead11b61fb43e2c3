"""Warnings about calls of compiled functions in which nothing was planned.

Dynamo may run a frame eagerly without asking the backend, for example because of a graph break in a
loop. A compiled function may also never be called.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from coop_plan.runtime.reports import REPORT, StepReport
from coop_plan.runtime.torch_internals.dynamo import (
    compile_whole_models,
    graph_break_counts,
    ignore_once_loggers,
    recorded_nodes,
    restore_top_frame,
    watch_calls,
)

log = logging.getLogger("coop-plan")

LOGGED = "coop_said"
"""Attribute of a `torch.compile` call for which a warning was logged."""


class _Counts:
    """Functions compiled in this process, and calls of them."""

    compiled = 0
    calls = 0


class _Thread(threading.local):
    planned = 0
    unplanned = 0
    breaks = 0
    prepared = False  # Dynamo's settings belong to a thread


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
        outputs = planned(*args)
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

    def first_step(*_: Any) -> None:
        handle.remove()
        if not _Counts.calls:
            log.warning(
                "nothing was planned: %d function(s) compiled with this backend, and an optimizer"
                " made its first step before one of them was called: compile what the loop calls"
                " (Lightning calls training_step: coop_plan.runtime.integrations.lightning)",
                _Counts.compiled,
            )

    handle = register_optimizer_step_post_hook(first_step)


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
        _Counts.calls += 1
        self._before, self._logged = sys.exception(), _thread.unplanned
        self._breaks = _thread.breaks
        self._planned, self._nodes = planned_forwards(), recorded_nodes()
        self._known = {} if hasattr(self._compiled, LOGGED) else graph_break_counts()

    def __exit__(self, *_: object) -> None:
        self._restore()
        if sys.exception() is not self._before or _thread.unplanned != self._logged:
            return  # Dynamo ends the context in a `finally`, without the exception
        if not torch.is_grad_enabled() or hasattr(self._compiled, LOGGED):
            return
        now = graph_break_counts().items()
        reasons = [why for why, times in now if times > self._known.get(why, 0)]
        if planned_forwards() != self._planned:
            if reasons and _thread.breaks == self._breaks:
                setattr(self._compiled, LOGGED, True)
                log.warning(
                    "a graph break (%s): code that Dynamo leaves to eager autograd, possibly whole"
                    " functions, is not within the budget; fullgraph=True makes this an error that"
                    " names the line",
                    _in_a_line(reasons),
                )
            return
        if recorded_nodes() == self._nodes:
            return
        setattr(self._compiled, LOGGED, True)
        log.warning(
            "nothing was planned: a compiled function ran as eager autograd, not within the"
            " budget%s; fullgraph=True makes this an error that names the line",
            f" ({_in_a_line(reasons)})" if reasons else "",
        )


def _in_a_line(reasons: Iterable[str]) -> str:
    """Dynamo's reasons in one line: the first two lines of its texts."""
    lines = (line.strip() for line in "\n".join(reasons).splitlines())
    return " ".join([line for line in lines if line][:2])
