"""Runs the two halves of a planned step inside its arena."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from runtime.arena import SERVED_OUTSIDE, Arena
from runtime.capture import Captured
from runtime.errors import GraphBreakError, StepInFlightError, StepSpentError
from runtime.partition import OCCURRENCE
from runtime.reports import StepReport
from schemas import Compute, Plan

_in_flight: "weakref.WeakSet[PlannedStep]" = weakref.WeakSet()
"""Steps whose forward has run and whose backward has not."""


class PlannedStep:
    """One compiled step: its arena, and where a run of it stands.

    `owner` is the same object for all graphs of one `torch.compile` call, which share one budget.
    """

    def __init__(
        self, captured: Captured, plan: Plan, report: StepReport, owner: object = None
    ) -> None:
        self.report = report
        self.owner = owner
        steps = [step for step in plan.steps if isinstance(step, Compute)]
        seen: set[int] = set()
        again = []
        for step in steps:
            again.append(step.op in seen)
            seen.add(step.op)
        repeated = {step.op for step, flag in zip(steps, again, strict=True) if flag}
        self._ops = [step.op for step in steps]
        self._again = again
        self._replayed = {op for op in repeated if captured.graph.ops[op].rng}
        self._states: dict[int, torch.Tensor] = {}
        self._present: torch.Tensor | None = None
        self._pending = False
        program = [_slots(captured, step) for step in steps]
        self._arena = Arena(plan.arena_bytes, program, again)

    def forward(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """The forward as a boxed callable."""
        run = self._code(module)

        def forward(args: list[Any]) -> Any:
            live = self._arena.live
            if live:
                raise StepInFlightError(
                    f"a forward of '{self.report.name}' began while {live} tensors of an earlier"
                    " step still lie in its arena: run the earlier step's backward, or drop its"
                    " loss, before the next forward"
                )
            for other in _in_flight:
                if other is not self and other.owner is self.owner and other._arena.live:
                    raise GraphBreakError(
                        "one compiled function runs as several graphs with gradients, and the"
                        " budget cannot bound them together: compile with fullgraph=True to see"
                        " the line that breaks the graph, and compile the parts apart or mend it"
                    )
            self._pending = True
            _in_flight.add(self)
            return self._run(run, args, fresh=True)

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward

    def backward(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """The backward as a boxed callable."""
        run = self._code(module)

        def backward(args: list[Any]) -> Any:
            if not self._pending:
                raise StepSpentError(
                    f"a second backward through the same step of '{self.report.name}': its memory"
                    " was reused by the first (retain_graph=True is not supported)"
                )
            self._pending = False
            _in_flight.discard(self)
            result = self._run(run, args, fresh=False)
            self._states.clear()
            self._measure()
            return result

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward

    def _run(self, run: Callable[..., Any], args: list[Any], *, fresh: bool) -> Any:
        inputs = list(args)
        args.clear()
        self._arena.begin(fresh=fresh)
        try:
            return run(*inputs)
        finally:
            self._arena.leave()

    def _measure(self) -> None:
        counters = self._arena.counters()
        report = self.report
        report.measured_arena_bytes = counters.high_water_bytes
        report.outside_bytes = counters.outside_bytes
        report.last_step_us = counters.first_us + counters.again_us
        if counters.first_us:
            report.measured_overhead = counters.again_us / counters.first_us
        report.steps_run += 1

    def _code(self, module: fx.GraphModule) -> Callable[..., Any]:
        """Straight-line code of a half: each op announced, random ops saved or replayed."""
        graph = module.graph
        for node in list(graph.nodes):
            number = node.meta.get(OCCURRENCE)
            if number is None:
                continue
            op, again = self._ops[number], self._again[number]
            with graph.inserting_before(node):
                if op in self._replayed:
                    graph.call_function(self._rng_recall if again else self._rng_save, (op,))
                graph.call_function(self._arena.enter, (number,))
            if op in self._replayed and again:
                with graph.inserting_after(node):
                    graph.call_function(self._rng_return, ())
        module.recompile()
        code: Callable[..., Any] = module.forward
        return code

    # Random ops of the CPU's default generator: the state before the first run is set again.

    def _rng_save(self, op: int) -> None:
        self._arena.pause()
        self._states[op] = torch.get_rng_state()

    def _rng_recall(self, op: int) -> None:
        self._arena.pause()
        self._present = torch.get_rng_state()
        torch.set_rng_state(self._states[op])

    def _rng_return(self) -> None:
        self._arena.pause()
        assert self._present is not None
        torch.set_rng_state(self._present)
        self._present = None


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
