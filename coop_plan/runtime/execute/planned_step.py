"""A planned step as AOTAutograd calls it: any number of calls, in any order of their halves."""

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from coop_plan.runtime.capture.graph_builder import device_of
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import Counters, Memory
from coop_plan.runtime.dynamic_shapes.history import Others
from coop_plan.runtime.errors import BudgetExceededError, CudaGraphError
from coop_plan.runtime.execute.arena_pool import Pools, claim
from coop_plan.runtime.execute.compiled_plan import Code
from coop_plan.runtime.execute.invocation import Flight, Runnable, flight_of, room
from coop_plan.runtime.execute.lower_to_fx import copied, inputs_of
from coop_plan.runtime.execute.rng_state import Generator, default_generator
from coop_plan.runtime.execute.transfers import Copies
from coop_plan.runtime.gradients import capture_adjust
from coop_plan.runtime.gradients.capture_adjust import Circumstances
from coop_plan.runtime.gradients.held_gradients import Residents, handed_over, held_in_place
from coop_plan.runtime.gradients.undefined import Undefined
from coop_plan.runtime.iteration.joint_plan import Call
from coop_plan.runtime.iteration.recorder import TOLERANCE, addresses
from coop_plan.runtime.locks import fork_safe_lock
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import StepReport
from coop_plan.runtime.source_lines import Lines
from coop_plan.runtime.torch_internals.autograd import after_this_backward, makes_a_graph
from coop_plan.runtime.torch_internals.joint_graphs import boxed
from coop_plan.schemas import Plan, format_bytes

log = logging.getLogger("coop-plan")

_planning = fork_safe_lock()
"""Who finds other circumstances than were planned for waits for a plan under way in a thread."""

PATIENCE = 50
"""Looks, 1 ms apart, at gradients that nobody may hold any more, before a step is planned anew."""

FIRST_STEPS = 2
"""On CUDA, steps in which libraries may take their workspaces."""


