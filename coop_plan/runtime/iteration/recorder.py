"""Iterations: the planned calls of one thread, in order, within one budget.

Invariant: at every moment the bytes of all that this thread holds for its planned calls are at most
the budget, or a line says which call took them.

An iteration lasts from a forward without waiting invocations to the next such forward. Its order is
its steps and the sequence of their halves. The next iteration that is expected to have the order is
planned when it begins (`runtime.iteration.joint_plan`), and runs that joint plan until it deviates.
The expected order is the one that followed the longest stretch of earlier iterations like the
latest. An order that does not come again is never planned.
"""

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from coop_plan.runtime.device.arena import Counters, Memory, Run
from coop_plan.runtime.errors import BudgetExceededError
from coop_plan.runtime.execute.compiled_plan import CompiledPlan
from coop_plan.runtime.execute.invocation import Invocation
from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment
from coop_plan.runtime.iteration.iteration import (
    EVERY_EVENT,
    Iteration,
    has_storage,
    set_inputs,
    storage_addresses,
)
from coop_plan.runtime.iteration.joint_plan import RecordedCall, plan_jointly
from coop_plan.runtime.iteration.order import (
    Order,
    extend_saved_outputs,
    learn,
    set_accumulable,
    update_held_gradients,
)
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import drop
from coop_plan.schemas import format_bytes

log = logging.getLogger("coop-plan")

MAX_CALLS = 1_000
"""Calls of an iteration, above which each call has its own plan."""

MAX_PENDING = 8
"""Iterations from an incomplete one on, whose backward joins them to one; older ones are joined."""

MAX_PAST = 32
"""Latest iterations by which the next order is expected."""

MAX_ORDERS = 16
"""Orders from one step that are planned; above, orders vary too much for plans to pay off."""

ORDERS_PLANNED_AT_ONCE = 4
"""Orders planned at their first occurrence; later ones must occur twice, as data may choose."""

MAX_REPLANS = 4
"""Re-plans of an order that exceeded its plan."""

TOLERANCE = 4096
"""Excess in bytes (autograd's scalars) for which no step is planned again, no iteration twice."""


