"""Runs the two halves of a planned step inside its arena."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.builder import device_of
from coop_plan.runtime.capture.joint import Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import SERVED_OUTSIDE, Arena, Memory
from coop_plan.runtime.errors import GraphBreakError, StepInFlightError, StepSpentError
from coop_plan.runtime.execute.generators import default_generator
from coop_plan.runtime.execute.partition import OCCURRENCE
from coop_plan.runtime.lines import Lines
from coop_plan.runtime.reports import StepReport
from coop_plan.runtime.torch_internals import boxed
from coop_plan.schemas import Compute, Free, Plan


class PlannedStep:
    """One compiled step in the memory that it shares with the others of its `torch.compile` call.

    `lines` are the user's lines of the step's graph.
    """

    def __init__(
        self, captured: Captured, plan: Plan, report: StepReport, memory: Memory, lines: Lines
    ) -> None:
        self.report = report
        self.lines = lines
        steps = [step for step in plan.steps if isinstance(step, Compute)]
        seen: set[int] = set()
        again = []
        for step in steps:
            again.append(step.op in seen)
            seen.add(step.op)
        repeated = {step.op for step, flag in zip(steps, again, strict=True) if flag}
        self._ops = [step.op for step in steps]
        self._again = again
        devices = {op: device_of(captured.ops[op]) for op in repeated if captured.graph.ops[op].rng}
        self._replayed = {op: default_generator(device) for op, device in devices.items()}
        self._states: dict[int, Any] = {}
        self._present: Any = None
        self._kept = _kept(plan)
        self._clock: cuda.Clock | None = None
        if captured.device.type == "cuda":
            self._clock = cuda.Clock(captured.device.index)
            self._uncapturable = [
                captured.graph.ops[op].name for op in devices if devices[op].type == "cuda"
            ]
        program = [_slots(captured, step) for step in steps]
        self._memory = memory
        self._arena = Arena(plan.arena_bytes, program, again, memory, captured.device.index)

    def forward(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """The forward as a boxed callable."""
        run = self._code(module)

        def forward(args: list[Any]) -> Any:
            self._claim()
            return self._run(run, args, fresh=True)

        return boxed(forward)

    def backward(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """The backward as a boxed callable."""
        run = self._code(module)

        def backward(args: list[Any]) -> Any:
            result = self._run(run, args, fresh=False)
            self._memory.pending = False
            self._states.clear()
            if self._clock is not None:
                self._clock.end()
            self._measure()
            return result

        return boxed(backward)

    def ticket(self) -> torch.Tensor:
        """What the forward saves so that its backward can tell whether its memory is still its."""
        return torch.tensor(self._memory.serial)

    def redeem(self, ticket: torch.Tensor) -> None:
        """Refuse a backward whose step's memory was reused.

        Raises:
            StepSpentError: a second backward, or one after another step's forward.
        """
        memory = self._memory
        if ticket.item() != memory.serial:
            raise StepSpentError(
                f"the backward of '{self.report.name}' comes after the forward of '{memory.holder}'"
                " reused its memory: run each step's backward before the next forward"
            )
        if not memory.pending:
            raise StepSpentError(
                f"a second backward through the same step of '{self.report.name}': its memory"
                " was reused by the first (retain_graph=True is not supported)"
            )

    def _claim(self) -> None:
        """Make the memory this step's, or refuse while another step needs it.

        What the user still holds of an earlier step, gradients for example, keeps its pages.
        """
        memory = self._memory
        if self._clock is not None:
            cuda.refuse_capture_of(self._uncapturable)
            if (times := self._clock.read()) is not None:
                self._take_times(*times)
        if memory.live and (memory.pending or not memory.can_part):
            gc.collect()  # a dropped step may hang in a reference cycle
        if memory.live and (memory.pending or not memory.can_part):
            self._refuse()
        if memory.live:
            memory.part()
        memory.serial += 1
        memory.holder, memory.holder_lines = self.report.name, self.lines
        memory.pending, memory.kept = True, self._kept

    def _refuse(self) -> None:
        memory = self._memory
        earlier = memory.holder_lines
        again = memory.holder == self.report.name
        if again or (earlier.begin == self.lines.begin and not earlier.breaks):  # another shape
            raise StepInFlightError(
                f"a forward of '{self.report.name}' began while {memory.live} tensors of an earlier"
                " step still lie in its arena: run the earlier step's backward, or drop its"
                " loss, before the next forward (if you did, a graph break makes one call run"
                " several graphs: fullgraph=True shows it)"
            )
        raise GraphBreakError(
            "one compiled function runs as several graphs with gradients, and the budget cannot"
            f" bound them together: the one that begins at {earlier.begin} ends at {earlier.end},"
            f" the next begins at {self.lines.begin}; remove the break (fullgraph=True shows it in"
            " full), or give each part a torch.compile and a budget of its own"
        )

    def _run(self, run: Callable[..., Any], args: list[Any], *, fresh: bool) -> Any:
        inputs = list(args)
        args.clear()
        self._arena.begin(fresh=fresh)
        if self._clock is not None and fresh:
            self._clock.begin()
        try:
            return run(*inputs)
        finally:
            if self._clock is not None:
                self._clock.mark(cuda.NEITHER)
            self._arena.leave()

    def _measure(self) -> None:
        counters = self._arena.counters()
        report = self.report
        report.measured_arena_bytes = counters.high_water_bytes
        report.measured_peak_bytes = report.resident_bytes + counters.process_bytes
        report.outside_bytes = counters.outside_bytes
        report.steps_run += 1
        if self._clock is None:
            self._take_times(counters.first_us, counters.again_us)

    def _take_times(self, first_us: float, again_us: float) -> None:
        self.report.last_step_us = first_us + again_us
        if first_us:
            self.report.measured_overhead = again_us / first_us

    def _code(self, module: fx.GraphModule) -> Callable[..., Any]:
        """Straight-line code of a half: each op announced, random ops saved or replayed."""
        graph = module.graph
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
                if op in self._replayed:
                    graph.call_function(self._rng_recall if again else self._rng_save, (op,))
                graph.call_function(self._arena.enter, (number,))
            if op in self._replayed and again:
                with graph.inserting_after(node):
                    graph.call_function(self._rng_return, (op,))
        module.recompile()
        code: Callable[..., Any] = module.forward
        return code

    # Random ops of a default generator: the state before the first run is set again.

    def _rng_save(self, op: int) -> None:
        self._arena.pause()
        self._states[op] = self._replayed[op].state()

    def _rng_recall(self, op: int) -> None:
        self._arena.pause()
        self._present = self._replayed[op].state()
        self._replayed[op].set(self._states[op])

    def _rng_return(self, op: int) -> None:
        self._arena.pause()
        self._replayed[op].set(self._present)
        self._present = None


def _kept(plan: Plan) -> list[tuple[int, int]]:
    """Where outputs lie in the arena when the step ends: (begin, end), ascending, bytes."""
    there: dict[int, tuple[int, int]] = {}
    for step in plan.steps:
        if isinstance(step, Compute):
            for write in step.writes:
                if write.offset is not None:
                    there[write.buffer] = (write.offset, write.offset + write.bytes)
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
