"""A plan of a step as code that runs in a memory."""

from collections.abc import Callable, Collection, Mapping, Sequence
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
    final_sources,
    shared_places,
    split,
)
from coop_plan.runtime.execute.rng_state import Generator, default_generator
from coop_plan.runtime.execute.transfers import Copies, Route, Transfers
from coop_plan.runtime.gradients.capture_adjust import TAKING, accumulate, hand_over
from coop_plan.schemas import Compute, Plan, Prefetch, Write


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
        steps = [step for step in plan.steps if isinstance(step, Compute)]
        seen: set[int] = set()
        self._again = []
        for step in steps:
            self._again.append(step.op in seen)
            seen.add(step.op)
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
        over = shared_places(captured, plan)
        program = [
            _slots(captured, step, over.get(number, ())) for number, step in enumerate(steps)
        ]
        self.slots = _gradient_slots(captured, steps, program, over)
        self.left = _left(captured, plan)
        given = captured.output_args[captured.num_fwd_outputs :]
        self.used: Sequence[int] = [
            position
            for position, value in enumerate(given)
            if isinstance(value, fx.Node) and value.target is hand_over
        ]
        self.watch = captured.device.type == "cpu"  # the next run, for what it takes beside this
        transfers = Transfers(plan)
        arriving = [transfers.all[i] for i in transfers.arrivals()]
        self.arena = Arena(
            plan.arena_bytes,
            [*program, *([(moved.bytes, moved.offset)] for moved in arriving)],
            [*self._again, *(False for _ in arriving)],
            captured.device.index,
        )
        self._clock = clock
        self._route: Route | None = None
        if transfers.all:
            device = captured.graph.device.with_link(plan.link_bytes_per_s)
            host = plan.host_arena_bytes
            self._route = Route(transfers, host, self.arena, len(steps), device, captured.device)
        halves = split(captured, plan, over)
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


def _gradient_slots(
    captured: Captured,
    steps: Sequence[Compute],
    program: Sequence[Slots],
    over: Mapping[int, Over],
) -> dict[int, int | None]:
    """The slot, counted over all occurrences, in which each lasting gradient is made, if it is."""
    first = 0
    made: dict[int, int] = {}
    found: dict[int, int | None] = {}
    for number, (step, slots) in enumerate(zip(steps, program, strict=True)):
        node = captured.ops[step.op]
        if node.target is accumulate:
            position = node.args[1]
            assert isinstance(position, int)
            buffer = step.reads[0]
            assert isinstance(buffer, int)
            found[position] = made.get(buffer)
        buffers = {captured.producer[write.tensor][1]: write.buffer for write in step.writes}
        taken = captured.selected_variant(step).profile.allocations_except(over.get(number, ()))
        for i, allocation in enumerate(taken):
            if allocation.output in buffers:
                made[buffers[allocation.output]] = first + i
        first += len(slots)
    return found


def _left(captured: Captured, plan: Plan) -> dict[int, int]:
    """Positions of the gradients that lie in the arena when the step is over, by offset."""
    final = final_sources(plan)
    written: list[Write | Prefetch] = []
    for step in plan.steps:
        written += step.writes if isinstance(step, Compute) else []
        written += [step] if isinstance(step, Prefetch) else []
    offsets = {
        write.tensor: place
        for write in written
        if (place := place_of(write)) is not None
        and final.get(write.tensor) == ("buffer", write.buffer)
    }
    found: dict[int, int] = {}
    for position, value in enumerate(captured.output_args[captured.num_fwd_outputs :]):
        if isinstance(value, fx.Node) and value.target not in TAKING:
            for t in captured.storages[value]:
                if t in offsets:
                    found[offsets[t]] = position
    return found


def place_of(write: Write | Prefetch) -> int | None:
    """Where in the arena a tensor lies; None: outside it.

    So does one without bytes, which a plan of several graphs makes of what only passes between them
    (`runtime.iteration.joint_plan`).
    """
    return write.offset if write.bytes else None


def _slots(captured: Captured, step: Compute, over: Collection[int]) -> list[tuple[int, int]]:
    """
    Where the allocations of one op occurrence go, in the order the op makes them.

    There are none for results that lie `over` arguments.
    """
    profile = captured.selected_variant(step).profile
    written = {captured.producer[w.tensor][1]: place_of(w) for w in step.writes}
    slots = []
    for allocation in profile.allocations_except(over):
        if allocation.output >= 0:
            offset = written[allocation.output]
            slots.append((allocation.bytes, SERVED_OUTSIDE if offset is None else offset))
        elif allocation.output == -1:
            slots.append((allocation.bytes, step.workspace.offset + allocation.offset))
        else:
            slots.append((allocation.bytes, SERVED_OUTSIDE))
    return slots
