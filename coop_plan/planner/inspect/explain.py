"""
Why a step needs what it needs: what holds the peak, what blocks the smallest budget, what was run
again, and what each further byte buys.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from coop_plan.planner.core.errors import InfeasibleBudgetError, TimeLimitError
from coop_plan.planner.core.working_sets import needs
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.inspect.advice import advice
from coop_plan.planner.inspect.buffers import Held, Look, look_at
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.planning import plan
from coop_plan.schemas import Graph, Plan

SWEEP = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Shares of keep-everything's peak at which the price of a budget is asked for."""


@dataclass(frozen=True)
class Holder:
    """Bytes that are there at the peak: a tensor or a workspace, and who made it."""

    tensor: str
    op: str
    source: str
    bytes: int
    kind: str


@dataclass(frozen=True)
class Rerun:
    """An op that runs again: how often, what that costs (µs), what it had let go (bytes)."""

    op: str
    source: str
    times: int
    cost_us: float
    bytes: int


@dataclass(frozen=True)
class Blocker:
    """The op whose working set no plan can go below, largest part first, and what to change."""

    op: str
    source: str
    bytes: int
    parts: list[Holder]
    advice: str


@dataclass(frozen=True)
class Price:
    """A budget (bytes) and the least overhead found within it; None: the method cannot meet it."""

    budget_bytes: int
    overhead: float | None


@dataclass(frozen=True)
class Explanation:
    """All sizes are bytes. `base_cost_us` is every op once."""

    graph: str
    method: str
    budget_bytes: int
    peak_bytes: int
    resident_bytes: int
    outside_bytes: int
    arena_bytes: int
    at_op: str
    at_source: str
    overhead: float
    base_cost_us: float
    holders: list[Holder]
    modules: list[tuple[str, int]]
    blocker: Blocker | None
    reruns: list[Rerun]
    prices: list[Price]


def explain(graph: Graph, made: Plan, prices: Sequence[Price] = (), top: int = 5) -> Explanation:
    """
    What `made`, a verified plan for `graph`, does with its memory; `top` is the length of lists.

    At the peak there are the arena's contents at its fullest moment, and the outputs that have left
    it by then; residents are one sum. Of equal sizes the one that was made first comes first.
    """
    look = look_at(graph, made)
    peak = look.peak
    there = look.at(peak)
    at = look.moments[peak].op if peak >= 0 else -1
    problem = Problem.from_graph(graph, made.alignment, made.outputs, made.host_budget_bytes)
    return Explanation(
        graph=graph.name,
        method=made.method,
        budget_bytes=made.budget_bytes,
        peak_bytes=made.peak_bytes,
        resident_bytes=made.resident_bytes,
        outside_bytes=problem.outside_bytes,
        arena_bytes=made.arena_bytes,
        at_op=_op(graph, at),
        at_source=_source(graph, at),
        overhead=made.overhead,
        base_cost_us=made.base_cost_us,
        holders=[_holder(graph, held, problem) for held in there[:top]],
        modules=_modules(graph, there, problem)[:top],
        blocker=_blocker(problem, top),
        reruns=_reruns(graph, look, problem)[:top],
        prices=list(prices),
    )


def price_list(graph: Graph, options: PlanOptions, peak_bytes: int) -> list[Price]:
    """
    The overhead of the method of `options` within shares of `peak_bytes`, keep-everything's.

    Ends at the first budget that the method cannot meet, with the smallest that it can.
    """
    found = [Price(peak_bytes, 0.0)]
    for share in SWEEP:
        budget = int(peak_bytes * share)
        if budget == 0:
            break
        try:
            made = plan(graph, replace(options, budget_=budget))
        except InfeasibleBudgetError as error:
            found.append(Price(budget, None))
            if error.min_feasible_bytes < found[-2].budget_bytes:
                found.insert(-1, _price(graph, options, error.min_feasible_bytes))
            break
        except TimeLimitError:
            break
        found.append(Price(budget, made.overhead))
    return found


