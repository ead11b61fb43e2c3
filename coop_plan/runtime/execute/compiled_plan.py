"""Compiled plan: the two halves of a plan as functions, with the slots of their allocations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from coop_plan.runtime.capture.custom_ops import BOXED_KERNELS
from coop_plan.runtime.capture.graph_builder import UPDATE, device_of, write_input
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import COPIES, SERVED_OUTSIDE, Arena, Slots, aligned
from coop_plan.runtime.execute.gap import arena_for_loans
from coop_plan.runtime.execute.lower_to_fx import OCCURRENCE, SharedPlaces, shared_places, split
from coop_plan.runtime.execute.plan_index import Buffer, PlanIndex
from coop_plan.runtime.execute.rng_state import Generator, default_generator
from coop_plan.runtime.execute.straight_line import straight_line
from coop_plan.runtime.execute.transfers import TransferProgram, TransferRunner, starts_of
from coop_plan.runtime.gradients.capture_adjust import GRADIENT_SINKS, accumulate, hand_over
from coop_plan.runtime.op_profile import part_offsets
from coop_plan.schemas import Compute, Plan

TAKING_INVOCATION = (*GRADIENT_SINKS, write_input)
"""Graph ops whose first argument is the invocation."""


class CompiledPlan:
    """The two halves of `plan` as functions, and the slots of its allocations in an arena.

    `forward(invocation, inputs)` returns outputs and saved tensors; `backward(invocation, saved +
    tangents)` returns gradients. Each empties its list, so that no tensor outlives its last use.
    `saved_inputs`, `inputs_read` and `updated_inputs` are as in `lower_to_fx.Halves`. `replayed`
    has the generators of random ops that run more than once, by op; the `redraws` of a half are its
    recomputed runs of them. `outputs` is where the step's outputs lie, as in `Plan`.

    `room` are the bytes of the budget that are left for arenas, `arena_bytes` those of its own: on
    CUDA more than the plan's, within `room`, if the optimizer's temporaries take more (`loans.py`).

    Gradients are named by their position among the primals. `gradient_slots` has the slot of each
    one that is added to a held gradient, None after a prefetch. Those in `consumed` are handed to
    the hooks of their leaves at once. `final_gradients` has the position of each one that remains
    in the arena after the step, by its offset.
    """

    def __init__(self, captured: Captured, plan: Plan, clock: cuda.Clock | None) -> None:
        self.budget_bytes = plan.budget_bytes
        self.outputs = plan.outputs
        self.room = plan.budget_bytes - (plan.peak_bytes - plan.arena_bytes)
        index = PlanIndex(captured.graph, plan)
        steps = [step for step in plan.steps if isinstance(step, Compute)]
        firsts = set(index.first_run.values())
        self._again = [at not in firsts for at in index.runs]
        self._graph = captured.graph
        self._ops = [step.op for step in steps]
        repeated = {op for op, again in zip(self._ops, self._again, strict=True) if again}
        devices = {op: device_of(captured.ops[op]) for op in repeated if captured.graph.ops[op].rng}
        self.replayed: Mapping[int, Generator] = {
            op: default_generator(device) for op, device in devices.items()
        }
        self.uncapturable = [
            captured.graph.ops[op].name for op in devices if devices[op].type == "cuda"
        ]
        over = shared_places(captured, plan, index)
        parts = _state_parts(captured)
        program, slot_of = _slots(captured, steps, over, index, parts)
        self.gradient_slots: dict[int, int | None] = {}
        for step in steps:
            if captured.ops[step.op].target is accumulate:
                position, gradient = captured.ops[step.op].args[1], step.reads[0]
                assert isinstance(position, int) and isinstance(gradient, int)
                self.gradient_slots[position] = slot_of.get(gradient)
        self.final_gradients = _final_gradients(captured, index)
        given = captured.output_args[captured.num_fwd_outputs :]
        self.consumed: Sequence[int] = [
            position
            for position, value in enumerate(given)
            if isinstance(value, fx.Node) and value.target is hand_over
        ]
        self.measure_outside = captured.device.type == "cpu"  # in the next run
        prefetched = [
            _copied_slots(moved.buffer, parts)
            if moved.is_home
            else [(moved.buffer.bytes, moved.buffer.offset or 0)]
            for moved in index.transfers
            if not moved.to_host
        ]
        self.arena = Arena(
            plan.arena_bytes,
            [*program, *prefetched],
            [*map(int, self._again), *(COPIES for _ in prefetched)],
            captured.device.index,
            smaller=captured.any_sizes,
        )
        self.arena_bytes = plan.arena_bytes
        if captured.device.type == "cuda":
            kept = (b for b in index.final.values() if b.place in self.final_gradients)
            wanted = arena_for_loans([aligned(buffer.bytes) for buffer in kept])
            self.arena_bytes = max(plan.arena_bytes, min(self.room, wanted))
        self._clock = clock
        self._program: TransferProgram | None = None
        if index.transfers:
            device = captured.graph.device.with_link(plan.link_bytes_per_s)
            starts = starts_of(index.transfers, len(steps), device)
            self._program = TransferProgram(
                starts, plan.host_arena_bytes, self.arena, captured.device
            )
        halves = split(captured, plan, index, over)
        self.saved_inputs = halves.saved_inputs
        self.inputs_read = halves.inputs_read
        self.updated_inputs = halves.updated_inputs
        self.forward, self.forward_redraws = self._lower(captured.module, halves.forward)
        self.backward, self.backward_redraws = self._lower(captured.module, halves.backward)

    def producer(self, slot: int) -> str:
        """The producer of the tensor in a slot, for messages."""
        number = self.arena.occurrence(slot)
        if number >= len(self._ops):
            return "a prefetched tensor"
        op = self._graph.ops[self._ops[number]]
        return f"a result of '{op.name}'" + (f" at {op.source}" if op.source else "")

    def transfer_runner(self) -> TransferRunner | None:
        """Executor of the plan's transfers for one invocation; None without transfers."""
        return None if self._program is None else TransferRunner(self._program, self._clock)

    def _lower(
        self, module: fx.GraphModule, graph: fx.Graph
    ) -> tuple[Callable[..., Any], Sequence[int]]:
        """Straight-line code of a half, with the constants of `module`, and its redraws.

        Each op enters its arena slots first; random ops save or restore their generator's state.
        """
        invocation = graph.find_nodes(op="placeholder")[0]
        kind: bool | None = None
        redraws = []
        for node in list(graph.nodes):
            number = node.meta.get(OCCURRENCE)
            if number is None:
                continue
            op, again = self._ops[number], self._again[number]
            with graph.inserting_before(node):
                if self._clock is not None and again != kind:
                    graph.call_function(self._clock.mark, (int(again),))
                    kind = again
                if op in self.replayed:
                    prepare = "restore_generator" if again else "save_generator"
                    graph.call_method(prepare, (invocation, op))
                graph.call_function(self.arena.enter, (number,))
            if (kernel := BOXED_KERNELS.get(node.target)) is not None:
                node.target = kernel
            if node.target in TAKING_INVOCATION:
                node.args = (invocation, *node.args[1:])
            if op in self.replayed and again:
                redraws.append(op)
                with graph.inserting_after(node):
                    graph.call_method("resume_generator", (invocation,))
        return straight_line(graph, module), redraws


