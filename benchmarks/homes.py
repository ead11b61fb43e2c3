"""Joint plans of a whole iteration, beside rules that move one kind of tensor at a time.

    python -m benchmarks.homes [--layers N] [--tokens N] [--width N] [--links 25 50] [--csv FILE]

The iteration is a GPT's with AdamW: weights in bf16, masters and moments in fp32, all movable. The
host computes an update at 100 GB/s of its memory. Each cell is the overhead over the step's compute
time within a share of keep-everything's peak; every plan is verified. Columns:

- activations: the plan by coop-offline with all residents on the device;
- states: masters and moments have homes on the host, fetched before each update and written back,
  as optimizer-state offload does; nothing else is moved, activations are recomputed as planned;
- streaming: weights as well, fetched before each use, as layer-wise streaming does;
- host: all updates on the host, as ZeRO-Offload does: gradients are offloaded as they are complete,
  and each weight is fetched once, before its first use;
- delta: the online plan by DELTA with homes for all residents or none, all updates on the device;
- device: the plan by coop-offline with homes, all updates on the device;
- joint: the plan by coop-offline with homes and updates on the host;
- bound: the lower bound on all of these that `auto` proves in 20 s.

An empty cell is a budget that is not met. Copies overlap with compute in all columns.
"""

import time
from collections.abc import Callable
from math import inf

from benchmarks.report import Column, Report, parser, scaled
from benchmarks.synthetic import gpt, with_adamw
from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.exact.dual.background import BoundingProcess
from coop_plan.planner.homes.lower import lowered, sequence_of, streamed, updated_on_host
from coop_plan.planner.homes.restore import assembled
from coop_plan.planner.homes.updates import host_updates
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.planning import keep_all_peak
from coop_plan.planner.registry import METHODS
from coop_plan.planner.search.makespan.annealing import MakespanSearch
from coop_plan.planner.search.makespan.sequence import to_sequence
from coop_plan.planner.smallest_budget import Task
from coop_plan.schemas import Graph, Plan

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)

SLACK = (1.0, 0.97, 0.94, 0.91, 0.88)
"""Shares of the budget within which activations are planned, until gradients on their way to the
host fit as well."""

COLUMNS = ("activations", "states", "streaming", "host", "delta", "device", "joint", "bound")

BOUND_SECONDS = 20.0
"""Time for the bound of a row."""


def joint(graph: Graph, budget: int, method: str = "coop-offline") -> Plan | None:
    """The plan by a method, None if the budget is not met."""
    try:
        return plan(graph, budget, method=method)
    except InfeasibleBudgetError:
        return None


def overhead(graph: Graph, budget: int, method: str = "coop-offline") -> float | None:
    """Overhead (fraction) of a plan by a method, None if the budget is not met."""
    made = joint(graph, budget, method)
    return None if made is None else made.overhead


def bound(graph: Graph, budget: int) -> float:
    """The lower bound on the overhead (fraction) of every plan."""
    problem, until = Problem.from_graph(graph), time.monotonic() + BOUND_SECONDS
    best = 0.0
    with BoundingProcess() as process:
        process.begin_with_homes(problem, budget)
        while process.running and time.monotonic() < until:
            best = max(best, process.proved(until))
    return best / problem.base_cost_us - 1


def rule(
    graph: Graph,
    budget: int,
    chosen: Callable[[int], bool],
    *,
    on_host: bool = False,
    alignment: int = 512,
) -> float | None:
    """Overhead of fetching the chosen residents (tensor ids) before each use, without a search.

    With `on_host` all updates that may run on the host do. The weights that they update are fetched
    once each, and activations are planned with room for these.
    """
    problem = Problem.from_graph(graph, alignment)
    updates = host_updates(problem) if on_host else []
    homes = {t.id for t in graph.tensors if t.movable and chosen(t.id)}
    homes.update(t for update in updates for t in update.residents)
    once, low = updated_on_host(problem, updates), lowered(problem, homes, updates)
    alone, versioned = streamed(problem, homes - once, updates), low.form.problem
    task = Task(alone, METHODS["coop-offline"], Request(0))
    request = Request(budget - versioned.fixed_bytes)
    for share in SLACK if on_host else SLACK[:1]:
        try:
            placed = task.within(int(share * budget) - alone.fixed_bytes).placed
        except DoesNotFitError:
            return None
        sequence = sequence_of(low, to_sequence(placed.schedule), once)
        search = MakespanSearch(versioned, request, [sequence], inf)
        search.consider(sequence)
        if search.placed is not None:
            options = PlanOptions.given(budget, {"alignment": alignment})
            found = Solution(search.placed)
            made = assembled(problem, low, found, options, budget, time.monotonic())
            return None if made is None else made.overhead
    return None


def main() -> None:
    """Print the table and write the CSV."""
    arguments = parser(__doc__)
    for name, value in (("layers", 8), ("tokens", 8192), ("width", 4096)):
        arguments.add_argument(f"--{name}", type=int, default=value)
    arguments.add_argument("--links", type=float, nargs="+", default=[25.0, 50.0], metavar="GB/s")
    args = arguments.parse_args()
    report = Report(
        Column("link", "GB/s"),
        Column("share", form=".0%"),
        Column("budget", "GB", scaled(1e-9, ".2f")),
        *(Column(name, form=".1%") for name in COLUMNS),
        progress=True,
    )
    for link in args.links:
        graph = with_adamw(gpt(args.layers, tokens=args.tokens, width=args.width), link)
        ops = [op.model_copy({"variants": []}) for op in graph.ops]
        device = graph.model_copy({"ops": ops})
        still = [t.model_copy({"movable": False}) for t in graph.tensors]
        fixed = device.model_copy({"tensors": still})
        states = {t.id for t in graph.tensors if t.kind == "buffer"}
        peak = keep_all_peak(graph, PlanOptions.given("min", {}))
        for share in SHARES:
            budget = int(share * peak)
            report.add(
                link=link,
                share=share,
                budget=budget,
                activations=overhead(fixed, budget),
                states=rule(graph, budget, states.__contains__),
                streaming=rule(graph, budget, lambda _: True),
                host=rule(graph, budget, lambda _: False, on_host=True),
                delta=overhead(graph, budget, "delta"),
                device=overhead(device, budget),
                joint=overhead(graph, budget),
                bound=bound(graph, budget),
            )
    report.finish(args.csv)


if __name__ == "__main__":
    main()
