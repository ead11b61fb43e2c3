"""`coop-plan fit`: memory and batch sizes of a training step on other devices."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import click

from coop_plan.api.cli.capture import MASTERS, OPTIMIZER, TARGET, fail_without_torch
from coop_plan.api.cli.exit_codes import EXIT_ERROR, EXIT_INVALID, fail
from coop_plan.api.cli.progress import show_progress

PARTS = ("weights", "gradients", "states", "activations", "update", "other")
COLUMNS = (*PARTS, "context", "as it is", "smallest", "card", "overhead", "samples/s")


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
@click.option("--batches", is_flag=True, help="Also search the largest batches; this takes longer.")
@OPTIMIZER
@MASTERS
@click.option(
    "--update",
    type=click.Choice(["foreach", "fused", "plain", "backward"]),
    help="How the optimizer runs. backward: for each parameter as soon as its gradient exists."
    "  [default: as PyTorch: foreach on CUDA, plain on the CPU]",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 100),
    default=10.0,
    show_default=True,
    metavar="PERCENT",
    help="Memory that PyTorch's allocator reserves beyond what is allocated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fit(
    target: str,
    devices: str,
    batch: int,
    batches: bool,
    optimizer: str | None,
    masters: bool,
    update: str | None,
    margin: float,
    as_json: bool,
) -> None:
    """Estimate whether a training step fits on devices that this machine does not have.

    FUNCTION takes batch=N and returns (callable, example arguments). For each device are printed
    the memory of eager PyTorch at its peak, the smallest memory with recomputation, and the
    overhead within the device's memory. --batches adds the largest batch at 5 %, 10 % and one
    forward of overhead. Each plan is verified.
    """
    if find_spec("torch") is None:
        fail_without_torch("fit")
    from coop_plan import fit as figures
    from coop_plan.planner.progress import progress_to

    names = devices.split(",")
    width = max(6, *map(len, names))
    rows: list[dict[str, Any]] = []
    with show_progress(message="capturing") as progress, progress_to(progress):
        for row in figures(
            target,
            names,
            batch,
            optimizer=optimizer,
            masters=masters,
            update=update,
            margin=margin / 100,
            batches=batches,
        ):
            if not as_json:
                _print(row, width, first=not any(earlier["eager"] for earlier in rows))
            rows.append(row)
    if as_json:
        click.echo(json.dumps(rows))
    elif len(fitting := [row for row in rows if row["within"] is not None]) > 1:
        least = min(fitting, key=lambda row: int(row["memory_bytes"]))
        click.echo(f"smallest of these that holds the step: {least['device']}")
    if faults := [row for row in rows if row["error"] is not None]:
        fail(_message(faults), EXIT_INVALID if faults[0]["invalid"] else EXIT_ERROR)


def _message(faults: list[dict[str, Any]]) -> str:
    """Each fault once, with the devices that have it."""
    devices: dict[str, list[str]] = {}
    for row in faults:
        devices.setdefault(row["error"], []).append(row["device"])
    return "; ".join(f"{', '.join(names)}: {error}" for error, names in devices.items())


def _print(row: dict[str, Any], width: int, first: bool) -> None:
    """Print a row as soon as it is known, the first one with what the table is of."""
    eager, within = row["eager"], row["within"]
    if eager is None:
        return
    unit, scale = ("GiB", 1 << 30) if eager["peak_bytes"] >= 1 << 30 else ("MiB", 1 << 20)
    if first:
        optimizer = row["optimizer"] or "no optimizer"
        masters = " with float32 masters" if row["masters"] else ""
        update = f" ({row['update']})" if row["update"] else ""
        click.echo(
            f"batch {row['batch']}, {row['dtype']}, {optimizer}{masters}{update}; {unit} of eager"
            " PyTorch at its peak:"
        )
        click.echo(_line("device", width, COLUMNS))
    sizes = [eager[part] for part in PARTS]
    sizes += [row["context_bytes"], eager["peak_bytes"], row["smallest"]["peak_bytes"]]
    cells = [f"{size / scale:.2f}" for size in (*sizes, row["memory_bytes"])]
    cells += (
        ["no fit", "-"]
        if within is None
        else [f"{within['overhead']:.2%}", f"{within['samples_per_s']:.4g}"]
    )
    click.echo(_line(row["device"], width, cells))
    click.echo(f"  {_advice(row)}")
    if found := row["largest"]:
        texts = [
            f"{largest['batch'] or 'none'} within {name}"
            + ("" if name.endswith("%") else f" ({largest['limit']:.0%})")
            for name, largest in found.items()
        ]
        click.echo(f"  largest batch: {', '.join(texts)} of overhead")


def _line(name: str, width: int, cells: Sequence[str]) -> str:
    columns = (f"{cell:>{max(9, len(head))}}" for cell, head in zip(cells, COLUMNS, strict=True))
    return "  ".join((f"{name:{width}}", *columns))


def _advice(row: dict[str, Any]) -> str:
    from coop_plan.schemas import format_bytes

    batch, within = row["batch"], row["within"]
    available = format_bytes(row["available_bytes"])
    if within is None:
        least = format_bytes(row["smallest"]["peak_bytes"])
        return f"batch {batch} needs {least}, and there are {available} without context and margin"
    if within["budget_bytes"] is None:
        return f"batch {batch} fits as it is: {available} without context and margin"
    options = json.dumps(within["options"])
    return f'batch {batch} fits with torch.compile(step, backend="coop", options={options})'
