"""The course of one iteration: which steps are called, and in which order their halves run.

An iteration lasts from a forward that finds nothing waiting to the next such forward. The first of
its kind is recorded; those that follow run by the plan of the whole (`runtime.iteration.joint_plan`), as
long as they keep to its order.
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
from coop_plan.runtime.execute.compiled_plan import Code
from coop_plan.runtime.execute.invocation import Flight
from coop_plan.runtime.gradients.capture_adjust import Circumstances, movable
from coop_plan.runtime.gradients.held_gradients import MANY_PLANS, can_be_added_to
from coop_plan.runtime.iteration.joint_plan import Call, Event, Made, Regions, plan_regions, stored
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import drop
from coop_plan.runtime.torch_internals.ops import has_no_memory, when_gone
from coop_plan.runtime.torch_internals.ranks import ranks
from coop_plan.schemas import format_bytes

log = logging.getLogger("coop-plan")

Order = tuple[tuple[weakref.ref[Any], ...], tuple[Event, ...]]
"""The steps of an iteration, by call, and its events."""

MOST_CALLS = 1_000
"""In one iteration: beyond, each call has a plan of its own."""

MOST_ORDERS = 16
"""That begin with one step and are planned: beyond, they differ too often for plans to pay."""

FIRST_ORDERS = 4
"""That are planned once they were met; one beyond must come a second time: data may choose it."""

MOST_TRIES = 4
"""How often an order is planned anew since it took more than was planned."""

RECORDED = -1
"""In place of the number of an event: at each one it is looked what is gone."""

MOST_THERE = 8
"""Of what is looked at, the latest first, is still there: what was made before is too, perhaps."""

TOLERANCE = 4096
"""Bytes above the budget for which no step is planned anew, and no iteration a second time:
scalars, and what autograd makes of them."""


@dataclass
class _Known:
    """An order that was recorded: its calls with all that was found since, and the plan of them.

    `tries` counts how often it was planned anew for what it took, `looks` for what it found;
    `threads` are bytes that a process group's threads may hold, and that no plan is for yet.
    """

    calls: list[Call]
    plans: Regions | None = None
    tries: int = 0
    looks: int = 0
    threads: int = 0


@dataclass
class _Orders:
    """The orders of iterations that begin with one step."""

    known: dict[Order, _Known] = field(default_factory=dict)
    met: set[Order] = field(default_factory=set)


class Course:
    """What one thread has in flight under some options, as a sequence of iterations."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._flights: list[weakref.ref[Flight]] = []
        self._steps: list[object] = []
        self._calls: list[Call] = []
        self._events: list[Event] = []
        self._numbers: weakref.WeakKeyDictionary[Flight, int] = weakref.WeakKeyDictionary()
        self._order: Order | None = None
        self._orders: weakref.WeakKeyDictionary[object, _Orders] = weakref.WeakKeyDictionary()
        self._plans: Regions | None = None
        self._known: _Known | None = None  # what is known of the order
        self._watched: dict[int, list[tuple[int, Made, Callable[[], bool]]]] = {}
        self._left = False
        self._tally: list[Counters] = []
        self._run: Run | None = None
        self._beside: dict[int, int] = {}

    @property
    def first(self) -> bool:
        """Whether the forward that begins is the first of its iteration."""
        return len(self._calls) == 1

    @property
    def regions(self) -> Regions | None:
        """By which this iteration runs, if it does."""
        return self._plans

    def forward(
        self, flight: Flight, step: object, call: Call, inputs: Callable[[], Sequence[int | None]]
    ) -> Code | None:
        """A forward begins: its code, if the iteration runs by a plan of the whole.

        `inputs` says where those of its inputs lie that are no parameters.
        """
        waiting = any(f is not None and f.saved is not None for f in self._present())
        waiting = waiting or self._goes_on(inputs)
        if not waiting or len(self._calls) == MOST_CALLS:
            self._begin_with(step)
        number = len(self._calls)
        self._numbers[flight] = number
        self._flights.append(weakref.ref(flight))
        self._steps.append(step)
        self._calls.append(call)
        return self._next(number, False)

    def _goes_on(self, inputs: Callable[[], Sequence[int | None]]) -> bool:
        """Whether a forward takes what a call made that gave its memory up and is not over.

        So a generator's backward is waited for while its critic learns.
        """
        if self._plans is not None:
            return False
        over = {number for number, backward in self._events if backward}
        made = {
            address
            for number, flight in enumerate(self._present())
            if flight is not None and number not in over
            for address in self._calls[number].made
        }
        return bool(made and made.intersection(inputs()) - {None})

    def backward(self, flight: Flight) -> None:
        """A backward begins."""
        number = self._numbers.get(flight)
        if number is None:
            self._leave("the backward of an earlier iteration came")
        else:
            self._next(number, True)

    def landed(
        self, flight: Flight, counters: Counters, memory: Memory | None, kept_twice: Sequence[int]
    ) -> None:
        """Add what was measured in a call that ran by the plan of the whole."""
        number = self._numbers.get(flight)
        if self._plans is None or self._known is None or number is None:
            return
        self._calls[number].circumstances = Circumstances(beside=frozenset(kept_twice))
        if number == 0:
            self._run = flight.run
        if number < next(i for i, (_, backward) in enumerate(self._events) if backward):
            self._beside |= flight.beside
        self._tally.append(counters)
        if len(self._tally) == len(self._plans.codes) and self._run is not None:
            self._run.end()
            taken = self._run.counters()
            self._plans.codes[0].watch = False
            # What a collective takes is of all ranks, or for each of them, and of one.
            collective = taken.largest_bytes + taken.largest_bytes // ranks()
            self._known.threads = GROUP_THREADS * collective
            if memory is not None:
                memory.rest(taken.before_bytes + taken.process_bytes)
            report = self._plans.report
            report.held_bytes = sum(self._beside.values())
            report.measured_arena_bytes = max(c.high_water_bytes for c in self._tally)
            report.measured_peak_bytes = (
                report.resident_bytes + report.held_bytes + taken.process_bytes
            )
            report.outside_bytes = sum(c.outside_bytes for c in self._tally)
            report.steps_run += 1
            first = sum(c.first_us for c in self._tally)
            again = sum(c.again_us for c in self._tally)
            report.last_step_us = first + again
            report.measured_overhead = again / first if first else None
            self._run = None

    def given(self, flight: Flight, tangents: Sequence[Any]) -> None:
        """Note what the backward of a recorded call takes."""
        call = self._recording(flight)
        if call is not None:
            call.inputs, call.tangents = addresses(flight.inputs), addresses(tangents)

    def returned(self, flight: Flight, made: Sequence[Any]) -> None:
        """Note what the backward of a call made."""
        call = self._recording(flight)
        if call is not None:
            call.made += addresses(made)
        if call is not None or flight.whole:
            # A gradient that is there at the next event lasts, as a rule.
            leaves = call.leaves if call is not None else ()
            self._watch(flight, True, made, dict.fromkeys(leaves, len(self._events)))

    def received(self, flight: Flight, made: Sequence[Any]) -> None:
        """Note what the forward of a call made."""
        number = self._numbers.get(flight)
        if self._plans is None and number is not None:
            self._calls[number].made += addresses(made)
        self._watch(flight, False, made, dict.fromkeys(range(len(made)), RECORDED))

    def _watch(
        self, flight: Flight, backward: bool, made: Sequence[Any], when: Mapping[int, int]
    ) -> None:
        """Look at these events whether what a half made is gone, by position.

        In a planned iteration at those by which it is to be gone.
        """
        number = self._numbers.get(flight)
        if number is None:
            return
        if self._known is not None:
            gone = self._known.calls[number].gone
            when = {p: at for (half, p), at in gone.items() if half == backward}
        for position, at in when.items():
            if has_memory(made[position]):
                entry = number, (backward, position), when_gone(made[position])
                self._watched.setdefault(at, []).append(entry)

    def _look_back(self) -> None:
        """Note what the halves before gave to the user's code and nobody has any more."""
        at = len(self._events)
        recorded, there = self._watched.setdefault(RECORDED, []), 0
        for entry in self._watched.pop(at, ()):
            number, which, is_gone = entry
            if is_gone():
                self._calls[number].gone[which] = at
            elif self._known is not None:
                self._calls[number].late.add(which)
                recorded.append(entry)
        for entry in recorded[::-1]:
            number, which, is_gone = entry
            if is_gone():
                self._calls[number].gone[which] = at
                recorded.remove(entry)
            else:
                there += 1
            if there == MOST_THERE:
                break

    def _recording(self, flight: Flight) -> Call | None:
        number = self._numbers.get(flight)
        if number is None or flight.whole or len(self._calls) == 1:
            return None
        return self._calls[number]

    def _present(self) -> list[Flight | None]:
        return [ref() for ref in self._flights]

    def _next(self, number: int, backward: bool) -> Code | None:
        self._look_back()
        at = len(self._events)
        if at <= 2 * MOST_CALLS:  # one more than an order can have
            self._events.append((number, backward))
        if self._plans is None or self._order is None:
            return None
        steps, events = self._order
        if at < len(events) and events[at] == (number, backward):
            if backward:
                return None
            if steps[number]() is self._steps[number]:
                return self._plans.codes[number]
        self._leave("another order of forwards and backwards")
        return None

    def _leave(self, why: str) -> None:
        """Run the rest of the iteration by plans of single calls, within the same budget."""
        if self._plans is None:
            return
        log.info("%s: its %d graphs are planned one by one", why, len(self._plans.codes))
        for flight in self._present():
            if flight is not None and flight.saved is not None:
                flight.give_up("another order of the iteration")
        self._plans, self._order, self._known, self._left = None, None, None, True

    def _begin_with(self, step: object) -> None:
        """Begin an iteration: by the last one's plan if its first step is this one."""
        recorded, left = len(self._calls) > 1, self._left
        try:
            order = self._end()
        finally:
            self._flights, self._steps, self._calls, self._events = [], [], [], []
            self._tally, self._left, self._order, self._plans = [], False, None, None
            self._run, self._beside, self._watched, self._known = None, {}, {}, None
            self._numbers = weakref.WeakKeyDictionary()
        known = self._orders.setdefault(step, _Orders()).known
        orders = [o for o in known if known[o].plans is not None]
        if order not in orders and orders and not left and not recorded:
            order = orders[-1]  # a single call came between, an evaluation perhaps
        if order in orders:
            if look_around(known[order]):
                self._plan_anew(order, known[order])
            self._order, self._known, self._plans = order, known[order], known[order].plans

    def _end(self) -> Order | None:
        """The order of the iteration that is over, if it can run by a plan of the whole."""
        if self._plans is not None and self._order is not None and self._known is not None:
            if len(self._tally) == len(self._plans.codes):
                self._plan_again(self._order, self._known, self._plans)
            return self._order
        calls = len(self._calls)
        complete = len(self._events) == 2 * calls == 2 * len({e for e in self._events if e[1]})
        complete = complete and all(call.inputs for call in self._calls)
        if self._left or not 1 < calls <= MOST_CALLS or not complete:
            return None
        order = tuple(map(weakref.ref, self._steps)), tuple(self._events)
        orders = self._orders[self._steps[0]]
        if order not in orders.known and _pays(order, orders):
            known = orders.known[order] = _Known(self._calls)
            set_homes(known.calls)
            keep_saved(known.calls, self._events)
            look_around(known)
            known.plans = plan_regions(known.calls, self._events, 0, self._options)
        return order

    def _plan_again(self, order: Order, known: _Known, plans: Regions) -> None:
        """Plan what the iteration found, or took beyond its plan, from now on."""
        if learn(known, self._calls):
            look_around(known)
            self._plan_anew(order, known)  # what it took beyond its plan was that, perhaps
            return
        report, tries = plans.report, known.tries
        beyond = max(0, report.measured_peak_bytes - report.budget_bytes)
        if (not known.threads and beyond <= (TOLERANCE if tries else 0)) or tries > MOST_TRIES:
            return
        known.tries = tries + 1
        if tries == MOST_TRIES:
            told = (
                f"{len(plans.codes)} graphs of one iteration and what runs between them take"
                f" {format_bytes(beyond)} more than their budget of"
                f" {format_bytes(report.budget_bytes)}"
            )
            if self._options.strict:
                raise BudgetExceededError(told)
            log.warning("%s", told)
            return
        self._plan_anew(order, known, beyond)

    def _plan_anew(self, order: Order, known: _Known, beyond: int = 0) -> None:
        """Let another plan take the place of the one there is, for so many bytes more between."""
        assert known.plans is not None
        # Which of their buffers a process group's threads still hold differs each time.
        between = known.plans.between + beyond + known.threads
        known.threads = 0
        again = plan_regions(known.calls, order[1], between, self._options)
        if again is not None:
            drop(known.plans.report)
            known.plans = again


