"""`coop-plan import`: a trace or memory snapshot of PyTorch as a graph or as buffers."""

import json
from pathlib import Path
from typing import Any

import click

from coop_plan.api.cli.file_kinds import PICKLE_START, check_kind
from coop_plan.api.cli.input import read_input
from coop_plan.api.cli.output import check_writable, write_whole
from coop_plan.schemas import InvalidInputError, format_bytes


@click.command("import", short_help="Convert a recorded step into a graph.")
@click.argument("trace")
@click.option(
    "--kineto", metavar="FILE", help="Kineto trace of the same step, from which op times are read."
)
@click.option("-o", "--output", required=True, metavar="FILE", help="- is stdout.")
def import_(trace: str, kineto: str | None, output: str) -> None:
    """Convert TRACE, recorded by PyTorch, into a graph or into buffers.

    An execution trace (torch.profiler.ExecutionTraceObserver; .json or .json.gz) becomes a graph
    of its last complete step, with the op times of --kineto. A memory snapshot
    (torch.cuda.memory._dump_snapshot) becomes a CSV file of buffers for `coop-plan place`.
    """
    check_writable(output)
    data, trace = read_input(trace)
    if data.startswith(PICKLE_START):
        if kineto is not None:
            raise click.UsageError(
                "--kineto is for an execution trace, and TRACE is a memory snapshot"
            )
        text, summary = _buffers(data, trace)
    else:
        text, summary = _graph(data, trace, kineto)
    write_whole(output, text)
    click.echo(f"{output}: {summary}", err=True)


def _graph(data: bytes, source: str, kineto: str | None) -> tuple[str, str]:
    from coop_plan.planner.importers.graph import import_trace

    times = None
    if kineto is not None:
        times_data, kineto = read_input(kineto)
        check_kind(times_data, kineto, "Kineto trace")
        times = _json(times_data, kineto) or {}
    try:
        name = Path(source).name.encode(errors="replace").decode()  # files may have any bytes
        made = import_trace(_json(data, source), times, name)
    except InvalidInputError as error:
        file = kineto if kineto and error.source == "kineto" else source
        if file == source:
            check_kind(data, source, "execution trace")
        raise InvalidInputError(error.message, error.pointer, file) from None
    ops = len(made.graph.ops)
    summary = f"{ops} ops, {len(made.graph.tensors)} tensors"
    if made.steps > 1:
        summary += f"; the last of {made.steps} steps"
    if kineto is None:
        summary += "; costs are the bytes moved at 1 TB/s (--kineto has measured ones)"
    else:
        summary += f"; {made.timed} of {ops} ops have measured times"
        if made.timed < ops:
            summary += ", the others cost the bytes they move at 1 TB/s"
        if made.times.device_us:
            share = 100 * made.times.joined_us / made.times.device_us
            summary += (
                f"; {share:.1f} % of the step's device time joined"
                f" ({made.times.joined_us:.0f} of {made.times.device_us:.0f} µs)"
            )
        if made.times.note:
            summary += f"; {made.times.note}"
    return made.graph.to_json() + "\n", summary


def _buffers(data: bytes, source: str) -> tuple[str, str]:
    from coop_plan.planner.importers.buffers_csv import Buffers, write_buffers
    from coop_plan.planner.importers.snapshot import read_snapshot

    try:
        found = read_snapshot(data)
    except InvalidInputError as error:
        raise InvalidInputError(error.message, error.pointer, source) from None
    ids = [
        f"{address:#x}@{lower}" for address, lower in zip(found.address, found.lower, strict=True)
    ]
    buffers = Buffers(ids, found.lower, found.upper, found.size)
    live, reserved = format_bytes(found.live_bytes), format_bytes(found.reserved_bytes)
    summary = (
        f"{len(ids)} buffers of device {found.device}, at most {live} live; {reserved} reserved"
    )
    return write_buffers(buffers, None), summary


def _json(data: bytes, source: str) -> Any:
    """The JSON of a trace; PyTorch writes NaN, too."""
    try:
        return json.loads(data)
    except RecursionError:
        raise InvalidInputError("not JSON: nested too deeply", source=source) from None
    except ValueError as error:
        raise InvalidInputError(f"not JSON: {error}", source=source) from None
