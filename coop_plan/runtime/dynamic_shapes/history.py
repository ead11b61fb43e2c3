"""What is known of a function's steps at other sizes when it is planned at one more."""

import logging
from collections import deque
from dataclasses import dataclass, field, replace

from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.gradients.capture_adjust import Circumstances
from coop_plan.schemas import Graph, Plan

MOST = 8
"""Plans of one function that are remembered."""


@dataclass
class Others:
    """Plans of one function's steps, the latest last, and what they found in the process."""

    plans: deque[tuple[Graph, Plan]] = field(default_factory=lambda: deque(maxlen=MOST))
    _found: dict[int, tuple[Circumstances, int]] = field(default_factory=dict)
    """By the number of inputs, which their positions are of; with the bytes of the step."""
    _told: set[str] = field(default_factory=set)

    def level(self, kind: str) -> int:
        """How loud the log says a kind of thing: it need not warn of it for each size."""
        if kind in self._told:
            return logging.INFO
        self._told.add(kind)
        return logging.WARNING

    def found(self, captured: Captured, circumstances: Circumstances) -> None:
        """A step runs under these circumstances."""
        self._found[_inputs(captured)] = circumstances, _bytes(captured)

    def expected(self, captured: Captured) -> Circumstances:
        """Those of another step, with what it takes outside the plan in proportion."""
        found, size = self._found.get(_inputs(captured), (Circumstances(), 1))
        reserve = -(-found.reserve * _bytes(captured) // size)
        return replace(found, reserve=reserve)


def _inputs(captured: Captured) -> int:
    return len(captured.output_args) - captured.num_fwd_outputs


def _bytes(captured: Captured) -> int:
    """Of all that is made in a step; at least one."""
    return 1 + sum(t.bytes for t in captured.graph.tensors if not t.resident)
