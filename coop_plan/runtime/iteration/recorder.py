"""Iterations: the planned calls of one thread, in order, within one budget.

Invariant: at every moment the bytes of all that this thread holds for its planned calls are at most
the budget, or a line says which call took them.

An iteration lasts from a forward without waiting invocations to the next such forward. Its order is
its steps and the sequence of their halves. The next iteration that is expected to have the order is
planned when it begins (`runtime.iteration.joint_plan`), and runs that joint plan until it deviates.
The expected order is the one that followed the longest stretch of earlier iterations like the
latest. An order that does not come again is never planned.
"""

import itertools
import logging
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coop_plan.runtime.device.arena import Counters, Memory, Run
from coop_plan.runtime.errors import BudgetExceededError
from coop_plan.runtime.execute.compiled_plan import CompiledPlan
from coop_plan.runtime.execute.invocation import Invocation
from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment, accumulable
from coop_plan.runtime.gradients.held_gradients import MAX_GRADIENT_PLANS, can_be_added_to
from coop_plan.runtime.iteration.joint_plan import (
    Event,
    HalfOutput,
    JointPlan,
    RecordedCall,
    input_bytes,
    plan_jointly,
    stored,
)
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import drop
from coop_plan.runtime.torch_internals.ops import has_no_memory, storage_expiry
from coop_plan.schemas import format_bytes

log = logging.getLogger("coop-plan")

MAX_CALLS = 1_000
"""Calls of an iteration, above which each call has its own plan."""

MAX_PENDING = 8
"""Iterations after an incomplete one, whose backward joins them to one."""

MAX_PAST = 32
"""Latest iterations by which the next order is expected."""

MAX_ORDERS = 16
"""Orders from one step that are planned; above, orders vary too much for plans to pay off."""

ORDERS_PLANNED_AT_ONCE = 4
"""Orders planned at their first occurrence; later ones must occur twice, as data may choose."""

MAX_REPLANS = 4
"""Re-plans of an order that exceeded its plan."""

EVERY_EVENT = -1
"""Sentinel: check liveness at every event."""

MAX_LIVE_CHECKS = 8
"""Live tensors found, latest first, after which older ones are not checked."""

TOLERANCE = 4096
"""Excess in bytes (autograd's scalars) for which no step is planned again, no iteration twice."""


@dataclass(eq=False)
class _Order:
    """Steps of an iteration by call, its events, and its joint plan.

    `calls` is empty until an iteration is recorded, which took `peak_bytes` by the plans of its
    calls. `is_planned` is also True if that failed. `replans` counts re-plans for excess bytes,
    `observations` those for held or late tensors.
    """

    steps: tuple[weakref.ref[Any], ...]
    events: tuple[Event, ...]
    calls: list[RecordedCall] = field(default_factory=list)
    peak_bytes: int = 0
    is_planned: bool = False
    joint_plan: JointPlan | None = None
    replans: int = 0
    observations: int = 0


