"""Iteration recorder: the steps of an iteration and the order of their halves.

An iteration lasts from a forward without waiting invocations to the next such forward. The first
one of an order is recorded. Those that follow run its joint plan (`runtime.iteration.joint_plan`),
as long as they keep to its order.
"""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coop_plan.runtime.device.arena import Counters, Memory, Run
from coop_plan.runtime.distributed.collectives import GROUP_THREADS
from coop_plan.runtime.errors import BudgetExceededError
from coop_plan.runtime.execute.compiled_plan import CompiledPlan
from coop_plan.runtime.execute.invocation import Invocation
from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment, accumulable
from coop_plan.runtime.gradients.held_gradients import MAX_GRADIENT_PLANS, can_be_added_to
from coop_plan.runtime.iteration.joint_plan import (
    Addresses,
    Event,
    HalfOutput,
    JointPlan,
    RecordedCall,
    plan_jointly,
    stored,
)
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import drop
from coop_plan.runtime.torch_internals.ops import has_no_memory, storage_expiry
from coop_plan.runtime.torch_internals.ranks import world_size
from coop_plan.schemas import format_bytes

log = logging.getLogger("coop-plan")

Order = tuple[tuple[weakref.ref[Any], ...], tuple[Event, ...]]
"""Steps of an iteration, by call, and its events."""

MAX_CALLS = 1_000
"""Calls of an iteration, above which each call has its own plan."""

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


@dataclass
class _KnownOrder:
    """A recorded order: its calls, with later observations, and their joint plan.

    `replans` counts re-plans for excess bytes, `observations` those for held or late tensors.
    `thread_bytes` may be held by threads of a process group, and are not planned for yet.
    """

    calls: list[RecordedCall]
    joint_plan: JointPlan | None = None
    replans: int = 0
    observations: int = 0
    thread_bytes: int = 0


@dataclass
class _OrdersFrom:
    """Orders of iterations that begin with one step: planned ones, and ones `met` once."""

    known: dict[Order, _KnownOrder] = field(default_factory=dict)
    met: set[Order] = field(default_factory=set)


