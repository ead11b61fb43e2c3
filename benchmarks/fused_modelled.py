"""Steps with eager kernels and with fused ones, modelled on a device that is not here.

    python -m benchmarks.fused_modelled [--only llama ...] [--device h100-80gb] [--csv FILE]

Costs are rooflines (`coop-plan capture --device`), in bf16. Both kinds of kernels get the same
bytes: what keep-everything takes with eager kernels, 60 % of it, and what the smallest budget is
with eager kernels. Regions that need more bytes than any op with eager kernels are split in a third
graph. The best of the plans is the one that `kernels="fused"` runs. Exits 1 if it costs more than
the plan over eager kernels anywhere.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.fused_models import NETWORKS
from benchmarks.report import Column, Report, parser, scaled
from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.runtime.offline_capture.devices import device
from coop_plan.runtime.offline_capture.fake_device import CaptureRequest, OfflineCapture
from coop_plan.schemas import Graph, Plan
from coop_plan.schemas.graph import FUSED_NAME


def planned(graph: Graph, budget: int | str) -> Plan | None:
    """The plan within a budget, or None if there is none."""
    try:
        return plan(graph, budget)
    except InfeasibleBudgetError:
        return None


def regions_of(graph: Graph) -> list[str]:
    """The names of a graph's fused regions."""
    return [op.name for op in graph.ops if op.name.startswith(FUSED_NAME)]


def rows(name: str, eager: Graph, fused: Graph, split: Graph | None) -> Iterator[dict[str, Any]]:
    """Rows of a network, one for each budget; its graphs over both kinds of kernels.

    `split` is that with split regions, None if no region is to be split.
    """
    regions = regions_of(fused)
    whole = {*regions} if split is None else {*regions_of(split)}
    kept = plan(eager, "100%", method="keep-all")
    least = plan(eager, "min")
    facts = {
        "network": NETWORKS[name],
        "ops": f"{len(eager.ops)}, {len(fused.ops)}",
        "regions": f"{len(regions)} ({len(set(regions))})",
        "all": (kept.peak_bytes, plan(fused, "100%", method="keep-all").peak_bytes),
        "least": [plan(g, "min").peak_bytes for g in (eager, fused, split) if g is not None],
        "split": sum(name not in whole for name in regions),
    }
    for title, budget, over in (
        ("100 %", kept.peak_bytes, kept),
        ("60 %", kept.peak_bytes * 60 // 100, None),
        ("min", least.peak_bytes, least),
    ):
        of_split = None if split is None else planned(split, budget)
        plans = over or planned(eager, budget), planned(fused, budget), of_split
        costs = [found and found.cost_us for found in plans]
        better = min((cost for cost in costs if cost is not None), default=None)
        ratio = better / costs[0] if better and costs[0] else None
        row = {"budget": title, "bytes": budget, "eager": costs[0], "fused": costs[1]}
        row["parts"] = costs[2]
        yield facts | row | {"ratio": ratio}


MS = scaled(1e-3, ".1f")
GB = scaled(1e-9, ".2f")


def _each(sizes: Sequence[int]) -> str:
    return ", ".join(map(GB, sizes))


COLUMNS = (
    *("network", "ops", Column("regions", "regions (distinct)"), "budget"),
    Column("bytes", "GB", GB),
    Column("eager", "eager ms", MS),
    Column("fused", "fused ms", MS),
    Column("split", "regions split"),
    Column("parts", "split ms", MS),
    Column("ratio", "better ÷ eager", ".2f"),
    Column("all", "keep-everything GB", _each),
    Column("least", "smallest GB", _each),
)


def main() -> int:
    """Returns 1 if a plan costs more than that over eager kernels."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    command.add_argument("--device", default="h100-80gb")
    asked = command.parse_args()
    report, spec = Report(*COLUMNS, progress=True), device(asked.device)
    with OfflineCapture() as captures:
        for name in asked.only:
            target = f"benchmarks.fused_models:{name}"
            request = CaptureRequest(
                target=target, spec=spec, kernels=("eager", "fused"), split="outside"
            )
            graphs = captures.capture(request).graphs
            for row in rows(name, graphs["eager"], graphs["fused"], graphs.get("split")):
                report.add(**row)
    report.finish(asked.csv)
    return int(any((row["ratio"] or 0) > 1 for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
