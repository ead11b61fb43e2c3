"""Arena pool: one budget for the arenas of all live invocations of a thread."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from coop_plan.runtime.device.arena import Memory
from coop_plan.runtime.execute.invocation import Invocation, live_invocations
from coop_plan.runtime.iteration.recorder import IterationRecorder
from coop_plan.runtime.locks import fork_safe_lock
from coop_plan.runtime.options import Options
from coop_plan.runtime.torch_internals.autograd import inside_backward

_lock = fork_safe_lock()


class ArenaPool:
    """Arenas whose total size is within the largest budget of the invocations that use them.

    If a new invocation does not fit, the oldest ones that wait for their backward release their
    arena: backwards run in the opposite order, so theirs is needed last.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.recorder = IterationRecorder(options)
        self.thread = threading.get_ident()
        self.arenas: list[Memory] = []
        self._entering = False
        self._owners: dict[int, weakref.ref[Any]] = {}
        self._calls: dict[int, int] = {}
        with _lock:
            _all.add(self)

    @contextmanager
    def entering(self) -> Iterator[None]:
        """The beginning of an invocation: the arenas are not released meanwhile."""
        with _lock:
            self._entering = True
        try:
            yield
        finally:
            self._entering = False

    def add_owner(self, owner: object) -> None:
        """Note the parameter `owner` that a step of the pool has, if any.

        When the parameters of all steps are gone, the arenas are released: Dynamo keeps the steps
        of a model that was deleted.
        """
        if owner is None:
            return
        key = id(owner)
        if key not in self._owners:
            pool = weakref.ref(self)
            self._owners[key] = weakref.ref(owner, lambda _: _owner_died(pool, key))
        self._calls[key] = self._calls.get(key, 0) + 1

    def release_after(self, owner: int) -> None:
        """Release the arenas if the parameter `owner`, which died, was the last one.

        The lock may be held by this thread, which the garbage collector interrupts.
        """
        self._owners.pop(owner, None)
        repeated = self._calls.pop(owner, 0) > 1  # others are made for each call
        if repeated and not self._owners and _lock.acquire(blocking=False):
            try:
                if not (self._entering or any(f.owner is self for f in live_invocations())):
                    self.release_idle()
            finally:
                _lock.release()

    def place(self, invocation: Invocation) -> bool:
        """Assign an arena to a new invocation; returns whether its counters start at zero."""
        if invocation.in_joint_plan and not self.recorder.has_one_call:
            invocation.memory = self.recorder.shared_memory()
            return False
        memory = self.allocate(invocation)
        if self.recorder.has_one_call:
            others = [other for other in self.arenas if other is not memory]
            self.recorder.open(memory, invocation.compiled, others)
        return True

    def allocate(self, invocation: Invocation) -> Memory:
        """Assign an arena of the pool to an invocation."""
        with _lock:
            memory = self._find(invocation, self.recorder.bytes_beside(invocation))
            memory.detach_live()
            invocation.memory = memory
        return memory

    def _find(self, invocation: Invocation, beside: int) -> Memory:
        """An arena for an invocation, with `beside` bytes of inputs of waiting ones."""
        size = invocation.compiled.arena.size
        allowed = max(size, invocation.compiled.room)
        own = {id(memory) for memory in self.arenas}
        users = [f for f in live_invocations() if f is not invocation and id(f.memory) in own]
        waiting = [f for f in users if f.saved is not None]
        sizes = {id(f.memory): f.memory.bytes for f in users if f.memory is not None}
        limit = max(allowed, *(f.compiled.room for f in users), 0) - beside
        while waiting and sum(sizes.values()) + size > limit:
            given = waiting[0].memory
            for other in [f for f in waiting if f.memory is given]:
                waiting.remove(other)
                other.release_arena(f"'{invocation.name}'")
            sizes.pop(id(given))
        used, busy = sum(sizes.values()), sizes.keys()
        size = max(size, min(invocation.compiled.arena_bytes, limit - used))
        free = [memory for memory in self.arenas if id(memory) not in busy]
        idle = [m for m in free if m.bytes <= allowed or m.in_cuda_graph]
        idle.sort(key=lambda memory: (memory.bytes < size, memory.bytes))
        found = idle.pop(0) if idle else Memory()
        spare = limit - used - max(size, found.bytes)
        self.arenas = [memory for memory in self.arenas if id(memory) in busy]
        for memory in idle:
            spare -= memory.bytes
            if spare >= 0:
                self.arenas.append(memory)
        self.arenas.append(found)
        found.wanted = size
        kept = {id(memory) for memory in self.arenas}
        for memory in free:
            if id(memory) not in kept:
                memory.detach_live(retire=True)
        return found

    def release_idle(self) -> None:
        """Release arenas without a live invocation, and the state of finished iterations."""
        invocations = live_invocations()
        if not any(invocation.owner is self for invocation in invocations):
            self.recorder = IterationRecorder(self._options)
        busy = {id(invocation.memory) for invocation in invocations}
        self.arenas = [memory for memory in self.arenas if id(memory) in busy]


def _owner_died(pool: "weakref.ref[ArenaPool]", owner: int) -> None:
    found = pool()
    if found is not None:
        found.release_after(owner)


_all: "weakref.WeakSet[ArenaPool]" = weakref.WeakSet()


def release() -> None:
    """Give the memory of idle arenas back, for an inference engine between two steps, for example.

    Arenas of calls that wait for their backward stay. The next call allocates its arena again. On
    CUDA the memory goes to PyTorch's cache, which `torch.cuda.empty_cache()` empties.
    """
    with _lock:
        for pool in list(_all):
            pool.release_idle()


def idle_arenas() -> list[Memory]:
    """The arenas of this thread's pools in which no invocation runs or waits."""
    thread = threading.get_ident()
    with _lock:
        busy = {id(invocation.memory) for invocation in live_invocations()}
        arenas = [memory for pool in _all if pool.thread == thread for memory in pool.arenas]
    return [memory for memory in arenas if id(memory) not in busy]


def pool_of(invocation: Invocation) -> ArenaPool:
    """The pool that an invocation has its memory from."""
    assert isinstance(invocation.owner, ArenaPool)
    return invocation.owner


def take_saved(invocation: Invocation) -> Sequence[Any] | None:
    """Take the saved tensors of an invocation; None if it had to release its arena."""
    with _lock:
        saved, invocation.saved = invocation.saved, None
    return saved


class ArenaPools:
    """The pools of all steps compiled with equal options, one a thread.

    An invocation on one of autograd's own threads belongs to the pool that was used last.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._local = threading.local()
        self._last: ArenaPool | None = None

    def of_thread(self) -> ArenaPool:
        """The pool of this thread."""
        found: ArenaPool | None = getattr(self._local, "pool", None)
        if found is None and self._last is not None and inside_backward():
            found = self._last
        if found is None:
            found = self._local.pool = ArenaPool(self._options)
        self._last = found
        return found


_pools: "weakref.WeakValueDictionary[str, ArenaPools]" = weakref.WeakValueDictionary()


def arena_pools_of(options: Options) -> ArenaPools:
    """The pools for steps with these options, kept as long as one of the steps."""
    with _lock:
        found = _pools.get(repr(options))
        if found is None:
            found = _pools[repr(options)] = ArenaPools(options)
        return found