class IterationRecorder:
    """Records the invocations of one thread as a sequence of iterations."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._invocations: list[weakref.ref[Invocation]] = []
        self._steps: list[object] = []
        self._calls: list[RecordedCall] = []
        self._events: list[Event] = []
        self._numbers: weakref.WeakKeyDictionary[Invocation, int] = weakref.WeakKeyDictionary()
        self._order: Order | None = None
        self._orders: weakref.WeakKeyDictionary[object, _OrdersFrom] = weakref.WeakKeyDictionary()
        self._joint_plan: JointPlan | None = None
        self._known: _KnownOrder | None = None
        self._observed: dict[int, list[tuple[int, HalfOutput, Callable[[], bool]]]] = {}
        self._left = False
        self._tally: list[Counters] = []
        self._run: Run | None = None
        self._held_bytes: dict[int, int] = {}

    @property
    def first(self) -> bool:
        """True if the forward that begins is the first of its iteration."""
        return len(self._calls) == 1

    @property
    def joint_plan(self) -> JointPlan | None:
        """The joint plan that this iteration runs, if any."""
        return self._joint_plan

    def forward(
        self,
        invocation: Invocation,
        step: object,
        call: RecordedCall,
        inputs: Callable[[], Addresses],
    ) -> CompiledPlan | None:
        """Record a forward; returns its plan if the iteration runs a joint plan.

        `inputs` returns the storage addresses of its inputs, parameters excluded.
        """
        waiting = any(f is not None and f.saved is not None for f in self._alive())
        waiting = waiting or self._continues(inputs)
        if not waiting or len(self._calls) == MAX_CALLS:
            self._begin(step)
        number = len(self._calls)
        self._numbers[invocation] = number
        self._invocations.append(weakref.ref(invocation))
        self._steps.append(step)
        self._calls.append(call)
        return self._next(number, False)

    def _continues(self, inputs: Callable[[], Addresses]) -> bool:
        """True if a forward reads a result of an unfinished call that released its memory.

        So an iteration includes a generator's backward after its critic's steps.
        """
        if self._joint_plan is not None:
            return False
        over = {number for number, backward in self._events if backward}
        made = {
            address
            for number, invocation in enumerate(self._alive())
            if invocation is not None and number not in over
            for address in self._calls[number].made
        }
        return bool(made and made.intersection(inputs()) - {None})

    def backward(self, invocation: Invocation) -> None:
        """Record a backward."""
        number = self._numbers.get(invocation)
        if number is None:
            self._abandon("the backward of an earlier iteration came")
        else:
            self._next(number, True)

    def finished(
        self,
        invocation: Invocation,
        counters: Counters,
        memory: Memory | None,
        duplicated: Sequence[int],
    ) -> None:
        """Add the counters of a call that ran the joint plan."""
        number = self._numbers.get(invocation)
        if self._joint_plan is None or self._known is None or number is None:
            return
        self._calls[number].environment = MemoryEnvironment(duplicated=frozenset(duplicated))
        if number == 0:
            self._run = invocation.run
        if number < next(i for i, (_, backward) in enumerate(self._events) if backward):
            self._held_bytes |= invocation.held_bytes
        self._tally.append(counters)
        if len(self._tally) == len(self._joint_plan.plans) and self._run is not None:
            self._run.end()
            taken = self._run.counters()
            self._joint_plan.plans[0].measure_outside = False
            # A collective holds memory of one rank and of all, or of each rank.
            collective = taken.largest_bytes + taken.largest_bytes // world_size()
            self._known.thread_bytes = GROUP_THREADS * collective
            if memory is not None:
                memory.release_above(taken.before_bytes + taken.process_bytes)
            report = self._joint_plan.report
            report.held_bytes = sum(self._held_bytes.values())
            report.measured_arena_bytes = max(c.high_water_bytes for c in self._tally)
            report.measured_peak_bytes = (
                report.resident_bytes + report.held_bytes + taken.process_bytes
            )
            report.outside_bytes = sum(c.outside_bytes for c in self._tally)
            report.steps_run += 1
            first = sum(c.compute_us for c in self._tally)
            again = sum(c.recompute_us for c in self._tally)
            report.last_step_us = first + again
            report.measured_overhead = again / first if first else None
            self._run = None

    def given(self, invocation: Invocation, tangents: Sequence[Any]) -> None:
        """Record the inputs and tangents of a call's backward."""
        call = self._recorded_call(invocation)
        if call is not None:
            call.inputs, call.tangents = (
                storage_addresses(invocation.inputs),
                storage_addresses(tangents),
            )

    def returned(self, invocation: Invocation, made: Sequence[Any]) -> None:
        """Record the gradients of a call."""
        call = self._recorded_call(invocation)
        if call is not None:
            call.made += storage_addresses(made)
        if call is not None or invocation.in_joint_plan:
            # A gradient that is alive at the next event is usually held across steps.
            leaves = call.leaves if call is not None else ()
            self._observe(invocation, True, made, dict.fromkeys(leaves, len(self._events)))

    def received(self, invocation: Invocation, made: Sequence[Any]) -> None:
        """Record the outputs of a call."""
        number = self._numbers.get(invocation)
        if self._joint_plan is None and number is not None:
            self._calls[number].made += storage_addresses(made)
        self._observe(invocation, False, made, dict.fromkeys(range(len(made)), EVERY_EVENT))

    def _observe(
        self, invocation: Invocation, backward: bool, made: Sequence[Any], when: Mapping[int, int]
    ) -> None:
        """Check the liveness of a half's results at the events in `when`, by position.

        In a planned iteration, check at the planned events instead.
        """
        number = self._numbers.get(invocation)
        if number is None:
            return
        if self._known is not None:
            released_at = self._known.calls[number].released_at
            when = {p: at for (half, p), at in released_at.items() if half == backward}
        for position, at in when.items():
            if has_storage(made[position]):
                entry = number, (backward, position), storage_expiry(made[position])
                self._observed.setdefault(at, []).append(entry)

    def _check_expiries(self) -> None:
        """Record which results of earlier halves are dead at this event."""
        at = len(self._events)
        recorded, there = self._observed.setdefault(EVERY_EVENT, []), 0
        for entry in self._observed.pop(at, ()):
            number, which, expired = entry
            if expired():
                self._calls[number].released_at[which] = at
            elif self._known is not None:
                self._calls[number].late.add(which)
                recorded.append(entry)
        for entry in recorded[::-1]:
            number, which, expired = entry
            if expired():
                self._calls[number].released_at[which] = at
                recorded.remove(entry)
            else:
                there += 1
            if there == MAX_LIVE_CHECKS:
                break

    def _recorded_call(self, invocation: Invocation) -> RecordedCall | None:
        number = self._numbers.get(invocation)
        if number is None or invocation.in_joint_plan or len(self._calls) == 1:
            return None
        return self._calls[number]

    def _alive(self) -> list[Invocation | None]:
        return [ref() for ref in self._invocations]

    def _next(self, number: int, backward: bool) -> CompiledPlan | None:
        self._check_expiries()
        at = len(self._events)
        if at <= 2 * MAX_CALLS:  # one more than an order can have
            self._events.append((number, backward))
        if self._joint_plan is None or self._order is None:
            return None
        steps, events = self._order
        if at < len(events) and events[at] == (number, backward):
            if backward:
                return None
            if steps[number]() is self._steps[number]:
                return self._joint_plan.plans[number]
        self._abandon("another order of forwards and backwards")
        return None

    def _abandon(self, why: str) -> None:
        """Run the rest of the iteration by each call's own plan, within the same budget."""
        if self._joint_plan is None:
            return
        log.info("%s: its %d graphs run by their own plans", why, len(self._joint_plan.plans))
        for invocation in self._alive():
            if invocation is not None and invocation.saved is not None:
                invocation.release_arena("another order of the iteration")
        self._joint_plan, self._order, self._known, self._left = None, None, None, True

    def _begin(self, step: object) -> None:
        """Begin an iteration, by the latest joint plan whose first step is this one."""
        recorded, left = len(self._calls) > 1, self._left
        try:
            order = self._end()
        finally:
            self._invocations, self._steps, self._calls, self._events = [], [], [], []
            self._tally, self._left, self._order, self._joint_plan = [], False, None, None
            self._run, self._held_bytes, self._observed, self._known = None, {}, {}, None
            self._numbers = weakref.WeakKeyDictionary()
        known = self._orders.setdefault(step, _OrdersFrom()).known
        orders = [o for o in known if known[o].joint_plan is not None]
        if order not in orders and orders and not left and not recorded:
            order = orders[-1]  # a single call came between, an evaluation perhaps
        if order in orders:
            if update_held_gradients(known[order]):
                self._replan(order, known[order])
            self._order, self._known, self._joint_plan = (
                order,
                known[order],
                known[order].joint_plan,
            )

    def _end(self) -> Order | None:
        """End an iteration; returns its order if that has a joint plan or can have one."""
        if self._joint_plan is not None and self._order is not None and self._known is not None:
            if len(self._tally) == len(self._joint_plan.plans):
                self._replan_if_needed(self._order, self._known, self._joint_plan)
            return self._order
        calls = len(self._calls)
        complete = len(self._events) == 2 * calls == 2 * len({e for e in self._events if e[1]})
        complete = complete and all(call.inputs for call in self._calls)
        if self._left or not 1 < calls <= MAX_CALLS or not complete:
            return None
        order = tuple(map(weakref.ref, self._steps)), tuple(self._events)
        orders = self._orders[self._steps[0]]
        if order not in orders.known and _pays(order, orders):
            known = orders.known[order] = _KnownOrder(self._calls)
            set_accumulable(known.calls)
            extend_saved_outputs(known.calls, self._events)
            update_held_gradients(known)
            known.joint_plan = plan_jointly(known.calls, self._events, 0, self._options)
        return order

    def _replan_if_needed(self, order: Order, known: _KnownOrder, joint_plan: JointPlan) -> None:
        """Plan an order again if its iteration observed new tensors or exceeded the budget."""
        if learn(known, self._calls):
            update_held_gradients(known)
            self._replan(order, known)  # this may explain an excess
            return
        report, replans = joint_plan.report, known.replans
        beyond = max(0, report.measured_peak_bytes - report.budget_bytes)
        kept = not known.thread_bytes and beyond <= (TOLERANCE if replans else 0)
        if kept or replans > MAX_REPLANS:
            return
        known.replans = replans + 1
        if replans == MAX_REPLANS:
            message = (
                f"{len(joint_plan.plans)} graphs of one iteration and the code between them use"
                f" {format_bytes(beyond)} more than their budget of"
                f" {format_bytes(report.budget_bytes)}"
            )
            if self._options.strict:
                raise BudgetExceededError(message)
            log.warning("%s", message)
            return
        self._replan(order, known, beyond)

    def _replan(self, order: Order, known: _KnownOrder, beyond: int = 0) -> None:
        """Replace the joint plan by one with `beyond` more bytes between the graphs."""
        assert known.joint_plan is not None
        # The buffers that a process group's threads still hold differ from time to time.
        between = known.joint_plan.between + beyond + known.thread_bytes
        known.thread_bytes = 0
        again = plan_jointly(known.calls, order[1], between, self._options)
        if again is not None:
            drop(known.joint_plan.report)
            known.joint_plan = again


