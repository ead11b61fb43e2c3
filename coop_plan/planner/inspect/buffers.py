"""Replay of a plan as rectangles: the address range and the lifetime of each buffer and workspace.

A *moment* is a step of the plan that is not a `free`: a run of an op, the start of a copy, a wait.
Lifetimes are in moments, and each moment has start and end on the timeline in µs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from coop_plan.planner.core.timeline import Timeline, host_runs, step_costs
from coop_plan.schemas import Compute, Free, Graph, Offload, Plan, Prefetch, Wait

Kind = Literal["kept", "evicted", "recomputed", "offloaded", "prefetched", "workspace", "output"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of rectangles.

Buffers of first runs are kept until the last use, or evicted before it, to be recomputed. Buffers
of reruns are recomputed. The source of a transfer is offloaded, its target prefetched. The rest are
the workspace of a run, and the last buffer of an output of the step.
"""

Engine = Literal["compute", "offload", "prefetch", "wait", "host"]


@dataclass
class Rectangle:
    """A buffer or a workspace: bytes `[offset, offset + bytes)` of the arena during `[begin, end)`.

    `op` is the position of the op that wrote it, −1 of a prefetch; `tensor` the position of its
    tensor and `buffer` its id in the plan, both −1 of a workspace.
    """

    buffer: int
    tensor: int
    op: int
    offset: int
    bytes: int
    begin: int
    end: int
    kind: Kind


@dataclass(frozen=True)
class Moment:
    """A step of the plan: its engine, op and tensor (positions, or −1), start and end, µs."""

    engine: Engine
    op: int
    begin_us: float
    end_us: float
    bytes: int = 0
    rerun: bool = False
    tensor: int = -1


@dataclass
class PlanView:
    """A replayed plan.

    `resident` has the bytes of the tensors on the device for the whole step, by their kind, and
    `arena_bytes` the size of the arena. `live[m]` is the exact live bytes of the arena at moment m,
    workspace included; `outside[m]` the bytes of outputs written outside it so far.
    """

    resident: dict[str, int]
    arena_bytes: int
    rectangles: list[Rectangle] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The first moment with `peak_bytes`; −1 without moments.

        The arena counts whole at every moment, so it is the first with the most bytes outside.
        """
        return max(range(len(self.outside)), key=self.outside.__getitem__, default=-1)

    @property
    def peak_bytes(self) -> int:
        """The plan's peak: residents, the arena, and the outputs outside it."""
        fixed = sum(self.resident.values()) + self.arena_bytes
        return fixed + max(self.outside, default=0)

    @property
    def fullest(self) -> int:
        """The first moment with the most live bytes in the arena; −1 without moments."""
        return max(range(len(self.live)), key=self.live.__getitem__, default=-1)

    def at(self, moment: int) -> list[Rectangle]:
        """The rectangles live at a moment, the largest first, then the oldest."""
        found = [
            rectangle for rectangle in self.rectangles if rectangle.begin <= moment < rectangle.end
        ]
        return sorted(found, key=lambda rectangle: (-rectangle.bytes, rectangle.begin))


