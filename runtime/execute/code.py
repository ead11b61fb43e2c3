"""A plan of a step as code that runs in a memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from coop_plan.runtime.capture.builder import device_of
from coop_plan.runtime.capture.joint import Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import SERVED_OUTSIDE, Arena
from coop_plan.runtime.execute.copies import Copies, Route, Transfers
from coop_plan.runtime.execute.flight import Flight
from coop_plan.runtime.execute.generators import Generator, default_generator
from coop_plan.runtime.execute.partition import FLIGHT, OCCURRENCE, split
from coop_plan.schemas import Compute, Free, Plan, Prefetch


class Code:
    """The two halves of `plan` as functions, and the slots of its ops in an arena.

    `forward(flight, *inputs)` returns outputs and saved tensors, `backward(flight, *saved,
    *tangents)` gradients; `saved_inputs` and `read` are as in `partition.Halves`. `kept` is where
    outputs lie in the arena when the step is over, ascending (begin, end). `replayed` are the
    generators of the random ops that run more than once, by op.
    """

    def __init__(self, captured: Captured, plan: Plan, clock: cuda.Clock | None) -> None:
        steps = [step for step in plan.steps if isinstance(step, Compute)]
        seen: set[int] = set()
        self._again = []
        for step in steps:
            self._again.append(step.op in seen)
            seen.add(step.op)
        self._ops = [step.op for step in steps]
        repeated = {op for op, again in zip(self._ops, self._again, strict=True) if again}
        devices = {op: device_of(captured.ops[op]) for op in repeated if captured.graph.ops[op].rng}
        self.replayed: Mapping[int, Generator] = {
            op: default_generator(device) for op, device in devices.items()
        }
        self.uncapturable = [
            captured.graph.ops[op].name for op in devices if devices[op].type == "cuda"
        ]
        self.kept = kept_by(plan)
        transfers = Transfers(plan)
        arriving = [transfers.all[i] for i in transfers.arrivals()]
        self.arena = Arena(
            plan.arena_bytes,
            [
                *(_slots(captured, step) for step in steps),
                *([(moved.bytes, moved.offset)] for moved in arriving),
            ],
            [*self._again, *(False for _ in arriving)],
            captured.device.index,
        )
        self._clock = clock
        self._route: Route | None = None
        if transfers.all:
            device = captured.graph.device.with_link(plan.link_bytes_per_s)
            host = plan.host_arena_bytes
            self._route = Route(transfers, host, self.arena, len(steps), device, captured.device)
        halves = split(captured, plan)
        self.saved_inputs = halves.saved_inputs
        self.read = halves.read
        self.forward = self._code(halves.forward)
        self.backward = self._code(halves.backward)

    def copies(self) -> Copies | None:
        """What carries out the plan's transfers for one flight, if it has any."""
        return None if self._route is None else Copies(self._route, self._clock)

    def _code(self, module: fx.GraphModule) -> Callable[..., Any]:
        """Straight-line code of a half: each op announced, random ops saved or replayed."""
        graph = module.graph
        (flight,) = (node for node in graph.nodes if node.name == FLIGHT)
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
            if op in self.replayed and again:
                with graph.inserting_after(node):
                    graph.call_function(Flight.go_on, (flight,))
        module.recompile()
        code: Callable[..., Any] = module.forward
        return code


def kept_by(plan: Plan) -> Sequence[tuple[int, int]]:
    """Where outputs lie in the arena when a plan is over: (begin, end), ascending, bytes."""
    there: dict[int, tuple[int, int]] = {}
    for step in plan.steps:
        if isinstance(step, Compute):
            for write in step.writes:
                if write.offset is not None:
                    there[write.buffer] = (write.offset, write.offset + write.bytes)
        elif isinstance(step, Prefetch):
            there[step.buffer] = (step.offset, step.offset + step.bytes)
        elif isinstance(step, Free):
            for buffer in step.buffers:
                del there[buffer]
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted(there.values()):  # in-place pairs have left two at one address
        if ranges and begin < ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((begin, end))
    return ranges


def _slots(captured: Captured, step: Compute) -> list[tuple[int, int]]:
    """Where the allocations of one op occurrence go, in the order the op makes them."""
    written = {captured.base[w.tensor][1]: w.offset for w in step.writes}
    slots = []
    for allocation in captured.profiles[step.op].allocations:
        if allocation.output >= 0:
            offset = written[allocation.output]
            slots.append((allocation.bytes, SERVED_OUTSIDE if offset is None else offset))
        elif allocation.output == -1:
            slots.append((allocation.bytes, step.workspace.offset + allocation.offset))
        else:
            slots.append((allocation.bytes, SERVED_OUTSIDE))
    return slots