def _pays(order: Order, orders: _OrdersFrom) -> bool:
    """True if an order without a plan is expected to occur again."""
    if len(orders.known) < ORDERS_PLANNED_AT_ONCE:
        return True
    if len(orders.known) == MAX_ORDERS:
        return False
    if order in orders.met:
        return True
    if len(orders.met) == MAX_CALLS:
        orders.met.clear()
    orders.met.add(order)
    return False


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


def update_held_gradients(known: _KnownOrder) -> bool:
    """Observe the gradients that are held when an iteration begins.

    Returns:
        True if it was not planned for one of them.
    """
    found = False
    for call in known.calls:
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
    return found and _count_observation(known)


def learn(known: _KnownOrder, calls: Sequence[RecordedCall]) -> bool:
    """Adopt the observations of the calls of an iteration that ran the joint plan.

    Returns:
        True if gradients or outputs were alive that it was not planned for.
    """
    found = False
    for call, other in zip(known.calls, calls, strict=True):
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
    return found and _count_observation(known)


def _count_observation(known: _KnownOrder) -> bool:
    """Count an observation; after `MAX_GRADIENT_PLANS`, assume the worst of all tensors."""
    known.observations += 1
    if known.observations == MAX_GRADIENT_PLANS:
        for call in known.calls:
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


def has_storage(value: object) -> bool:
    """True for a tensor with a storage."""
    return isinstance(value, torch.Tensor) and not has_no_memory(value)