class _Iteration:
    """Calls and events so far. `order` is the `expected` one while it runs its joint plan.

    `run` is its window: the bytes that its thread allocated since it began. `budget_bytes` is the
    largest budget of its calls, `noted_bytes` the peak that a line told. `returned` are the calls
    whose backward ended without an error. `later_fresh` are the inputs allocated in its window of
    each call of the later iterations.
    """

    def __init__(self) -> None:
        self.expected: _Order | None = None
        self.order: _Order | None = None
        self.run: Run | None = None
        self.budget_bytes = self.peak_bytes = self.noted_bytes = 0
        self.invocations: list[weakref.ref[Invocation]] = []
        self.steps: list[object] = []
        self.calls: list[RecordedCall] = []
        self.events: list[Event] = []
        self.numbers: weakref.WeakKeyDictionary[Invocation, int] = weakref.WeakKeyDictionary()
        self.returned: set[int] = set()
        self.finished: list[Counters] = []
        self.made: set[int | None] = {None}
        self.inputs: dict[int | None, int] = {}
        self.input_bytes = self.resident_bytes = self.absent_bytes = 0
        self.held_bytes: dict[int, int] = {}
        self.later_fresh: list[Sequence[int]] = []
        self.observed: dict[int, list[tuple[int, HalfOutput, Callable[[], bool]]]] = {}

    def add(self, invocation: Invocation, step: object, call: RecordedCall) -> int:
        """Add a call; returns its number."""
        self.numbers[invocation] = number = len(self.calls)
        self.invocations.append(weakref.ref(invocation))
        self.steps.append(step)
        self.calls.append(call)
        return number

    def count_inputs(self, number: int) -> int:
        """Count the inputs of a call; returns the bytes of those of other calls alone.

        `resident_bytes` are those of inputs that existed before the iteration began, and
        `absent_bytes` what a plan for larger sizes has more.
        """
        own: dict[int | None, int] = {}
        call = self.calls[number]
        # Copies of inputs, the last ones, are made when the forward has begun.
        planned = input_bytes(call.captured)
        for i, (address, size) in enumerate(zip(call.inputs, call.input_bytes, strict=True)):
            own[address] = size
            if address is not None and address not in self.inputs:
                self.inputs[address] = size
                self.input_bytes += size
                if i not in call.fresh and address not in self.made:
                    self.resident_bytes += size
                    self.absent_bytes += planned[i] - size
        own.pop(None, None)
        return self.input_bytes - sum(own.values())

    def count_first_inputs(self) -> None:
        """Count the inputs of the first call, once its iteration has another call or run."""
        first, invocation = self.calls[0], self.invocations[0]()
        if not first.inputs and invocation is not None:
            set_inputs(first, invocation.inputs, self.made)
            self.count_inputs(0)

    def hold(self, gradients: Mapping[int, int]) -> None:
        """Count the bytes of held gradients, by address, that existed before it began."""
        fresh = self.allocated(list(gradients))
        before = (item for i, item in enumerate(gradients.items()) if i not in fresh)
        self.held_bytes.update(before)

    def allocated(self, addresses: Sequence[int | None]) -> Sequence[int]:
        """Positions of the storages that were allocated since it began."""
        return () if self.run is None else self.run.allocated(addresses)

    def output_bytes(self, number: int) -> int:
        """Bytes of the live outputs of other calls that are no inputs."""
        alive: dict[int | None, int] = {}
        for other, (backward, position), expired in itertools.chain(*self.observed.values()):
            call = self.calls[other]
            if other != number and not backward and not expired():
                alive[call.made[position]] = call.output_bytes[position]
        return sum(size for address, size in alive.items() if address not in self.inputs)

    def continue_with(self, other: "_Iteration") -> None:
        """Append the calls and events of the iteration that seemed to come after this one."""
        self.count_first_inputs()
        calls, events = len(self.calls), len(self.events)
        for reference, step, call in zip(other.invocations, other.steps, other.calls, strict=True):
            invocation = reference()
            if invocation is not None:
                self.numbers[invocation] = len(self.calls)
            self.invocations.append(reference)
            self.steps.append(step)
            self.calls.append(call)
            call.released_at = {which: at + events for which, at in call.released_at.items()}
            if not call.inputs and invocation is not None:  # the first of its iteration
                set_inputs(call, invocation.inputs, self.made)
            call.fresh = self.later_fresh.pop(0)
            self.made.update(call.made)
            if call.inputs:
                self.count_inputs(len(self.calls) - 1)
        self.budget_bytes = max(self.budget_bytes, other.budget_bytes)
        self.noted_bytes = max(self.noted_bytes, other.noted_bytes)
        self.events += [(number + calls, backward) for number, backward in other.events]
        self.returned.update(number + calls for number in other.returned)
        for at, entries in other.observed.items():
            at = at if at == EVERY_EVENT else at + events
            moved = [(number + calls, which, expired) for number, which, expired in entries]
            self.observed.setdefault(at, []).extend(moved)
        self.order = None

    @property
    def joint_plan(self) -> JointPlan | None:
        """The joint plan that it runs."""
        return None if self.order is None else self.order.joint_plan

    @property
    def is_complete(self) -> bool:
        """True if each call had one backward, which returned gradients."""
        return len(self.events) == 2 * len(self.calls) == 2 * len(self.returned)

    @property
    def may_continue(self) -> bool:
        """True if a backward of one of its calls may still come, a second one, too."""
        return bool(self.numbers)

    def waiting(self) -> Iterator[Invocation]:
        """Invocations that hold memory for their backward."""
        alive = (reference() for reference in self.invocations)
        return (f for f in alive if f is not None and f.saved is not None)

    def check_expiries(self) -> None:
        """Record which results of earlier halves are dead at this event."""
        at = len(self.events)
        if self.events:
            number, backward = self.events[-1]
            if not backward or self.events[-2:-1] == [(number, False)]:
                leaves = self.calls[number].leaves.items()
                self.calls[number].lent = [p for p, leaf in leaves if is_empty(leaf())]
        recorded, there = self.observed.setdefault(EVERY_EVENT, []), 0
        for entry in self.observed.pop(at, ()):
            number, which, expired = entry
            if expired():
                self.calls[number].released_at[which] = at
            elif self.order is not None:
                self.calls[number].late.add(which)
                recorded.append(entry)
        for entry in recorded[::-1]:
            number, which, expired = entry
            if expired():
                self.calls[number].released_at[which] = at
                recorded.remove(entry)
            else:
                there += 1
            if there == MAX_LIVE_CHECKS:
                break

    def observe(
        self, number: int, backward: bool, made: Sequence[Any], when: Mapping[int, int]
    ) -> None:
        """Check the liveness of a half's results at the events in `when`, by position.

        In a planned iteration, check at the planned events instead.
        """
        if self.order is not None:
            released_at = self.order.calls[number].released_at
            when = {p: at for (half, p), at in released_at.items() if half == backward}
        for position, at in when.items():
            if has_storage(made[position]):
                entry = number, (backward, position), storage_expiry(made[position])
                self.observed.setdefault(at, []).append(entry)


