"""`coop-plan fit`: whether a step fits into devices that are not here, and with what batch."""

import json
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import click

from coop_plan.api.capture import MASTERS, OPTIMIZER, TARGET, captured

if TYPE_CHECKING:
    from coop_plan.planner.fit import Fit, Largest
    from coop_plan.schemas import Graph, Plan

CONTEXT_BYTES = 512 << 20
"""About what a process on CUDA takes before it has any tensor: the step cannot have it."""

LIMITS = {"5%": 0.05, "10%": 0.10}


@click.command(short_help="Say whether a training step fits into devices that are not here.")
@TARGET
@click.option("--device", "devices", required=True, metavar="DEVICE[,...]", help="As of capture.")
@click.option(
    "--batch", type=click.IntRange(1), default=8, show_default=True, help="Of FUNCTION(batch=N)."
)
@OPTIMIZER
@MASTERS
@click.option("--json", "as_json", is_flag=True, help="Print the figures for programs.")
def fit(
    target: str, devices: str, batch: int, optimizer: str | None, masters: bool, as_json: bool
) -> None:
    """Say whether a training step fits into devices that are not here.

    The function takes batch=N and returns (callable, example arguments). For each device: what the
    step needs when nothing is recomputed, the smallest budget, what it costs to fit into the
    device, and the largest batch within 5 %, 10 % and one extra forward. Behind each number is a
    verified plan.
    """
    from coop_plan.planner.fit import fit as figures_of

    rows = []
    for device in devices.split(","):
        graph_at = cache(partial(_graph_at, target, device, optimizer, masters))
        there = graph_at(batch).device
        memory = there.memory_bytes - (CONTEXT_BYTES if there.kind == "cuda" else 0)
        found = figures_of(graph_at, batch, memory, LIMITS)
        rows.append({"device": device, "batch": batch, **_figures(found)})
    if as_json:
        click.echo(json.dumps(rows))
        return
    _print(rows)


def _graph_at(
    target: str, device: str, optimizer: str | None, masters: bool, batch: int
) -> "Graph":
    return captured(target, device, batch, optimizer, masters)


def _figures(found: "Fit") -> dict[str, Any]:
    def of(made: "Plan | None") -> dict[str, Any] | None:
        if made is None:
            return None
        return {"peak_bytes": made.peak_bytes, "overhead": made.overhead, "cost_us": made.cost_us}

    def batch_of(largest: "Largest") -> dict[str, Any]:
        return {"limit": largest.limit, "batch": largest.batch, "plan": of(largest.plan)}

    return {
        "memory_bytes": found.memory_bytes,
        "keep_all": of(found.kept),
        "smallest": of(found.least),
        "within": of(found.planned),
        "largest": {name: batch_of(largest) for name, largest in found.largest.items()},
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from coop_plan.schemas import format_bytes

    names = list(rows[0]["largest"])
    heads = ["device", "memory", "nothing recomputed", "smallest", "overhead"]
    lines = [[*heads, *(f"batch, {name}" for name in names)]]
    for row in rows:
        within = row["within"]
        lines.append(
            [
                row["device"],
                format_bytes(row["memory_bytes"]),
                format_bytes(row["keep_all"]["peak_bytes"]),
                format_bytes(row["smallest"]["peak_bytes"]),
                "does not fit" if within is None else f"{within['overhead']:.2%}",
                *(str(row["largest"][name]["batch"] or "none") for name in names),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())
    for row in rows:
        click.echo(f"{row['device']}: {_advice(row)}")


def _advice(row: dict[str, Any]) -> str:
    """What to do next."""
    from coop_plan.schemas import format_bytes

    batch, within = row["batch"], row["within"]
    if within is None:
        fitting = row["largest"]["one extra forward"]["batch"]
        least = format_bytes(row["smallest"]["peak_bytes"])
        if fitting:
            return f"batch {batch} needs {least}; batch {fitting} fits"
        return f"batch {batch} needs {least}: a larger device, or fewer bytes of parameters"
    if row["keep_all"]["peak_bytes"] <= row["memory_bytes"]:
        return f"batch {batch} fits as it is"
    budget = row["memory_bytes"]
    return (
        f'batch {batch} fits with torch.compile(step, backend="coop",'
        f' options={{"budget": {budget}}})'
    )
