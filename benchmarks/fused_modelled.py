"""Steps with eager kernels and with fused ones, modelled on a device that is not here.

    python -m benchmarks.fused_modelled [--only llama ...] [--device h100-80gb] [--csv FILE]

Costs are rooflines (`coop-plan capture --device`), in bf16. Both kinds of kernels get the same
bytes: what keep-everything takes with eager kernels, 60 % of it, and what the smallest budget is
with eager kernels. The better of both plans is the one that `kernels="fused"` runs. Exits 1 if it
costs more than the plan over eager kernels anywhere.
"""

import sys
from collections.abc import Iterator
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


def rows(name: str, eager: Graph, fused: Graph) -> Iterator[dict[str, Any]]:
    """Rows of a network, one for each budget; its graphs over both kinds of kernels."""
    regions = [op.name for op in fused.ops if op.name.startswith(FUSED_NAME)]
    kept = plan(eager, "100%", method="keep-all")
    least = plan(eager, "min")
    facts = {
        "network": NETWORKS[name],
        "ops": f"{len(eager.ops)}, {len(fused.ops)}",
        "regions": f"{len(regions)} ({len(set(regions))})",
        "all": (kept.peak_bytes, plan(fused, "100%", method="keep-all").peak_bytes),
        "least": (least.peak_bytes, plan(fused, "min").peak_bytes),
    }
    for title, budget, over in (
        ("100 %", kept.peak_bytes, kept),
        ("60 %", kept.peak_bytes * 60 // 100, None),
        ("min", least.peak_bytes, least),
    ):
        pair = over or planned(eager, budget), planned(fused, budget)
        costs = [found and found.cost_us for found in pair]
        better = min((cost for cost in costs if cost is not None), default=None)
        ratio = better / costs[0] if better and costs[0] else None
        row = {"budget": title, "bytes": budget, "eager": costs[0], "fused": costs[1]}
        yield facts | row | {"ratio": ratio}


MS = scaled(1e-3, ".1f")
GB = scaled(1e-9, ".2f")


def _pair(sizes: tuple[int, int]) -> str:
    return ", ".join(map(GB, sizes))


COLUMNS = (
    *("network", "ops", Column("regions", "regions (distinct)"), "budget"),
    Column("bytes", "GB", GB),
    Column("eager", "eager ms", MS),
    Column("fused", "fused ms", MS),
    Column("ratio", "better ÷ eager", ".2f"),
    Column("all", "keep-everything GB", _pair),
    Column("least", "smallest GB", _pair),
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
            request = CaptureRequest(target=target, spec=spec, kernels=("eager", "fused"))
            found = captures.capture(request)
            for row in rows(name, found.graphs["eager"], found.graphs["fused"]):
                report.add(**row)
    report.finish(asked.csv)
    return int(any((row["ratio"] or 0) > 1 for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
