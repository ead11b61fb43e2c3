"""Contract of `coop-plan/plan/1`: the joint schedule of one training step.

Sizes and offsets are bytes, costs and stalls µs, ratios fractions. Buffer ids are distinct within a
plan; op and tensor ids are those of the graph. `parse_plan` and `load_plan` raise
`InvalidInputError` with the JSON pointer of the first fault; `planner.verifier` checks the rest.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from coop_plan.schemas import _parse
from coop_plan.schemas._parse import Model
from coop_plan.schemas.graph import Bytes, Id

# The upper limits exclude infinity.
Ratio = Annotated[float, Meta(ge=-1, le=1e300)]
Cost = Annotated[float, Meta(ge=0, le=1e300)]
Count = Annotated[int, Meta(ge=0)]


class TensorRead(Model, frozen=True):
    """A read of a tensor outside the arena: a resident tensor, or an output allocated outside."""

    tensor: Id


class Write(Model, frozen=True):
    """One buffer written by a compute step: `tensor` at `offset` in the arena.

    `offset` is null for an output outside the arena. `bytes` is the tensor's exact size.
    """

    buffer: Id
    tensor: Id
    offset: Bytes | None
    bytes: Bytes


class Workspace(Model, frozen=True):
    """Scratch memory of one compute step in the arena."""

    offset: Bytes = 0
    bytes: Bytes = 0


class Compute(Model, frozen=True, kw_only=True, tag_field="do", tag="compute"):
    """Run a variant of op `op`; `reads` follow its inputs, `writes` its outputs.

    A variant on the host reads host copies of buffers, and the homes of tensors (`Plan.homes`).
    """

    do: ClassVar[str] = "compute"
    op: Id
    variant: str | None = None
    reads: list[Id | TensorRead]
    writes: list[Write]
    workspace: Workspace = Workspace()


class Free(Model, frozen=True, tag_field="do", tag="free"):
    """Free these buffers."""

    do: ClassVar[str] = "free"
    buffers: list[Id]


class Offload(Model, frozen=True, omit_defaults=True, tag_field="do", tag="offload"):
    """Start copying a buffer to the host; the buffer must stay live until a `wait` on it.

    The copy occupies `host_offset` in the host slab until the last `wait` on it or on a `prefetch`
    from it. At the offset of the tensor's home (`Plan.homes`) it overwrites the home.
    """

    do: ClassVar[str] = "offload"
    buffer: Id
    host_offset: Bytes | None = None


class Prefetch(Model, frozen=True, tag_field="do", tag="prefetch"):
    """Start copying the host copy of buffer `from` into a new buffer, readable after a `wait`.

    If `from` is null, the copy is that of the tensor's home (`Plan.homes`).
    """

    do: ClassVar[str] = "prefetch"
    buffer: Id
    tensor: Id
    offset: Bytes
    bytes: Bytes
    from_: Id | None = field(name="from")


class Wait(Model, frozen=True, tag_field="do", tag="wait"):
    """Wait for the transfer last started on a buffer."""

    do: ClassVar[str] = "wait"
    buffer: Id


class Home(Model, frozen=True):
    """Place of a movable resident on the host: `host_offset` in the slab, for the whole step."""

    tensor: Id
    host_offset: Bytes


Step = Compute | Free | Offload | Prefetch | Wait


Outputs = Literal["outside", "arena", "gradients"]
"""Place of step outputs. With "gradients" those of backward and optimizer ops are in the arena,
those of the forward pass (loss, logits) outside."""

BoundModel = Literal["any", "program-order"]
"""Schedules that a lower bound holds for; see `Plan`."""


class Plan(Model, frozen=True, kw_only=True):
    """A joint schedule and its figures. Sizes are bytes, costs µs.

    `alignment` and `outputs` are the options that the figures depend on. `eviction_free_ratio` is
    Coop's own fragmentation figure (NeurIPS 2023, section 5.3), for online methods: the mean over
    forced evictions of free bytes / arena. `evictions` counts the tensors that failed allocations
    evicted.

    Copies on the host are in a slab of `host_arena_bytes`, limited by `host_budget_bytes` unless it
    is null; 0 allows no transfers. `homes` lists the movable residents that begin and end the step
    on the host: `resident_bytes` does not count them, and ops read buffers of them.
    `prefetch_stall_us` and `offload_stall_us` are the times that compute waits for prefetches, and
    for offloads. `link_bytes_per_s` is the requested bandwidth in both directions, null for the
    device's own.

    `budget_lower_bound_bytes` is set if the smallest budget was requested: no schedule of any
    method has a peak below it. `lower_bound_model` names the schedules for which `lower_bound_us`
    holds: "any", or "program-order", in which first runs are in program order, in any variant that
    is not approximate, with any transfers that the device and `host_budget_bytes` allow.
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
    homes: list[Home] = []
    steps: list[Step]


def parse_plan(document: str | bytes | dict[str, Any], source: str = "") -> Plan:
    """Plan from JSON text or a decoded object.

    Raises:
        InvalidInputError: the first fault and its JSON pointer.
    """
    return _parse.parse(Plan, document, source)


def load_plan(path: Path | str) -> Plan:
    """Plan from a file; raises `InvalidInputError` as `parse_plan` does."""
    return _parse.read(Plan, path)
