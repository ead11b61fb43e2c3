"""
Coop, DTR and DTE: one simulator of an eager execution at real addresses.

The simulator runs the program op by op and knows nothing of what is to come, except when a tensor
has no reader left in the program (its references die). Before an op it recomputes what is missing,
with the whole closure pinned; when an allocation fails, the method's eviction rule makes room.
Tensors that were recomputed only for others are dropped as soon as nothing pins them. Recomputed
in-place (Coop, section 3.4) hands a dying input's address to the output of an elementwise op.

Sources: Coop, NeurIPS 2023, Algorithm 1 and sections 3.2-3.4; DTR, ICLR 2021, section 3 and
appendix C; and, where the papers leave a choice open, the behaviour of OneFlow's public
implementation (oneflow/core/vm/remat): best fit, cost / staleness without the size in windows,
closure pinning, eager eviction of recomputed tensors.
"""

from collections.abc import Callable

from planner.errors import DoesNotFitError
from planner.methods.address_space import FREE, AddressSpace
from planner.methods.base import Progress, Request, Solution
from planner.methods.neighbour_cost import NeighbourCost
from planner.problem import Problem
from planner.schedule import Schedule

COOP_SWITCHES = {
    "sliding-window": "evict one tensor at a time, by cost / (bytes x staleness), as dtr does",
    "partitioning": "allocate cheap and expensive tensors from the same end",
    "recomputable-inplace": "in-place pairs are copied instead of sharing one address",
}

MIN_STALENESS_US = 1e-3
"""A tensor touched just now has no staleness; this keeps its cost finite."""

MAX_RECOMPUTES_PER_OP = 30
"""More recomputed ops than this many times the program is thrashing, and counts as no fit."""


