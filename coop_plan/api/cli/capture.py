"""`coop-plan capture`: a training step of PyTorch as a graph; the command's door to the runtime."""

import contextlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import click
import msgspec

from coop_plan.api.cli.exit_codes import EXIT_ERROR, fail
from coop_plan.api.cli.output import check_writable, write_whole
from coop_plan.api.cli.progress import show_progress
from coop_plan.schemas.errors import missing_package

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
EMA = click.option(
    "--ema",
    is_flag=True,
    help="Add an exponential moving average of the trained parameters; needs --optimizer.",
)
KERNELS = click.option(
    "--kernels",
    type=click.Choice(["eager", "fused"]),
    default="eager",
    show_default=True,
    help="Kernels that run: one for each op, or regions that Inductor compiles.",
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
@EMA
@KERNELS
@click.option(
    "--variants",
    is_flag=True,
    help="Also profile variants of ops that give bitwise equal results.  [default: off]",
)
def capture(target: str, output: str, **options: Any) -> None:
    """Profile a training step of PyTorch into a graph.

    FUNCTION returns (callable, example arguments); the callable returns a loss. Its joint forward
    and backward graph is profiled op by op. With --device nothing runs or is allocated: the step
    is traced as on that device, and op costs are roofline estimates.
    """
    check_writable(output)
    with runtime_work("capture", "tracing"):
        from coop_plan import capture as captured

        graph = captured(target, **options)
    write_whole(output, graph.to_json() + "\n")
    click.echo(f"{output}: {len(graph.ops)} ops, {len(graph.tensors)} tensors", err=True)


@contextlib.contextmanager
def runtime_work(command: str, message: str) -> Iterator[None]:
    """Context of the runtime's work, with its progress; exits without PyTorch, or if it refuses."""
    from coop_plan import RuntimeRefusalError
    from coop_plan.planner.progress import progress_to

    if find_spec("torch") is None:
        fail(missing_package(command, "PyTorch", "torch"), EXIT_ERROR)
    try:
        with show_progress(message=message) as progress, progress_to(progress):
            yield
    except RuntimeRefusalError as error:
        fail(error, EXIT_ERROR)


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
    check_writable(output)
    with runtime_work("calibrate", "measuring"):
        from coop_plan import calibrate as measured

        spec = measured(device)
    write_whole(output, json.dumps(msgspec.to_builtins(spec), indent=2) + "\n")
