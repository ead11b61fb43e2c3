"""Rows of the tables of `benchmarks.papers`, one function a row."""

import inspect
import os
import time
from functools import cache
from pathlib import Path

from benchmarks.papers import networks
from benchmarks.synthetic import gpt
from benchmarks.variants import MONET, headline, ms
from benchmarks.variants import planned as planned_with_variants
from coop_plan.planner import InfeasibleBudgetError, TimeLimitError, plan
from coop_plan.planner.fit import ONE_FORWARD, Budgeting, largest_sizes, scaled
from coop_plan.runtime.offline_capture.devices import DeviceSpec, device
from coop_plan.runtime.offline_capture.fake_device import CaptureRequest, capture_for
from coop_plan.schemas import Graph, InvalidInputError, Plan, format_bytes, load_graph

CONTEXT_BYTES = 512 << 20
"""Memory of a process on CUDA before its first tensor, about, as in `coop-plan fit`."""

CHECKMATE_BYTES = 16 * 10**9
"""The V100 of Checkmate's authors: `p32xlarge` in experiments/common/profile/platforms.py of
parasj/checkmate (before commit 3e0ec9c), less parameters and their gradients, and no context."""

SEARCH_SECONDS = 60.0
MONET_SECONDS = 40.0


def hurry() -> None:
    """Give searches half of their time, in this process."""
    global SEARCH_SECONDS, MONET_SECONDS
    SEARCH_SECONDS, MONET_SECONDS = SEARCH_SECONDS / 2, MONET_SECONDS / 2


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
    """The step of a network for a device that is built in, or for `FLOPS`.

    Both processes find what one has captured in the folder `COOP_PLAN_CAPTURED`.
    """
    folder = os.environ.get("COOP_PLAN_CAPTURED")
    kept = Path(folder or ".") / f"{network} {name} {batch}.json".replace(" ", "_")
    if folder and kept.exists():
        return load_graph(kept)
    on = FLOPS if name == FLOPS.name else device(name)
    target = f"{networks.__name__}:{network}"
    graph = capture_for(CaptureRequest(target=target, spec=on, batch=batch))
    if folder:
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(graph.to_json())
        part.replace(kept)
    return graph