def replay_plan(graph: Graph, plan: Plan) -> PlanView:
    """Replay a plan that the verifier has passed for `graph`.

    Raises:
        KeyError: a step names an unknown op, tensor or buffer.
    """
    op_at = {op.id: position for position, op in enumerate(graph.ops)}
    tensor_at = {tensor.id: position for position, tensor in enumerate(graph.tensors)}
    is_output = [tensor.kind == "output" for tensor in graph.tensors]
    resident: Counter[str] = Counter()
    homes = {home.tensor for home in plan.homes}
    for fixed in graph.tensors:
        if fixed.resident and fixed.id not in homes:
            resident[fixed.kind] += fixed.bytes
    view, live = PlanView(dict(resident), plan.arena_bytes), dict[int, Rectangle]()
    line = Timeline(graph.device.with_link(plan.link_bytes_per_s))
    cost, on_host = step_costs(graph), host_runs(graph)
    ran: set[int] = set()
    # At the moment of an in-place write by a smaller output, the bytes that it does not cover.
    uncovered: Counter[int] = Counter()
    outside = 0
    pending: dict[int, tuple[int, int]] = {}
    for step in plan.steps:
        now = len(view.moments)
        match step:
            case Free():
                for buffer in step.buffers:
                    live.pop(buffer).end = now
                continue
            case Compute() if (step.op, step.variant) in on_host:
                duration_us = cost[step.op, step.variant]
                line.compute_on_host(duration_us, (b for b in step.reads if isinstance(b, int)))
                begin_us = line.host_us - duration_us
                view.moments.append(Moment("host", op_at[step.op], begin_us, line.host_us))
            case Compute():
                op = op_at[step.op]
                rerun = op in ran
                ran.add(op)
                begin_us = line.compute(cost[step.op, step.variant])
                view.moments.append(Moment("compute", op, begin_us, line.now_us, rerun=rerun))
                if step.workspace.bytes:
                    scratch = step.workspace
                    view.rectangles.append(
                        Rectangle(
                            -1, -1, op, scratch.offset, scratch.bytes, now, now + 1, "workspace"
                        )
                    )
                overwritable = {
                    live[read].offset: read
                    for read in step.reads
                    # a buffer of 0 bytes may share its offset with any other
                    if isinstance(read, int) and read in live and live[read].bytes
                }
                for write in step.writes:
                    if write.offset is None:
                        outside += write.bytes
                        continue
                    if write.bytes and write.offset in overwritable:  # in place
                        source = live.pop(overwritable.pop(write.offset))
                        source.end = now
                        uncovered[now] += max(0, source.bytes - write.bytes)
                    tensor = tensor_at[write.tensor]
                    kind: Kind = "recomputed" if rerun else "kept"
                    made = Rectangle(
                        write.buffer,
                        tensor,
                        op,
                        write.offset,
                        write.bytes,
                        now,
                        now + 1,
                        "output" if is_output[tensor] else kind,
                    )
                    live[write.buffer] = made
                    view.rectangles.append(made)
            case Offload():
                source = live[step.buffer]
                end_us = line.offload(step.buffer, source.bytes)
                took = line.copy_us(source.bytes, to_host=True)
                view.moments.append(
                    Moment("offload", -1, end_us - took, end_us, source.bytes, tensor=source.tensor)
                )
                source.kind = "offloaded"
                pending[step.buffer] = (source.tensor, source.bytes)
            case Prefetch():
                end_us = line.prefetch(step.buffer, step.bytes)
                took = line.copy_us(step.bytes, to_host=False)
                tensor = tensor_at[step.tensor]
                view.moments.append(
                    Moment("prefetch", -1, end_us - took, end_us, step.bytes, tensor=tensor)
                )
                made = Rectangle(
                    step.buffer, tensor, -1, step.offset, step.bytes, now, now + 1, "prefetched"
                )
                live[step.buffer] = made
                view.rectangles.append(made)
                pending[step.buffer] = (tensor, step.bytes)
            case Wait():
                tensor, size = pending.pop(step.buffer)
                begin_us = line.now_us
                line.wait(step.buffer)
                view.moments.append(Moment("wait", -1, begin_us, line.now_us, size, tensor=tensor))
        view.outside.append(outside)
    for rectangle in live.values():
        rectangle.end = len(view.moments)
    _mark_evicted(view.rectangles)
    _count_live(view, uncovered)
    return view


def _mark_evicted(rectangles: Iterable[Rectangle]) -> None:
    """Mark buffers of first runs whose tensor has a later buffer."""
    last: dict[int, Rectangle] = {}
    for rectangle in rectangles:
        if rectangle.tensor < 0:
            continue
        before = last.get(rectangle.tensor)
        if before is not None and before.kind in ("kept", "output"):
            before.kind = "evicted"
        last[rectangle.tensor] = rectangle


def _count_live(view: PlanView, uncovered: Mapping[int, int]) -> None:
    change = [0] * (len(view.moments) + 1)
    for rectangle in view.rectangles:
        change[rectangle.begin] += rectangle.bytes
        change[rectangle.end] -= rectangle.bytes
    total = 0
    for moment in range(len(view.moments)):
        total += change[moment]
        view.live.append(total + uncovered.get(moment, 0))
