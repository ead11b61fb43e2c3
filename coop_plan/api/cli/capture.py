"""`coop-plan capture`: a training step of PyTorch as a graph; the command's door to the runtime."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from coop_plan.api.cli.exit_codes import EXIT_ERROR, fail
from coop_plan.api.cli.progress import show_progress

if TYPE_CHECKING:
    from coop_plan.planner import Progress
    from coop_plan.schemas import Graph

TARGET = click.argument("target", metavar="PACKAGE.MODULE:FUNCTION")
OPTIMIZER = click.option(
    "--optimizer",
    type=click.Choice(["sgd", "momentum", "adamw", "adamw8bit", "adafactor", "lion", "muon"]),
    help="Add the state of this optimizer to the resident tensors.",
)
MASTERS = click.option(
    "--masters",
    is_flag=True,
    help="Add float32 master copies of low-precision parameters; needs --optimizer.",
)


@click.command(short_help="Profile a PyTorch training step into a graph.")
@TARGET
@click.option(
    "-o", "--output", required=True, metavar="GRAPH", help="Write the graph here; - is stdout."
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Trace for this device instead of running here: a100-80gb, rtx4090, ... or a device file.",
)
@click.option(
    "--batch", type=click.IntRange(1), metavar="N", help="Batch size: call FUNCTION(batch=N)."
)
@OPTIMIZER
@MASTERS
@click.option(
    "--variants",
    is_flag=True,
    help="Also profile variants of ops that give bitwise equal results.  [default: off]",
)
def capture(
    target: str,
    output: str,
    device: str | None,
    batch: int | None,
    optimizer: str | None,
    masters: bool,
    variants: bool,
) -> None:
    """Profile a training step of PyTorch into a graph.

    FUNCTION returns (callable, example arguments); the callable returns a loss. Its joint forward
    and backward graph is profiled op by op. With --device nothing runs or is allocated: the step
    is traced as on that device, and op costs are roofline estimates.
    """
    from coop_plan.api.cli.output import check_writable, write_whole

    check_writable(output)
    from coop_plan import RuntimeRefusalError

    try:
        with show_progress(message="tracing") as progress:
            graph = captured(
                target,
                progress,
                device=device,
                batch=batch,
                optimizer=optimizer,
                masters=masters,
                variants=variants,
            )
    except RuntimeRefusalError as error:
        fail(error, EXIT_ERROR)
    if output == "-":
        click.echo(graph.to_json())
        return
    write_whole(output, graph.to_json() + "\n")
    click.echo(f"{output}: {len(graph.ops)} ops, {len(graph.tensors)} tensors", err=True)


def captured(
    target: str, progress: "Callable[[Progress], None] | None" = None, **options: Any
) -> "Graph":
    """Returns the graph of `coop_plan.capture`; ends the command if PyTorch is missing."""
    try:
        from coop_plan import capture
        from coop_plan.planner.progress import progress_to

        with contextlib.nullcontext() if progress is None else progress_to(progress):
            return capture(target, **options)
    except ModuleNotFoundError as error:
        fail_without_torch("capture", error)


def fail_without_torch(command: str, error: ModuleNotFoundError | None = None) -> NoReturn:
    """End the command, which needs PyTorch; an error of another module is raised."""
    if error is not None and error.name != "torch":
        raise error
    from coop_plan.schemas.errors import missing_package

    fail(missing_package(command, "PyTorch", "torch"), EXIT_ERROR)


@click.command(short_help="Measure this machine's device into a device file.")
@click.option(
    "-o", "--output", required=True, metavar="FILE", help="Write the file here; - is stdout."
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device to measure.",
)
def calibrate(output: str, device: str) -> None:
    """Measure a dozen ops and write a device file for --device of capture and fit.

    A peak is the best rate of any op; a class of ops has its share of the peak. It takes ten
    seconds, in which the machine should be idle.
    """
    import json

    import msgspec

    from coop_plan import RuntimeRefusalError
    from coop_plan.api.cli.output import check_writable, write_whole

    check_writable(output)
    try:
        from coop_plan import calibrate as measured
        from coop_plan.planner.progress import progress_to

        with show_progress(message="measuring") as progress, progress_to(progress):
            spec = measured(device)
        found = json.dumps(msgspec.to_builtins(spec), indent=2)
    except RuntimeRefusalError as error:
        fail(error, EXIT_ERROR)
    except ModuleNotFoundError as error:
        fail_without_torch("calibrate", error)
    if output == "-":
        click.echo(found)
    else:
        write_whole(output, found + "\n")