def _pays(order: Order, orders: _Orders) -> bool:
    """Whether an order that is not planned yet may be expected to come again."""
    if len(orders.known) < FIRST_ORDERS:
        return True
    if len(orders.known) == MOST_ORDERS:
        return False
    if order in orders.met:
        return True
    if len(orders.met) == MOST_CALLS:
        orders.met.clear()
    orders.met.add(order)
    return False


def set_homes(calls: Sequence[Call]) -> None:
    """Say which gradients of recorded calls can have a home.

    The gradient of a leaf that several calls share is there once: for the first of them, and
    without a home, as autograd adds up what all of them make before it adds that to it.
    """
    by_use: dict[int, list[Call]] = {}
    for call in calls:
        for leaf in call.leaves.values():
            by_use.setdefault(id(leaf()), []).append(call)
    for call in calls:
        own = {p: by_use[id(leaf())] for p, leaf in call.leaves.items()}
        call.homes = [p for p in movable(call.captured) if len(own.get(p, ())) == 1]
        call.leaves = {p: leaf for p, leaf in call.leaves.items() if own[p][0] is call}


def keep_saved(calls: Sequence[Call], events: Sequence[Event]) -> None:
    """Let outputs that recorded calls need in their backward be there until that is over.

    A call that gave its memory up while it was recorded had them no longer.
    """
    for number, call in enumerate(calls):
        over = events.index((number, True)) + 1
        captured = call.captured
        read = {t for op in captured.graph.ops[captured.forward_ops :] for t in op.inputs}
        for which, at in call.gone.items():
            backward, position = which
            if not backward and not read.isdisjoint(stored(call, captured.output_args[position])):
                call.gone[which] = max(at, over)