class IterationRecorder:
    """Records the invocations of one thread as a sequence of iterations."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._now = _Iteration()
        self._pending: list[_Iteration] = []  # from one on whose backwards may come late
        self._orders: weakref.WeakKeyDictionary[object, dict[Any, _Order]] = (
            weakref.WeakKeyDictionary()
        )
        self._past: list[_Order] = []
        # Iterations from a step, one after another, of which a call had no backward.
        self._incomplete: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    @property
    def has_one_call(self) -> bool:
        """True if the iteration has one call so far: the forward that begins is its first."""
        return len(self._now.calls) == 1

    @property
    def will_plan(self) -> bool:
        """True if the next such iteration is planned, for the first time or after an excess."""
        now = self._now
        if now.order is not None:
            return now.order.replans < MAX_REPLANS
        if now.expected is not None and now.expected.calls and not now.expected.joint_plan:
            return False
        if self._incomplete.get(now.steps[0], 0) > 1:
            return False
        known = self._orders.get(now.steps[0], {}).values()
        return sum(bool(order.calls) for order in known) < ORDERS_PLANNED_AT_ONCE

    @property
    def will_plan_jointly(self) -> bool:
        """True if this iteration has several calls and the next such one is planned."""
        return len(self._now.calls) > 1 and self.will_plan

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
        over, self._now = self._now, _Iteration()
        self._pending.append(over)
        while self._pending and not self._pending[0].may_continue:
            del self._pending[0]
        self._pending = self._pending[-MAX_PENDING:]
        self._end(over)
        self._now.expected = order = self._expected(step)
        if order is None or not order.calls:
            return
        changed = update_held_gradients(order)
        if not order.is_planned or (changed and order.joint_plan is not None):
            self._plan(order)
        if order.joint_plan is not None:
            self._now.order = order

    def _expected(self, step: object) -> _Order | None:
        """The order from a step that followed the longest stretch like the latest iterations.

        Among equals, orders of several calls come first, and then the latest.
        """
        past = self._past
        found: _Order | None = None
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

    def _end(self, over: _Iteration) -> None:
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
            order = known.setdefault(key, _Order(*key))
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

    def _replan_if_needed(self, order: _Order, over: _Iteration) -> None:
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

    def _plan(self, order: _Order, beyond: int = 0) -> None:
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


def set_accumulable(calls: Sequence[RecordedCall]) -> None:
    """Set the accumulable gradients of recorded calls.

    The gradient of a leaf that several calls share counts for the first of them, and is not
    accumulable: autograd sums the gradients of all calls before it adds the sum to `.grad`.
    """
    by_use: dict[int, list[RecordedCall]] = {}
    for call in calls:
        for leaf in call.leaves.values():
            by_use.setdefault(id(leaf()), []).append(call)
    for call in calls:
        own = {p: by_use[id(leaf())] for p, leaf in call.leaves.items()}
        call.accumulable = [p for p in accumulable(call.captured) if len(own.get(p, ())) == 1]
        call.leaves = {p: leaf for p, leaf in call.leaves.items() if own[p][0] is call}


def extend_saved_outputs(calls: Sequence[RecordedCall], events: Sequence[Event]) -> None:
    """Keep outputs that a recorded call's backward reads alive until its end.

    A call that released its memory while it was recorded did not hold them.
    """
    for number, call in enumerate(calls):
        over = events.index((number, True)) + 1
        captured = call.captured
        read = {t for op in captured.graph.ops[captured.forward_ops :] for t in op.inputs}
        for which, at in call.released_at.items():
            backward, position = which
            if not backward and not read.isdisjoint(stored(call, captured.output_args[position])):
                call.released_at[which] = max(at, over)


def update_held_gradients(order: _Order) -> bool:
    """Observe the gradients that are held when an iteration begins.

    Returns:
        True if it was not planned for one of them.
    """
    found = False
    for call in order.calls:
        now = call.environment
        planned = now.across_steps | now.duplicated
        across_steps: set[int] = set()
        duplicated: set[int] = set()
        for position, reference in call.leaves.items():
            leaf = reference()
            if leaf is None or leaf.grad is None or position in planned:
                continue
            owner = can_be_added_to(call.accumulable, position, leaf)
            (across_steps if owner else duplicated).add(position)
        if across_steps or duplicated:
            found = True
            call.environment = MemoryEnvironment(
                now.across_steps | across_steps, now.duplicated | duplicated
            )
    return found and _count_observation(order)


def learn(order: _Order, calls: Sequence[RecordedCall]) -> bool:
    """Adopt the observations of the calls of an iteration that ran the joint plan.

    Returns:
        True if gradients or outputs were alive that it was not planned for.
    """
    found = False
    for call, other in zip(order.calls, calls, strict=True):
        call.leaves = {p: other.leaves[p] for p in call.leaves}
        now, twice = call.environment, other.environment.duplicated
        late = call.released_at.keys() & other.late
        if twice <= now.duplicated and not late:
            continue
        found = True
        call.environment = MemoryEnvironment(now.across_steps - twice, now.duplicated | twice)
        on_time = {which: at for which, at in call.released_at.items() if which not in late}
        call.released_at = on_time | {
            which: other.released_at[which] for which in late & other.released_at.keys()
        }
    return found and _count_observation(order)


def _count_observation(order: _Order) -> bool:
    """Count an observation; after `MAX_GRADIENT_PLANS`, assume the worst of all tensors."""
    order.observations += 1
    if order.observations == MAX_GRADIENT_PLANS:
        for call in order.calls:
            now = call.environment
            across_steps = (
                now.across_steps | set(call.accumulable) & call.leaves.keys()
            ) - now.duplicated
            call.environment = replace(now, across_steps=across_steps)
            call.released_at = {}
    return True


def storage_addresses(values: Sequence[Any]) -> list[int | None]:
    """Storage address of each tensor; None for values without memory."""
    return [
        value.untyped_storage().data_ptr() or None if has_storage(value) else None
        for value in values
    ]


def set_inputs(call: RecordedCall, values: Sequence[Any], made: Container[int | None]) -> None:
    """Set the bytes and the address of each input of a call.

    The address is that of its storage if a call of the iteration made that, else its own: inputs
    may be parts of one storage, such as parameters in a flat buffer.
    """
    call.input_bytes = input_bytes(call.captured, values)
    call.inputs = [
        address if address in made else value.data_ptr()
        for value, address in zip(values, storage_addresses(values), strict=True)
    ]


def is_empty(value: object) -> bool:
    """True for a tensor whose storage was resized to nothing."""
    return has_storage(value) and not value.untyped_storage().nbytes()  # type: ignore[attr-defined]


def has_storage(value: object) -> bool:
    """True for a tensor with a storage."""
    return isinstance(value, torch.Tensor) and not has_no_memory(value)
