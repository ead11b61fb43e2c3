"""Fit of a step in a budget: its plan within it, the smallest budget, and the largest sizes.

Every number is that of a verified plan. A size is a batch, or the length of a sequence. The search
for the largest size interpolates between two captured graphs, with bytes and costs affine in the
size. A size is accepted once the step has been captured at it and planned within the budget. If
that fails, the new capture replaces one of the two, and the search continues below it.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import fsum

import msgspec

from coop_plan.planner.core.errors import InfeasibleBudgetError
from coop_plan.planner.planning import least_at_any_costs, plan
from coop_plan.schemas import Graph, InvalidInputError, Outputs, Plan
from coop_plan.schemas.graph import FUSED_NAME

MAX_SIZE = 1 << 24

ONE_FORWARD = "one extra forward"
"""Limit of overhead: the cost of the forward pass, as of a checkpoint for every layer."""


@dataclass(frozen=True)
class Budgeting:
    """The bytes that a step may use, and how it is planned.

    `link` is the bandwidth to the host in both directions, bytes/s; 0 for no transfers.
    """

    bytes: int
    outputs: Outputs = "outside"
    link: int = 0

    def plan(self, graph: Graph) -> Plan | None:
        """The plan within the budget, or None if the method finds none."""
        if self.bytes <= 0:
            return None
        try:
            return plan(graph, self.bytes, outputs=self.outputs, link=self.link)
        except InfeasibleBudgetError:
            return None


@dataclass(frozen=True)
class Fit:
    """Plans of a step: keep-everything, the smallest budget, and within the budget, or None."""

    kept: Plan
    least: Plan
    planned: Plan | None


@dataclass(frozen=True)
class Largest:
    """The largest size within a limit of overhead, with its plan; 0 and None if none was found."""

    limit: float
    size: int
    plan: Plan | None


def fit(graph: Graph, budget: Budgeting) -> Fit:
    """Plan a step within a budget, and search the smallest one, which depends on no costs."""
    kept = plan(graph, "100%", method="keep-all", outputs=budget.outputs)
    least = least_at_any_costs(graph, outputs=budget.outputs, link=budget.link)
    return Fit(kept, least, budget.plan(graph))


def largest_sizes(
    graph_at: Callable[[int], Graph], size: int, budget: Budgeting, limits: Mapping[str, float]
) -> dict[str, Largest]:
    """The largest size within a budget per limit of overhead.

    Args:
        graph_at: captures the step at a size; `size`, twice it and a few others are captured.
        size: the first size.
        budget: of the step, at any size.
        limits: limits of overhead by name; `ONE_FORWARD` is added.

    Raises:
        InvalidInputError: the step has other ops at another size, or `graph_at` raised it.
    """
    search = _Search(graph_at, budget)
    limits = {**limits, ONE_FORWARD: forward_share(search.capture(size))}
    return {name: search.largest(size, limit) for name, limit in limits.items()}


def forward_share(graph: Graph) -> float:
    """The cost of the forward relative to the whole step."""
    forward = fsum(op.cost_us for op in graph.ops if op.phase == "forward")
    return forward / max(fsum(op.cost_us for op in graph.ops), 1e-9)


def scaled(small: Graph, large: Graph, position: float) -> Graph:
    """Linear interpolation between the graphs of two sizes: 0 is the first, 1 the second.

    Positions outside [0, 1] extrapolate.

    Raises:
        InvalidInputError: the graphs have different ops.
    """
    if _structure(small) != _structure(large):
        raise InvalidInputError(
            "the step has other ops at another size, so it cannot be interpolated: ask for one"
            " size at a time"
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


def _structure(graph: Graph) -> list[object]:
    """Names and edges of all ops; the name of a fused region is a digest that contains sizes."""
    return [
        (FUSED_NAME if op.name.startswith(FUSED_NAME) else op.name, op.inputs, op.outputs)
        for op in graph.ops
    ]


class _Search:
    """Cached captures and plans of one step at many sizes within one budget."""

    def __init__(self, graph_at: Callable[[int], Graph], budget: Budgeting) -> None:
        self._budget = budget
        self.capture = functools.cache(graph_at)
        self._planned = functools.cache(lambda size: budget.plan(self.capture(size)))
        self._scaled = functools.cache(self._plan_scaled)

    def largest(self, first: int, limit: float) -> Largest:
        """The largest size whose captured step has a plan with at most this overhead."""
        low, high = 0, MAX_SIZE
        pair = (first, 2 * first)
        for _ in range(6):  # captures
            guess = self._guess(pair, low, high, limit)
            if guess <= low:
                break
            if _meets(self._planned(guess), limit):
                low = guess
                break
            high = guess
            pair = (first, guess) if guess > first else (guess, first)
        return Largest(limit, low, self._planned(low) if low else None)

    def _guess(self, pair: tuple[int, int], low: int, high: int, limit: float) -> int:
        """
        The largest size in (`low`, `high`) whose interpolated graph meets the limit; else `low`.

        Steps double upwards from the first size; after a failed guess downwards from that one,
        which was close. Then bisection.
        """
        if high == MAX_SIZE:
            step = max(1, pair[0])
            while low + step < high and _meets(self._scaled(pair, low + step), limit):
                low += step
                step *= 2
            high = min(high, low + step)
        else:
            step = 1
            while high - step > low and not _meets(self._scaled(pair, high - step), limit):
                high -= step
                step *= 2
            low = max(low, high - step)
        while high - low > 1:
            middle = (low + high) // 2
            if _meets(self._scaled(pair, middle), limit):
                low = middle
            else:
                high = middle
        return low

    def _plan_scaled(self, pair: tuple[int, int], size: int) -> Plan | None:
        """The plan of the graph at a size, interpolated between those of a pair of sizes."""
        small, large = (self.capture(b) for b in pair)
        position = (size - pair[0]) / (pair[1] - pair[0])
        return self._budget.plan(scaled(small, large, position))


def _meets(made: Plan | None, limit: float) -> bool:
    return made is not None and made.overhead <= limit
