"""The course of one iteration: which steps are called, and in which order their halves run.

An iteration lasts from a forward that finds nothing waiting to the next such forward. The first of
its kind is recorded; those that follow run by the plan of the whole (`runtime.execute.regions`), as
long as they keep to its order.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from coop_plan.runtime.device.arena import Counters, Memory, Run
from coop_plan.runtime.errors import BudgetExceededError
from coop_plan.runtime.execute.code import Code
from coop_plan.runtime.execute.flight import Flight
from coop_plan.runtime.execute.regions import Call, Event, Regions, plan_regions
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import drop
from coop_plan.runtime.torch_internals import has_no_memory
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

TOLERANCE = 4096
"""Bytes above the budget for which no step is planned anew, and no iteration a second time:
scalars, and what autograd makes of them."""


@dataclass
class _Orders:
    """The orders of iterations that begin with one step."""

    known: dict[Order, Regions | None] = field(default_factory=dict)
    recorded: dict[Order, list[Call]] = field(default_factory=dict)
    tries: dict[Order, int] = field(default_factory=dict)
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

    def landed(self, flight: Flight, counters: Counters, memory: Memory | None) -> None:
        """Add what was measured in a call that ran by the plan of the whole."""
        number = self._numbers.get(flight)
        if self._plans is None or number is None:
            return
        if number == 0:
            self._run = flight.run
        if number < next(i for i, (_, backward) in enumerate(self._events) if backward):
            self._beside |= flight.beside
        self._tally.append(counters)
        if len(self._tally) == len(self._plans.codes) and self._run is not None:
            self._run.end()
            taken = self._run.counters()
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
        """Note what the backward of a recorded call made."""
        call = self._recording(flight)
        if call is not None:
            call.made += addresses(made)

    def received(self, flight: Flight, made: Sequence[Any]) -> None:
        """Note what the forward of a recorded call made."""
        if self._plans is None:
            self._calls[self._numbers[flight]].made += addresses(made)

    def _recording(self, flight: Flight) -> Call | None:
        number = self._numbers.get(flight)
        if number is None or flight.whole or len(self._calls) == 1:
            return None
        return self._calls[number]

    def _present(self) -> list[Flight | None]:
        return [ref() for ref in self._flights]

    def _next(self, number: int, backward: bool) -> Code | None:
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
        self._plans, self._order, self._left = None, None, True

    def _begin_with(self, step: object) -> None:
        """Begin an iteration: by the last one's plan if its first step is this one."""
        recorded, left = len(self._calls) > 1, self._left
        try:
            order = self._end()
        finally:
            self._flights, self._steps, self._calls, self._events = [], [], [], []
            self._tally, self._left, self._order, self._plans = [], False, None, None
            self._run, self._beside = None, {}
            self._numbers = weakref.WeakKeyDictionary()
        known = self._orders.setdefault(step, _Orders()).known
        orders = [o for o in known if known[o] is not None]
        if order not in orders and orders and not left and not recorded:
            order = orders[-1]  # a single call came between, an evaluation perhaps
        if order in orders:
            self._order, self._plans = order, known[order]

    def _end(self) -> Order | None:
        """The order of the iteration that is over, if it can run by a plan of the whole."""
        if self._plans is not None and self._order is not None:
            if len(self._tally) == len(self._plans.codes):
                self._plan_again(self._order, self._plans)
            return self._order
        calls = len(self._calls)
        complete = len(self._events) == 2 * calls == 2 * len({e for e in self._events if e[1]})
        complete = complete and all(call.inputs for call in self._calls)
        if self._left or not 1 < calls <= MOST_CALLS or not complete:
            return None
        order = tuple(map(weakref.ref, self._steps)), tuple(self._events)
        orders = self._orders[self._steps[0]]
        if order not in orders.known and _pays(order, orders):
            orders.recorded[order] = self._calls
            orders.known[order] = plan_regions(self._calls, self._events, 0, self._options)
        return order

    def _plan_again(self, order: Order, plans: Regions) -> None:
        """Plan what the iteration took beyond its plan from now on."""
        orders = self._orders[self._steps[0]]
        report, tries = plans.report, orders.tries.get(order, 0)
        beyond = report.measured_peak_bytes - report.budget_bytes
        if beyond <= (TOLERANCE if tries else 0) or tries > MOST_TRIES:
            return
        orders.tries[order] = tries + 1
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
        between = plans.between + beyond
        again = plan_regions(orders.recorded[order], order[1], between, self._options)
        if again is not None:
            drop(report)
            orders.known[order] = again


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


def addresses(values: Sequence[Any]) -> list[int | None]:
    """Where the storage of each tensor begins; None for what has no memory."""
    return [
        value.untyped_storage().data_ptr() or None
        if isinstance(value, torch.Tensor) and not has_no_memory(value)
        else None
        for value in values
    ]