class Simulator:
    """
    State of one simulated step.

    `evict` frees room for one request; it returns False when nothing more can be evicted.
    """

    def __init__(
        self,
        problem: Problem,
        request: Request,
        evict: "Callable[[Simulator, int], bool]",
        *,
        partition: bool,
        inplace: bool,
    ) -> None:
        self.problem = problem
        self.request = request
        self.space = AddressSpace(request.arena_bytes & -problem.alignment)
        self.schedule = Schedule(problem, offset=[], workspace_offset=[])
        self.neighbours = NeighbourCost(problem)
        self.clock_us = 0.0
        self.last_access = [0.0] * problem.tensor_count
        self.pins = [0] * problem.tensor_count
        self.evictable = list(problem.evictable)
        self.free_ratios: list[float] = []
        self._evict = evict
        self._inplace = inplace
        self._address: dict[int, int] = {}
        self._position = 0
        self._retained: set[int] = set()
        self._from_right = _expensive(problem) if partition else [False] * problem.op_count

    def run(self) -> Schedule:
        """Execute the program; raises `DoesNotFitError` at the op that cannot be run."""
        limit = self.problem.op_count * (MAX_RECOMPUTES_PER_OP + 1)
        for op in range(self.problem.op_count):
            self._position = op
            self.request.check_time()
            if self.request.progress is not None and op % 64 == 0:
                self.request.progress(Progress("simulating", op / self.problem.op_count))
            self._pin_closure(op)
            self._compute(op, limit)
            for t in dict.fromkeys(self.problem.reads[op] + self.problem.makes[op]):
                self._release_if_dead(t)
            for t in list(self._retained):
                self._release_if_dead(t)
        self.schedule.finish()
        return self.schedule

    # Recomputation

    def _pin_closure(self, op: int) -> None:
        """Pin the inputs of `op`, and of every op that must run again before it."""
        seen = {op}
        stack = [op]
        while stack:
            for t in self.problem.reads[stack.pop()]:
                self.pins[t] += 1
                producer = self.problem.producer[t]
                if not self.schedule.holds(t) and producer not in seen:
                    seen.add(producer)
                    stack.append(producer)

    def _compute(self, goal: int, limit: int) -> None:
        """Run `goal` after the ops it needs, each unpinning its inputs when it is done."""
        stack = [goal]
        while stack:
            op = stack[-1]
            if op != goal and all(
                self.schedule.holds(t) or not self.pins[t] for t in self.problem.makes[op]
            ):
                stack.pop()  # two readers asked for it, and the first has had it computed
                continue
            missing = [t for t in self.problem.reads[op] if not self.schedule.holds(t)]
            if missing:
                stack.extend(self.problem.producer[t] for t in reversed(missing))
                continue
            stack.pop()
            if len(self.schedule.ops) >= limit:
                raise DoesNotFitError(goal)
            self._execute(op, goal)

    def _execute(self, op: int, goal: int) -> None:
        problem, schedule = self.problem, self.schedule
        assert schedule.offset is not None
        assert schedule.workspace_offset is not None
        pairs = self._inplace_pairs(op)
        sources = dict(pairs)
        kept = {t for t in problem.makes[op] if schedule.holds(t)}
        for t in problem.makes[op]:
            self.pins[t] += 1  # until the op is done
        transient: list[int] = []
        for t in problem.op_outputs[op]:
            if schedule.leaves(t):
                continue
            if t in sources:
                offset = self._address.pop(sources[t])
                self.space.rename(offset, t)
                self.neighbours.evicted(sources[t])
            elif t in kept or problem.outside[t]:
                # Made once more beside the one that is there: it ends with this op.
                offset = self._allocate(problem.size[t], problem.tensor_count, op, goal)
                if problem.size[t]:
                    transient.append(offset)
            else:
                offset = self._allocate(problem.size[t], t, op, goal)
            schedule.offset.append(offset)
            if t not in kept and not problem.outside[t]:
                self._address[t] = offset
                self.neighbours.computed(t)
        need = problem.workspace[op]
        workspace = self._allocate(need, problem.tensor_count, op, goal)
        if need:
            transient.append(workspace)
        schedule.run(op, pairs)
        schedule.workspace_offset.append(workspace)
        self.clock_us += problem.cost[op]
        for offset in transient:
            self.space.release(offset)
        self._settle(op, kept)

    def _settle(self, op: int, kept: set[int]) -> None:
        """After `op`: stamp what it touched, unpin it, drop what was recomputed only for it."""
        problem = self.problem
        for t in problem.makes[op]:
            self.pins[t] -= 1
            if t not in kept:
                self.last_access[t] = self.clock_us
        for t in problem.reads[op]:
            self.last_access[t] = self.clock_us
            self.pins[t] -= 1
        for t in dict.fromkeys(problem.reads[op] + problem.makes[op]):
            if problem.last_use[t] < self._position:
                self._release_if_dead(t)

    def _inplace_pairs(self, op: int) -> tuple[tuple[int, int], ...]:
        """Pairs whose input has no reader left, in the program and in the pinned closure."""
        if not self._inplace:
            return ()
        pairs: list[tuple[int, int]] = []
        taken: set[int] = set()
        for out, source in self.problem.inplace[op]:
            if (
                self.problem.last_use[source] <= self._position
                and self.pins[source] == 1
                and self.evictable[source]
                and out not in taken
                and source not in taken
                and not self.schedule.holds(out)
            ):
                pairs.append((out, source))
                taken.update((out, source))
        return tuple(pairs)

    # Memory

    def _allocate(self, size: int, owner: int, op: int, goal: int) -> int:
        if not size:
            return 0
        right = self._from_right[op]
        offset = self.space.allocate(size, owner, right)
        if offset is not None:
            return offset
        while offset is None:
            if not self._evict(self, size):
                raise DoesNotFitError(goal)
            offset = self.space.allocate(size, owner, right)
        # OneFlow takes the figure with the requested block still counted as free.
        self.free_ratios.append((self.space.free_bytes + size) / self.space.capacity)
        return offset

    def drop(self, t: int) -> None:
        """Evict tensor `t`."""
        self.schedule.drop(t)
        address = self._address.pop(t)
        if self.problem.size[t]:
            self.space.release(address)
        self.neighbours.evicted(t)

    def may_evict(self, owner: int) -> bool:
        """Whether the block of `owner` is an unpinned evictable tensor."""
        return owner < self.problem.tensor_count and not self.pins[owner] and self.evictable[owner]

    def cost(self, t: int) -> float:
        """e* over staleness, in µs per µs."""
        staleness = self.clock_us - self.last_access[t]
        return self.neighbours.of(t) / max(staleness, MIN_STALENESS_US)

    def _release_if_dead(self, t: int) -> None:
        """
        Drop `t` when the program reads it no more and nothing pins it.

        A tensor that cannot be recomputed is banished (DTR, appendix C.3): it goes only when no
        evicted tensor needs it, and what was made from it can no longer be evicted.
        """
        if self.problem.last_use[t] > self._position or self.pins[t] or not self.schedule.holds(t):
            return
        if self.evictable[t]:
            self.drop(t)
            return
        fixed = self._banish(t)
        if fixed is None:
            self._retained.add(t)
            return
        self._retained.discard(t)
        for child in fixed:
            self.evictable[child] = False
        self.drop(t)

    def _banish(self, t: int) -> list[int] | None:
        """Live tensors that depend on `t` through dropped ones; None if a dropped one is needed."""
        problem = self.problem
        found: list[int] = []
        seen = {t}
        stack = [t]
        while stack:
            for op in problem.consumers[stack.pop()]:
                if op > self._position:
                    continue
                for child in problem.makes[op]:
                    if child in seen or problem.is_output[child]:
                        continue
                    seen.add(child)
                    if self.schedule.holds(child):
                        found.append(child)
                    elif problem.last_use[child] > self._position:
                        return None
                    else:
                        stack.append(child)
        return found


