"""Calls of compiled functions in which nothing was planned are told of, never passed over.

Dynamo may decide, without asking the backend, that a frame runs as it is: because of a graph break
in a loop, or since nobody calls what was compiled.
"""

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from coop_plan.runtime.reports import REPORT, StepReport
from coop_plan.runtime.torch_internals.dynamo import (
    graph_break_counts,
    recorded_nodes,
    restore_top_frame,
    watch_calls,
)

log = logging.getLogger("coop-plan")

SAID = "coop_said"
"""Attribute of a `torch.compile` call of which was said that not all of it is planned."""


class _Counts:
    """Of this process: functions compiled, and calls of them."""

    compiled = 0
    calls = 0


class _Here(threading.local):
    planned = 0
    told = 0
    breaks = 0


_here = _Here()


def planned_forwards() -> int:
    """How many forwards that are planned this thread began: it only rises."""
    return _here.planned


def counted(
    planned: Callable[..., Any], report: StepReport, returned: Callable[[Any], None]
) -> Callable[..., Any]:
    """A step that is planned: its record, and what is called with the outputs of each call."""

    def run(*args: Any) -> Any:
        _here.planned += 1
        outputs = planned(*args)
        returned(outputs)
        return outputs

    setattr(run, REPORT, report)
    return run


def told(unplanned: Callable[..., Any]) -> Callable[..., Any]:
    """A graph that is not planned, of which it was said why."""

    def run(*args: Any) -> Any:
        _here.told += 1
        return unplanned(*args)

    return run


def told_of_break() -> None:
    """It was said which graph break ends a graph that this thread compiled."""
    _here.breaks += 1


def install(backend: Any) -> None:
    """Watch the calls of all functions that are compiled with `backend` from now on."""
    watch_calls(backend, _compiled, _Call)


_calls: list["weakref.ref[Any]"] = []
"""The `torch.compile` calls with this backend, as long as what they made is there."""


def is_one_of_several(call: object) -> bool:
    """Whether other functions were compiled as by this `torch.compile` call: blocks of a model."""
    return len([ref for ref in list(_calls) if ref() == call]) > 1


def _compiled(call: Any) -> None:
    """A function was compiled; if it is never called, the first optimizer step tells."""
    _calls.append(weakref.ref(call, _calls.remove))
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
    """Surrounds one call of what `compiled`, a `torch.compile` call, made."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __enter__(self) -> None:
        restore_top_frame()
        _Counts.calls += 1
        self._before, self._told = sys.exception(), _here.told
        self._breaks = _here.breaks
        self._planned, self._nodes = planned_forwards(), recorded_nodes()
        self._known = {} if hasattr(self._compiled, SAID) else graph_break_counts()

    def __exit__(self, *_: object) -> None:
        if sys.exception() is not self._before or _here.told != self._told:
            return  # Dynamo ends the context in a `finally`, and does not say what was raised
        if not torch.is_grad_enabled() or hasattr(self._compiled, SAID):
            return
        now = graph_break_counts().items()
        reasons = [why for why, times in now if times > self._known.get(why, 0)]
        if planned_forwards() != self._planned:
            if reasons and _here.breaks == self._breaks:
                setattr(self._compiled, SAID, True)
                log.warning(
                    "a graph break (%s): what Dynamo leaves to eager autograd, whole functions"
                    " perhaps, is not within the budget; fullgraph=True makes this an error that"
                    " names the line",
                    _in_a_line(reasons),
                )
            return
        if recorded_nodes() == self._nodes:
            return
        setattr(self._compiled, SAID, True)
        log.warning(
            "nothing was planned: a compiled function ran as eager autograd, not within the"
            " budget%s; fullgraph=True makes this an error that names the line",
            f" ({_in_a_line(reasons)})" if reasons else "",
        )


def _in_a_line(reasons: Iterable[str]) -> str:
    """The reasons of Dynamo that are the first lines of its texts, with their explanations."""
    lines = (line.strip() for line in "\n".join(reasons).splitlines())
    return " ".join([line for line in lines if line][:2])