def methods(network: str, spec: str) -> list[str]:
    """Overheads at half of the peak, and two measures of fragmentation."""
    graph = captured(network, spec)
    kept = plan(graph, "100%", method="keep-all")
    half = kept.peak_bytes // 2
    made = {name: _planned(graph, half, name) for name in ("dtr", "dte", "coop", "coop-offline")}
    offline, coop = made["coop-offline"], made["coop"]
    return [
        network,
        str(inspect.signature(getattr(networks, network)).parameters["batch"].default),
        format_bytes(kept.peak_bytes),
        *map(_overhead, made.values()),
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


SHARES = (80, 70, 60, 50, 40, 30)


def shares(network: str, spec: str) -> list[str]:
    """Overhead at each of `SHARES`, and the worst fragmentation of the arena among them."""
    graph = captured(network, spec)
    kept = plan(graph, "100%", method="keep-all")
    made = [_planned(graph, f"{share}%", "coop-offline") for share in SHARES]
    worst = max((found.fragmentation for found in made if found is not None), default=0.0)
    least = plan(graph, "min", method="coop-offline", host_budget=0)
    fixed = (kept.peak_bytes - kept.arena_bytes) / kept.peak_bytes
    bound = least.budget_lower_bound_bytes
    return [
        network,
        *map(_overhead, made),
        f"{worst:.2%}",
        f"{least.peak_bytes / kept.peak_bytes:.1%}",
        "-" if bound is None else f"{bound / kept.peak_bytes:.1%}",
        f"{fixed:.1%}",
    ]


def saved(network: str, batch: int, link: int) -> list[str]:
    """Overhead where 40 to 70 percent of the peak are saved, with a link of so many bytes/s."""
    graph = captured(network, V100.name, batch)
    peak = plan(graph, "100%", method="keep-all").peak_bytes
    made = [_planned(graph, peak * share // 100, "coop-offline", link=link) for share in SAVED]
    return [network, str(batch), _speed(link), *map(_overhead, made)]


SAVED = (60, 50, 40, 30)
"""Budgets in percent of the peak."""


def latency(network: str, spec: str) -> list[str]:
    """Planning time of each method at half of the peak, in seconds of one core."""
    graph = captured(network, spec)
    half = plan(graph, "100%", method="keep-all").peak_bytes // 2
    cells = [network, str(len(graph.ops))]
    for method in ("dtr", "dte", "coop", "coop-offline"):
        _planned(graph, half, method)  # loads the kernels
        begun = time.process_time()
        made = _planned(graph, half, method)
        cells.append("does not fit" if made is None else f"{time.process_time() - begun:.2f}")
    return cells


def solving(layers: int) -> list[str]:
    """Checkmate's program beside ours on one step: overhead, status, seconds on the wall."""
    graph = gpt(layers)
    kept = plan(graph, "100%", method="keep-all")
    budget = (kept.peak_bytes - kept.arena_bytes) + kept.arena_bytes * 6 // 10
    cells = [f"GPT of {layers} layers", str(len(graph.ops))]
    for method in ("checkmate", "optimal"):
        begun, none = time.monotonic(), "does not fit"
        try:
            made = _planned(graph, budget, method, SEARCH_SECONDS)
        except TimeLimitError:
            made, none = None, "none"
        except InvalidInputError:  # it refuses programs of too many variables
            made, none = None, "refused"
        spent = time.monotonic() - begun
        found = none if made is None else f"{_overhead(made)}, {made.status}"
        cells += [found, f"{spent:.1f}"]
    return cells


def speed_up(network: str, spec: str) -> list[str]:
    """Steps of the heuristics ÷ ours, at the smallest budget that DTR meets."""
    graph = captured(network, spec)
    kept = plan(graph, "100%", method="keep-all")
    least = plan(graph, "min", method="dtr")
    ours = _planned(graph, least.peak_bytes, "coop-offline")
    cells = [network, f"{least.peak_bytes / kept.peak_bytes:.1%}"]
    for method in ("dtr", "dte", "coop"):
        other = _planned(graph, least.peak_bytes, method)
        known = other is not None and ours is not None
        cells.append(f"{other.cost_us / ours.cost_us:.2f}" if known else "does not fit")
    return cells


def variants(name: str, gib: float) -> list[str]:
    """The step with variants within a budget, beside MONeT's published solution."""
    path = _monet(name)
    if not path.exists():
        return [name, f"{gib:g}", str(MONET[name][gib]), "no ../shared", "-", "-"]
    made = planned_with_variants(load_graph(path), gib, "optimal", MONET_SECONDS)
    bound = None if made is None else made.lower_bound_us
    return [
        name,
        f"{gib:g}",
        str(MONET[name][gib]),
        ms(made),
        "-" if bound is None else f"{bound / 1e3:.1f}",
        "-" if made is None else f"{MONET[name][gib] / (made.cost_us / 1e3):.3f}",
    ]


def third(name: str, accounting: str) -> list[str]:
    """The step at a third of the memory, beside MONeT's headline."""
    path = _monet(name)
    if not path.exists():
        return [name, accounting, "no ../shared", "-", "-", "-"]
    return [name, *headline(load_graph(path), accounting, MONET_SECONDS)]


def _monet(name: str) -> Path:
    return Path(__file__).parents[3] / "shared" / "data" / "graphs" / f"{name}.json"


def batches(
    network: str,
    first: int,
    published: str,
    flops: bool,
    limit: float | None = None,
    link: int = 0,
) -> list[str]:
    """The largest batches in a V100: with nothing recomputed, and within a limit of overhead.

    Without a `limit` that is one extra forward, as Checkmate has it. `link` is in bytes/s each way;
    0: nothing is moved.
    """
    spec = FLOPS if flops else V100

    def graph_at(batch: int) -> Graph:
        return captured(network, spec.name, batch)

    memory = CHECKMATE_BYTES if limit is None else spec.memory_bytes - CONTEXT_BYTES
    name = ONE_FORWARD if limit is None else "limit"
    limits = {} if limit is None else {"limit": limit}
    found = largest_sizes(graph_at, first, Budgeting(memory, link=link), limits)[name]
    kept = _largest_kept(graph_at(first), graph_at(2 * first), first, memory)
    whole = int(kept)
    ratio = f"{found.size / whole:.2f}" if whole else "-"
    if limit is not None:
        return [network, _speed(link), str(whole), str(found.size), ratio, published]
    costs = "FLOPs" if flops else "roofline"
    parts = f"{found.size / kept:.2f}"
    return [network, costs, f"{kept:.1f}", str(found.size), ratio, parts, published]


def _largest_kept(small: Graph, large: Graph, first: int, memory: int) -> float:
    """The largest batch that fits with nothing recomputed, in parts of a sample, too.

    Steps of other batches lie between those of two, and peaks between those of whole samples.
    """

    @cache
    def peak(batch: int) -> int:
        graph = scaled(small, large, (batch - first) / first)
        return plan(graph, "100%", method="keep-all").peak_bytes

    low, high = 0, 1
    while peak(high) <= memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= memory else (low, middle)
    below, above = peak(low) if low else 0, peak(high)
    return low + (memory - below) / (above - below)


def _planned(
    graph: Graph,
    budget: str | int,
    method: str,
    time_limit: float | None = None,
    link: int = 0,
) -> Plan | None:
    """A plan, or None where the method does not meet the budget; without a link nothing moves."""
    try:
        return plan(graph, budget, method=method, link=link, time_limit=time_limit)
    except InfeasibleBudgetError:
        return None


def _speed(link: int) -> str:
    return f"{link / 1e9:g} GB/s" if link else "none"


def _overhead(made: Plan | None) -> str:
    return "does not fit" if made is None else f"{made.overhead:.2%}"
