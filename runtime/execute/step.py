"""A planned step as AOTAutograd calls it: any number of calls, in any order of their halves."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from coop_plan.runtime.capture.builder import device_of
from coop_plan.runtime.capture.joint import Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import Counters
from coop_plan.runtime.execute.code import Code
from coop_plan.runtime.execute.copies import Copies
from coop_plan.runtime.execute.flight import Flight, flight_of
from coop_plan.runtime.execute.generators import Generator, default_generator
from coop_plan.runtime.execute.partition import copied, inputs_of
from coop_plan.runtime.execute.pool import Pools, claim
from coop_plan.runtime.execute.regions import Call
from coop_plan.runtime.lines import Lines
from coop_plan.runtime.reports import StepReport
from coop_plan.runtime.torch_internals import boxed
from coop_plan.schemas import Plan

log = logging.getLogger("coop-plan")


class PlannedStep:
    """One compiled step; `lines` are the user's lines of its graph, `call` what it is compiled for.

    Each call is a flight of its own. It keeps its memory until its backward, unless the budget does
    not allow that; then its forward runs again before its backward.
    """

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        report: StepReport,
        pools: Pools,
        lines: Lines,
        call: object,
    ) -> None:
        self.report = report
        self.lines = lines
        self._pools = pools
        self._captured = captured
        self._call = call  # lives as long as one of its steps
        self._room = plan.budget_bytes - plan.resident_bytes
        self._outputs = captured.num_fwd_outputs
        self._copied = copied(captured)
        self._parameters = _parameters(captured)
        self._generators = _generators(captured)
        self._clock: cuda.Clock | None = None
        if captured.device.type == "cuda":
            self._clock = cuda.Clock(captured.device.index)
        self._code = Code(captured, plan, self._clock)

    def forward(self) -> Callable[[list[Any]], Any]:
        """The forward as a boxed callable: primals to outputs and a ticket."""

        def forward(args: list[Any]) -> Any:
            inputs = list(args)
            args.clear()
            if self._clock is not None:
                cuda.refuse_capture_of(self._code.uncapturable)
                if (times := self._clock.read()) is not None:
                    self._take_times(*times, self._clock.stall_us)
            pool = self._pools.here()
            flight = Flight(self.report.name, self._code, pool, self._room, self._generators)
            fresh = pool.begin(flight, self, Call(self._captured, self._clock))
            if flight.copies is not None:
                flight.copies.begin(flight.memory)
            ticket = flight.ticket()
            with self._running(flight, fresh=fresh):
                inputs += [inputs[i].clone() for i in self._copied]
                flight.hold(inputs, self._parameters)
                made = flight.code.forward(flight, *inputs)
            outputs = made[: self._outputs]
            flight.keep(made[self._outputs :], outputs)
            pool.course.received(flight, outputs)
            return (*outputs, ticket)

        return boxed(forward)

    def backward(self) -> Callable[[list[Any]], Any]:
        """The backward as a boxed callable: a ticket and tangents to gradients."""

        def backward(args: list[Any]) -> Any:
            ticket, *tangents = args
            args.clear()
            flight = flight_of(ticket)
            flight.home.course.backward(flight)
            saved = claim(flight)
            if saved is None:
                saved = self._forward_again(flight)
            flight.check(saved)
            with self._running(flight, fresh=False):
                result = flight.code.backward(flight, *saved, *tangents)
            flight.land()
            if self._clock is not None:
                self._clock.end()
            if flight.code is self._code:
                flight.home.course.given(flight, tangents, result)
                self._measure(flight.run.counters(), flight.copies)
            else:
                self.report.steps_run += 1
                flight.home.course.measured(flight, flight.run.counters())
            return result

        return boxed(backward)

    def _forward_again(self, flight: Flight) -> Sequence[Any]:
        """The saved tensors of a flight whose memory was given to another."""
        if not self.report.forwards_again:
            log.warning(
                "%s: '%s' runs its forward again before its backward, because %s",
                *(self.lines.begin, self.report.name, flight.why_again),
            )
        self.report.forwards_again += 1
        with flight.rewound():
            flight.home.admit(flight)
            if flight.copies is not None:
                flight.copies.begin(flight.memory)
            with self._running(flight, fresh=False), torch.no_grad():
                made = flight.code.forward(flight, *flight.inputs)
        flight.keep(made[self._outputs :], made[: self._outputs])
        saved = claim(flight)
        assert saved is not None
        return saved

    @contextmanager
    def _running(self, flight: Flight, *, fresh: bool) -> Iterator[None]:
        """Keep this thread in the arena."""
        assert flight.memory is not None
        try:
            flight.run.begin(flight.memory, fresh=fresh)
            if self._clock is not None and fresh:
                self._clock.begin()
            try:
                yield
            finally:
                flight.go_on()
                if self._clock is not None:
                    self._clock.mark(cuda.NEITHER)
                flight.code.arena.leave()
        except BaseException:
            if flight.copies is not None:
                flight.copies.abandon()
            flight.memory = None  # of what was made, none is needed any more
            raise

    def _measure(self, counters: Counters, copies: Copies | None) -> None:
        report = self.report
        report.measured_arena_bytes = counters.high_water_bytes
        report.measured_peak_bytes = report.resident_bytes + counters.process_bytes
        report.outside_bytes = counters.outside_bytes
        report.steps_run += 1
        if self._clock is None:
            stalls = (0.0, 0.0) if copies is None else copies.stall_us
            self._take_times(counters.first_us, counters.again_us, stalls)
        if copies is not None:
            report.measured_host_arena_bytes = copies.host_high_water
            report.copies = copies.spans

    def _take_times(self, first_us: float, again_us: float, stalls: Sequence[float]) -> None:
        report = self.report
        report.last_step_us = first_us + again_us
        report.measured_offload_stall_us, report.measured_prefetch_stall_us = stalls
        if first_us:
            report.measured_overhead = (again_us + sum(stalls)) / first_us


def _parameters(captured: Captured) -> set[int]:
    """Positions of the inputs that are leaves with a gradient."""
    found = set()
    for i, node in enumerate(inputs_of(captured)):
        (t,) = captured.storages[node]
        if t is not None and captured.graph.tensors[t].kind == "parameter":
            found.add(i)
    return found


def _generators(captured: Captured) -> list[Generator]:
    """The generators that the forward draws from."""
    nodes = zip(captured.graph.ops[: captured.forward_ops], captured.ops, strict=False)
    devices = {device_of(node) for op, node in nodes if op.rng}
    return [default_generator(device) for device in devices]
