"""
`coop-plan place`: offsets for the buffers of a CSV file.

The format is that of MiniMalloc (google/minimalloc): a header line, then a line per buffer, with
the columns `id,lower,upper,size` in any order: live in [lower, upper), size in bytes. A column
`offset` gives the address of a buffer beforehand where it is not empty; the answer has it filled.
"""

import csv
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from coop_plan.schemas.errors import InvalidInputError

COLUMNS = ("id", "lower", "upper", "size")
LIMIT = 1 << 62
"""Times, sizes, offsets and the sum of the sizes stay below this."""

ALIGNMENT_LIMIT = 1 << 40


@dataclass
class Buffers:
    """The lines of the file, in its order."""

    id: list[str]
    lower: list[int]
    upper: list[int]
    size: list[int]
    offset: list[int]
    """-1 where none is given."""


def read_buffers(text: str, source: str, alignment: int = 1) -> Buffers:
    """The buffers of a CSV text; `source` names it in errors.

    Raises:
        InvalidInputError: with the number of the line that is wrong, and why.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    buffers = Buffers([], [], [], [], [])
    columns: list[str] | None = None
    seen: set[str] = set()
    total = 0
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            cells = [cell.strip() for cell in row]
            if columns is None:
                columns = _header(cells)
                continue
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} values for the {len(columns)} columns")
            values = dict(zip(columns, cells, strict=True))
            if values["id"] in seen:
                raise ValueError(f"id {values['id']} is there twice")
            seen.add(values["id"])
            lower, upper, size = (_whole(values, name) for name in COLUMNS[1:])
            offset = _whole(values, "offset") if values.get("offset") else -1
            total += size
            if lower >= upper:
                raise ValueError(f"lower {lower} is not below upper {upper}")
            if size < 0 or total >= LIMIT:
                raise ValueError("size is negative" if size < 0 else "the sizes sum up to too much")
            if values.get("offset") and (offset < 0 or offset % alignment):
                raise ValueError(f"offset {offset} is not a multiple of {alignment} from 0 up")
            buffers.id.append(values["id"])
            buffers.lower.append(lower)
            buffers.upper.append(upper)
            buffers.size.append(size)
            buffers.offset.append(offset)
        if columns is None:
            raise ValueError(f"no header: {','.join(COLUMNS)} expected")
    except (ValueError, csv.Error) as error:
        line = max(1, reader.line_num)
        raise InvalidInputError(f"line {line}: {error}", source=source) from None
    return buffers


def _header(cells: list[str]) -> list[str]:
    columns = [cell.lower() for cell in cells]
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise ValueError(f"the header has no column {missing[0]}: {','.join(COLUMNS)} expected")
    other = [name for name in columns if name not in (*COLUMNS, "offset")]
    if other or len(set(columns)) < len(columns):
        raise ValueError(f"column {other[0]!r} is unknown" if other else "a column is there twice")
    return columns


def _whole(values: dict[str, str], name: str) -> int:
    text = values[name]
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 30:
        raise ValueError(f"{name} is not a whole number: {text[:40]!r}")
    value = int(text)
    if abs(value) >= LIMIT:
        raise ValueError(f"{name} {text} is too large")
    return value


def write_buffers(buffers: Buffers, offsets: list[int]) -> str:
    """The CSV text with an offset for every buffer."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*COLUMNS, "offset"))
    rows = zip(buffers.id, buffers.lower, buffers.upper, buffers.size, offsets, strict=True)
    writer.writerows(rows)
    return out.getvalue()


@click.command(short_help="Give the buffers of a CSV file their offsets.")
@click.argument("buffers")
@click.option("--capacity", metavar="BYTES", help="Fit this (1MiB, 4096) instead of minimising.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Seconds.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search's restarts.")
@click.option(
    "--alignment",
    type=click.IntRange(1, ALIGNMENT_LIMIT),
    default=1,
    show_default=True,
    help="Of offsets, in bytes.",
)
@click.option("-o", "--output", metavar="CSV", help="Write the placement here; - is stdout.")
@click.option("--plot", metavar="MAP", help="Draw the memory map: a .html or .png file.")
def place(
    buffers: str,
    capacity: str | None,
    time_limit: float,
    seed: int,
    alignment: int,
    output: str | None,
    plot: str | None,
) -> None:
    """Place BUFFERS: a CSV file with the columns id,lower,upper,size[,offset], or - for stdin.

    Each is live in [lower, upper); an offset is kept as given. Exit 3 when the capacity is proved
    too small, 4 when no placement within it was found.
    """
    from coop_plan.api.cli import EXIT_INFEASIBLE, EXIT_TIME, fail
    from coop_plan.api.memory_map import check_drawable, draw
    from coop_plan.api.output import check_writable, write_whole
    from coop_plan.planner.placement import FixedOverlapError
    from coop_plan.planner.placement import place as find_offsets
    from coop_plan.schemas import format_bytes, parse_bytes

    check_writable(output)
    check_drawable(plot)
    limit = None if capacity is None else parse_bytes(capacity)
    source = "stdin" if buffers == "-" else buffers
    given = read_buffers(_read(buffers, source), source, alignment)
    try:
        made = find_offsets(
            given.lower,
            given.upper,
            given.size,
            capacity=limit,
            alignment=alignment,
            fixed=given.offset,
            time_limit=time_limit,
            seed=seed,
        )
    except FixedOverlapError as error:
        one, two = (given.id[i] for i in error.buffers)
        message = f"buffers {one} and {two} overlap at their given offsets"
        raise InvalidInputError(message, source=source) from None
    if made.proved_impossible:
        least = f"at least {made.lower_bound} bytes are needed"
        fail(f"no placement within {limit} bytes exists: {least}", EXIT_INFEASIBLE)
    if made.fits is False:
        known = f"found {made.peak}, the lower bound is {made.lower_bound}"
        spent = f"{made.seconds:.1f} s"
        fail(f"no placement within {limit} bytes found in {spent}: {known}", EXIT_TIME)
    offsets = made.offsets.tolist()
    text = write_buffers(given, offsets)
    if plot is not None:
        draw(plot, given, offsets, made.peak, limit)
    if output is not None and output != "-":
        write_whole(output, text)
    if output == "-":
        click.echo(text, nl=False)
        return
    loss = made.peak / made.lower_bound - 1 if made.lower_bound else 0.0
    click.echo(f"buffers      {len(offsets)}")
    click.echo(f"peak         {made.peak} bytes  ({format_bytes(made.peak)})")
    click.echo(f"lower bound  {made.lower_bound} bytes  (the peak is {loss:.2%} above)")
    click.echo(f"optimal      {'yes, proved' if made.optimal else 'not proved'}")
    click.echo(f"time         {made.seconds:.2f} s")


def _read(path: str, source: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidInputError("not UTF-8 text", source=source) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"cannot be read: {reason}", source=source) from None
