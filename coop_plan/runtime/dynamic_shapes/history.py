"""Shape history: plans and observations for other input shapes of the same function."""

import logging
from collections import deque
from dataclasses import dataclass, field, replace

from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment
from coop_plan.schemas import Graph, Plan

MAX_PLANS = 8
"""Plans kept for one function."""


@dataclass
class ShapeHistory:
    """Plans of one function's steps, the latest last, and their memory environments."""

    plans: deque[tuple[Graph, Plan]] = field(default_factory=lambda: deque(maxlen=MAX_PLANS))
    _found: dict[int, tuple[MemoryEnvironment, int]] = field(default_factory=dict)
    """Environment and bytes of the latest step, by number of inputs (which positions refer to)."""
    _logged: set[str] = field(default_factory=set)

    def level(self, kind: str) -> int:
        """Log level of a kind of message: a warning once, then only information."""
        if kind in self._logged:
            return logging.INFO
        self._logged.add(kind)
        return logging.WARNING

    def found(self, captured: Captured, environment: MemoryEnvironment) -> None:
        """Record the environment of a step."""
        self._found[_inputs(captured)] = environment, _bytes(captured)

    def expected(self, captured: Captured) -> MemoryEnvironment:
        """Environment of another step, with its reserve in proportion to the bytes."""
        found, size = self._found.get(_inputs(captured), (MemoryEnvironment(), 1))
        reserve = -(-found.reserve * _bytes(captured) // size)
        return replace(found, reserve=reserve)


def _inputs(captured: Captured) -> int:
    return len(captured.output_args) - captured.num_fwd_outputs


def _bytes(captured: Captured) -> int:
    """Bytes of all tensors that a step makes, plus one."""
    return 1 + sum(t.bytes for t in captured.graph.tensors if not t.resident)