def _price(graph: Graph, options: PlanOptions, budget: int) -> Price:
    try:
        return Price(budget, plan(graph, replace(options, budget_=budget)).overhead)
    except (InfeasibleBudgetError, TimeLimitError):
        return Price(budget, None)


def slopes(prices: Sequence[Price]) -> list[float | None]:
    """Per price but the first, what a byte less costs since the one before, in overhead."""
    found: list[float | None] = []
    for wide, tight in itertools.pairwise(prices):
        saved = wide.budget_bytes - tight.budget_bytes
        if tight.overhead is None or wide.overhead is None or not saved:
            found.append(None)
        else:
            found.append((tight.overhead - wide.overhead) / saved)
    return found


def _op(graph: Graph, position: int) -> str:
    return graph.ops[position].name if position >= 0 else ""


def _source(graph: Graph, position: int) -> str:
    return graph.ops[position].source if position >= 0 else ""


def _maker(held: Held, problem: Problem) -> int:
    return held.op if held.op >= 0 else problem.producer[held.tensor]


def _holder(graph: Graph, held: Held, problem: Problem) -> Holder:
    op = _maker(held, problem)
    name = tensor_name(graph, held.tensor) if held.tensor >= 0 else "workspace"
    return Holder(name, _op(graph, op), _source(graph, op), held.bytes, held.kind)


def tensor_name(graph: Graph, position: int) -> str:
    """What a tensor is called; without a name by its id."""
    tensor = graph.tensors[position]
    return tensor.name or f"tensor {tensor.id}"


def parts_of(source: str) -> tuple[str, str]:
    """The module's path in a source, and `file:line`; empty where it has none."""
    module, comma, line = source.partition(", ")
    return ("", module) if not comma and ":" in module else (module, line)


def _modules(graph: Graph, there: Iterable[Held], problem: Problem) -> list[tuple[str, int]]:
    total: dict[str, int] = {}
    for held in there:
        op = _maker(held, problem)
        module, line = parts_of(_source(graph, op))
        name = module or line or _op(graph, op)
        total[name] = total.get(name, 0) + held.bytes
    return sorted(total.items(), key=lambda pair: -pair[1])


def _blocker(problem: Problem, top: int) -> Blocker | None:
    """The op with the largest working set: whatever is dropped, it must fit at once."""
    graph = problem.graph
    wanted = needs(problem).first[: problem.op_count]
    if not wanted:
        return None
    op = max(range(len(wanted)), key=wanted.__getitem__)
    variant = problem.variants[op]
    parts = [
        Holder(
            tensor_name(graph, t),
            _op(graph, problem.producer[t]),
            _source(graph, problem.producer[t]),
            problem.bytes[t],
            "output" if t in variant.makes else "input",
        )
        for t in dict.fromkeys((*variant.reads, *variant.makes))
    ]
    if variant.workspace_bytes:
        own = _op(graph, op), _source(graph, op)
        parts.append(Holder("workspace", *own, variant.workspace_bytes, "workspace"))
    parts.sort(key=lambda part: -part.bytes)
    return Blocker(_op(graph, op), _source(graph, op), wanted[op], parts[:top], advice(problem, op))


def _reruns(graph: Graph, look: Look, problem: Problem) -> list[Rerun]:
    """What runs again, the most bytes let go per µs first: that is why it was chosen."""
    times: dict[int, int] = {}
    cost: dict[int, float] = {}
    for moment in look.moments:
        if moment.again:
            times[moment.op] = times.get(moment.op, 0) + 1
            cost[moment.op] = cost.get(moment.op, 0.0) + moment.end_us - moment.begin_us
    found = [
        Rerun(
            _op(graph, op),
            _source(graph, op),
            count,
            cost[op],
            sum(problem.bytes[t] for t in problem.makes[op]),
        )
        for op, count in times.items()
    ]
    return sorted(found, key=lambda rerun: -rerun.bytes)