def _final_gradients(captured: Captured, index: PlanIndex) -> dict[int, int]:
    """Positions of the gradients that remain in the arena after the step, by offset."""
    found: dict[int, int] = {}
    for position, value in enumerate(captured.output_args[captured.num_fwd_outputs :]):
        if isinstance(value, fx.Node) and value.target not in GRADIENT_SINKS:
            for t in captured.storages[value]:
                buffer = None if t is None else index.final.get(t)
                if buffer is not None and buffer.place is not None:
                    found[buffer.place] = position
    return found


def _state_parts(captured: Captured) -> dict[int, Sequence[int]]:
    """Bytes of the storages of an optimizer's states, by tensor id."""
    return {
        t: node.meta[UPDATE].profile.state_parts
        for node, op in zip(captured.ops, captured.graph.ops, strict=True)
        if UPDATE in node.meta
        for t in op.inputs[2:]
    }


def _copied_slots(copy: Buffer, state_parts: Mapping[int, Sequence[int]]) -> Slots:
    """Size and offset of each part of a copy of a home."""
    parts = state_parts.get(copy.tensor, (copy.bytes,))
    return [
        (size, (copy.offset or 0) + at) for size, at in zip(parts, part_offsets(parts), strict=True)
    ]


def _makes_states(captured: Captured, op: int) -> bool:
    """True if an op is an update that makes the states of its parameter."""
    update = captured.ops[op].meta.get(UPDATE)
    return update is not None and captured.profiles[op] is update.profile.first


def _slots(
    captured: Captured,
    steps: Sequence[Compute],
    over: Mapping[int, SharedPlaces],
    index: PlanIndex,
    parts: Mapping[int, Sequence[int]],
) -> tuple[list[Slots], dict[int, int]]:
    """Size and offset of each allocation of each run, in order, and the slot of each buffer.

    Slots are counted over all runs. Results that share the place of an argument (`over`) are not
    allocated. States that an update makes are where the copy of their home would be.
    """
    program: list[Slots] = []
    slot_of: dict[int, int] = {}
    first = 0
    for number, step in enumerate(steps):
        written = {captured.producer[write.tensor][1]: write for write in step.writes}
        slots = []
        profile = captured.selected_variant(step).profile
        allocations = profile.allocations_except(over.get(number, ()))
        states = step.reads[2:] if _makes_states(captured, step.op) else ()
        copies = (index.buffers[read] for read in states if isinstance(read, int))
        at_home = [slot for copy in copies for slot in _copied_slots(copy, parts)]
        for i, allocation in enumerate(allocations, start=first):
            offset = None
            if allocation.output >= 0:
                write = written[allocation.output]
                slot_of[write.buffer] = i
                offset = write.offset if write.bytes else None
            elif allocation.output == -1:
                offset = step.workspace.offset + allocation.offset
            elif found := next((slot for slot in at_home if slot[0] == allocation.bytes), None):
                at_home.remove(found)
                offset = found[1]
            slots.append((allocation.bytes, SERVED_OUTSIDE if offset is None else offset))
        first += len(slots)
        program.append(slots)
    return program, slot_of
