"""
A plan as rectangles: which bytes of the arena hold what, and when.

A *moment* is a step of the plan that is not a `free`: a run of an op, a copy that begins, a wait.
Everything here is in moments, and each moment has a place on the timeline in µs.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coop_plan.planner.core.timeline import Timeline, step_costs
from coop_plan.schemas import Compute, Free, Graph, Offload, Plan, Prefetch, Wait

Kind = Literal["kept", "recomputed", "swapped", "workspace", "output"]
KINDS: tuple[Kind, ...] = ("kept", "recomputed", "swapped", "workspace", "output")
"""What a rectangle is: made by an op's first run, made again, on its way to or from the host,
scratch of one run, or what leaves the step."""

Engine = Literal["compute", "offload", "prefetch", "wait"]


@dataclass
class Held:
    """
    A buffer or a workspace: bytes `[offset, offset + bytes)` of the arena during `[begin, end)`.

    `op` is the position of the op that made it, `tensor` that of its tensor, −1 of a workspace;
    `buffer` is its number in the plan, −1 of a workspace.
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
    """A step of the plan: what runs, the op (a position, or −1), from when to when, µs."""

    engine: Engine
    op: int
    begin_us: float
    end_us: float
    bytes: int = 0
    again: bool = False
    tensor: int = -1


@dataclass
class Look:
    """
    All of a plan that can be drawn.

    `live[m]` is the arena's bytes in use at moment m, workspace included, exact; `outside[m]` those
    of outputs that lie outside it by then.
    """

    held: list[Held] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The moment at which most bytes of the arena are in use, the first of them; −1: none."""
        return max(range(len(self.live)), key=self.live.__getitem__, default=-1)

    def at(self, moment: int) -> list[Held]:
        """What the arena holds at a moment, the largest first, then in the order it was made."""
        found = [held for held in self.held if held.begin <= moment < held.end]
        return sorted(found, key=lambda held: (-held.bytes, held.begin))


def look_at(graph: Graph, plan: Plan) -> Look:
    """
    Replay a plan that the verifier has passed for `graph`.

    Raises:
        KeyError: a step names an op, a tensor or a buffer that is not there.
    """
    op_at = {op.id: position for position, op in enumerate(graph.ops)}
    tensor_at = {tensor.id: position for position, tensor in enumerate(graph.tensors)}
    leaves = [tensor.kind == "output" for tensor in graph.tensors]
    look, live = Look(), dict[int, Held]()
    line = Timeline(graph.device.with_link(plan.link_bytes_per_s))
    cost = step_costs(graph)
    ran: set[int] = set()
    still: Counter[int] = Counter()  # bytes of what is overwritten by less, while it is
    out = 0
    flying: dict[int, tuple[int, int]] = {}
    for step in plan.steps:
        now = len(look.moments)
        match step:
            case Free():
                for buffer in step.buffers:
                    live.pop(buffer).end = now
                continue
            case Compute():
                op = op_at[step.op]
                again = op in ran
                ran.add(op)
                begin_us = line.now_us
                line.compute(cost[step.op, step.variant])
                look.moments.append(Moment("compute", op, begin_us, line.now_us, again=again))
                if step.workspace.bytes:
                    scratch = step.workspace
                    look.held.append(
                        Held(-1, -1, op, scratch.offset, scratch.bytes, now, now + 1, "workspace")
                    )
                dying = {
                    live[read].offset: read
                    for read in step.reads
                    # what has no bytes shares its offset with anything
                    if isinstance(read, int) and read in live and live[read].bytes
                }
                for write in step.writes:
                    if write.offset is None:
                        out += write.bytes
                        continue
                    if write.bytes and write.offset in dying:  # in place: it ends what was there
                        source = live.pop(dying.pop(write.offset))
                        source.end = now
                        still[now] += max(0, source.bytes - write.bytes)
                    tensor = tensor_at[write.tensor]
                    kind: Kind = "recomputed" if again else "kept"
                    made = Held(
                        write.buffer,
                        tensor,
                        op,
                        write.offset,
                        write.bytes,
                        now,
                        now + 1,
                        "output" if leaves[tensor] else kind,
                    )
                    live[write.buffer] = made
                    look.held.append(made)
            case Offload():
                source = live[step.buffer]
                end_us = line.offload(step.buffer, source.bytes)
                took = line.copy_us(source.bytes, away=True)
                look.moments.append(
                    Moment("offload", -1, end_us - took, end_us, source.bytes, tensor=source.tensor)
                )
                source.kind = "swapped"
                flying[step.buffer] = (source.tensor, source.bytes)
            case Prefetch():
                end_us = line.prefetch(step.buffer, step.bytes)
                took = line.copy_us(step.bytes, away=False)
                tensor = tensor_at[step.tensor]
                look.moments.append(
                    Moment("prefetch", -1, end_us - took, end_us, step.bytes, tensor=tensor)
                )
                made = Held(
                    step.buffer, tensor, -1, step.offset, step.bytes, now, now + 1, "swapped"
                )
                live[step.buffer] = made
                look.held.append(made)
                flying[step.buffer] = (tensor, step.bytes)
            case Wait():
                tensor, size = flying.pop(step.buffer)
                begin_us = line.now_us
                line.wait(step.buffer)
                look.moments.append(Moment("wait", -1, begin_us, line.now_us, size, tensor=tensor))
        look.outside.append(out)
    for held in live.values():
        held.end = len(look.moments)
    _count(look, still)
    return look


def _count(look: Look, still: Mapping[int, int]) -> None:
    change = [0] * (len(look.moments) + 1)
    for held in look.held:
        change[held.begin] += held.bytes
        change[held.end] -= held.bytes
    total = 0
    for moment in range(len(look.moments)):
        total += change[moment]
        look.live.append(total + still.get(moment, 0))
