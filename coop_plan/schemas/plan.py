"""The joint schedule of one training step, `coop-plan/plan/1`."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from coop_plan.schemas import _parse
from coop_plan.schemas._parse import Model
from coop_plan.schemas.graph import Bytes, Id

# The upper limits keep out what is no number: infinity.
Ratio = Annotated[float, Meta(ge=-1, le=1e300)]
Cost = Annotated[float, Meta(ge=0, le=1e300)]
Count = Annotated[int, Meta(ge=0)]


class TensorRead(Model, frozen=True):
    """A read of a tensor outside the arena: a resident one, or an output that left the step."""

    tensor: Id


class Write(Model, frozen=True):
    """
    One buffer made by a compute step: `tensor` materialized at `offset` in the arena.

    `offset` is null for an output that lives outside the arena. `bytes` is the tensor's exact size.
    """

    buffer: Id
    tensor: Id
    offset: Bytes | None
    bytes: Bytes


class Workspace(Model, frozen=True):
    """Scratch of one compute step in the arena."""

    offset: Bytes = 0
    bytes: Bytes = 0


class Compute(Model, frozen=True, kw_only=True, tag_field="do", tag="compute"):
    """Run op `op`. `reads` follow the op's inputs and `writes` its outputs, one by one."""

    do: ClassVar[str] = "compute"
    op: Id
    variant: str | None = None
    reads: list[Id | TensorRead]
    writes: list[Write]
    workspace: Workspace = Workspace()


class Free(Model, frozen=True, tag_field="do", tag="free"):
    """The buffers that end here."""

    do: ClassVar[str] = "free"
    buffers: list[Id]


class Offload(Model, frozen=True, omit_defaults=True, tag_field="do", tag="offload"):
    """
    Start copying a buffer to the host; the buffer must stay until a `wait` on it.

    The copy lies at `host_offset` in the host's slab until the last `wait` on it or on a `prefetch`
    from it.
    """

    do: ClassVar[str] = "offload"
    buffer: Id
    host_offset: Bytes | None = None


class Prefetch(Model, frozen=True, tag_field="do", tag="prefetch"):
    """Start copying the host's copy of buffer `from` into a new buffer; readable after a `wait`."""

    do: ClassVar[str] = "prefetch"
    buffer: Id
    tensor: Id
    offset: Bytes
    bytes: Bytes
    from_: Id = field(name="from")


class Wait(Model, frozen=True, tag_field="do", tag="wait"):
    """Wait for the transfer that was last started on a buffer."""

    do: ClassVar[str] = "wait"
    buffer: Id


Step = Compute | Free | Offload | Prefetch | Wait


Outputs = Literal["outside", "arena", "gradients"]

BoundModel = Literal["any", "program-order"]
"""Where tensors that leave the step lie: "gradients" has those that backward and optimizer ops make
in the arena, and the forward's (loss, logits) outside."""


class Plan(Model, frozen=True, kw_only=True):
    """
    A joint schedule and its figures. Sizes are bytes, costs µs.

    `alignment` and `outputs` name the options that the figures depend on. `eviction_free_ratio` is
    Coop's own fragmentation figure (NeurIPS 2023, section 5.3): the mean over forced evictions of
    free bytes / arena, for online methods; `evictions` counts the tensors that a full arena forced
    out. Copies on the host lie in a slab of `host_arena_bytes`, which `host_budget_bytes` limits
    where it was given; with 0 nothing is moved there. `prefetch_stall_us` and `offload_stall_us`
    are what compute waits for tensors to come back, and for bytes still being copied away.
    `link_bytes_per_s` is a bandwidth, either way, that the cost was asked for instead of the
    device's.
    `budget_lower_bound_bytes` is there where the smallest budget was asked for: no schedule of any
    method has a peak below it.
    `lower_bound_model` says for which schedules `lower_bound_us` holds: "any", or those in
    "program-order", in which every op runs for the first time in that order, in whichever variant is
    not approximate; they may move to the host what the device and `host_budget_bytes` let them.
    """

    schema_: Literal["coop-plan/plan/1"] = field(name="schema")
    graph: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
    method: str
    status: Literal["optimal", "feasible"]
    budget_bytes: Bytes
    host_budget_bytes: Bytes | None = None
    link_bytes_per_s: Cost | None = None
    resident_bytes: Bytes
    arena_bytes: Bytes
    host_arena_bytes: Bytes = 0
    peak_bytes: Bytes
    base_cost_us: Cost
    cost_us: Cost
    overhead: Ratio
    lower_bound_us: Cost | None = None
    lower_bound_model: BoundModel | None = None
    budget_lower_bound_bytes: Bytes | None = None
    fragmentation: Ratio
    eviction_free_ratio: Ratio | None = None
    evictions: Count | None = None
    recomputed_ops: Count
    swapped_bytes: Bytes
    prefetch_stall_us: Cost = 0.0
    offload_stall_us: Cost = 0.0
    solve_seconds: Cost
    alignment: Annotated[int, Meta(ge=1)] = 512
    outputs: Outputs = "outside"
    versions: dict[str, str] = {}
    steps: list[Step]


def parse_plan(document: str | bytes | dict[str, Any], source: str = "") -> Plan:
    """
    A plan from JSON text or a decoded object.

    Raises:
        InvalidInputError: with the JSON pointer of the first fault.
    """
    return _parse.parse(Plan, document, source)


def load_plan(path: Path | str) -> Plan:
    """A plan from a file; raises `InvalidInputError` as `parse_plan` does."""
    return _parse.read(Plan, path)
