"""The joint schedule of one training step, `coop-plan/plan/1`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from coop_plan.schemas import _parse
from coop_plan.schemas._parse import Model
from coop_plan.schemas.graph import Bytes, Id, Micros

Ratio = Annotated[float, Field(strict=True)]


class TensorRead(Model):
    """A read of a tensor outside the arena: a resident one, or an output that left the step."""

    tensor: Id


class Write(Model):
    """
    One buffer made by a compute step: `tensor` materialized at `offset` in the arena.

    `offset` is null for an output that lives outside the arena. `bytes` is the tensor's exact size.
    """

    buffer: Id
    tensor: Id
    offset: Bytes | None
    bytes: Bytes


class Workspace(Model):
    """Scratch of one compute step in the arena."""

    offset: Bytes = 0
    bytes: Bytes = 0


class Compute(Model):
    """Run op `op`. `reads` follow the op's inputs and `writes` its outputs, one by one."""

    do: Literal["compute"] = "compute"
    op: Id
    variant: str | None = None
    reads: list[Id | TensorRead]
    writes: list[Write]
    workspace: Workspace = Workspace()


class Free(Model):
    """The buffers that end here."""

    do: Literal["free"] = "free"
    buffers: list[Id]


class Offload(Model):
    """
    Start copying a buffer to the host; the buffer must stay until a `wait` on it.

    The copy lies at `host_offset` in the host's slab until the last `wait` on it or on a `prefetch`
    from it.
    """

    do: Literal["offload"] = "offload"
    buffer: Id
    host_offset: Bytes | None = Field(default=None, exclude_if=lambda offset: offset is None)


class Prefetch(Model):
    """Start copying the host's copy of buffer `from` into a new buffer; readable after a `wait`."""

    do: Literal["prefetch"] = "prefetch"
    buffer: Id
    tensor: Id
    offset: Bytes
    bytes: Bytes
    from_: Id = Field(alias="from")


class Wait(Model):
    """Wait for the transfer that was last started on a buffer."""

    do: Literal["wait"] = "wait"
    buffer: Id


Step = Annotated[Compute | Free | Offload | Prefetch | Wait, Field(discriminator="do")]


Outputs = Literal["outside", "arena", "gradients"]
"""Where tensors that leave the step lie: "gradients" has those that backward and optimizer ops make
in the arena, and the forward's (loss, logits) outside."""


class Plan(Model):
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
    `lower_bound_model` says for which schedules `lower_bound_us` holds:
    "any", or those in "program-order": every op runs for the first time in that order, in its
    default body, and nothing is moved to the host.
    """

    schema_: Literal["coop-plan/plan/1"] = Field(alias="schema")
    graph: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    method: str
    status: Literal["optimal", "feasible"]
    budget_bytes: Bytes
    host_budget_bytes: Bytes | None = None
    link_bytes_per_s: Annotated[float, Field(ge=0, strict=True)] | None = None
    resident_bytes: Bytes
    arena_bytes: Bytes
    host_arena_bytes: Bytes = 0
    peak_bytes: Bytes
    base_cost_us: Micros
    cost_us: Micros
    overhead: Ratio
    lower_bound_us: Micros | None = None
    lower_bound_model: Literal["any", "program-order"] | None = None
    fragmentation: Ratio
    eviction_free_ratio: Ratio | None = None
    evictions: Annotated[int, Field(ge=0, strict=True)] | None = None
    recomputed_ops: Annotated[int, Field(ge=0, strict=True)]
    swapped_bytes: Bytes
    prefetch_stall_us: Micros = 0.0
    offload_stall_us: Micros = 0.0
    solve_seconds: Annotated[float, Field(ge=0, strict=True)]
    alignment: Annotated[int, Field(ge=1, strict=True)] = 512
    outputs: Outputs = "outside"
    versions: dict[str, str] = {}
    steps: list[Step]

    def to_json(self) -> str:
        """The document as compact JSON text."""
        return self.model_dump_json(by_alias=True)


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
