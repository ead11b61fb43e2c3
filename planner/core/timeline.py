"""
The timeline: what the steps of a plan cost, in one place.

Three engines run in plan order: compute, device to host, host to device. A copy begins when compute
has come to its step and its engine is free, and takes a latency and its bytes at the engine's
bandwidth; a wait holds compute until the copy is over. The cost of a plan is its makespan: the end
of the last compute step or of the last copy that was waited for. Without copies it is the sum of
the costs of the bodies, whatever their order.
"""

from dataclasses import dataclass, field
from math import fsum

from coop_plan.schemas import Compute, Device, Graph, Offload, Plan, Prefetch, Wait


@dataclass
class Engine:
    """A copy engine: bytes/s, µs per copy, and when it is free, µs."""

    bytes_per_s: float
    latency_us: float
    free_us: float = 0.0

    def copy(self, now_us: float, size: int) -> float:
        """Copy so many bytes as soon as it can; returns the end, µs. No engine never ends."""
        if not self.bytes_per_s:
            self.free_us = float("inf")
        else:
            begin = max(now_us, self.free_us)
            self.free_us = begin + self.latency_us + size / self.bytes_per_s * 1e6
        return self.free_us


@dataclass
class Timeline:
    """The engines of a device while the steps of a plan go by; times are µs from the beginning."""

    device: Device
    stall_us: float = 0.0
    """How long compute has waited for copies."""
    _costs: list[float] = field(default_factory=list)
    _now_us: float = 0.0
    _ends: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        latency = self.device.copy_latency_us
        self._to_host = Engine(self.device.d2h_bytes_per_s, latency)
        self._to_device = Engine(self.device.h2d_bytes_per_s, latency)

    def compute(self, cost_us: float) -> None:
        """A body runs for so long."""
        self._costs.append(cost_us)
        self._now_us += cost_us

    def offload(self, buffer: int, size: int) -> None:
        """A copy of so many bytes of a buffer to the host begins."""
        self._ends[buffer] = self._to_host.copy(self._now_us, size)

    def prefetch(self, buffer: int, size: int) -> None:
        """A copy of so many bytes from the host into a buffer begins."""
        self._ends[buffer] = self._to_device.copy(self._now_us, size)

    def wait(self, buffer: int) -> None:
        """Compute waits for the copy that was last begun on a buffer."""
        end = self._ends.pop(buffer)
        self.stall_us += max(0.0, end - self._now_us)
        self._now_us = max(self._now_us, end)

    @property
    def end_us(self) -> float:
        """The makespan so far."""
        # Without stalls an exact sum: the same runs cost the same in any order.
        return self._now_us if self.stall_us else fsum(self._costs)


def plan_cost_us(graph: Graph, plan: Plan) -> float:
    """
    What the steps of a plan cost with the costs and the device of `graph`, µs.

    Raises:
        KeyError: a step names an op, a variant or a buffer that is not there.
    """
    timeline = Timeline(graph.device)
    cost: dict[tuple[int, str | None], float] = {(op.id, None): op.cost_us for op in graph.ops}
    cost |= {(op.id, v.name): v.cost_us for op in graph.ops for v in op.variants}
    size: dict[int, int] = {}
    for step in plan.steps:
        match step:
            case Compute():
                timeline.compute(cost[step.op, step.variant])
                size |= {write.buffer: write.bytes for write in step.writes}
            case Offload():
                timeline.offload(step.buffer, size[step.buffer])
            case Prefetch():
                size[step.buffer] = step.bytes
                timeline.prefetch(step.buffer, step.bytes)
            case Wait():
                timeline.wait(step.buffer)
    return timeline.end_us
