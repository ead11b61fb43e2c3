"""One iteration of a thread: its calls and events so far, and the bytes that they hold."""

import itertools
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from coop_plan.runtime.device.arena import Counters, Run
from coop_plan.runtime.execute.invocation import Invocation
from coop_plan.runtime.iteration.joint_plan import (
    Event,
    HalfOutput,
    JointPlan,
    RecordedCall,
    input_bytes,
)
from coop_plan.runtime.iteration.order import Order
from coop_plan.runtime.torch_internals.ops import has_no_memory, storage_expiry

EVERY_EVENT = -1
"""Sentinel: check liveness at every event."""

MAX_LIVE_CHECKS = 8
"""Live tensors found, latest first, after which older ones are not checked."""


class Iteration:
    """Calls and events so far. `order` is the `expected` one while it runs its joint plan.

    `run` is its window: the bytes that its thread allocated since it began. `budget_bytes` is the
    largest budget of its calls, `noted_bytes` the peak that a line told. `returned` are the calls
    whose backward ended without an error. `later_fresh` are the inputs allocated in its window of
    each call of the later iterations.
    """

    def __init__(self) -> None:
        self.expected: Order | None = None
        self.order: Order | None = None
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

    def continue_with(self, other: "Iteration") -> None:
        """Append the calls and events of the iteration that seemed to come after this one."""
        self.count_first_inputs()
        calls, events = len(self.calls), len(self.events)
        for reference, step, call in zip(other.invocations, other.steps, other.calls, strict=True):
            invocation = reference()
            if invocation is not None:
                self.numbers[invocation] = len(self.calls)
            self.invocations.append(reference)
            self.steps.append(step)
            released_at = {which: at + events for which, at in call.released_at.items()}
            # An order may have the other iteration's calls.
            call = replace(call, released_at=released_at, fresh=self.later_fresh.pop(0))
            self.calls.append(call)
            if not call.inputs and invocation is not None:  # the first of its iteration
                set_inputs(call, invocation.inputs, self.made)
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
                leaves = ((p, leaf()) for p, leaf in self.calls[number].leaves.items())
                self.calls[number].lent = [
                    p for p, v in leaves if has_storage(v) and not v.untyped_storage().nbytes()
                ]
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


def has_storage(value: object) -> TypeGuard[torch.Tensor]:
    """True for a tensor with a storage."""
    return isinstance(value, torch.Tensor) and not has_no_memory(value)