def _expensive(problem: Problem) -> list[bool]:
    """
    Which ops' outputs are expensive: cost density above that of the whole program.

    Cost density is cost / output bytes (Coop, section 3.3).
    """
    made = [sum(problem.size[t] for t in tensors) for tensors in problem.op_outputs]
    total = sum(made)
    mean = problem.base_cost_us / total if total else 0.0
    return [cost > mean * size for cost, size in zip(problem.cost, made, strict=True)]


def evict_window(sim: Simulator, size: int) -> bool:
    """
    Coop's sliding window: the cheapest run of adjacent blocks of at least `size` bytes.

    Two pointers move over the blocks in address order; free blocks cost nothing, and a block that
    cannot be evicted restarts the window behind it (Algorithm 1).
    """
    offsets, sizes, owners = sim.space.offsets, sim.space.sizes, sim.space.owners
    best_cost, best = float("inf"), (0, 0)
    costs: list[float] = []
    start, window, total = 0, 0, 0.0
    for end, owner in enumerate(owners):
        if owner == FREE:
            costs.append(0.0)
        elif sim.may_evict(owner):
            costs.append(sim.cost(owner))
            total += costs[-1]
        else:
            costs.append(0.0)
            start, window, total = end + 1, 0, 0.0
            continue
        window += sizes[end]
        while window - sizes[start] >= size:
            window -= sizes[start]
            total -= costs[start]
            start += 1
        if window >= size and total < best_cost:
            best_cost, best = total, (start, end + 1)
    if best == (0, 0):
        return False
    victims = [owner for owner in owners[best[0] : best[1]] if owner != FREE]
    assert victims, f"a free block of {size} bytes at {offsets[best[0]]} was overlooked"
    for t in victims:
        sim.drop(t)
    return True


def _evict_single(neighbourhood: bool) -> Callable[[Simulator, int], bool]:
    def evict(sim: Simulator, size: int) -> bool:
        best_cost, victim = float("inf"), -1
        space = sim.space
        for at, owner in enumerate(space.owners):
            if owner == FREE or not sim.may_evict(owner):
                continue
            room = space.sizes[at]
            if neighbourhood:
                room = space.size_with_free_neighbours(space.offsets[at])
            cost = sim.cost(owner) / room
            if cost < best_cost:
                best_cost, victim = cost, owner
        if victim < 0:
            return False
        sim.drop(victim)
        return True

    return evict


def _solve(
    problem: Problem,
    request: Request,
    evict: Callable[[Simulator, int], bool],
    *,
    partition: bool,
    inplace: bool,
) -> Solution:
    simulator = Simulator(problem, request, evict, partition=partition, inplace=inplace)
    schedule = simulator.run()
    ratios = simulator.free_ratios
    return Solution(schedule, eviction_free_ratio=sum(ratios) / len(ratios) if ratios else 0.0)


def solve_coop(problem: Problem, request: Request) -> Solution:
    """Coop with its three ideas, each unless switched off."""
    window = "sliding-window" not in request.off
    return _solve(
        problem,
        request,
        evict_window if window else _evict_single(neighbourhood=False),
        partition="partitioning" not in request.off,
        inplace="recomputable-inplace" not in request.off,
    )


def solve_dtr(problem: Problem, request: Request) -> Solution:
    """DTR's h with e*: minimum of cost / (bytes × staleness), one tensor at a time."""
    evict = _evict_single(neighbourhood=False)
    return _solve(problem, request, evict, partition=False, inplace=False)


def solve_dte(problem: Problem, request: Request) -> Solution:
    """DTR's rule with the free bytes next to a tensor counted as its own."""
    evict = _evict_single(neighbourhood=True)
    return _solve(problem, request, evict, partition=False, inplace=False)
