"""A step in flight: one call from its forward to its backward, and the ticket leading back to it.

Autograd keeps the ticket and nothing else of a step; what the backward needs is kept here, by the
ticket's number. When autograd drops the ticket, with the loss or after the backward, the flight is
over.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from coop_plan.runtime.device.arena import Arena, Counters, Memory, Run
from coop_plan.runtime.errors import StepSpentError
from coop_plan.runtime.execute.rng_state import Generator
from coop_plan.runtime.execute.transfers import Copies
from coop_plan.runtime.torch_internals.autograd import give_gradient
from coop_plan.runtime.torch_internals.ops import tensor_version
from coop_plan.schemas import Plan

_numbers = itertools.count()
_flights: "dict[int, Flight]" = {}
"""By number. One operation of a dict at a time: a ticket may be dropped on any thread."""


def room(plan: Plan) -> int:
    """Bytes that a plan's budget has for arenas, beside what lies outside of them."""
    return plan.budget_bytes - (plan.peak_bytes - plan.arena_bytes)


class Runnable(Protocol):
    """What a flight has to know of its code (runtime.execute.compiled_plan)."""

    arena: Arena
    replayed: Mapping[int, Generator]
    saved_inputs: Sequence[int | None]
    read: Sequence[int]
    slots: dict[int, int | None]
    left: dict[int, int]
    used: Sequence[int]
    watch: bool
    forward: Callable[..., Any]
    backward: Callable[..., Any]

    def copies(self) -> Copies | None:
        """What carries out the transfers of one flight, if there are any."""


class Course(Protocol):
    """What the flight is part of (runtime.iteration.recorder)."""

    def backward(self, flight: "Flight") -> None:
        """Its backward begins."""

    def given(self, flight: "Flight", tangents: Sequence[Any]) -> None:
        """Its backward takes these."""

    def returned(self, flight: "Flight", made: Sequence[Any]) -> None:
        """Its backward made these."""

    def landed(
        self,
        flight: "Flight",
        counters: Counters,
        memory: Memory | None,
        kept_twice: Sequence[int],
    ) -> None:
        """It is over, and ran by the plan of the whole, in this memory; see `Step._land`."""


class Home(Protocol):
    """Where a flight gets memory (runtime.execute.arena_pool)."""

    @property
    def course(self) -> Course:
        """Of what shares the memory."""

    def admit(self, flight: "Flight") -> None:
        """Set the flight's memory."""


