"""Costs of callers: the rule by which a plan made for other costs is an answer.

Plans are stored by structure, and callers of one structure have different costs. A plan made for
costs c' costs C' there and C under the caller's costs c. It is an answer if C is at most
`TOLERANCE` above `carried_bound`: the least cost under c of any schedule that costs at least C'
under c'. So nobody's costs decide the plan of others.
"""

import hashlib
from collections.abc import Sequence
from math import fsum, inf, log2

import numpy as np

from coop_plan.planner.core.timeline import step_costs
from coop_plan.schemas import Graph, Op

TOLERANCE = 0.01
"""Share by which a plan made for other costs may exceed its carried bound."""

DEVICE_COSTS = 3
"""Entries of `all_costs` that are the device's."""


def all_costs(graph: Graph) -> list[float]:
    """All costs of a graph, the device's first; a proved bound holds for these only.

    Launches come last, if the device has any: of ops and of copies ahead of the device, and of
    copies that compute waits for. Those of ops that compute waits for are in the costs of runs.
    """
    device = graph.device
    costs = [device.d2h_bytes_per_s, device.h2d_bytes_per_s, device.copy_latency_us]
    costs += [cost for costs in _run_costs(graph) for cost in costs]
    if device.launch_us or device.copy_launch_us:
        ahead = 0.0 if device.is_host else device.launch_us
        costs += [ahead, device.copy_launch_us, device.copy_launch_us * device.is_host]
    return costs


def _run_costs(graph: Graph) -> list[list[float]]:
    """Per op the costs of a run, by its default variant and by the others, µs."""
    cost = step_costs(graph)
    return [[cost[op.id, None], *(cost[op.id, v.name] for v in op.variants)] for op in graph.ops]


def cost_digest(costs: Sequence[float]) -> str:
    """Name of these costs, to the digit."""
    return hashlib.sha256(np.array(costs, np.float64).tobytes()).hexdigest()[:16]


def cost_class(costs: Sequence[float]) -> str:
    """Coarse name of costs: repeated measurements of one machine mostly have the same.

    It has the shares of the step's time of equal parts of the ops. With a link, the ratio of
    copies to ops counts as well, to a power of two. Callers of one class share a solve at first;
    the rule decides whether its plan is an answer to each.
    """
    ops = np.array(costs[DEVICE_COSTS:], np.float64)
    total = float(ops.sum()) or 1.0
    shares = [round(float(part.sum()) / total * 8) for part in np.array_split(ops, 8)]
    rates = [round(log2(rate * total)) for rate in costs[: DEVICE_COSTS - 1] if rate]
    return "-".join(map(str, shares + rates))


def least_cost(graph: Graph) -> float:
    """Lower bound on the cost of every schedule: each op runs once, by its cheapest variant.

    An op that may run on the host counts nothing, as the device may run others meanwhile.
    """
    return fsum(
        min(costs)
        for op, costs in zip(graph.ops, _run_costs(graph), strict=True)
        if not _may_run_on_host(op)
    )


def _may_run_on_host(op: Op) -> bool:
    return any(variant.engine == "host" for variant in op.variants)


def carried_bound(
    graph: Graph, theirs: Sequence[float], cost_us: float, *, link: bool, recomputes: float = inf
) -> float:
    """Lower bound for `graph` on every schedule that costs at least `cost_us` under `theirs`.

    It holds for schedules that recompute an op at most `recomputes` times; by default for all.
    `link` says that schedules may have copies: their cost is then a makespan, not a sum.
    """
    least, costs = least_cost(graph), all_costs(graph)
    end = DEVICE_COSTS + sum(1 + len(op.variants) for op in graph.ops)
    mine, other = np.array(costs[DEVICE_COSTS:end]), np.array(theirs[DEVICE_COSTS:end])
    none = [0.0] * 3
    launches, their_launches = costs[end:] or none, theirs[end:] or none
    link = link or their_launches[0] > 0  # a makespan, too
    starts = np.cumsum([0, *(1 + len(op.variants) for op in graph.ops)])[:-1]
    known = other > 0
    if not len(starts) or not known.any() or any(map(_may_run_on_host, graph.ops)):
        return least

    # A run costs at least ratio * c' - shortfall. The best ratio weighs what all recomputes keep
    # against the shortfalls of the ops that are cheaper than that for the caller.
    ratios, times = mine[known] / other[known], other[known]
    order = np.argsort(ratios, kind="stable")
    ratios, times = ratios[order], times[order]
    again = cost_us - float(np.minimum.reduceat(other, starts).sum())
    cheaper = 0 if recomputes == inf else int(np.searchsorted(np.cumsum(times) * recomputes, again))
    ratio = float(ratios[min(cheaper, len(ratios) - 1)])
    if link:
        ratio = min(ratio, 1.0)
    shortfall = float(np.maximum(ratio * other - mine, 0.0).sum())
    recomputed = 0.0 if recomputes == inf else recomputes * shortfall

    if not link:  # a sum: the first run of each op is counted by the caller's costs
        first = float(np.minimum.reduceat(mine - ratio * other, starts).sum())
        return max(least, ratio * cost_us + first - recomputed)
    # A makespan: it falls by at most as much as its runs do, if no copy or launch is faster, and
    # none is saved by a run of no cost. A run that is dearer for the caller may run during a copy,
    # so that it counts nothing.
    faster = any(a > b for a, b in zip(costs[:2], theirs[:2], strict=True))
    sooner = zip([costs[2], *launches], [theirs[2], *their_launches], strict=True)
    saved = their_launches[0] > 0 and (known & (mine == 0)).any()
    if faster or saved or any(a < b for a, b in sooner):
        return least
    fall = float(np.maximum.reduceat(np.maximum(other - mine, 0.0), starts).sum())
    base = cost_us - max(again, 0.0)
    return max(least, base + ratio * max(again, 0.0) - fall - recomputed)
