"""`coop-plan fit`: memory and batch sizes of a training step on other devices."""

import json
from collections.abc import Sequence
from typing import Any

import click

from coop_plan.api.cli.capture import EMA, KERNELS, MASTERS, OPTIMIZER, TARGET, runtime_work
from coop_plan.api.cli.exit_codes import EXIT_ERROR, EXIT_INVALID, fail
from coop_plan.schemas import format_bytes

PARTS = ("weights", "gradients", "states", "activations", "update", "other")
KEPT = {
    "masters": "float32 masters",
    "ema": "an average",
    "clip_norm": "clipping",
    "accumulate": "gradients of earlier micro-batches",
}
COLUMNS = (*PARTS, "context", "as it is", "smallest", "card", "overhead")


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
@click.option(
    "--length",
    type=click.IntRange(1),
    metavar="N",
    help="Sequence length: call FUNCTION(length=N), too.",
)
@click.option("--lengths", is_flag=True, help="Also search the largest lengths; needs --length.")
@OPTIMIZER
@MASTERS
@EMA
@click.option(
    "--clip-norm",
    is_flag=True,
    help="Clip gradients to a norm before the optimizer's step; needs --optimizer.",
)
@KERNELS
@click.option(
    "--update",
    type=click.Choice(["foreach", "fused", "plain", "backward"]),
    help="How the optimizer runs. backward: for each parameter as soon as its gradient exists."
    "  [default: as PyTorch: foreach on CUDA, plain on the CPU]",
)
@click.option(
    "--accumulate",
    is_flag=True,
    help="Gradients of several micro-batches of this size add up before the optimizer's step.",
)
@click.option(
    "--shards",
    type=click.IntRange(1),
    metavar="N",
    help="Also count a rank of N that share weights, gradients and states (FSDP, ZeRO-3).",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 100),
    default=10.0,
    show_default=True,
    metavar="PERCENT",
    help="Memory that PyTorch's allocator reserves beyond what is allocated.",
)
@click.option(
    "--iteration",
    is_flag=True,
    help="Also plan the iteration with its updates, as train_iteration does; needs --optimizer.",
)
@click.option(
    "--link",
    metavar="RATE",
    help="Parameters and states of that plan may move to the host at this bandwidth, as 25GB/s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def fit(target: str, devices: str, margin: float, as_json: bool, **options: Any) -> None:
    """Estimate whether a training step fits on devices that this machine does not have.

    FUNCTION takes batch=N and returns (callable, example arguments). For each device are printed
    the memory of eager PyTorch at its peak, the smallest memory with recomputation, and the
    overhead within the device's memory. --batches and --lengths add the largest batch and sequence
    length at 5 %, 10 % and one forward of overhead. Each plan is verified. Tensors of the training
    loop that are no arguments of the callable, as batches of another step, come on top.
    """
    names = devices.split(",")
    width = max(6, *map(len, names))
    rows: list[dict[str, Any]] = []
    with runtime_work("fit", "capturing"):
        from coop_plan import fit as figures

        for row in figures(target, names, margin=margin / 100, **options):
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
        kept = [text for name, text in KEPT.items() if row[name]]
        copies = f" with {' and '.join(kept)}" if kept else ""
        update = f" ({row['update']})" if row["update"] else ""
        length = f", length {row['length']}" if row["length"] else ""
        click.echo(
            f"batch {row['batch']}{length}, {row['dtype']}, {optimizer}{copies}{update}; {unit} of"
            " eager PyTorch at its peak:"
        )
        rate = "tokens/s" if row["length"] else "samples/s"
        click.echo(_line("device", width, (*COLUMNS, rate)))
    sizes = [eager[part] for part in PARTS]
    sizes += [row["context_bytes"], eager["peak_bytes"], row["smallest"]["peak_bytes"]]
    cells = [f"{size / scale:.2f}" for size in (*sizes, row["memory_bytes"])]
    cells += (
        ["no fit", "-"]
        if within is None
        else [
            f"{within['overhead']:.2%}",
            f"{within['samples_per_s'] * (row['length'] or 1):.4g}",
        ]
    )
    click.echo(_line(row["device"], width, cells))
    click.echo(f"  {_advice(row)}")
    if row["iteration"]:
        click.echo(f"  {_of_iteration(row)}")
    if row["shards"]:
        held = format_bytes(row["shard_bytes"])
        click.echo(
            f"  of {row['shards']} shards each takes {held} in eager PyTorch, without the gathered"
            " weights of a block and buffers of collectives"
        )
    if within and within["budget_bytes"] and row["first_call_bytes"] > row["available_bytes"]:
        taken = format_bytes(row["first_call_bytes"])
        click.echo(f"  its first call measures ops on copies of their inputs, which takes {taken}")
    if within and within["head_in_chunks"]:
        click.echo("  its logits are made in chunks, if the device gives them the bits of a whole")
    if first and row["without_loss"]:
        shape = tuple(row["without_loss"])
        click.echo(f"  the step returns no scalar, but {shape}: the memory of a loss is not in it")
    for size, found in (("batch", row["largest"]), ("length", row["longest"])):
        texts = [
            f"{largest[size] or 'none'} within {name}"
            + ("" if name.endswith("%") else f" ({largest['limit']:.0%})")
            for name, largest in found.items()
        ]
        if texts:
            click.echo(f"  largest {size}: {', '.join(texts)} of overhead")


def _of_iteration(row: dict[str, Any]) -> str:
    """The plans of the whole iteration, and what the runtime cannot run of them."""
    least, within = row["iteration"]["smallest"], row["iteration"]["within"]
    link = f", link {row['link']}" if row["link"] else ""
    text = f"whole iteration in one plan{link}: smallest {format_bytes(least['peak_bytes'])}"
    if within is None:
        return f"{text}; no plan within the card"
    number, rate = within["samples_per_s"], "samples/s"
    if row["length"]:
        number, rate = number * row["length"], "tokens/s"
    text += f"; on the card {within['overhead']:.2%} of overhead, {number:.4g} {rate}"
    if within["host_bytes"]:
        text += f", {format_bytes(within['host_bytes'])} on the host"
        if row["context_bytes"]:
            text += " (a plan alone: on CUDA the runtime updates them on the device)"
    return text


def _line(name: str, width: int, cells: Sequence[str]) -> str:
    heads = (*COLUMNS, "samples/s")
    columns = (f"{cell:>{max(9, len(head))}}" for cell, head in zip(cells, heads, strict=True))
    return "  ".join((f"{name:{width}}", *columns))


def _advice(row: dict[str, Any]) -> str:
    batch, within = row["batch"], row["within"]
    available = format_bytes(row["available_bytes"])
    if within is None:
        least = format_bytes(row["smallest"]["peak_bytes"])
        return f"batch {batch} needs {least}, and there are {available} without context and margin"
    if within["budget_bytes"] is None:
        return f"batch {batch} fits as it is: {available} without context and margin"
    options = json.dumps(within["options"])
    return f'batch {batch} fits with torch.compile(step, backend="coop", options={options})'
