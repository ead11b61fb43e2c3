"""Explanation of a plan's memory: tensors at the peak, the op that blocks smaller budgets, reruns,
and the overhead of smaller budgets.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from coop_plan.planner.core.errors import InfeasibleBudgetError, TimeLimitError
from coop_plan.planner.core.memory_bounds import budget_lower_bound, largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.inspect.advice import advice
from coop_plan.planner.inspect.buffers import PlanView, Rectangle, replay_plan
from coop_plan.planner.method import Progress
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.planning import plan
from coop_plan.schemas import Graph, Plan


@dataclass(frozen=True)
class PeakTensor:
    """A tensor or workspace live at the peak: its bytes, and the op that produced it."""

    tensor: str
    op: str
    source: str
    bytes: int
    kind: str


@dataclass(frozen=True)
class ModuleBytes:
    """Live bytes of a module's buffers at the moment when the arena is fullest."""

    module: str
    bytes: int


@dataclass(frozen=True)
class Rerun:
    """An op that runs again: number and cost (µs) of its reruns, and its output bytes."""

    op: str
    source: str
    times: int
    cost_us: float
    bytes: int


@dataclass(frozen=True)
class Blocker:
    """The op with the largest working set, its largest parts, and advice to reduce it."""

    op: str
    source: str
    bytes: int
    parts: list[PeakTensor]
    advice: str


@dataclass(frozen=True)
class Price:
    """A budget (bytes) and the overhead within it; None if the method cannot meet it."""

    budget_bytes: int
    overhead: float | None


@dataclass(frozen=True)
class Move:
    """A tensor that moves to the host: times, bytes each, and the time its waits take, µs."""

    tensor: str
    op: str
    source: str
    times: int
    bytes: int
    stall_us: float


@dataclass(frozen=True)
class Explanation:
    """Explanation of a plan; sizes are bytes, `base_cost_us` is the cost of every op once.

    The peak is first reached at step `peak_moment`, while `peak_op` runs: `residents` by kind, the
    arena, and `outside_bytes` of outputs. The arena has the most live bytes, `live_bytes`, while
    `at_op` runs. `omitted` has, by list, the entries left out and the sum of their bytes.
    """

    graph: str
    method: str
    budget_bytes: int
    peak_bytes: int
    peak_moment: int
    peak_op: str
    peak_source: str
    resident_bytes: int
    residents: dict[str, int]
    outside_bytes: int
    arena_bytes: int
    live_bytes: int
    budget_lower_bound_bytes: int
    at_op: str
    at_source: str
    overhead: float
    base_cost_us: float
    holders: list[PeakTensor]
    modules: list[ModuleBytes]
    blocker: Blocker | None
    reruns: list[Rerun]
    moves: list[Move]
    omitted: dict[str, tuple[int, int]]
    prices: list[Price]


Sized = TypeVar("Sized", PeakTensor, ModuleBytes, Rerun, Move)


def explain(graph: Graph, made: Plan, prices: Sequence[Price] = (), top: int = 5) -> Explanation:
    """Explain `made`, a verified plan for `graph`; `top` limits the length of each list.

    Of equal sizes the oldest comes first.
    """
    view = replay_plan(graph, made)
    linked = graph.model_copy({"device": graph.device.with_link(made.link_bytes_per_s)})
    problem = Problem.from_graph(linked, made.alignment, made.outputs, made.host_budget_bytes)
    live = view.at(view.fullest)
    at, peak = (_op(graph, view.moments[m].op if m >= 0 else -1) for m in (view.fullest, view.peak))
    omitted: dict[str, tuple[int, int]] = {}

    def first(name: str, found: list[Sized]) -> list[Sized]:
        rest = found[top:]
        if rest:
            omitted[name] = (len(rest), sum(entry.bytes for entry in rest))
        return found[:top]

    return Explanation(
        graph=graph.name,
        method=made.method,
        budget_bytes=made.budget_bytes,
        peak_bytes=made.peak_bytes,
        peak_moment=view.peak,
        peak_op=peak[0],
        peak_source=peak[1],
        resident_bytes=made.resident_bytes,
        residents=view.resident,
        outside_bytes=max(view.outside, default=0),
        arena_bytes=made.arena_bytes,
        live_bytes=max(view.live, default=0),
        budget_lower_bound_bytes=budget_lower_bound(problem),
        at_op=at[0],
        at_source=at[1],
        overhead=made.overhead,
        base_cost_us=made.base_cost_us,
        holders=first("holders", [_peak_tensor(graph, found, problem) for found in live]),
        modules=first("modules", _modules(graph, live, problem)),
        blocker=_blocker(problem, top),
        reruns=first("reruns", _reruns(graph, view, problem)),
        moves=first("moves", _moves(graph, view, problem)),
        omitted=omitted,
        prices=list(prices),
    )


