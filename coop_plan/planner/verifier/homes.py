"""Rules of movable residents and updates on the host, for the replay of a plan."""

from collections.abc import Iterable, Iterator, Mapping

from coop_plan.planner.verifier.host import FOR_EVER, HostSlab
from coop_plan.planner.verifier.state import HOME, Place, Transfer
from coop_plan.schemas import Compute, Op, Plan, Tensor, TensorRead, Variant

FoundFault = tuple[str, Place, str]
"""Code, place and message of a fault."""


class Homes:
    """The homes of a plan during its replay."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.offset = {home.tensor: home.host_offset for home in plan.homes}
        """Offset in the host slab of each resident that begins and ends the step there."""
        self.version = dict.fromkeys(self.offset, 0)
        self.writes: dict[int, int] = {}
        """Buffer of the copy in flight that overwrites a home, by tensor."""
        self.on_host: set[int] = set()
        """Tensors whose homes a run on the host has used."""

    def faults(self, tensors: Mapping[int, Tensor], slab: HostSlab) -> Iterator[FoundFault]:
        """Add the homes to the slab; each is of a movable resident, which has one home."""
        if len(self.offset) != len(self._plan.homes):
            yield "wrong-home", "/homes", "a tensor has two homes"
        for index, home in enumerate(self._plan.homes):
            place = ("/homes/", index)
            tensor = tensors.get(home.tensor)
            if tensor is None or not (tensor.resident and tensor.movable):
                message = f"tensor {home.tensor} is not a movable resident"
                yield "wrong-home", (place, "/tensor"), message
                continue
            for code, message in slab.add(FOR_EVER, home.host_offset, tensor.bytes):
                yield code, (place, "/host_offset"), message

    def is_busy(
        self, tensor: int, pending: Mapping[int, Transfer], tensor_of: Mapping[int, int]
    ) -> bool:
        """True if a transfer in flight, or a run on the host, uses the home of a tensor."""
        return (
            tensor in self.writes
            or tensor in self.on_host
            or any(
                transfer.source == HOME and tensor_of[buffer] == tensor
                for buffer, transfer in pending.items()
            )
        )

    def run(
        self,
        op: Op,
        variant: Variant,
        step: Compute,
        needed: Mapping[int, int],
        copies: Mapping[int, tuple[int, int]],
        in_transfer: Iterable[int],
    ) -> Iterator[FoundFault]:
        """Run an op on the host; yields the faults of its reads, and of what it writes.

        Args:
            op: the op, and its variant on the host.
            variant: see `op`.
            step: the step that runs it.
            needed: the version of each tensor that the op reads in program order.
            copies: per buffer with a copy on the host, complete or in flight, its tensor and
                version.
            in_transfer: tensors whose home a transfer in flight uses.
        """
        name = f"op {op.id} ({op.name})"
        if len(step.reads) != len(variant.inputs):
            message = f"{name} has {len(variant.inputs)} inputs, not {len(step.reads)}"
            yield "wrong-reads", "/reads", message
        if step.writes:
            yield "wrong-writes", "/writes", f"{name} is on the host and writes no buffer"
        if step.workspace.bytes:
            yield "wrong-workspace", "/workspace/bytes", f"{name} is on the host: no workspace"
        for index, (entry, tensor) in enumerate(zip(step.reads, variant.inputs, strict=False)):
            place = ("/reads/", index)
            if isinstance(entry, TensorRead):
                found = entry.tensor, self.version.get(entry.tensor)
            else:
                found = copies.get(entry, (tensor, None))
            if found[1] is None:
                message = f"{name} reads tensor {found[0]}, of which no such copy is on the host"
                yield "not-offloaded", place, message
            elif found[0] != tensor:
                message = f"{name} reads tensor {tensor} here, not {found[0]}"
                yield "wrong-tensor", place, message
            elif found[1] != needed[tensor]:
                message = (
                    f"{name} reads version {needed[tensor]} of tensor {tensor}, not {found[1]}"
                )
                yield "stale-version", place, message
            if tensor in op.mutates and not isinstance(entry, TensorRead):
                yield "split-mutation", place, f"{name} overwrites tensor {tensor}, not its home"
        for tensor in in_transfer:
            yield (
                "not-ready",
                "/reads",
                f"{name} uses the home of tensor {tensor} during a transfer",
            )
        for tensor in set(op.mutates):
            if tensor not in variant.inputs:
                message = f"{name} mutates tensor {tensor}, which this variant does not read"
                yield "unknown-variant", "/variant", message
            self.version[tensor] = self.version.get(tensor, 0) + 1
        self.on_host.update(variant.inputs)
