"""`coop-plan fit`: memory and batch sizes of a training step on other devices."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from coop_plan.api.cli.capture import MASTERS, OPTIMIZER, TARGET, captured
from coop_plan.api.cli.exit_codes import EXIT_ERROR, EXIT_INVALID, fail
from coop_plan.api.cli.progress import show_progress

if TYPE_CHECKING:
    from coop_plan.planner import Progress
    from coop_plan.planner.fit import Fit, Largest
    from coop_plan.schemas import Graph, Plan

CONTEXT_BYTES = 512 << 20
"""Approximate memory of a CUDA context, which the step cannot use."""

LIMITS = {"5%": 0.05, "10%": 0.10}


@click.command(short_help="Estimate whether a training step fits on other devices.")
@TARGET
@click.option(
    "--device",
    "devices",
    required=True,
    metavar="DEVICE[,...]",
    help="Devices, as of `coop-plan capture`.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Batch size: call FUNCTION(batch=N).",
)
@OPTIMIZER
@MASTERS
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fit(
    target: str, devices: str, batch: int, optimizer: str | None, masters: bool, as_json: bool
) -> None:
    """Estimate whether a training step fits on devices that this machine does not have.

    FUNCTION takes batch=N and returns (callable, example arguments). For each device are printed:
    the memory without recomputation, the smallest budget, the overhead within the device's memory,
    and the largest batch at 5 %, 10 % and one forward of overhead. Each figure is of a verified
    plan.
    """
    with show_progress(message="capturing") as progress:
        asked = [
            _row(target, device, batch, optimizer, masters, progress)
            for device in devices.split(",")
        ]
    rows = [row for row, _ in asked]
    if as_json:
        click.echo(json.dumps(rows))
    else:
        _print([row for row in rows if row["keep_all"] is not None])
    if faults := [(row, code) for row, code in asked if row["error"] is not None]:
        fail(_message([row for row, _ in faults]), faults[0][1])


def _row(
    target: str,
    device: str,
    batch: int,
    optimizer: str | None,
    masters: bool,
    progress: "Callable[[Progress], None]",
) -> tuple[dict[str, Any], int]:
    """Figures of one device, and the exit code; `error` is the reason for missing figures."""
    from coop_plan import RuntimeRefusalError
    from coop_plan.planner import Progress
    from coop_plan.planner.fit import fit as figures_of
    from coop_plan.schemas import InvalidInputError

    def graph_at(number: int) -> "Graph":
        if number == batch:
            return graph
        progress(Progress(f"{device}: capturing at batch {number}"))
        try:
            return captured(target, progress, **options, batch=number)
        except (InvalidInputError, RuntimeRefusalError) as error:
            raise InvalidInputError(f"at batch {number}, {error}") from None
        finally:
            progress(Progress(f"{device}: planning with batch {number}"))

    options: dict[str, Any] = {"device": device, "optimizer": optimizer, "masters": masters}
    row: dict[str, Any] = {"device": device, "batch": batch}
    progress(Progress(f"{device}: capturing at batch {batch}"))
    try:
        graph = captured(target, progress, **options, batch=batch)
    except (InvalidInputError, RuntimeRefusalError) as error:
        figures = dict.fromkeys(("memory_bytes", "keep_all", "smallest", "within"))
        code = EXIT_INVALID if isinstance(error, InvalidInputError) else EXIT_ERROR
        return row | figures | {"largest": {}, "error": str(error)}, code
    there = graph.device
    memory = there.memory_bytes - (CONTEXT_BYTES if there.kind == "cuda" else 0)
    progress(Progress(f"{device}: planning at batch {batch}"))
    found = figures_of(graph_at, batch, memory, LIMITS)
    return row | _figures(found) | {"error": found.unknown or None}, EXIT_ERROR


def _message(faults: list[dict[str, Any]]) -> str:
    """Each fault once, with the devices that have it."""
    devices: dict[str, list[str]] = {}
    for row in faults:
        devices.setdefault(row["error"], []).append(row["device"])
    return "; ".join(f"{', '.join(names)}: {error}" for error, names in devices.items())


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
    from coop_plan.planner.fit import ONE_FORWARD
    from coop_plan.schemas import format_bytes

    if not rows:
        return
    names = [*LIMITS, ONE_FORWARD]
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
                *(_batch(row["largest"].get(name)) for name in names),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())
    for row in rows:
        click.echo(f"{row['device']}: {_advice(row)}")


def _batch(largest: dict[str, Any] | None) -> str:
    return "unknown" if largest is None else str(largest["batch"] or "none")


def _advice(row: dict[str, Any]) -> str:
    from coop_plan.schemas import format_bytes

    batch, within = row["batch"], row["within"]
    if within is None:
        fitting = max((found["batch"] for found in row["largest"].values()), default=0)
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