class IterationRecorder:
    """Records the invocations of one thread as a sequence of iterations."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._now = Iteration()
        self._pending: list[Iteration] = []  # from one on whose backwards may come late
        self._orders: weakref.WeakKeyDictionary[object, dict[Any, Order]] = (
            weakref.WeakKeyDictionary()
        )
        self._past: list[Order] = []
        self._late: set[str] = set()  # names of steps whose late backward was told
        # Iterations from a step, one after another, of which a call had no backward.
        self._incomplete: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    @property
    def has_one_call(self) -> bool:
        """True if the iteration has one call so far: the forward that begins is its first."""
        return len(self._now.calls) == 1

    @property
    def will_plan_jointly(self) -> bool:
        """True if this iteration has several calls and the next one like it is planned."""
        now = self._now
        if len(now.calls) < 2:
            return False
        if now.order is not None:
            return now.order.replans < MAX_REPLANS
        if now.expected is not None and now.expected.calls and not now.expected.joint_plan:
            return False
        if self._incomplete.get(now.steps[0], 0) > 1:
            return False
        known = self._orders.get(now.steps[0], {}).values()
        return sum(bool(order.calls) for order in known) < ORDERS_PLANNED_AT_ONCE

    def shared_memory(self) -> Memory | None:
        """The memory of the joint plan that this iteration runs."""
        return next((f.memory for f in self._now.waiting()), None)

    def bytes_beside(self, invocation: Invocation) -> int:
        """Bytes that the other calls of its iteration hold even after they release their memory.

        These are their inputs, which their forward needs if it runs again, and live outputs.
        """
        now, number = self._now, self._recorded(invocation)
        return 0 if number is None else now.count_inputs(number) + now.output_bytes(number)

    def waiting_names(self, invocation: Invocation) -> str:
        """Names of the steps that have other calls without a backward yet in the iteration."""
        over = {call for call, backward in self._now.events if backward}
        others = (f() for i, f in enumerate(self._now.invocations) if i not in over)
        return ", ".join(sorted({f"'{f.name}'" for f in others if f not in (None, invocation)}))

    def open(self, memory: Memory, compiled: CompiledPlan, others: Iterable[Memory]) -> None:
        """Count the bytes of this iteration, which begins in this memory, and of `others`.

        These are the other memories of its pool, in which its later calls may run.
        """
        self._now.run = run = Run(compiled.arena)
        run.begin(memory, fresh=True, watch=compiled.measure_outside)
        compiled.arena.leave()
        for other in others:
            run.include(other)

    def forward(
        self, invocation: Invocation, step: object, call: RecordedCall, inputs: Sequence[Any]
    ) -> CompiledPlan | None:
        """Record a forward; returns its plan if the iteration runs a joint plan."""
        if next(self._now.waiting(), None) is None or len(self._now.calls) == MAX_CALLS:
            self._begin(step)
        now = self._now
        number = now.add(invocation, step, call)
        for pending in self._pending:
            pending.later_fresh.append(pending.allocated(storage_addresses(inputs)))
        if number:
            set_inputs(call, inputs, now.made)
            call.fresh = now.allocated(storage_addresses(inputs))
            now.count_first_inputs()
            now.count_inputs(number)
        return self._next(number, False)

    def backward(self, invocation: Invocation) -> None:
        """Record a backward; one of an earlier iteration shows that the later ones belong to it."""
        for at, earlier in enumerate(self._pending):
            if invocation in earlier.numbers:
                self._abandon("the backward of an earlier graph came")
                for later in (*self._pending[at + 1 :], self._now):
                    earlier.continue_with(later)
                self._now, self._pending = earlier, []
                break
        number = self._now.numbers.get(invocation)
        if number is None:
            self._abandon("the backward of an earlier iteration came")
            if invocation.name not in self._late:
                self._late.add(invocation.name)
                log.warning(
                    "'%s' runs a backward more than %d calls after its forward: bytes that these"
                    " calls hold are not counted beside it; run the backward earlier",
                    *(invocation.name, MAX_CALLS),
                )
        else:
            self._next(number, True)

    def given(self, invocation: Invocation, tangents: Sequence[Any]) -> None:
        """Record the tangents of a call's backward."""
        number = self._recorded(invocation)
        if number is not None:
            call = self._now.calls[number]
            set_inputs(call, invocation.inputs, self._now.made)
            call.tangents = storage_addresses(tangents)

    def returned(self, invocation: Invocation, made: Sequence[Any]) -> None:
        """Record the gradients of a call."""
        number = self._now.numbers.get(invocation)
        if number is None:
            return
        self._now.returned.add(number)
        if self._recorded(invocation) is not None:
            call = self._now.calls[number]
            call.made += storage_addresses(made)
            self._now.made.update(call.made)
            # A gradient that is alive at the next event is usually held across steps.
            when = dict.fromkeys(call.leaves, len(self._now.events))
            self._now.observe(number, True, made, when)

    def received(self, invocation: Invocation, made: Sequence[Any]) -> None:
        """Record the outputs of a call, and the gradients held when it began."""
        now = self._now
        number = now.numbers[invocation]
        call = now.calls[number]
        call.made += storage_addresses(made)
        call.output_bytes = [v.untyped_storage().nbytes() if has_storage(v) else 0 for v in made]
        now.made.update(call.made)
        now.observe(number, False, made, dict.fromkeys(range(len(made)), EVERY_EVENT))
        held = dict(invocation.held_bytes)
        for one in (now, *reversed(self._pending)):  # each may turn out to contain those after it
            held = {address: size for address, size in held.items() if address not in one.made}
            one.hold(held)

    def _recorded(self, invocation: Invocation) -> int | None:
        """Number of a call in an iteration of several; a single one has its own plan."""
        alone = len(self._now.calls) == 1 and not self._pending
        return None if alone else self._now.numbers.get(invocation)

    def measure(self, invocation: Invocation) -> tuple[int, int] | None:
        """Peak of an iteration after a half, and its budget; None for one call that ran once.

        The counters of a forward that runs again lack the outputs of its first run and what the
        backward made before.
        """
        now = self._now
        now.budget_bytes = max(now.budget_bytes, invocation.compiled.budget_bytes)
        if now.run is None or invocation not in now.numbers:
            return None
        if len(now.calls) == 1 and now.joint_plan is None:
            if not invocation.runs_again:
                return None
            now.count_first_inputs()
        resident = now.resident_bytes
        if now.joint_plan is not None:
            resident = now.joint_plan.report.resident_bytes - now.absent_bytes
        held = sum(now.held_bytes.values())
        peak = resident + held + now.run.counters().process_bytes
        now.peak_bytes = peak
        if now.joint_plan is not None:
            now.joint_plan.report.held_bytes = held
            now.joint_plan.report.measured_peak_bytes = peak
        return peak, now.budget_bytes

    def note_excess(self, peak: int) -> bool:
        """Note that a peak of the iteration is told; returns False if a line told it before."""
        is_new = peak > self._now.noted_bytes + TOLERANCE
        if is_new:
            self._now.noted_bytes = peak
        return is_new

    def finished(
        self,
        invocation: Invocation,
        counters: Counters,
        memory: Memory | None,
        duplicated: Sequence[int],
    ) -> None:
        """Add the counters of a call that ran the joint plan."""
        now, number = self._now, self._now.numbers.get(invocation)
        if now.order is None or now.joint_plan is None or now.run is None or number is None:
            return
        now.calls[number].environment = MemoryEnvironment(duplicated=frozenset(duplicated))
        now.finished.append(counters)
        if len(now.finished) < len(now.joint_plan.plans):
            return
        taken = now.run.counters()
        if memory is not None:
            memory.release_above(taken.before_bytes + taken.process_bytes)
        report = now.joint_plan.report
        report.measured_arena_bytes = max(c.high_water_bytes for c in now.finished)
        report.outside_bytes = sum(c.outside_bytes for c in now.finished)
        report.steps_run += 1
        first = sum(c.compute_us for c in now.finished)
        again = sum(c.recompute_us for c in now.finished)
        report.last_step_us = first + again
        report.measured_overhead = again / first if first else None

    def _next(self, number: int, backward: bool) -> CompiledPlan | None:
        now = self._now
        now.check_expiries()
        at = len(now.events)
        if at <= 2 * MAX_CALLS:  # one more than an order can have
            now.events.append((number, backward))
        order = now.order
        if order is None or order.joint_plan is None:
            return None
        if at < len(order.events) and order.events[at] == (number, backward):
            if backward:
                return None
            if order.steps[number]() is now.steps[number]:
                return order.joint_plan.plans[number]
        self._abandon("another order of forwards and backwards")
        return None

    def _abandon(self, why: str) -> None:
        """Run the rest of the iteration by each call's own plan, within the same budget."""
        now = self._now
        if now.joint_plan is None:
            return
        log.info("%s: its %d graphs run by their own plans", why, len(now.joint_plan.plans))
        memory = self.shared_memory()
        for invocation in now.waiting():
            invocation.release_arena("another order of the iteration")
        if memory is not None and now.run is not None:
            taken = now.run.counters()
            memory.release_above(taken.before_bytes + taken.process_bytes)
        for at in [at for at in now.observed if at != EVERY_EVENT]:
            now.observed.setdefault(EVERY_EVENT, []).extend(now.observed.pop(at))
        now.order = None

    def _begin(self, step: object) -> None:
        """Begin an iteration, by the joint plan of the expected order if it has one."""
        over, self._now = self._now, Iteration()
        self._pending.append(over)
        while self._pending and not self._pending[0].may_continue:
            del self._pending[0]
        if len(self._pending) > MAX_PENDING:
            self._pending[0].continue_with(self._pending.pop(1))
            if len(self._pending[0].calls) > MAX_CALLS:
                del self._pending[0]
        self._end(over)
        self._now.expected = order = self._expected(step)
        if order is None or not order.calls:
            return
        changed = update_held_gradients(order)
        if not order.is_planned or (changed and order.joint_plan is not None):
            self._plan(order)
        if order.joint_plan is not None:
            self._now.order = order

    def _expected(self, step: object) -> Order | None:
        """The order from a step that followed the longest stretch like the latest iterations.

        Among equals, orders of several calls come first, and then the latest.
        """
        past = self._past
        found: Order | None = None
        best = -1, False
        for at in range(len(past) - 1, -1, -1):
            if past[at].steps[0]() is not step:
                continue
            common = 0
            while common < at and past[at - 1 - common] is past[-1 - common]:
                common += 1
            rank = common, len(past[at].steps) > 1
            if rank > best:
                found, best = past[at], rank
        return found

    def _end(self, over: Iteration) -> None:
        """End an iteration: keep its calls for a plan, or plan again if it needs another."""
        if not over.calls:
            return
        first = over.steps[0]
        self._incomplete[first] = 0 if over.is_complete else self._incomplete.get(first, 0) + 1
        if not over.is_complete:
            return
        if over.run is not None and not over.may_continue:
            over.run.end()
        if over.order is not None:
            order, known = over.order, {}
        else:
            known = self._orders.setdefault(over.steps[0], {})
            key = tuple(map(weakref.ref, over.steps)), tuple(over.events)
            met = key in known
            order = known.setdefault(key, Order(*key))
        self._past = [o for o in self._past[1 - MAX_PAST :] if o.steps[0]() is not None] + [order]
        if over.order is not None:
            self._replan_if_needed(order, over)
        elif len(over.calls) > 1 and not order.calls and all(call.inputs for call in over.calls):
            planned = sum(bool(other.calls) for other in known.values())
            if planned < (MAX_ORDERS if met else ORDERS_PLANNED_AT_ONCE):
                order.calls, order.peak_bytes = over.calls, over.peak_bytes
                set_accumulable(order.calls)
                extend_saved_outputs(order.calls, order.events)
            elif len(known) > MAX_CALLS:
                self._orders[over.steps[0]] = {k: o for k, o in known.items() if o.calls}

    def _replan_if_needed(self, order: Order, over: Iteration) -> None:
        """Plan an order again if its iteration observed new tensors or exceeded the budget."""
        joint_plan = order.joint_plan
        if joint_plan is None or len(over.finished) < len(joint_plan.plans):
            return
        if learn(order, over.calls):
            update_held_gradients(order)
            self._plan(order)  # this may explain an excess
            return
        report, replans = joint_plan.report, order.replans
        beyond = max(0, report.measured_peak_bytes - report.budget_bytes)
        if beyond <= (TOLERANCE if replans else 0) or replans > MAX_REPLANS:
            return
        order.replans = replans + 1
        if replans < MAX_REPLANS:
            self._plan(order, beyond)
            return
        message = (
            f"{len(joint_plan.plans)} graphs of one iteration and the code between them use"
            f" {format_bytes(beyond)} more than their budget of"
            f" {format_bytes(report.budget_bytes)}"
        )
        if self._options.strict:
            raise BudgetExceededError(message)
        log.warning("%s", message)

    def _plan(self, order: Order, beyond: int = 0) -> None:
        """Plan an order, again with `beyond` more bytes between the graphs."""
        order.is_planned, old = True, order.joint_plan
        between, taken, otherwise = 0, order.peak_bytes, "are not planned together"
        if old is not None:
            between, taken = old.between + beyond, old.report.measured_peak_bytes
            otherwise = "keep their joint plan"
        made = plan_jointly(order.calls, order.events, between, self._options, taken, otherwise)
        if made is None:
            return
        if old is not None:
            drop(old.report)
        order.joint_plan = made
