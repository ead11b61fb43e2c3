"""What `benchmarks.papers` measures: each function makes one row of a table."""

import inspect
from functools import cache

from benchmarks.papers import networks
from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.planner.fit import ONE_FORWARD, fit, scaled
from coop_plan.runtime.capture.deviceless import Question, capture_for
from coop_plan.runtime.capture.devices import DeviceSpec, device
from coop_plan.schemas import Graph, Plan, format_bytes

CONTEXT_BYTES = 512 << 20
"""About what a process on CUDA takes before it has any tensor, as `coop-plan fit` has it."""

SEARCH_SECONDS = 60.0

V100 = device("v100-16gb")
FLOPS = DeviceSpec(
    name="FLOPs alone",
    kind="cuda",
    memory_bytes=V100.memory_bytes,
    flops={"float32": 1e12},
    bytes_per_s=1e18,
    launch_us=0.0,
    matmul_share=1.0,
    convolution_share=1.0,
    attention_share=1.0,
    memory_share=1.0,
)
"""Costs that are operations of products and convolutions; where there are none, almost nothing."""


@cache
def captured(network: str, name: str, batch: int | None = None) -> Graph:
    """The step of a network for a device that is built in, or for `FLOPS`."""
    on = FLOPS if name == FLOPS.name else device(name)
    target = f"{networks.__name__}:{network}"
    return capture_for(Question(target=target, spec=on, batch=batch))


def methods(network: str, spec: str) -> list[str]:
    """Overheads at half of the peak, the smallest share, two measures of fragmentation."""
    graph = captured(network, spec)
    kept = plan(graph, "100%", method="keep-all")
    half = kept.peak_bytes // 2
    made = {name: _planned(graph, half, name) for name in ("dtr", "dte", "coop", "coop-offline")}
    least = plan(graph, "min", method="coop-offline", host_budget=0)
    offline, coop = made["coop-offline"], made["coop"]
    return [
        network,
        str(inspect.signature(getattr(networks, network)).parameters["batch"].default),
        format_bytes(kept.peak_bytes),
        *map(_overhead, made.values()),
        f"{least.peak_bytes / kept.peak_bytes:.1%}",
        "-" if offline is None else f"{offline.fragmentation:.2%}",
        "-"
        if coop is None or coop.eviction_free_ratio is None
        else f"{coop.eviction_free_ratio:.1%}",
    ]


def proved(network: str, spec: str, share: str) -> list[str]:
    """Overheads within a share of the peak, and the bound that was proved."""
    graph = captured(network, spec)
    kept = plan(graph, "100%", method="keep-all")
    best = _planned(graph, share, "auto", SEARCH_SECONDS)
    bound = None if best is None else best.lower_bound_us
    return [
        network,
        share,
        format_bytes(kept.peak_bytes),
        _overhead(_planned(graph, share, "coop-offline")),
        _overhead(best),
        "-" if bound is None else f"{bound / kept.base_cost_us - 1:.2%}",
    ]


def batches(
    network: str, first: int, published: str, flops: bool, limit: float | None = None
) -> list[str]:
    """The largest batches in a V100: with nothing recomputed, and within a limit of overhead.

    Without a `limit` that is one extra forward.
    """
    spec = FLOPS if flops else V100

    def graph_at(batch: int) -> Graph:
        return captured(network, spec.name, batch)

    memory = spec.memory_bytes - CONTEXT_BYTES
    name = ONE_FORWARD if limit is None else "limit"
    found = fit(graph_at, first, memory, {} if limit is None else {"limit": limit}).largest[name]
    kept = _largest_kept(graph_at(first), graph_at(2 * first), first, memory)
    ratio = f"{found.batch / kept:.2f}" if kept else "-"
    costs = "FLOPs" if flops else "roofline"
    return [network, costs, str(kept), str(found.batch), ratio, published]


def _largest_kept(small: Graph, large: Graph, first: int, memory: int) -> int:
    """The largest batch that fits with nothing recomputed, between steps of two batches."""

    def fits(batch: int) -> bool:
        graph = scaled(small, large, (batch - first) / first)
        return plan(graph, "100%", method="keep-all").peak_bytes <= memory

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _planned(
    graph: Graph, budget: str | int, method: str, time_limit: float | None = None
) -> Plan | None:
    """A plan without transfers, or None where the method does not meet the budget."""
    try:
        return plan(graph, budget, method=method, host_budget=0, time_limit=time_limit)
    except InfeasibleBudgetError:
        return None


def _overhead(made: Plan | None) -> str:
    return "does not fit" if made is None else f"{made.overhead:.2%}"