class PlannedStep:
    """One compiled step; `lines` are the user's lines of its graph, `call` what it is compiled for.

    The `plan` is one for the circumstances `now`.

    Each call is a flight of its own. It keeps its memory until its backward, unless the budget does
    not allow that; then its forward runs again before its backward.
    """

    def __init__(
        self,
        captured: Captured,
        now: Circumstances,
        plan: Plan,
        report: StepReport,
        pools: Pools,
        lines: Lines,
        call: object,
        options: Options,
        others: Others,
    ) -> None:
        self.report = report
        self.lines = lines
        self._pools = pools
        self._captured = captured
        self._call = call  # lives as long as one of its steps
        self._strict = options.strict
        budget, name = plan.budget_bytes, report.name
        self._residents = Residents(captured, now, options, budget, name, others)
        self._landed: tuple[weakref.ref[Memory], Runnable] | None = None
        self._warned = False
        self._noted = False
        self._gave_up = False
        self._learned = False
        self._handed = False
        self._room = room(plan)
        self._outputs = captured.num_fwd_outputs
        self._copied = copied(captured)
        self._parameters = _parameters(captured)
        gradients = captured.output_args[captured.num_fwd_outputs :]
        self._passable = [
            i for i, made in enumerate(gradients) if made is not None and i not in self._parameters
        ]
        self.undefined = Undefined(captured)
        self._generators = _generators(captured)
        self._clock: cuda.Clock | None = None
        if captured.device.type == "cuda":
            self._clock = cuda.Clock(captured.device.index)
        self._code: Code
        if not self._is_planned_like_others():
            self._code = Code(capture_adjust.under(captured, now), plan, self._clock)

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
            # PyTorch does not say where they stand while a CUDA graph is captured.
            generators = [] if self._is_captured() else self._generators
            flight = Flight(self.report.name, self._code, pool, self._room, generators)
            passing = [i for i in self._passable if _is_made(inputs[i])]
            leaves = self._residents.leaves(inputs)
            call = Call(self._captured, self._clock, passing, leaves)
            whole = pool.joins(flight, self, call, lambda: self._addresses(inputs))
            if not whole:
                self._plan_as_learned()
                if pool.course.first:
                    self._look_around(inputs)
            flight.beside = self._residents.held(inputs)
            if not whole and flight.code is not self._code:
                flight.run_alone(self._code, self._room)
            fresh = pool.place(flight, whole=whole)
            code = flight.code
            flight.leaves = {position: inputs[position] for position in (*code.slots, *code.used)}
            if flight.copies is not None:
                flight.copies.begin(flight.memory)
            flight.meet()
            ticket = flight.ticket()
            with self._running(flight, fresh=fresh):
                inputs += [inputs[i].clone() for i in self._copied]
                flight.hold(inputs, self._parameters)
                made = flight.code.forward(flight, inputs)
            outputs = made[: self._outputs]
            flight.keep(made[self._outputs :], outputs)
            pool.course.received(flight, outputs)
            return (*outputs, ticket)

        return boxed(forward)

    def _addresses(self, inputs: Sequence[Any]) -> Sequence[int | None]:
        return addresses([v for i, v in enumerate(inputs) if i not in self._parameters])

    def backward(self) -> Callable[[list[Any]], Any]:
        """The backward as a boxed callable: a ticket and tangents to gradients."""

        def backward(args: list[Any]) -> Any:
            ticket, *tangents = args
            args.clear()
            flight = flight_of(ticket)
            course = flight.home.course
            course.backward(flight)
            saved = claim(flight)
            if saved is None:
                saved = self._forward_again(flight)
            flight.check(saved)
            flight.meet()
            self._note_graph()
            flight.held = held_in_place(flight.leaves)
            flight.handed = handed_over(flight.leaves, flight.code.used)
            slots = flight.code.slots.items()
            elsewhere = [slot for p, slot in slots if slot is not None and p not in flight.held]
            flight.run.serve_elsewhere(elsewhere)
            course.given(flight, tangents)
            given = [*saved, *tangents]
            del saved, tangents
            with self._running(flight, fresh=False):
                result = flight.code.backward(flight, given)
            result = self.undefined.left_out(result)
            course.returned(flight, result)
            if not flight.whole:
                self._watch_hooks(flight.inputs)
            self._land(flight, [p for p in flight.leaves if self._keeps_twice(flight, p)])
            return result

        return boxed(backward)

    def _is_captured(self) -> bool:
        return self._clock is not None and cuda.capturing()

    def _note_graph(self) -> None:
        """Say what to write instead before PyTorch refuses a double backward without it."""
        if self._noted or not makes_a_graph():
            return
        self._noted = True
        log.warning(
            "%s: a backward of '%s' with create_graph=True: its gradients are right, but cannot be"
            " differentiated again, as nothing can that AOTAutograd compiled; for a gradient"
            " penalty call the function itself, not the compiled one",
            *(self.lines.begin, self.report.name),
        )

    def _forward_again(self, flight: Flight) -> Sequence[Any]:
        """The saved tensors of a flight whose memory was given to another."""
        if self._generators and self._is_captured():
            raise CudaGraphError(
                f"the forward of '{self.report.name}' would have to run again in a CUDA graph,"
                f" because {flight.why_again}, and PyTorch does not let its random numbers be drawn"
                " again there"
            )
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
            with self._running(flight, fresh=True), torch.no_grad():
                made = flight.code.forward(flight, [*flight.inputs])
        flight.keep(made[self._outputs :], made[: self._outputs])
        saved = claim(flight)
        assert saved is not None
        return saved

    @contextlib.contextmanager
    def _running(self, flight: Flight, *, fresh: bool) -> Iterator[None]:
        """Keep this thread in the arena."""
        assert flight.memory is not None
        flight.memory.tenant = None
        untried = contextlib.nullcontext() if self._clock is None else cuda.kernels_untried()
        try:
            flight.run.begin(flight.memory, fresh=fresh, watch=flight.code.watch)
            if self._clock is not None and fresh:
                self._clock.begin()
            try:
                with untried:
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

    def _look_around(self, inputs: Sequence[Any]) -> None:
        """Plan anew if other gradients are there than was planned for."""
        left = self._left()
        for _ in range(PATIENCE):
            if self._residents.circumstances.lasting.issuperset(left):
                break
            time.sleep(1e-3)  # a process group's thread lets go of them a moment after it is done
            left = self._left()
        with _planning:
            if self._residents.observe(inputs, left):
                self._plan_anew()

    def _left(self) -> list[int]:
        """Positions of the gradients of the call before that still lie in the arena."""
        if self._landed is None:
            return []
        found, code = self._landed
        memory = found()
        if memory is None or memory.tenant is not code:
            return []
        return [code.left[offset] for offset in memory.there if offset in code.left]

    def _plan_as_learned(self) -> None:
        """Plan anew if a step before took what was not planned for; not before another comes."""
        if not self._learned:  # others may plan for long
            return
        with _planning:
            if not self._learned:
                return
            self._learned = False
            try:
                self._plan_anew()
            except BudgetExceededError as error:
                self._gave_up = True
                log.warning("%s: %s", self.lines.begin, str(error))  # keeps no frames

    def _is_planned_like_others(self) -> bool:
        """Plan, before the first call, for what the function's steps found at other sizes."""
        with _planning:
            try:
                if self._residents.expect():
                    self._plan_anew()
                    return True
            except BudgetExceededError:
                pass  # perhaps it is not so at these sizes: the first call will tell
        return False

    def _plan_anew(self) -> None:
        captured, plan, cached = self._residents.plan()
        self._code = Code(captured, plan, self._clock)
        self._room = room(plan)
        self.report.replace_plan(captured, plan, cached=cached)

    def _watch_hooks(self, inputs: Sequence[Any]) -> None:
        """When autograd is done, see which gradients the hooks of their leaves have used up."""
        watched = self._residents.used_up(inputs)
        if not watched or makes_a_graph():
            return

        def look() -> None:
            leaves = ((p, leaf()) for p, leaf in watched.items())
            used = [p for p, leaf in leaves if leaf is not None and leaf.grad is None]
            with _planning:
                if not self._gave_up and self._residents.learn(used=used):
                    self._learned = True

        after_this_backward(look)

    @staticmethod
    def _keeps_twice(flight: Flight, position: int) -> bool:
        """Whether a gradient is held, and autograd is given a new one that it will add to it."""
        return position not in flight.held and flight.leaves[position].grad is not None

    def _land(self, flight: Flight, kept_twice: Sequence[int]) -> None:
        """The backward is over: what it took, and what that means for those to come."""
        counters, handed = flight.run.counters(), bool(flight.handed)
        memory, code = flight.memory, flight.code
        flight.land()
        if self._clock is not None:
            self._clock.end()
        self.report.steps_run += 1
        if flight.whole:
            flight.home.course.landed(flight, counters, memory, kept_twice)
            return
        flight.run.end()
        if memory is not None:
            memory.rest(counters.before_bytes + counters.process_bytes)
            memory.tenant = code
            self._landed = weakref.ref(memory), code
        watched, code.watch = code.watch, False
        if code is not self._code:  # another plan has taken its place, in the report too
            return
        self._measure(counters, sum(flight.beside.values()), flight.copies)
        peak = self.report.measured_peak_bytes
        over = peak > self.report.budget_bytes + TOLERANCE
        if self._clock is not None:  # where the counters do not know how much there was at once
            self._tell_of_strays(counters)
            over = False
        if not flight.alone:
            if over:
                self._warn(f"{self._taken()}, beside others that wait for their backward")
            return
        if handed and not self._handed:  # an optimizer makes its state there, once, and that stays
            self._handed, over = True, False
        outside = 0
        if over:
            self._tell(counters)
            if not watched:
                code.watch = True
            # All of it, and not only what the budget lacks: the next plan may use what this one
            # left free.
            outside = peak - self.report.peak_bytes
        with _planning:
            if not self._gave_up and self._residents.learn(outside=outside, beside=kept_twice):
                self._learned = True

    def _taken(self) -> str:
        report = self.report
        return (
            f"{self.lines.begin}: '{report.name}' took {format_bytes(report.measured_peak_bytes)}"
            f" of its budget of {format_bytes(report.budget_bytes)}"
        )

    def _tell(self, counters: Counters) -> None:
        text = self._taken()
        if counters.stray_count:
            text += f"; outside the plan: {self.report.outside_plan}"
        self._refuse(text)

    def _tell_of_strays(self, counters: Counters) -> None:
        """Of what lay outside the plan on CUDA; how much of it at once, nobody counts there.

        In the first steps libraries take workspaces, once for each thread.
        """
        if not counters.outside_bytes or self.report.steps_run <= FIRST_STEPS:
            return
        text = (
            f"{self.lines.begin}: ops of '{self.report.name}' took"
            f" {format_bytes(counters.outside_bytes)}, one after the other, that do not lie where"
            " they were planned: its budget may not have been kept"
        )
        if counters.wanted_slot >= 0:
            text += f"; {self.report.outside_plan}"
        self._refuse(text)

    def _refuse(self, text: str) -> None:
        """An error where the budget is strict, else a warning."""
        if self._strict:
            raise BudgetExceededError(text)
        self._warn(text)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", text)

    def _measure(self, counters: Counters, held_bytes: int, copies: Copies | None) -> None:
        report = self.report
        report.measured_arena_bytes = counters.high_water_bytes
        report.measured_peak_bytes = report.resident_bytes + held_bytes + counters.process_bytes
        report.held_bytes = held_bytes
        report.outside_bytes = counters.outside_bytes
        found = []
        if counters.stray_count:
            many = "s" if counters.stray_count > 1 else ""
            found.append(
                f"{format_bytes(counters.stray_bytes)} in {counters.stray_count} tensor{many}, the"
                f" largest ({format_bytes(counters.largest_bytes)}) from {counters.largest_line}"
            )
        if counters.wanted_slot >= 0:
            maker, kept = self._code.maker, counters.kept_slot
            of = "another step" if kept < 0 else maker(kept)
            found.append(
                f"where {maker(counters.wanted_slot)} was to lie there still are"
                f" {format_bytes(counters.kept_bytes)} of {of}, which somebody keeps"
            )
        if found:
            report.outside_plan = "; ".join(found)
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


def _is_made(value: object) -> bool:
    """Whether autograd made it; a mesh of DTensor's may be among the inputs too."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


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
