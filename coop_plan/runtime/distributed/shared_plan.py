"""One plan for all ranks of a process group whose steps have collectives: the first rank's.

The n-th graph with collectives of a process group is the same step on every rank, but measured
costs differ. The first rank puts its costs and its plan into the store of the process group, and
the others read both. Correctness does not depend on it: all plans keep collectives in program
order, and a rank that receives no valid plan makes its own.

With a planning service all ranks run one plan, even if their steps have no collectives. The first
rank calls the service, and its failure is raised on all ranks.
"""

import hashlib
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import fx

from coop_plan.planner.verifier import InvalidPlanError, verify
from coop_plan.runtime.distributed.collectives import group_of
from coop_plan.runtime.errors import PlanServerError
from coop_plan.runtime.torch_internals.ranks import default_store, first_rank, world_group
from coop_plan.schemas import Graph, InvalidInputError, Plan, fingerprint, parse_plan

log = logging.getLogger("coop-plan")

PLAN_TIMEOUT = timedelta(minutes=10)
"""Time that a rank waits for the plan of its group's first rank, which may be profiling."""

_planned: dict[str, "itertools.count[int]"] = defaultdict(itertools.count)
"""Number of graphs with collectives that this process has planned, by group."""


@dataclass(frozen=True)
class SharedPlan:
    """A plan, and the graph with the costs from which it was made."""

    graph: Graph
    plan: Plan
    cached: bool


def agree_on_plan(
    graph: Graph,
    nodes: Sequence[fx.Node],
    options_key: str,
    make_plan: Callable[[], tuple[Plan, bool]],
    *,
    all_ranks: bool = False,
) -> SharedPlan:
    """The plan of a captured step: made by `make_plan`, or received from the group's first rank.

    Args:
        graph: the captured graph.
        nodes: the nodes of its ops.
        options_key: key of the planning options; ranks with other options do not share a plan.
        make_plan: returns a plan, and whether it comes from a cache.
        all_ranks: share the plan among all ranks if the step has no collectives.

    Raises:
        PlanServerError: the first rank got no plan from the planning service.
    """
    group = next((found for found in map(group_of, nodes) if found is not None), None)
    if group is None and all_ranks:
        group = world_group()
    if group is None:
        return SharedPlan(graph, *make_plan())
    first = first_rank(group)
    key = f"coop-plan/{group}/{next(_planned[group])}"
    structure = f"{fingerprint(graph)} {options_key}"
    if torch.distributed.get_rank() == first:
        try:
            shared = SharedPlan(graph, *make_plan())
        except BaseException as error:
            server_error = str(error) if isinstance(error, PlanServerError) else None
            default_store().set(key, json.dumps({"of": None, "away": server_error}))
            raise
        costs = [op.cost_us for op in graph.ops]
        text = shared.plan.to_json()
        record = {"of": structure, "costs": costs, "plan": text, "hash": _hash_of(text)}
        default_store().set(key, json.dumps(record))
        return shared
    received = _receive(key, structure, graph, first)
    return received or SharedPlan(graph, *make_plan())


def _receive(key: str, structure: str, graph: Graph, first: int) -> SharedPlan | None:
    """The first rank's plan, if it is for this graph and these options, and valid."""
    store = default_store()
    try:
        store.wait([key], PLAN_TIMEOUT)
        record: dict[str, Any] = json.loads(store.get(key))
    except RuntimeError as error:  # DistStoreError: a time-out, or the store is closed
        log.warning(
            "received no plan from rank %d, making one here: %s", first, str(error).splitlines()[0]
        )
        return None
    if record.get("away") is not None:
        raise PlanServerError(f"rank {first}: {record['away']}")
    if record["of"] != structure:
        return None  # another shape or budget, or a failure that rank `first` has reported
    ops = [
        op.model_copy(update={"cost_us": cost})
        for op, cost in zip(graph.ops, record["costs"], strict=True)
    ]
    same = graph.model_copy(update={"ops": ops})
    try:
        plan = parse_plan(record["plan"], source=f"plan of rank {first}")
        verify(same, plan)
        if _hash_of(plan.to_json()) != record["hash"]:
            raise InvalidInputError(f"plan hash differs between rank {first} and this rank")
    except (InvalidInputError, InvalidPlanError) as error:
        log.warning("the plan of rank %d is not valid here, making one here: %s", first, error)
        return None
    return SharedPlan(same, plan, cached=True)


def _hash_of(plan: str) -> str:
    """Digest of a plan document; ranks compare it."""
    return hashlib.sha256(plan.encode()).hexdigest()