def price_list(
    graph: Graph,
    options: PlanOptions,
    peak_bytes: int,
    progress: Callable[[Progress], None] | None = None,
) -> list[Price]:
    """Overheads of the method of `options` for shares of `peak_bytes`, the peak of keep-everything.

    The list ends at the first budget that the method cannot meet, after the smallest that it can.
    """
    found: list[Price] = []
    shares = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
    for number, share in enumerate(shares):
        budget = peak_bytes if share == 1 else int(peak_bytes * share)
        if progress is not None:
            progress(Progress(f"price of {share:.0%} of the peak", number / len(shares)))
        if budget == 0:
            break
        try:
            made = plan(graph, replace(options, budget_=budget))
        except InfeasibleBudgetError:
            least = plan(graph, replace(options, budget_="min"))
            if not found or least.budget_bytes < found[-1].budget_bytes:
                found.append(Price(least.budget_bytes, least.overhead))
            found.append(Price(budget, None))
            break
        except TimeLimitError:
            break
        found.append(Price(budget, made.overhead))
    return found


def slopes(prices: Sequence[Price]) -> list[float | None]:
    """Per price except the first, the increase of overhead per byte less than the one before."""
    found: list[float | None] = []
    for larger, smaller in itertools.pairwise(prices):
        saved = larger.budget_bytes - smaller.budget_bytes
        if smaller.overhead is None or larger.overhead is None or not saved:
            found.append(None)
        else:
            found.append((smaller.overhead - larger.overhead) / saved)
    return found


def _op(graph: Graph, position: int) -> tuple[str, str]:
    """Name and source of an op; both are "" if there is none."""
    return (graph.ops[position].name, graph.ops[position].source) if position >= 0 else ("", "")


def _producer(rectangle: Rectangle, problem: Problem) -> int:
    return rectangle.op if rectangle.op >= 0 else problem.producer[rectangle.tensor]


def _peak_tensor(graph: Graph, rectangle: Rectangle, problem: Problem) -> PeakTensor:
    maker = _op(graph, _producer(rectangle, problem))
    name = tensor_name(graph, rectangle.tensor) if rectangle.tensor >= 0 else "workspace"
    return PeakTensor(name, *maker, rectangle.bytes, rectangle.kind)


def tensor_name(graph: Graph, position: int) -> str:
    """The tensor's name; without one, its id."""
    tensor = graph.tensors[position]
    return tensor.name or f"tensor {tensor.id}"


def split_source(source: str) -> tuple[str, str]:
    """Module path and `file:line` of an op's source; each is "" if missing."""
    module, comma, line = source.partition(", ")
    return ("", module) if not comma and ":" in module else (module, line)


def _modules(graph: Graph, live: Iterable[Rectangle], problem: Problem) -> list[ModuleBytes]:
    total: dict[str, int] = {}
    for rectangle in live:
        op, source = _op(graph, _producer(rectangle, problem))
        module, line = split_source(source)
        name = module or line or op
        total[name] = total.get(name, 0) + rectangle.bytes
    found = [ModuleBytes(name, size) for name, size in total.items()]
    return sorted(found, key=lambda entry: -entry.bytes)


def _blocker(problem: Problem, top: int) -> Blocker | None:
    """The op with the largest working set, which evictions cannot reduce."""
    graph = problem.graph
    op, working_set = largest_working_set(problem)
    if op < 0:
        return None
    variant = problem.variants[op]
    parts = [
        PeakTensor(
            tensor_name(graph, t),
            *_op(graph, problem.producer[t]),
            problem.bytes[t],
            "output" if t in variant.makes else "input",
        )
        for t in dict.fromkeys((*variant.reads, *variant.makes))
    ]
    if variant.workspace_bytes:
        scratch = variant.workspace_bytes
        parts.append(PeakTensor("workspace", *_op(graph, op), scratch, "workspace"))
    parts.sort(key=lambda part: -part.bytes)
    return Blocker(*_op(graph, op), working_set, parts[:top], advice(problem, op))


def _reruns(graph: Graph, view: PlanView, problem: Problem) -> list[Rerun]:
    """Reruns by op, those with the most output bytes first."""
    count: dict[int, int] = {}
    cost: dict[int, float] = {}
    for moment in view.moments:
        if moment.rerun:
            count[moment.op] = count.get(moment.op, 0) + 1
            cost[moment.op] = cost.get(moment.op, 0.0) + moment.end_us - moment.begin_us
    found = [
        Rerun(*_op(graph, op), times, cost[op], sum(problem.bytes[t] for t in problem.makes[op]))
        for op, times in count.items()
    ]
    return sorted(found, key=lambda rerun: -rerun.bytes)


def _moves(graph: Graph, view: PlanView, problem: Problem) -> list[Move]:
    """Tensors that move to the host, those with the most bytes first."""
    times, size, stall = Counter[int](), dict[int, int](), defaultdict[int, float](float)
    for moment in view.moments:
        if moment.engine == "offload":
            times[moment.tensor] += 1
            size[moment.tensor] = moment.bytes
        elif moment.engine == "wait":
            stall[moment.tensor] += moment.end_us - moment.begin_us
    found = []
    for t, count in times.items():
        maker = _op(graph, problem.producer[t])
        found.append(Move(tensor_name(graph, t), *maker, count, size[t], stall[t]))
    return sorted(found, key=lambda move: -move.bytes)
