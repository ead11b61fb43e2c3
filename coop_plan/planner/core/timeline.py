"""
The timeline: what the steps of a plan cost, in one place.

Three engines run in plan order: compute, device to host, host to device. Compute comes to a step
when every compute step before it is over, and every copy that a `wait` before it is for. From then
on

- a compute step runs at once;
- a copy runs as soon as its engine is free, for the latency of the device and its bytes at the
  engine's bandwidth; without bandwidth there is no such engine, and a copy never ends;
- a `wait` holds compute, and all that is listed after it, until its copy is over.

So a copy begins with its source complete: what makes an offload's source, and the wait for the
offload that a prefetch reads, are listed before it. And it begins only when everything before it
that used the bytes it writes is over: lifetimes, on the device and on the host, end with a compute
step or a wait, in the order of the steps, whatever the times turn out to be. A device does this by
recording an event where compute stands when the copy is listed, and having the copy's stream wait
for it. An offload is listed right behind the run that makes its source for it to begin early, a
prefetch behind the last step that uses the bytes it takes over.

The cost of a plan is its makespan: the end of the last compute step or of the last copy that was
waited for. Without copies it is the sum of the costs of the variants, whatever their order. How long
compute is held is told by cause: waits for a tensor to come back, and waits for bytes that are
still being copied away.
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
        self.free_us = max(now_us, self.free_us) + self.lasts_us(size)
        return self.free_us

    def lasts_us(self, size: int) -> float:
        """How long a copy of so many bytes takes, µs."""
        if not self.bytes_per_s:
            return float("inf")
        return self.latency_us + size / self.bytes_per_s * 1e6


@dataclass
class Timeline:
    """The engines of a device while the steps of a plan go by; times are µs from the beginning."""

    device: Device
    offload_stall_us: float = 0.0
    """How long compute has waited for copies to the host, that is, for the bytes they leave."""
    prefetch_stall_us: float = 0.0
    """How long compute has waited for copies from the host."""
    _costs: list[float] = field(default_factory=list)
    _now_us: float = 0.0
    _away: dict[int, float] = field(default_factory=dict)
    _back: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        latency = self.device.copy_latency_us
        self._to_host = Engine(self.device.d2h_bytes_per_s, latency)
        self._to_device = Engine(self.device.h2d_bytes_per_s, latency)

    def compute(self, cost_us: float) -> None:
        """A variant runs for so long."""
        self._costs.append(cost_us)
        self._now_us += cost_us

    def offload(self, buffer: int, size: int) -> float:
        """A copy of so many bytes of a buffer to the host begins; returns when it ends, µs."""
        self._away[buffer] = self._to_host.copy(self._now_us, size)
        return self._away[buffer]

    def prefetch(self, buffer: int, size: int) -> float:
        """A copy of so many bytes from the host into a buffer begins; returns its end, µs."""
        self._back[buffer] = self._to_device.copy(self._now_us, size)
        return self._back[buffer]

    def copy_us(self, size: int, *, away: bool) -> float:
        """How long a copy of so many bytes takes on its engine, µs."""
        return (self._to_host if away else self._to_device).lasts_us(size)

    def wait(self, buffer: int) -> None:
        """Compute waits for the copy in flight on a buffer."""
        if buffer in self._away:
            end = self._away.pop(buffer)
            self.offload_stall_us += max(0.0, end - self._now_us)
        else:
            end = self._back.pop(buffer)
            self.prefetch_stall_us += max(0.0, end - self._now_us)
        self._now_us = max(self._now_us, end)

    @property
    def now_us(self) -> float:
        """When compute comes to the next step."""
        return self._now_us

    @property
    def stall_us(self) -> float:
        """How long compute has waited for copies."""
        return self.offload_stall_us + self.prefetch_stall_us

    @property
    def end_us(self) -> float:
        """The makespan so far."""
        # Without stalls an exact sum: the same runs cost the same in any order.
        return self._now_us if self.stall_us else fsum(self._costs)


def step_costs(graph: Graph) -> dict[tuple[int, str | None], float]:
    """What a run of an op costs, µs, by its id and variant; None is the default one."""
    cost: dict[tuple[int, str | None], float] = {(op.id, None): op.cost_us for op in graph.ops}
    return cost | {(op.id, v.name): v.cost_us for op in graph.ops for v in op.variants}


def plan_timeline(graph: Graph, plan: Plan) -> Timeline:
    """
    The timeline at the end of a plan, with the costs of `graph`, and its device or the plan's link.

    Raises:
        KeyError: a step names an op, a variant or a buffer that is not there.
    """
    timeline = Timeline(graph.device.with_link(plan.link_bytes_per_s))
    cost = step_costs(graph)
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
    return timeline
