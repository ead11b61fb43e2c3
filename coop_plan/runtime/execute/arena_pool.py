"""The memory that flights share: one budget for all that a thread has in flight."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from coop_plan.runtime.device.arena import Memory
from coop_plan.runtime.execute.invocation import Flight, in_flight
from coop_plan.runtime.iteration.joint_plan import Call
from coop_plan.runtime.iteration.recorder import Course
from coop_plan.runtime.locks import fork_safe_lock
from coop_plan.runtime.options import Options
from coop_plan.runtime.torch_internals.autograd import inside_backward

_lock = fork_safe_lock()


class Pool:
    """Memories within the budget of the flights in them, the largest if they differ.

    When a flight does not fit beside those that wait for their backward, the oldest give up their
    memory: backwards come in the opposite order, so theirs is needed last.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.course = Course(options)
        self._memories: list[Memory] = []
        self._of_all: Memory | None = None
        with _lock:
            _all.add(self)

    def joins(
        self, flight: Flight, step: object, call: Call, inputs: Callable[[], Sequence[int | None]]
    ) -> bool:
        """Let a new flight be the next call of its iteration.

        Returns:
            Whether it runs by the plan of the whole iteration, with the code of that.
        """
        code = self.course.forward(flight, step, call, inputs)
        if code is None or self.course.regions is None:
            return False
        flight.run_as(code, self.course.regions.room)
        return True

    def place(self, flight: Flight, *, whole: bool) -> bool:
        """Give a new flight memory; whether counters begin anew with it."""
        if not whole:
            self.admit(flight)
            return True
        if self.course.first:
            self.admit(flight)
            self._of_all = flight.memory
        flight.memory = self._of_all
        return self.course.first

    def admit(self, flight: Flight) -> None:
        """Give memory to a flight, for its next half."""
        with _lock:
            memory = self._find(flight)
            memory.part()
            flight.memory = memory

    def _find(self, flight: Flight) -> Memory:
        size = flight.code.arena.size
        most = max(size, flight.room)
        ours = {id(memory) for memory in self._memories}
        users = [f for f in in_flight() if f is not flight and id(f.memory) in ours]
        waiting = [f for f in users if f.saved is not None]
        sizes = {id(f.memory): f.memory.bytes for f in users if f.memory is not None}
        limit = max(most, *(f.room for f in users), 0)
        while waiting and sum(sizes.values()) + size > limit:
            given = waiting[0].memory
            for other in [f for f in waiting if f.memory is given]:
                waiting.remove(other)
                other.give_up(f"'{flight.name}'")
            sizes.pop(id(given))
        taken, busy = sum(sizes.values()), sizes.keys()
        idle = [
            memory
            for memory in self._memories
            if id(memory) not in busy and (memory.bytes <= most or memory.fixed)
        ]
        idle.sort(key=lambda memory: (memory.bytes < size, memory.bytes))
        found = idle.pop(0) if idle else Memory()
        spare = limit - taken - max(size, found.bytes)
        self._memories = [memory for memory in self._memories if id(memory) in busy]
        for memory in idle:
            spare -= memory.bytes
            if spare >= 0:
                self._memories.append(memory)
        self._memories.append(found)
        return found

    def rest(self) -> None:
        """Keep no memory that no flight is in, and nothing of iterations that are over."""
        flights = in_flight()
        if not any(flight.home is self for flight in flights):
            self.course = Course(self._options)
        busy = {id(flight.memory) for flight in flights}
        self._memories = [memory for memory in self._memories if id(memory) in busy]
        if id(self._of_all) not in busy:
            self._of_all = None


_all: "weakref.WeakSet[Pool]" = weakref.WeakSet()


def rest() -> None:
    """Let all pools give up what nobody is in; they take memory again when a step is called."""
    with _lock:
        for pool in list(_all):
            pool.rest()


def claim(flight: Flight) -> Sequence[Any] | None:
    """What a flight saved, for its backward, or None if it had to give up its memory."""
    with _lock:
        saved, flight.saved = flight.saved, None
    return saved


class Pools:
    """The pools of all steps that were compiled with equal options, one for each thread.

    What runs in the backward on a thread of autograd's own belongs to the pool that was last used.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._here = threading.local()
        self._last: Pool | None = None

    def here(self) -> Pool:
        """The pool of this thread."""
        found: Pool | None = getattr(self._here, "pool", None)
        if found is None and self._last is not None and inside_backward():
            found = self._last
        if found is None:
            found = self._here.pool = Pool(self._options)
        self._last = found
        return found


_pools: "weakref.WeakValueDictionary[str, Pools]" = weakref.WeakValueDictionary()


def pools_of(options: Options) -> Pools:
    """The pools for steps of these options, which last as long as one of the steps."""
    with _lock:
        found = _pools.get(repr(options))
        if found is None:
            found = _pools[repr(options)] = Pools(options)
        return found
