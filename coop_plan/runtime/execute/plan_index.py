"""Index of a plan's buffers: maker, readers, address, sharing and end of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coop_plan.schemas import (
    Compute,
    Free,
    Graph,
    Offload,
    Plan,
    Prefetch,
    Variant,
    Wait,
    Write,
)


@dataclass
class Buffer:
    """A buffer of a plan; `made_at`, `read_at` and `ends_at` are positions among the plan's steps.

    `offset` is its address in the arena, None outside of it. `shares` is the buffer that ends in
    the same step and whose place this one takes. `ends_at` is None if the buffer outlives the plan.
    What lies outside the arena is read by tensor, which `read_at` does not list.
    """

    id: int
    tensor: int
    offset: int | None
    bytes: int
    made_at: int
    shares: int | None = None
    read_at: list[int] = field(default_factory=list)
    ends_at: int | None = None

    @property
    def place(self) -> int | None:
        """Address in the arena; None also if the buffer has no bytes, as in joint plans."""
        return self.offset if self.bytes else None


@dataclass(frozen=True)
class Transfer:
    """One copy of a plan.

    `source` is the number of the offload that a prefetch reads; None for an offload, and for a
    prefetch of a home. `is_home` is true for a copy from, or to, the home of a resident.
    """

    buffer: Buffer
    host_offset: int
    to_host: bool
    source: int | None = None
    is_home: bool = False


class PlanIndex:
    """Buffers, runs and transfers of a verified plan of `graph`, whose op ids are positions.

    `runs` are the positions of the compute steps, `first_run[op]` the first one of an op.
    `transfer_of` has the number of the transfer that an offload, prefetch or wait belongs to, or
    that copies the gradient of an update on the host, by position of the step.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.buffers: dict[int, Buffer] = {}
        self.runs: list[int] = []
        self.first_run: dict[int, int] = {}
        self.transfers: list[Transfer] = []
        self.transfer_of: dict[int, int] = {}
        latest: dict[int, int] = {}  # transfer by buffer
        homes = {home.tensor: home.host_offset for home in plan.homes}
        for at, step in enumerate(plan.steps):
            match step:
                case Compute():
                    self._run(graph, step, at, latest)
                case Free():
                    for freed in step.buffers:
                        self.buffers[freed].ends_at = at
                case Offload():
                    assert step.host_offset is not None
                    self.buffers[step.buffer].read_at.append(at)
                    self.transfer_of[at] = latest[step.buffer] = len(self.transfers)
                    buffer = self.buffers[step.buffer]
                    is_home = homes.get(buffer.tensor) == step.host_offset
                    self.transfers.append(
                        Transfer(buffer, step.host_offset, to_host=True, is_home=is_home)
                    )
                case Prefetch():
                    made = self._make(step, at)
                    source = None if step.from_ is None else latest[step.from_]
                    host_offset = (
                        homes[step.tensor] if source is None else self.transfers[source].host_offset
                    )
                    self.transfer_of[at] = latest[step.buffer] = len(self.transfers)
                    self.transfers.append(
                        Transfer(made, host_offset, False, source, is_home=source is None)
                    )
                case Wait():
                    self.transfer_of[at] = latest[step.buffer]
        self.final: dict[int, Buffer] = {}
        """Buffer that holds each tensor after the last step; one outside the arena first.

        An output may be made again after its own buffer, as a by-product: that one is freed.
        """
        for buffer in self.buffers.values():
            if buffer.offset is None:
                self.final[buffer.tensor] = buffer
        for buffer in self.buffers.values():
            if buffer.ends_at is None:
                self.final.setdefault(buffer.tensor, buffer)

    def _make(self, made: Write | Prefetch, at: int) -> Buffer:
        buffer = Buffer(made.buffer, made.tensor, made.offset, made.bytes, at)
        self.buffers[made.buffer] = buffer
        return buffer

    def _run(self, graph: Graph, step: Compute, at: int, latest: Mapping[int, int]) -> None:
        self.runs.append(at)
        self.first_run.setdefault(step.op, at)
        op = graph.ops[step.op]
        form = next((v for v in op.variants if v.name == step.variant), op)
        if isinstance(form, Variant) and form.engine == "host":
            (self.transfer_of[at],) = (latest[r] for r in step.reads if isinstance(r, int))
            return
        reads = {
            t: self.buffers[read]
            for t, read in zip(form.inputs, step.reads, strict=True)
            if isinstance(read, int)
        }
        for buffer in reads.values():
            buffer.read_at.append(at)
        made = {write.tensor: self._make(write, at) for write in step.writes}
        for output, source in form.inplace:
            new, old = made.get(output), reads.get(source)
            if not (new and old and new.bytes and old.bytes):
                continue  # a buffer of 0 bytes may share its offset with any other
            if new.place is not None and new.place == old.offset:
                new.shares, old.ends_at = old.id, at