class Flight:
    """One call of a step, named `name`, that runs as `code` in a memory from `home`.

    `room` is how many bytes its budget has for arenas (`room(plan)`).

    Between the halves it waits, with `saved` tensors in `memory`, unless another took that: then
    they are computed again, from the inputs and the states of `generators` at the start.

    Inputs and saved outputs are kept as aliases that autograd does not know of, or they would keep
    the ticket. Their versions tell whether one was overwritten.

    `beside` has the bytes of the gradients that were there when it began, by their addresses;
    `alone` says that no other flight of its thread ran meanwhile. `leaves` are the tensors whose
    gradients last or are used up, `held` those of the gradients that the backward adds to, both by
    position among the primals; `handed` are positions of leaves whose hooks run in the backward.
    """

    def __init__(
        self, name: str, code: Runnable, home: Home, room: int, generators: Sequence[Generator]
    ) -> None:
        self.name = name
        self.home = home
        self.run_alone(code, room)
        self.inputs: Sequence[Any] = ()
        self.leaves: Mapping[int, torch.Tensor] = {}
        self.held: Mapping[int, torch.Tensor] = {}
        self.handed: Container[int] = ()
        self.beside: Mapping[int, int] = {}
        self.alone = True
        self.thread = threading.get_ident()
        self.saved: Sequence[Any] | None = None
        self.memory: Memory | None = None
        self.why_again = "it ran a backward already (retain_graph=True)"
        self._number = next(_numbers)
        self._ticket: object = None
        self._start = [(generator, generator.state()) for generator in generators]
        self._states: dict[int, Any] = {}
        self._present: tuple[Generator, Any] | None = None
        self._versions: Sequence[int] = ()
        self._saved_versions: Sequence[int] = ()

    def run_as(self, code: Runnable, room: int) -> None:
        """Let both halves be of this code."""
        self.code, self.room, self.run = code, room, Run(code.arena)
        self.copies = code.copies()

    def run_alone(self, code: Runnable, room: int) -> None:
        """Let this be the code for when it runs by a plan of its own, as from now."""
        self._alone = code, room
        self.run_as(code, room)

    @property
    def whole(self) -> bool:
        """Whether it runs by the plan of its whole iteration."""
        return self.code is not self._alone[0]

    def ticket(self) -> torch.Tensor:
        """What stands for the flight until it is dropped: a scalar on the CPU, its number.

        It requires a gradient: by a saved tensor that does PyTorch 2.11 knows a double backward,
        which AOTAutograd then refuses. Otherwise the gradients would count as constants.
        """
        number, drop = self._number, _flights.pop
        array = np.array(float(number))
        _flights[number] = self
        self._ticket = weakref.ref(array, lambda _: drop(number, None))
        return torch.from_numpy(array).requires_grad_()

    def meet(self) -> None:
        """It runs now: let the flights of this thread that lie in memory note that."""
        for other in in_flight():
            if other is not self and other.memory is not None and other.thread == self.thread:
                other.alone = False

    def hold(self, inputs: Sequence[Any], leaves: Container[int]) -> None:
        """Keep the inputs of the forward; those at `leaves` never lead to a ticket."""
        self.inputs = [
            value.detach() if isinstance(value, torch.Tensor) and i not in leaves else value
            for i, value in enumerate(inputs)
        ]
        self._versions = [version_of(value) for value in self.inputs]

    def keep(self, saved: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Keep what the forward saved, of which some are inputs or outputs."""
        given = {id(value) for value in outputs}
        kept = [
            self.inputs[at] if at is not None else value.detach() if id(value) in given else value
            for value, at in zip(saved, self.code.saved_inputs, strict=True)
        ]
        self._saved_versions = [
            version_of(value) if at is None else self._versions[at]
            for value, at in zip(kept, self.code.saved_inputs, strict=True)
        ]
        self.saved = kept  # from now on it waits

    def give_up(self, taken_by: str) -> None:
        """Leave the memory to another."""
        self.saved, self.memory = None, None
        self.run_as(*self._alone)
        self.why_again = f"{taken_by} needed its memory"

    def take_in(self, position: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add a new gradient to the one held, or let autograd have it."""
        held = self.held.get(position)
        if held is None:
            if self.code.slots[position] is not None:
                return gradient
            self.code.arena.pause()
            return gradient.clone()  # where it lies is the arena's
        held.add_(gradient)
        return None

    def hand_over(self, position: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Let the hooks of a leaf have a new gradient, or autograd."""
        if position not in self.handed:
            return gradient
        self.code.arena.pause()
        give_gradient(self.leaves[position], gradient)
        return None

    def check(self, saved: Sequence[Any]) -> None:
        """See that nothing was overwritten that the backward needs.

        Raises:
            RuntimeError: as autograd does.
        """
        for value, expected in zip(saved, self._saved_versions, strict=True):
            if version_of(value) != expected:
                self.memory = None
                raise RuntimeError(
                    f"one of the variables needed for the backward of '{self.name}' has been"
                    f" modified by an inplace operation: {_described(value)} is at version"
                    f" {version_of(value)}, expected version {expected}"
                )

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """While this lasts, the generators stand as when the forward began.

        Raises:
            StepSpentError: inputs of the forward were overwritten since.
        """
        for at in self.code.read:
            if version_of(self.inputs[at]) != self._versions[at]:
                raise StepSpentError(
                    f"the forward of '{self.name}' would have to run again before its backward,"
                    f" because {self.why_again}, but an input of it has been modified by an"
                    f" inplace operation since: {_described(self.inputs[at])}"
                )
        present = [generator.state() for generator, _ in self._start]
        try:
            for generator, state in self._start:
                generator.set(state)
            yield
        finally:
            for (generator, _), state in zip(self._start, present, strict=True):
                generator.set(state)

    def land(self) -> None:
        """The backward is over: of its memory, only the gradients are needed."""
        self.held, self.leaves, self.handed = {}, {}, ()
        self.memory = None

    # Random ops of a default generator: the state before the first run is set again.

    def save(self, op: int) -> None:
        """The first run of a random op is next."""
        self.code.arena.pause()
        self._states[op] = self.code.replayed[op].state()

    def recall(self, op: int) -> None:
        """The same op runs again, with the numbers of its first run."""
        self.code.arena.pause()
        generator = self.code.replayed[op]
        self._present = generator, generator.state()
        generator.set(self._states[op])

    def go_on(self) -> None:
        """It has run, or failed."""
        if self._present is not None:
            self.code.arena.pause()
            generator, state = self._present
            generator.set(state)
            self._present = None


def flight_of(ticket: torch.Tensor) -> Flight:
    """The flight that a ticket leads to.

    Raises:
        StepSpentError: it is over.
    """
    found = _flights.get(int(ticket.item()))
    if found is None:
        raise StepSpentError(
            "the backward of a step whose memory was given back: what autograd saved for it was"
            " copied (by torch.autograd.graph.saved_tensors_hooks, for example) and then dropped"
        )
    return found


def in_flight() -> list[Flight]:
    """All that are not over, oldest first."""
    return list(_flights.copy().values())


def _described(value: torch.Tensor) -> str:
    return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"


def version_of(value: object) -> int:
    """How often a tensor has been overwritten; 0 for anything else."""
    return tensor_version(value) if isinstance(value, torch.Tensor) else 0
