"""`coop-plan capture`: a training step of PyTorch as a graph; the command's door to the runtime."""

from typing import TYPE_CHECKING, Any, NoReturn

import click

from coop_plan.api.cli.exit_codes import EXIT_ERROR, fail

if TYPE_CHECKING:
    from coop_plan.schemas import Graph

TARGET = click.argument("target", metavar="PACKAGE.MODULE:FUNCTION")
OPTIMIZER = click.option(
    "--optimizer",
    type=click.Choice(["sgd", "momentum", "adamw"]),
    help="Whose state is resident, too.",
)
MASTERS = click.option(
    "--masters", is_flag=True, help="With float32 copies of parameters of fewer bits."
)


@click.command(short_help="Profile a training step of PyTorch into a graph.")
@TARGET
@click.option("-o", "--output", required=True, metavar="GRAPH", help="- is stdout.")
@click.option("--device", metavar="DEVICE", help="a100-80gb, rtx4090, ... or a device file.")
@click.option("--batch", type=click.IntRange(1), metavar="N", help="Call FUNCTION(batch=N).")
@OPTIMIZER
@MASTERS
@click.option("--variants", is_flag=True, help="Try other ways to run ops, equal to the bit.")
def capture(
    target: str,
    output: str,
    device: str | None,
    batch: int | None,
    optimizer: str | None,
    masters: bool,
    variants: bool,
) -> None:
    """Profile a training step: the function returns (callable, example arguments).

    The callable returns a loss; its joint forward and backward graph is profiled op by op. With
    --device nothing runs and nothing of the model is allocated: the step is traced as on that
    device, and its costs are a roofline.
    """
    from coop_plan.api.cli.output import check_writable, write_whole

    check_writable(output)
    from coop_plan import RuntimeRefusalError

    try:
        graph = captured(
            target,
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


def captured(target: str, **options: Any) -> "Graph":
    """Returns the graph of `coop_plan.capture`, whose errors pass; ends the command without PyTorch."""
    try:
        from coop_plan import capture

        return capture(target, **options)
    except ModuleNotFoundError as error:
        _fail_without_torch("capture", error)


def _fail_without_torch(command: str, error: ModuleNotFoundError) -> NoReturn:
    if error.name != "torch":
        raise error
    fail(f"{command} needs PyTorch: pip install 'coop-plan[torch]'", EXIT_ERROR)


@click.command(short_help="Measure this machine's device into a file for --device.")
@click.option("-o", "--output", required=True, metavar="FILE", help="- is stdout.")
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Which."
)
def calibrate(output: str, device: str) -> None:
    """Measure a dozen ops here and write a device file, which --device of capture and fit takes.

    Peaks are the best rate that any op reached, shares what the ops of a class reach of them. Leave
    the machine alone meanwhile: ten seconds.
    """
    import json

    import msgspec

    from coop_plan import RuntimeRefusalError
    from coop_plan.api.cli.output import check_writable, write_whole

    check_writable(output)
    try:
        from coop_plan import calibrate as measured

        found = json.dumps(msgspec.to_builtins(measured(device)), indent=2)
    except RuntimeRefusalError as error:
        fail(error, EXIT_ERROR)
    except ModuleNotFoundError as error:
        _fail_without_torch("calibrate", error)
    if output == "-":
        click.echo(found)
    else:
        write_whole(output, found + "\n")