def look_around(known: _Known) -> bool:
    """Look at the gradients that are there when an iteration begins.

    Returns:
        Whether others are there than it was planned for.
    """
    found = False
    for call in known.calls:
        now = call.circumstances
        there = now.lasting | now.beside
        lasting: set[int] = set()
        beside: set[int] = set()
        for position, reference in call.leaves.items():
            leaf = reference()
            if leaf is None or leaf.grad is None or position in there:
                continue
            home = can_be_added_to(call.homes, position, leaf)
            (lasting if home else beside).add(position)
        if lasting or beside:
            found = True
            call.circumstances = Circumstances(now.lasting | lasting, now.beside | beside)
    return found and _looked(known)


def learn(known: _Known, calls: Sequence[Call]) -> bool:
    """Take over what the calls of an iteration found that ran by the plan of the whole.

    Returns:
        Whether gradients or outputs were kept that it was not planned for.
    """
    found = False
    for call, other in zip(known.calls, calls, strict=True):
        call.leaves = {p: other.leaves[p] for p in call.leaves}
        now, twice = call.circumstances, other.circumstances.beside
        late = call.gone.keys() & other.late
        if twice <= now.beside and not late:
            continue
        found = True
        call.circumstances = Circumstances(now.lasting - twice, now.beside | twice)
        on_time = {which: at for which, at in call.gone.items() if which not in late}
        call.gone = on_time | {which: other.gone[which] for which in late & other.gone.keys()}
    return found and _looked(known)


def _looked(known: _Known) -> bool:
    """Count a look at which something new was found; after some, expect it of everything."""
    known.looks += 1
    if known.looks == MANY_PLANS:
        for call in known.calls:
            now = call.circumstances
            lasting = (now.lasting | set(call.homes) & call.leaves.keys()) - now.beside
            call.circumstances = replace(now, lasting=lasting)
            call.gone = {}
    return True


def addresses(values: Sequence[Any]) -> list[int | None]:
    """Where the storage of each tensor begins; None for what has no memory."""
    return [
        value.untyped_storage().data_ptr() or None if has_memory(value) else None
        for value in values
    ]


def has_memory(value: object) -> bool:
    """Whether it is a tensor with a storage."""
    return isinstance(value, torch.Tensor) and not has_no_memory(value)
