"""`coop-plan import`: what PyTorch recorded of a real step, as a graph or as buffers."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import click

from coop_plan.schemas.errors import InvalidInputError

PICKLES = b"\x80"
"""How every pickle of protocol 2 or later begins, and no JSON."""


@click.command("import", short_help="Turn a recorded step into a graph.")
@click.argument("trace")
@click.option("--kineto", metavar="FILE", help="The Kineto trace with the times of the ops.")
@click.option("-o", "--output", required=True, metavar="FILE", help="- is stdout.")
def import_(trace: str, kineto: str | None, output: str) -> None:
    """Turn TRACE, recorded by PyTorch, into a graph, or a memory snapshot into buffers.

    An execution trace (torch.profiler.ExecutionTraceObserver; .json or .json.gz) becomes a graph
    of its last whole step; --kineto has the times. A snapshot (torch.cuda.memory._dump_snapshot)
    becomes the CSV file of its buffers' lifetimes that `coop-plan place` takes.
    """
    from coop_plan.api.cli.output import check_writable, write_whole

    check_writable(output)
    data = _read(trace)
    if data.startswith(PICKLES):
        if kineto is not None:
            raise click.UsageError("--kineto is for execution traces, not for a memory snapshot")
        text, said = _buffers(data, trace)
    else:
        text, said = _graph(data, trace, kineto)
    if output == "-":
        click.echo(text, nl=False)
    else:
        write_whole(output, text)
    click.echo(f"{output}: {said}", err=True)


def _graph(data: bytes, source: str, kineto: str | None) -> tuple[str, str]:
    from coop_plan.planner.importers.graph import import_trace

    times = None if kineto is None else _json(_read(kineto), kineto) or {}
    try:
        name = Path(source).name.encode(errors="replace").decode()  # files may have any bytes
        made = import_trace(_json(data, source), times, name)
    except InvalidInputError as error:
        origin = kineto if error.source == "kineto" and kineto else source
        raise InvalidInputError(error.message, error.pointer, origin) from None
    ops = len(made.graph.ops)
    said = f"{ops} ops, {len(made.graph.tensors)} tensors"
    if made.steps > 1:
        said += f"; the last of {made.steps} steps"
    if kineto is None:
        said += "; costs are the bytes moved at 1 TB/s (--kineto has measured ones)"
    else:
        said += f"; {made.timed} of {ops} ops have measured times"
        if made.timed < ops:
            said += ", the others cost the bytes they move at 1 TB/s"
    return made.graph.to_json() + "\n", said


def _buffers(data: bytes, source: str) -> tuple[str, str]:
    from coop_plan.api.cli.buffers_csv import Buffers, write_buffers
    from coop_plan.planner.importers.snapshot import read_snapshot
    from coop_plan.schemas import format_bytes

    try:
        found = read_snapshot(data)
    except InvalidInputError as error:
        raise InvalidInputError(error.message, error.pointer, source) from None
    ids = [
        f"{address:#x}@{lower}" for address, lower in zip(found.address, found.lower, strict=True)
    ]
    buffers = Buffers(ids, found.lower, found.upper, found.size, [])
    live, reserved = format_bytes(found.live_bytes), format_bytes(found.reserved_bytes)
    said = f"{len(ids)} buffers of device {found.device}, at most {live} live; {reserved} reserved"
    return write_buffers(buffers, None), said


def _read(path: str) -> bytes:
    from coop_plan.schemas._parse import read_bytes

    data = read_bytes(path)
    try:
        return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInputError(f"cannot be read: {error}", source=path) from None


def _json(data: bytes, source: str) -> Any:
    """A trace's document; as PyTorch writes it, which may say NaN."""
    try:
        return json.loads(data)
    except RecursionError:
        raise InvalidInputError("not JSON: nested too deeply", source=source) from None
    except ValueError as error:
        raise InvalidInputError(f"not JSON: {error}", source=source) from None
