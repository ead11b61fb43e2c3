"""Whether a step fits into a device, what it costs there, and how large its batch may be.

Behind every number stands a verified plan. A largest batch is looked for among graphs between two
captured ones, in which sizes and costs are affine in the batch, and holds only once the step has
been captured at it and planned within the memory: where that fails, the capture is one of the two
from then on, and the search goes on below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import fsum

import msgspec

from coop_plan.planner.core.errors import InfeasibleBudgetError
from coop_plan.planner.planning import plan, plan_if_it_fits
from coop_plan.schemas import Graph, InvalidInputError, Plan

MAX_CAPTURES = 6
"""Of one search for a largest batch."""

MAX_BATCH = 1 << 24

ONE_FORWARD = "one extra forward"


@dataclass(frozen=True)
class Largest:
    """The largest batch found within a limit of overhead, with its plan; 0 and None if none was."""

    limit: float
    batch: int
    plan: Plan | None


@dataclass(frozen=True)
class Fit:
    """Figures of one step on one device.

    `memory_bytes` is what the step may have; `kept` the plan of keep-everything in as much as it
    needs, `least` that of the smallest budget, `planned` that within the memory, if there is one.
    `largest` has an entry for each limit of overhead, or none, and `unknown` says why.
    """

    memory_bytes: int
    kept: Plan
    least: Plan
    planned: Plan | None
    largest: Mapping[str, Largest]
    unknown: str = ""


def fit(
    graph_at: Callable[[int], Graph],
    batch: int,
    memory_bytes: int,
    limits: Mapping[str, float],
    link: int = 0,
) -> Fit:
    """Plan the step of a batch for a memory, and look for the largest batch within each limit.

    Args:
        graph_at: captures the step at a batch. An `InvalidInputError` at another batch than the
            one that is asked about leaves the largest ones unknown.
        batch: the one that is asked about; twice as many is captured too.
        memory_bytes: what the step may have.
        limits: of overhead, by what they are called; `ONE_FORWARD` is one more, of the step itself.
        link: bytes/s to the host and back for plans that move tensors; 0: none does.
    """
    captured = {batch: graph_at(batch)}
    graph = captured[batch]
    kept = plan(graph, "100%", method="keep-all")
    search = _Search(graph_at, captured, memory_bytes, link)
    planned = search.within(graph)
    forward = fsum(op.cost_us for op in graph.ops if op.phase == "forward")
    limits = {**limits, ONE_FORWARD: forward / max(kept.base_cost_us, 1e-9)}
    least = plan(graph, "min")
    try:
        largest = {name: search.largest(batch, limit) for name, limit in limits.items()}
    except InvalidInputError as error:
        return Fit(memory_bytes, kept, least, planned, {}, f"no largest batch: {error}")
    return Fit(memory_bytes, kept, least, planned, largest)


def scaled(small: Graph, large: Graph, position: float) -> Graph:
    """The step between two of other batches, at 0 the first, at 1 the second; beyond them too.

    Raises:
        InvalidInputError: their ops differ.
    """
    ours = [(op.name, op.inputs, op.outputs) for op in small.ops]
    if ours != [(op.name, op.inputs, op.outputs) for op in large.ops]:
        raise InvalidInputError(
            "the step has other ops at another batch: it cannot be scaled, only asked about one"
            " batch at a time"
        )

    def at(first: float, second: float) -> float:
        return max(0.0, first + (second - first) * position)

    tensors = [
        msgspec.structs.replace(a, bytes=round(at(a.bytes, b.bytes)))
        for a, b in zip(small.tensors, large.tensors, strict=True)
    ]
    ops = [
        msgspec.structs.replace(
            a,
            cost_us=at(a.cost_us, b.cost_us),
            workspace_bytes=round(at(a.workspace_bytes, b.workspace_bytes)),
        )
        for a, b in zip(small.ops, large.ops, strict=True)
    ]
    return msgspec.structs.replace(small, tensors=tensors, ops=ops)


class _Search:
    """Plans of one step at many batches within one memory; what was made once is kept."""

    def __init__(
        self,
        graph_at: Callable[[int], Graph],
        captured: dict[int, Graph],
        memory_bytes: int,
        link: int,
    ) -> None:
        self._graph_at = graph_at
        self._captured = captured
        self._memory = memory_bytes
        self._link = link
        self._real: dict[int, Plan | None] = {}
        self._guesses: dict[tuple[int, int, int], Plan | None] = {}

    def within(self, graph: Graph) -> Plan | None:
        """The plan within the memory, if the method finds one."""
        try:
            return plan(graph, self._memory, link=self._link)
        except InfeasibleBudgetError:
            return None

    def largest(self, first: int, limit: float) -> Largest:
        """The largest batch whose captured step has a plan of at most that overhead."""
        low, high = 0, MAX_BATCH
        pair = (first, 2 * first)
        for _ in range(MAX_CAPTURES):
            guess = self._guess(pair, low, high, limit)
            if guess <= low:
                break
            if _holds(self._planned(guess), limit):
                low = guess
                break
            high = guess
            pair = (first, guess) if guess > first else (guess, first)
        return Largest(limit, low, self._planned(low) if low else None)

    def _guess(self, pair: tuple[int, int], low: int, high: int, limit: float) -> int:
        """
        The largest batch in (`low`, `high`) that the scaled graphs say holds; else `low`.

        From the first batch upwards; once there was a guess, from the last one downwards, which was
        near.
        """
        if high == MAX_BATCH:
            step = max(1, pair[0])
            while low + step < high and _holds(self._scaled(pair, low + step), limit):
                low += step
                step *= 2
            high = min(high, low + step)
        else:
            step = 1
            while high - step > low and not _holds(self._scaled(pair, high - step), limit):
                high -= step
                step *= 2
            low = max(low, high - step)
        while high - low > 1:
            middle = (low + high) // 2
            if _holds(self._scaled(pair, middle), limit):
                low = middle
            else:
                high = middle
        return low

    def _scaled(self, pair: tuple[int, int], batch: int) -> Plan | None:
        key = (*pair, batch)
        if key not in self._guesses:
            small, large = (self._capture(b) for b in pair)
            position = (batch - pair[0]) / (pair[1] - pair[0])
            guessed = scaled(small, large, position)
            self._guesses[key] = plan_if_it_fits(guessed, self._memory, link=self._link)
        return self._guesses[key]

    def _planned(self, batch: int) -> Plan | None:
        if batch not in self._real:
            self._real[batch] = self.within(self._capture(batch))
        return self._real[batch]

    def _capture(self, batch: int) -> Graph:
        if batch not in self._captured:
            self._captured[batch] = self._graph_at(batch)
        return self._captured[batch]


def _holds(made: Plan | None, limit: float) -> bool:
    return made is not None and made.overhead <= limit
