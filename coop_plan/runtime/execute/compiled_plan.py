"""A plan of a step as code that runs in a memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from coop_plan.runtime.capture.graph_builder import device_of
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import SERVED_OUTSIDE, Arena, Slots
from coop_plan.runtime.execute.invocation import Flight
from coop_plan.runtime.execute.lower_to_fx import (
    FLIGHT,
    OCCURRENCE,
    Over,
    shared_places,
    split,
)
from coop_plan.runtime.execute.plan_index import PlanIndex
from coop_plan.runtime.execute.rng_state import Generator, default_generator
from coop_plan.runtime.execute.transfers import Copies, Route
from coop_plan.runtime.gradients.capture_adjust import TAKING, accumulate, hand_over
from coop_plan.schemas import Compute, Plan


class Code:
    """The two halves of `plan` as functions, and the slots of its ops in an arena.

    `forward(flight, inputs)` returns outputs and saved tensors, `backward(flight, saved +
    tangents)` gradients; each empties the list it is given, so that nothing lives longer than it is
    needed. `saved_inputs` and `read` are as in `partition.Halves`. `replayed` are
    the generators of the random ops that run more than once, by op. Gradients by their position
    among the primals: `slots[position]` is the slot of one that is added to its home, None where
    it has come back from the host by then; `used` are handed over once they are made; `left` is
    where in the arena the others lie when the step is over.
    """

    def __init__(self, captured: Captured, plan: Plan, clock: cuda.Clock | None) -> None:
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
        program, slot_of = _slots(captured, steps, over)
        # Homes are the second argument of `accumulate`, and what it reads is the gradient.
        accumulated = [step for step in steps if captured.ops[step.op].target is accumulate]
        self.slots: dict[int, int | None] = {
            captured.ops[step.op].args[1]: slot_of.get(step.reads[0]) for step in accumulated
        }
        self.left = _left(captured, index)
        given = captured.output_args[captured.num_fwd_outputs :]
        self.used: Sequence[int] = [
            position
            for position, value in enumerate(given)
            if isinstance(value, fx.Node) and value.target is hand_over
        ]
        self.watch = captured.device.type == "cpu"  # the next run, for what it takes beside this
        prefetched = [moved.buffer for moved in index.transfers if not moved.to_host]
        self.arena = Arena(
            plan.arena_bytes,
            [*program, *([(buffer.bytes, buffer.offset)] for buffer in prefetched)],
            [*self._again, *(False for _ in prefetched)],
            captured.device.index,
        )
        self._clock = clock
        self._route: Route | None = None
        if index.transfers:
            device = captured.graph.device.with_link(plan.link_bytes_per_s)
            host = plan.host_arena_bytes
            self._route = Route(
                *(index.transfers, host, self.arena, len(steps), device, captured.device)
            )
        halves = split(captured, plan, index, over)
        self.saved_inputs = halves.saved_inputs
        self.read = halves.read
        self.forward = self._code(captured.module, halves.forward)
        self.backward = self._code(captured.module, halves.backward)

    def maker(self, slot: int) -> str:
        """What takes a slot, in words."""
        number = self.arena.occurrence(slot)
        if number >= len(self._ops):
            return "a tensor from the host"
        op = self._graph.ops[self._ops[number]]
        return f"what '{op.name}' made" + (f" at {op.source}" if op.source else "")

    def copies(self) -> Copies | None:
        """What carries out the plan's transfers for one flight, if it has any."""
        return None if self._route is None else Copies(self._route, self._clock)

    def _code(self, module: fx.GraphModule, graph: fx.Graph) -> Callable[..., Any]:
        """Straight-line code of a half: each op announced, random ops saved or replayed.

        `module` has the constants.
        """
        flight = _boxed(graph)
        kind: bool | None = None
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
                    prepare = Flight.recall if again else Flight.save
                    graph.call_function(prepare, (flight, op))
                graph.call_function(self.arena.enter, (number,))
            if node.target in TAKING:
                node.args = (flight, *node.args[1:])
            if op in self.replayed and again:
                with graph.inserting_after(node):
                    graph.call_function(Flight.go_on, (flight,))
        code: Callable[..., Any] = fx.GraphModule(module, graph).forward
        return code


def _boxed(graph: fx.Graph) -> fx.Node:
    """Let the code take its inputs out of one list; the flight is returned, which stays beside."""
    flight: fx.Node
    flight, *inputs = graph.find_nodes(op="placeholder")
    assert flight.name == FLIGHT
    with graph.inserting_after(inputs[-1] if inputs else flight):
        box = graph.placeholder("box")
    after = box
    for i, node in enumerate(inputs):
        with graph.inserting_after(after):
            after = graph.call_function(_take, (box, i))
        node.replace_all_uses_with(after)
        graph.erase_node(node)
    return flight


def _take(box: list[Any], position: int) -> Any:
    value, box[position] = box[position], None
    return value


def _left(captured: Captured, index: PlanIndex) -> dict[int, int]:
    """Positions of the gradients that lie in the arena when the step is over, by offset."""
    found: dict[int, int] = {}
    for position, value in enumerate(captured.output_args[captured.num_fwd_outputs :]):
        if isinstance(value, fx.Node) and value.target not in TAKING:
            for t in captured.storages[value]:
                buffer = None if t is None else index.final.get(t)
                if buffer is not None and buffer.place is not None:
                    found[buffer.place] = position
    return found


def _slots(
    captured: Captured, steps: Sequence[Compute], over: Mapping[int, Over]
) -> tuple[list[Slots], dict[int, int]]:
    """
    Address of each allocation of each op occurrence, in the order the ops make them.

    Results `over` arguments are not allocated. Also returns the slot of each buffer, counted over
    all occurrences.
    """
    program: list[Slots] = []
    slot_of: dict[int, int] = {}
    first = 0
    for number, step in enumerate(steps):
        written = {captured.base[write.tensor][1]: write for write in step.writes}
        slots = []
        allocations = captured.running(step).facts.allocated_beside(over.get(number, ()))
        for i, allocation in enumerate(allocations, start=first):
            offset = None
            if allocation.output >= 0:
                write = written[allocation.output]
                slot_of[write.buffer] = i
                offset = write.offset if write.bytes else None  # none: passed between joint graphs
            elif allocation.output == -1:
                offset = step.workspace.offset + allocation.offset
            slots.append((allocation.bytes, SERVED_OUTSIDE if offset is None else offset))
        first += len(slots)
        program.append(slots)
    return program, slot_of
