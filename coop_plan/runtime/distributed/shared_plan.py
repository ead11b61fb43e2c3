"""Ranks that exchange data inside their steps run one plan: that of their group's first rank.

The n-th graph with collectives of one process group is the same step on every rank, whatever its
clock and its caches say. The first rank of the group puts the costs that it measured, and its plan,
into the store of the process group; the others take both. Nothing depends on it: all plans keep
collectives in program order, so a rank whose first rank has no plan for it makes its own.

Where a planning service is asked, all ranks run one plan, with collectives in their steps or not:
the first one asks, and decides what happens when the service is away.
"""

import hashlib
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from coop_plan.planner.verifier import InvalidPlanError, verify
from coop_plan.runtime.distributed.collectives import group_of
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.errors import PlanServerError
from coop_plan.runtime.torch_internals.ranks import default_store, first_rank, group_of_all
from coop_plan.schemas import Graph, InvalidInputError, Plan, fingerprint, parse_plan

log = logging.getLogger("coop-plan")

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the plan of its group's first rank, which may be profiling."""

_planned: dict[str, "itertools.count[int]"] = defaultdict(itertools.count)
"""How many graphs with collectives of a group this process has planned."""


@dataclass(frozen=True)
class Shared:
    """What a rank runs: a graph, with the costs that the plan was made with, and the plan."""

    graph: Graph
    plan: Plan
    cached: bool


def one_plan(
    captured: Captured,
    asked: str,
    make: Callable[[], tuple[Plan, bool]],
    *,
    everywhere: bool = False,
) -> Shared:
    """The plan of a captured step: the one that `make` makes, or that of the group's first rank.

    `asked` names the question (budget, method, ...); `make` returns a plan and whether it was kept
    in a cache. `everywhere` takes all ranks for one group where a step has no collectives.

    Raises:
        PlanServerError: the first rank got no plan of a planning service.
    """
    group = next((found for found in map(group_of, captured.ops) if found is not None), None)
    if group is None and everywhere:
        group = group_of_all()
    if group is None:
        return Shared(captured.graph, *make())
    first = first_rank(group)
    key = f"coop-plan/{group}/{next(_planned[group])}"
    structure = f"{fingerprint(captured.graph)} {asked}"
    if torch.distributed.get_rank() == first:
        try:
            shared = Shared(captured.graph, *make())
        except BaseException as error:
            away = str(error) if isinstance(error, PlanServerError) else None
            default_store().set(key, json.dumps({"of": None, "away": away}))
            raise
        costs = [op.cost_us for op in captured.graph.ops]
        text = shared.plan.to_json()
        record = {"of": structure, "costs": costs, "plan": text, "hash": _hash_of(text)}
        default_store().set(key, json.dumps(record))
        return shared
    taken = _take(key, structure, captured.graph, first)
    return taken or Shared(captured.graph, *make())


def _take(key: str, structure: str, graph: Graph, first: int) -> Shared | None:
    """The first rank's plan, if it is one for this graph and this question, and holds."""
    store = default_store()
    try:
        store.wait([key], PATIENCE)
        record: dict[str, Any] = json.loads(store.get(key))
    except RuntimeError as error:  # the store's own, DistStoreError: a time-out, or it is gone
        log.warning("no plan from rank %d, planning alone: %s", first, str(error).splitlines()[0])
        return None
    if record.get("away") is not None:
        raise PlanServerError(f"rank {first}: {record['away']}")
    if record["of"] != structure:
        return None  # another shape, another budget, or no plan at all: said where it was made
    ops = [
        op.model_copy(update={"cost_us": cost})
        for op, cost in zip(graph.ops, record["costs"], strict=True)
    ]
    same = graph.model_copy(update={"ops": ops})
    try:
        plan = parse_plan(record["plan"], source=f"plan of rank {first}")
        verify(same, plan)
        if _hash_of(plan.to_json()) != record["hash"]:
            raise InvalidInputError("it has another hash here than there")
    except (InvalidInputError, InvalidPlanError) as error:
        log.warning("the plan of rank %d does not hold here, planning alone: %s", first, error)
        return None
    return Shared(same, plan, cached=True)


def _hash_of(plan: str) -> str:
    """Of a plan's document, by which ranks tell that they run the same one."""
    return hashlib.sha256(plan.encode()).hexdigest()
