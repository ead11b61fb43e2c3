"""Replay of a plan: the state of device memory, host slab and engines after each step."""

from bisect import bisect_left, bisect_right

from coop_plan.planner.verifier.clock import Clock
from coop_plan.planner.verifier.homes import Homes
from coop_plan.planner.verifier.host import HostSlab
from coop_plan.planner.verifier.state import HOME, Buffer, Fault, Place, Transfer, pointer
from coop_plan.schemas import (
    Compute,
    Free,
    Graph,
    Offload,
    Op,
    Plan,
    Prefetch,
    TensorRead,
    Variant,
    Wait,
    Write,
)


def _name(op: Op) -> str:
    return f"op {op.id} ({op.name})"


class Replay:
    """State of the device and the host during the replay of a plan's steps."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.plan = plan
        self.device = graph.device.with_link(plan.link_bytes_per_s)
        self.ops = {op.id: op for op in graph.ops}
        self.position = {op.id: index for index, op in enumerate(graph.ops)}
        self.tensors = {tensor.id: tensor for tensor in graph.tensors}
        self.mutators: dict[int, list[int]] = {}
        for index, op in enumerate(graph.ops):
            for tensor in set(op.mutates):
                self.mutators.setdefault(tensor, []).append(index)
        self.faults: list[Fault] = []
        late_outputs = {t for op in graph.ops if op.phase != "forward" for t in op.outputs}
        in_arena = {"outside": set(), "gradients": late_outputs, "arena": set(self.tensors)}
        self.outside_outputs = {
            tensor.id
            for tensor in graph.tensors
            if tensor.kind == "output" and tensor.id not in in_arena[plan.outputs]
        }
        """Outputs that belong outside the arena."""
        self.homes = Homes(plan)
        self.outside = {
            tensor.id: 0
            for tensor in graph.tensors
            if tensor.resident and tensor.id not in self.homes.offset
        }
        """Version of each tensor that is readable outside the arena."""
        self.produced: set[int] = set()
        self.outside_buffers: set[int] = set()
        self.live: dict[int, Buffer] = {}
        self.tensor_of: dict[int, int] = {}
        """Tensor of every buffer id so far."""
        self.starts: list[int] = []
        self.owners: list[int] = []
        """Address index: start addresses of disjoint live buffers, ascending, and their ids."""
        self.pending: dict[int, Transfer] = {}
        """Unfinished transfer per buffer."""
        self.host: dict[int, int] = {}
        """Version of each complete host copy, by the buffer that was offloaded."""
        on_host = {(op.id, v.name) for op in graph.ops for v in op.variants if v.engine == "host"}
        self.slab = HostSlab(plan, on_host)
        for fault in self.homes.faults(self.tensors, self.slab):
            self.fault(*fault)
        self.runs: dict[int, int] = {}
        self.last_random = self.last_once = -1
        """Highest position of a random op, and of a run-once op, that has run."""
        self.clock = Clock(self.device)
        self.offload_stall_us = self.prefetch_stall_us = 0.0
        self.live_bytes = self.peak_live_bytes = self.arena_bytes = self.swapped_bytes = 0

    def fault(self, code: str, place: Place, message: str) -> None:
        self.faults.append(Fault(code, pointer(place), message))

    # -- steps -----------------------------------------------------------------------------------

    def compute(self, step: Compute, at: Place) -> None:
        op = self.ops.get(step.op)
        if op is None:
            self.fault("unknown-op", (at, "/op"), f"the graph has no op with id {step.op}")
            return
        variant: Op | Variant = op
        if step.variant is not None:
            found = next((v for v in op.variants if v.name == step.variant), None)
            if found is None:
                message = f"{_name(op)} has no variant '{step.variant}'"
                self.fault("unknown-variant", (at, "/variant"), message)
            else:
                variant = found
                if found.approximate:
                    message = f"variant '{found.name}' of {_name(op)} is approximate: never chosen"
                    self.fault("approximate-variant", (at, "/variant"), message)
        on_host = isinstance(variant, Variant) and variant.engine == "host"
        self._check_order(op, at, on_host=on_host)
        if isinstance(variant, Variant) and on_host:
            self._run_on_host(op, variant, step, at)
            return
        read = self._reads(op, variant, step, at)
        if len(step.writes) != len(variant.outputs):
            message = f"{_name(op)} has {len(variant.outputs)} outputs, not {len(step.writes)}"
            self.fault("wrong-writes", (at, "/writes"), message)
        shrinking: list[int] = []
        for index, (write, tensor) in enumerate(zip(step.writes, variant.outputs, strict=False)):
            self._write(op, variant, write, tensor, read, shrinking, (at, "/writes/", index))
        self._workspace(op, variant, step, at)
        # Buffers taken over in place end after the workspace is checked: during the step all are
        # live together. Then the writes shrink to their own bytes.
        for number, buffer in read.items():
            if buffer.taken_over:
                self.live_bytes -= self.live.pop(number).bytes
        for writer in shrinking:
            buffer = self.live[writer]
            buffer.end = buffer.offset + buffer.bytes
            self.live_bytes += buffer.bytes
        self.clock.run(variant.cost_us)

    def free(self, step: Free, at: Place) -> None:
        for index, number in enumerate(step.buffers):
            place = (at, "/buffers/", index)
            if number not in self.live:
                if number not in self.tensor_of:
                    self.fault("not-live", place, f"buffer {number} was never written")
                elif number in self.outside_buffers:
                    message = f"buffer {number} is an output outside the arena, which is not freed"
                    self.fault("early-free", place, message)
                else:
                    self.fault("double-free", place, f"buffer {number} has already been freed")
                continue
            if number in self.pending:
                message = f"buffer {number} is freed during the transfer started at"
                start = pointer(self.pending.pop(number).place)
                self.fault("early-free", place, f"{message} {start}")
            buffer = self.live.pop(number)
            self.live_bytes -= buffer.bytes
            if buffer.indexed:
                slot = bisect_left(self.starts, buffer.offset)
                del self.starts[slot], self.owners[slot]

    def offload(self, step: Offload, at: Place, number: int) -> None:
        buffer = self._readable(step.buffer, (at, "/buffer"))
        if buffer is None:
            return
        if step.buffer in self.pending:
            message = f"buffer {step.buffer} already has a transfer in flight"
            self.fault("not-ready", (at, "/buffer"), message)
            return
        if step.buffer in self.host:
            if any(transfer.source == step.buffer for transfer in self.pending.values()):
                message = f"a prefetch is reading the host copy of buffer {step.buffer}"
                self.fault("not-ready", (at, "/buffer"), message)
            del self.host[step.buffer]
        home = self.homes.offset.get(buffer.tensor)
        if home is not None and step.host_offset == home:
            if self.homes.is_busy(buffer.tensor, self.pending, self.tensor_of):
                message = f"a transfer or the host uses the home of tensor {buffer.tensor}"
                self.fault("not-ready", (at, "/buffer"), message)
            self.homes.writes[buffer.tensor] = step.buffer
        else:
            for code, message in self.slab.add(number, step.host_offset, buffer.bytes):
                self.fault(code, (at, "/host_offset"), message)
        end_us = self._transfer(buffer.bytes, self.device.d2h_bytes_per_s, "d2h", at)
        self.pending[step.buffer] = Transfer(at, end_us)

    def prefetch(self, step: Prefetch, at: Place) -> None:
        version = None if step.from_ is None else self.host.get(step.from_)
        if step.from_ is None:
            version = self.homes.version.get(step.tensor)
            if version is None:
                message = f"tensor {step.tensor} has no home on the host"
                self.fault("not-offloaded", (at, "/from"), message)
            elif step.tensor in self.homes.writes or step.tensor in self.homes.on_host:
                message = f"a copy or the host overwrites the home of tensor {step.tensor}"
                self.fault("not-ready", (at, "/from"), message)
        elif version is None:
            message = f"the host has no complete copy of buffer {step.from_}"
            self.fault("not-offloaded", (at, "/from"), message)
        elif self.tensor_of[step.from_] != step.tensor:
            held = self.tensor_of[step.from_]
            message = f"buffer {step.from_} held tensor {held}, not {step.tensor}"
            self.fault("wrong-tensor", (at, "/tensor"), message)
        if not self._check_new(step.buffer, step.tensor, step.bytes, at):
            return
        self._allocate(step.buffer, step.tensor, step.offset, step.bytes, version or 0, at)
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        end_us = self._transfer(step.bytes, self.device.h2d_bytes_per_s, "h2d", at)
        source = HOME if step.from_ is None else step.from_
        self.pending[step.buffer] = Transfer(at, end_us, source)

    def wait(self, step: Wait, at: Place) -> None:
        transfer = self.pending.pop(step.buffer, None)
        if transfer is None:
            message = f"no transfer of buffer {step.buffer} is in flight"
            self.fault("no-transfer", (at, "/buffer"), message)
            return
        stall_us = self.clock.wait(transfer.end_us)
        if transfer.source is not None:
            self.prefetch_stall_us += stall_us
        else:
            self.offload_stall_us += stall_us
            buffer = self.live[step.buffer]
            if self.homes.writes.get(buffer.tensor) == step.buffer:
                del self.homes.writes[buffer.tensor]
                self.homes.version[buffer.tensor] = buffer.version
            else:
                self.host[step.buffer] = buffer.version

    def check_end(self) -> None:
        """Check the state after the last step: transfers, ops, outputs, leaks."""
        for number, transfer in self.pending.items():
            message = f"no step waits for the transfer of buffer {number}"
            self.fault("unfinished-transfer", transfer.place, message)
        for op in self.ops.values():
            if op.id not in self.runs:
                self.fault("missing-op", "/steps", f"no step runs {_name(op)}")
        for tensor_id, version in self.homes.version.items():
            if version != len(self.mutators.get(tensor_id, ())):
                message = f"the home of tensor {tensor_id} holds version {version} at the end"
                self.fault("stale-home", "/steps", message)
        in_arena: set[int] = set()
        for number, buffer in self.live.items():
            final = buffer.version == len(self.mutators.get(buffer.tensor, ()))
            is_output = self.tensors[buffer.tensor].kind == "output"
            belongs = final and is_output and buffer.tensor not in self.outside_outputs
            if belongs and buffer.tensor not in in_arena:
                in_arena.add(buffer.tensor)
            else:
                message = f"no step frees buffer {number} (tensor {buffer.tensor})"
                self.fault("leak", "/steps", message)
        for tensor in self.tensors.values():
            if tensor.kind != "output":
                continue
            final_version = len(self.mutators.get(tensor.id, ()))
            outside = self.outside.get(tensor.id) == final_version
            if not (outside if tensor.id in self.outside_outputs else tensor.id in in_arena):
                message = f"output tensor {tensor.id} does not exist at the end of the step"
                self.fault("missing-output", "/steps", message)

    # -- parts of steps --------------------------------------------------------------------------

    def _check_order(self, op: Op, at: Place, *, on_host: bool) -> None:
        count = self.runs[op.id] = self.runs.get(op.id, 0) + 1
        if op.recomputable and not op.rng:
            return
        if count > 1 and not op.recomputable:
            self.fault("repeated-op", (at, "/op"), f"{_name(op)} must run exactly once")
        if not op.recomputable and count == 1 and not on_host:
            if self.position[op.id] < self.last_once:
                message = f"{_name(op)} runs after a later op, and both must run exactly once"
                self.fault("once-order", (at, "/op"), message)
            self.last_once = max(self.last_once, self.position[op.id])
        if op.rng and count == 1:
            if self.position[op.id] < self.last_random:
                message = f"random {_name(op)} runs for the first time after a later random op"
                self.fault("rng-order", (at, "/op"), message)
            self.last_random = max(self.last_random, self.position[op.id])

    def _run_on_host(self, op: Op, variant: Variant, step: Compute, at: Place) -> None:
        sent = {b: self.live[b].version for b, copy in self.pending.items() if copy.source is None}
        copies = {b: (self.tensor_of[b], version) for b, version in (self.host | sent).items()}
        position, inputs = self.position[op.id], set(variant.inputs)
        needed = {t: bisect_left(self.mutators.get(t, ()), position) for t in inputs}
        moved = [
            t
            for t in inputs - self.homes.on_host
            if self.homes.is_busy(t, self.pending, self.tensor_of)
        ]
        for code, place, message in self.homes.run(op, variant, step, needed, copies, moved):
            self.fault(code, (at, place), message)
        read = [self.pending[b].end_us for b in sent if b in step.reads]
        self.clock.run_on_host(variant.cost_us, read)

    def _reads(self, op: Op, variant: Op | Variant, step: Compute, at: Place) -> dict[int, Buffer]:
        """Check the reads and apply the op's mutations; returns the buffers read in the arena."""
        if len(step.reads) != len(variant.inputs):
            message = f"{_name(op)} has {len(variant.inputs)} inputs, not {len(step.reads)}"
            self.fault("wrong-reads", (at, "/reads"), message)
        read: dict[int, Buffer] = {}
        mutated: dict[int, int | None] = {}
        mutators, live, outside, pending = self.mutators, self.live, self.outside, self.pending
        for index, (entry, tensor) in enumerate(zip(step.reads, variant.inputs, strict=False)):
            if tensor not in mutators:  # the fast path of most reads
                if isinstance(entry, TensorRead):
                    if entry.tensor == tensor and outside.get(tensor) == 0:
                        continue
                else:
                    found = live.get(entry)
                    right = found is not None and found.tensor == tensor and not found.version
                    if right and entry not in pending:
                        read[entry] = found  # type: ignore[assignment]
                        continue
            place = (at, "/reads/", index)
            number = None if isinstance(entry, TensorRead) else entry
            if isinstance(entry, TensorRead):
                holds, version = entry.tensor, self.outside.get(entry.tensor)
                if version is None:
                    message = f"{_name(op)} reads tensor {holds}, which is not outside the arena"
                    self.fault("missing-input", place, message)
            else:
                buffer = self._readable(entry, place)
                if buffer is None:
                    continue
                read[entry] = buffer
                holds, version = buffer.tensor, buffer.version
            if holds != tensor:
                message = f"{_name(op)} reads tensor {tensor} here, not {holds}"
                self.fault("wrong-tensor", place, message)
                continue
            if number is not None and tensor in self.outside_outputs and tensor in mutators:
                message = f"output tensor {tensor} is overwritten: read it outside the arena"
                self.fault("stale-version", place, message)
            needed = bisect_left(self.mutators.get(tensor, ()), self.position[op.id])
            if version is not None and version != needed:
                message = f"{_name(op)} reads version {needed} of tensor {tensor}, not {version}"
                self.fault("stale-version", place, message)
            if tensor in op.mutates and mutated.setdefault(tensor, number) != number:
                message = (
                    f"{_name(op)} mutates tensor {tensor} and reads it from a second place here"
                )
                self.fault("split-mutation", place, message)
        for tensor, number in mutated.items():
            if number is None:
                if tensor in self.outside:
                    self.outside[tensor] += 1
                continue
            if number in self.pending:
                message = f"{_name(op)} mutates buffer {number} during its copy to the host"
                self.fault("early-free", (at, "/reads"), message)
            read[number].version += 1
        for tensor in set(op.mutates).difference(variant.inputs) if op.mutates else ():
            message = f"{_name(op)} mutates tensor {tensor}, which this variant does not read"
            self.fault("unknown-variant", (at, "/variant"), message)
        return read

    def _write(
        self,
        op: Op,
        variant: Op | Variant,
        write: Write,
        tensor: int,
        read: dict[int, Buffer],
        shrinking: list[int],
        at: Place,
    ) -> None:
        """Write the buffer of one output; an in-place one is added to `shrinking`."""
        if write.tensor != tensor:
            message = f"{_name(op)} writes tensor {tensor} here, not {write.tensor}"
            self.fault("wrong-tensor", (at, "/tensor"), message)
        if not self._check_new(write.buffer, write.tensor, write.bytes, at):
            return
        outside = write.tensor in self.outside_outputs
        first = write.tensor not in self.produced
        self.produced.add(write.tensor)
        if write.offset is None:
            if not outside:
                message = f"tensor {write.tensor} belongs in the arena: give an offset"
                self.fault("output-outside", (at, "/offset"), message)
            elif not first:
                message = f"output tensor {write.tensor} is written outside the arena twice"
                self.fault("output-twice", (at, "/offset"), message)
            else:
                self.outside[write.tensor] = 0
            self.tensor_of[write.buffer] = write.tensor
            self.outside_buffers.add(write.buffer)
            return
        if outside and first:
            message = f"output tensor {write.tensor} belongs outside the arena: give offset null"
            self.fault("output-in-arena", (at, "/offset"), message)
        # A write at the offset of a buffer that the step reads takes that buffer over in place.
        slot = bisect_left(self.starts, write.offset)
        occupied = slot < len(self.starts) and self.starts[slot] == write.offset
        owner = self.owners[slot] if occupied else None
        if owner is None or owner not in read or not write.bytes:
            self._allocate(write.buffer, write.tensor, write.offset, write.bytes, 0, at)
            return
        old = read[owner]
        allowed = [write.tensor, old.tensor] in variant.inplace and old.tensor not in op.mutates
        if not allowed or write.bytes > old.bytes:
            why = "is larger than" if allowed else "may not take over"
            message = f"buffer {write.buffer} {why} buffer {owner}, which {_name(op)} reads there"
            self.fault("inplace", (at, "/offset"), message)
        if owner in self.pending:
            message = f"{_name(op)} overwrites buffer {owner} during its copy to the host"
            self.fault("early-free", (at, "/offset"), message)
            del self.pending[owner]
        old.taken_over, old.indexed = True, False
        self.owners[slot] = write.buffer
        self.tensor_of[write.buffer] = write.tensor
        end = max(old.end, write.offset + write.bytes)
        self.live[write.buffer] = Buffer(
            write.tensor, write.offset, write.bytes, version=0, end=end, indexed=True
        )
        self._check_place(write.offset, write.bytes, at)
        shrinking.append(write.buffer)

    def _workspace(self, op: Op, variant: Op | Variant, step: Compute, at: Place) -> None:
        offset, size = step.workspace.offset, step.workspace.bytes
        place = (at, "/workspace")
        if size != variant.workspace_bytes:
            message = f"{_name(op)} needs {variant.workspace_bytes} bytes of workspace, not {size}"
            self.fault("wrong-workspace", (place, "/bytes"), message)
        self._check_place(offset, size, place)
        other = self._overlapping(offset, size)
        if other is not None:
            message = f"the workspace of {_name(op)} overlaps buffer {other}"
            self.fault("overlap", (place, "/offset"), message)
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes + size)

    # -- buffers ---------------------------------------------------------------------------------

    def _readable(self, number: int, at: Place) -> Buffer | None:
        """The live buffer of that id, or None after a fault."""
        buffer = self.live.get(number)
        if buffer is None:
            if number not in self.tensor_of:
                message = f"buffer {number} was never written"
            elif number in self.outside_buffers:
                tensor = self.tensor_of[number]
                message = f"buffer {number} is outside the arena: read it as tensor {tensor}"
            else:
                tensor = self.tensor_of[number]
                message = f"buffer {number} (tensor {tensor}) is not live any more"
            self.fault("not-live", at, message)
        elif number in self.pending and self.pending[number].source is not None:
            self.fault("not-ready", at, f"buffer {number} is used before the wait on its prefetch")
        return buffer

    def _check_new(self, number: int, tensor: int, size: int, at: Place) -> bool:
        """Check id, tensor and bytes of a new buffer; False if it cannot be created."""
        if number in self.tensor_of:
            self.fault("reused-buffer", (at, "/buffer"), f"buffer id {number} was used before")
            return False
        if tensor not in self.tensors:
            return False  # already a fault: the op writes, or the host holds, another tensor
        expected = self.tensors[tensor].bytes
        if size != expected:
            message = f"tensor {tensor} has {expected} bytes, not {size}"
            self.fault("wrong-bytes", (at, "/bytes"), message)
        return True

    def _allocate(
        self, number: int, tensor: int, offset: int, size: int, version: int, at: Place
    ) -> None:
        """Add a live buffer; the address index omits one that overlaps another buffer."""
        self.tensor_of[number] = tensor
        buffer = self.live[number] = Buffer(tensor, offset, size, version, offset + size)
        self.live_bytes += size
        self._check_place(offset, size, at)
        other = self._overlapping(offset, size)
        if other is not None:
            message = f"buffer {number} overlaps buffer {other}"
            self.fault("overlap", (at, "/offset"), message)
        elif size:
            slot = bisect_left(self.starts, offset)
            self.starts.insert(slot, offset)
            self.owners.insert(slot, number)
            buffer.indexed = True

    def _check_place(self, offset: int, size: int, at: Place) -> None:
        if size and offset + size > self.arena_bytes:
            self.arena_bytes = offset + size
        if offset % self.plan.alignment:
            message = f"offset {offset} is not a multiple of {self.plan.alignment}"
            self.fault("misaligned", (at, "/offset"), message)
        if offset + size > self.plan.arena_bytes:
            message = f"bytes {offset} to {offset + size} exceed the arena"
            self.fault("outside-arena", (at, "/offset"), f"{message} of {self.plan.arena_bytes}")

    def _overlapping(self, offset: int, size: int) -> int | None:
        """The first indexed buffer that shares bytes with this range, or None."""
        if not size:
            return None
        slot = bisect_right(self.starts, offset)
        if slot and self.live[self.owners[slot - 1]].end > offset:
            return self.owners[slot - 1]
        if slot < len(self.starts) and self.starts[slot] < offset + size:
            return self.owners[slot]
        return None

    def _transfer(self, size: int, bytes_per_s: float, engine: str, at: Place) -> float:
        self.swapped_bytes += size
        if not bytes_per_s:
            message = f"the graph's device has {engine}_bytes_per_s 0, so it cannot transfer"
            self.fault("no-bandwidth", at, message)
            return 0.0
        return self.clock.copy(engine, size / bytes_per_s * 1e6)
