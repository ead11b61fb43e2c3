"""Cost model: the timeline of a plan's steps on a compute stream, two copy engines and the host.

Four engines run in plan order: compute, device to host, host to device, the host's processor.
Compute reaches a step when every earlier compute step has ended, and every copy that an earlier
`wait` names. From then on

- a compute step runs as soon as it is launched;
- a compute step on the host runs as soon as it is launched, the host is free and the copies that it
  reads have ended; compute does not wait for it;
- a copy runs as soon as it is launched and its engine is free, for the latency of the device and
  its bytes at the engine's bandwidth; bandwidth 0 means that the engine does not exist, and a copy
  never ends;
- a `wait` stalls compute, and all later steps, until its copy has ended.

The host launches compute steps and copies in plan order, each in the device's launch time, ahead of
the device. Where the device is the host's own processor, it cannot run ahead: it launches a step
when compute reaches it, and compute goes on after the launch. The launch of a compute step on the
host, whose thread waits for it, takes as long as a copy's. A compute step of no cost and a `wait`
cost no launch.

Hence a copy starts with its source complete: the producer of an offload's source, and the wait for
the offload that a prefetch reads, are earlier steps. It starts only after every earlier use of the
bytes it writes: lifetimes, on the device and on the host, end with a compute step or a wait, in the
order of the steps, for any durations. On a device, an event is recorded on the compute stream at
the copy's position, and the copy's stream waits for it. An offload is listed right after the run
that produces its source, to start early; a prefetch after the last step that uses its bytes.

The cost of a plan is its makespan: the end of the last compute step, on the device or the host, or
of the last copy that was waited for. Without copies, and if no step waits for its launch, it is the
sum of the variants' costs, in any order. Stalls of compute are counted by cause: waits for
prefetches, and waits for offloads, whose bytes are still in use.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import fsum

from coop_plan.schemas import Compute, Device, Graph, Offload, Plan, Prefetch, Wait


@dataclass
class Engine:
    """A copy engine: bandwidth (bytes/s), latency per copy (µs), and when it is free (µs)."""

    bytes_per_s: float
    latency_us: float
    free_us: float = 0.0

    def copy(self, now_us: float, size: int) -> float:
        """Queue a copy of `size` bytes at `now_us`; returns its end, µs."""
        self.free_us = max(now_us, self.free_us) + self.duration_us(size)
        return self.free_us

    def duration_us(self, size: int) -> float:
        """Duration of a copy of `size` bytes, µs; infinite without bandwidth."""
        if not self.bytes_per_s:
            return float("inf")
        return self.latency_us + size / self.bytes_per_s * 1e6


@dataclass
class Timeline:
    """The engines of a device, advanced step by step; times are µs since the first step."""

    device: Device
    offload_stall_us: float = 0.0
    """Time that compute has waited for offloads."""
    prefetch_stall_us: float = 0.0
    """Time that compute has waited for prefetches."""
    _costs: list[float] = field(default_factory=list)
    now_us: float = 0.0
    """Time at which compute reaches the next step."""
    host_us: float = 0.0
    """End of the last compute step on the host."""
    _launched_us: float = 0.0
    """Time at which the host has launched all steps so far, if it runs ahead."""
    _offloads: dict[int, float] = field(default_factory=dict)
    """End of each offload in flight, by buffer."""
    _prefetches: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        latency = self.device.copy_latency_us
        self._to_host = Engine(self.device.d2h_bytes_per_s, latency)
        self._to_device = Engine(self.device.h2d_bytes_per_s, latency)

    def _launch(self, us: float) -> float:
        """Launch a step in this time (µs); returns when it may start, µs."""
        if self.device.is_host:
            self._costs.append(us)
            self.now_us += us
        else:
            self._launched_us += us
        return max(self.now_us, self._launched_us)

    def compute(self, cost_us: float) -> float:
        """Run a variant of this cost (`Device.run_us`); returns its start, µs."""
        begin_us = self.now_us
        if cost_us and not self.device.is_host:
            begin_us = self._launch(self.device.launch_us)
            self._costs.append(begin_us - self.now_us)
        self._costs.append(cost_us)
        self.now_us = begin_us + cost_us
        return begin_us

    def compute_on_host(self, cost_us: float, buffers: Iterable[int]) -> None:
        """Run a variant of this cost on the host, which reads the copies of these buffers."""
        begin_us = self._launch(self.device.copy_launch_us) if cost_us else self.now_us
        ready = (self._offloads.get(buffer, 0.0) for buffer in buffers)
        self.host_us = max(begin_us, self.host_us, *ready) + cost_us

    def offload(self, buffer: int, size: int) -> float:
        """Start the copy of a buffer of `size` bytes to the host; returns its end, µs."""
        start_us = self._launch(self.device.copy_launch_us)
        self._offloads[buffer] = self._to_host.copy(start_us, size)
        return self._offloads[buffer]

    def prefetch(self, buffer: int, size: int) -> float:
        """Start the copy of `size` bytes from the host into a buffer; returns its end, µs."""
        start_us = self._launch(self.device.copy_launch_us)
        self._prefetches[buffer] = self._to_device.copy(start_us, size)
        return self._prefetches[buffer]

    def skip(self, buffer: int) -> None:
        """Start a copy of a buffer that takes no time."""
        self._prefetches[buffer] = self.now_us

    def copy_us(self, size: int, *, to_host: bool) -> float:
        """Duration of a copy of `size` bytes in this direction, µs."""
        return (self._to_host if to_host else self._to_device).duration_us(size)

    def wait(self, buffer: int) -> None:
        """Stall compute until the copy in flight on a buffer has ended."""
        if buffer in self._offloads:
            end = self._offloads.pop(buffer)
            self.offload_stall_us += max(0.0, end - self.now_us)
        else:
            end = self._prefetches.pop(buffer)
            self.prefetch_stall_us += max(0.0, end - self.now_us)
        self.now_us = max(self.now_us, end)

    @property
    def stall_us(self) -> float:
        """Time that compute has waited for copies."""
        return self.offload_stall_us + self.prefetch_stall_us

    @property
    def end_us(self) -> float:
        """The makespan so far."""
        # Without stalls an exact sum: the same runs cost the same in any order.
        return max(self.host_us, self.now_us if self.stall_us else fsum(self._costs))


def step_costs(graph: Graph) -> dict[tuple[int, str | None], float]:
    """Time of a run in µs by (op id, variant name); the default variant has the name None."""
    run_us = graph.device.run_us
    cost: dict[tuple[int, str | None], float] = {
        (op.id, None): run_us(op.cost_us) for op in graph.ops
    }
    return cost | {
        (op.id, v.name): v.cost_us if v.engine == "host" else run_us(v.cost_us)
        for op in graph.ops
        for v in op.variants
    }


def base_cost_us(graph: Graph) -> float:
    """Makespan of every op once, in program order and in its default variant, µs."""
    timeline = Timeline(graph.device)
    for op in graph.ops:
        timeline.compute(graph.device.run_us(op.cost_us))
    return timeline.end_us


def host_runs(graph: Graph) -> set[tuple[int, str | None]]:
    """The (op id, variant name) of the runs on the host."""
    return {(op.id, v.name) for op in graph.ops for v in op.variants if v.engine == "host"}


def plan_timeline(graph: Graph, plan: Plan) -> Timeline:
    """
    The timeline at the end of a plan, with the costs of `graph`, and its device or the plan's link.

    Raises:
        KeyError: a step names an unknown op, variant or buffer.
    """
    timeline = Timeline(graph.device.with_link(plan.link_bytes_per_s))
    cost, on_host = step_costs(graph), host_runs(graph)
    size: dict[int, int] = {}
    for step in plan.steps:
        match step:
            case Compute() if (step.op, step.variant) in on_host:
                buffers = (read for read in step.reads if isinstance(read, int))
                timeline.compute_on_host(cost[step.op, step.variant], buffers)
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
