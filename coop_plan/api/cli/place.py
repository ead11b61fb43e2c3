"""`coop-plan place`: offsets of the buffers in a CSV file (`planner.importers.buffers_csv`)."""

import click

from coop_plan.api.cli.exit_codes import EXIT_INFEASIBLE, EXIT_TIME, fail
from coop_plan.api.cli.file_kinds import check_kind
from coop_plan.api.cli.input import read_input
from coop_plan.api.cli.output import check_writable, write_whole
from coop_plan.planner.importers.buffers_csv import ALIGNMENT_LIMIT, read_buffers, write_buffers
from coop_plan.schemas import InvalidInputError, format_bytes, parse_bytes


@click.command(short_help="Place the buffers of a CSV file in one arena.")
@click.argument("buffers")
@click.option(
    "--capacity",
    metavar="BYTES",
    help="Search a placement within this size (1MiB, 4096), not the smallest one.",
)
@click.option(
    "--time-limit",
    type=float,
    default=10.0,
    show_default=True,
    metavar="S",
    help="Seconds to search, at most.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 63) - 1),
    default=0,
    show_default=True,
    help="Seed of the search.",
)
@click.option(
    "--alignment",
    type=click.IntRange(1, ALIGNMENT_LIMIT),
    default=1,
    show_default=True,
    help="Alignment of every offset, in bytes.",
)
@click.option(
    "-o", "--output", metavar="CSV", help="Write the placement to this CSV file; - is stdout."
)
@click.option(
    "--plot", metavar="MAP", help="Draw the memory map into this .html, .png or .svg file."
)
def place(
    buffers: str,
    capacity: str | None,
    time_limit: float,
    seed: int,
    alignment: int,
    output: str | None,
    plot: str | None,
) -> None:
    """Place BUFFERS: a CSV file in MiniMalloc's format, or - for stdin.

    A buffer is live in [lower, upper) and has size bytes. Columns: id,lower,upper,size, and as
    needed offset (fixed), alignment, hint and gaps. Exit code 3 if the capacity is proved to be
    too small, 4 if no placement within it was found.
    """
    from coop_plan.api.cli.memory_map import check_drawable, draw
    from coop_plan.planner.placement import FixedOverlapError
    from coop_plan.planner.placement import place as find_offsets
    from coop_plan.planner.verifier import placement_fault

    if not 0 <= time_limit <= 1e9:
        raise click.UsageError("--time-limit: give seconds from 0 to 1e9")
    check_writable(output)
    check_drawable(plot)
    limit = None if capacity is None else parse_bytes(capacity)
    data, source = read_input(buffers)
    try:
        given = read_buffers(data.decode("utf-8-sig"), source, alignment)
    except (UnicodeDecodeError, InvalidInputError) as error:
        check_kind(data, source, "CSV file of buffers")
        if isinstance(error, UnicodeDecodeError):
            raise InvalidInputError("not UTF-8 text", source=source) from None
        raise
    lifetimes = given.lower, given.upper, given.size
    hinted = [i for i, hint in enumerate(given.hint) if hint >= 0]
    try:
        made = find_offsets(
            *lifetimes,
            alignment=given.alignment,
            gaps=given.gaps,
            capacity=limit,
            fixed=given.offset,
            order_hint=sorted(hinted, key=given.hint.__getitem__) or None,
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
    fault = placement_fault(*lifetimes, offsets, alignment=given.alignment, gaps=given.gaps)
    if fault is not None:
        raise RuntimeError(f"the placement is wrong, please report this: {fault}")
    text = write_buffers(given, offsets)
    if plot is not None:
        draw(plot, given, offsets, made.peak, limit)
    if output is not None:
        write_whole(output, text)
    if output == "-":
        return
    loss = made.peak / made.lower_bound - 1 if made.lower_bound else 0.0
    click.echo(f"buffers      {len(offsets)}")
    click.echo(f"peak         {made.peak} bytes  ({format_bytes(made.peak)})")
    click.echo(f"lower bound  {made.lower_bound} bytes  (the peak is {loss:.2%} above)")
    click.echo(f"optimal      {'yes, proved' if made.optimal else 'not proved'}")
    click.echo(f"time         {made.seconds:.2f} s")
