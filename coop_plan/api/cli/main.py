"""The `coop-plan` command.

stdout is data, stderr is progress and errors. Exit codes: 0 ok, 1 error, 2 usage or invalid input,
3 infeasible budget, 4 time limit reached without any plan, 130 interrupted. Each command makes its
heavy imports when it runs.
"""

import contextlib
import difflib
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from coop_plan.api.cli.capture import calibrate, capture
from coop_plan.api.cli.compare import compare
from coop_plan.api.cli.exit_codes import (
    EXIT_ERROR,
    EXIT_INFEASIBLE,
    EXIT_INTERRUPTED,
    EXIT_INVALID,
    EXIT_TIME,
    WRITE_ERRNOS,
    ClosedOutput,
    OutputError,
    fail,
    interruptions,
    needs_extra,
)
from coop_plan.api.cli.explain import explain
from coop_plan.api.cli.export import export
from coop_plan.api.cli.fit import fit
from coop_plan.api.cli.floor import floor
from coop_plan.api.cli.import_trace import import_
from coop_plan.api.cli.input import read_graph, read_plan, read_valid_plan
from coop_plan.api.cli.output import check_writable, print_plan, write_whole
from coop_plan.api.cli.place import place
from coop_plan.api.cli.plan_options import option_message, parse_plan_options, plan_options
from coop_plan.api.cli.progress import show_progress
from coop_plan.api.cli.serve import serve
from coop_plan.api.cli.show import show
from coop_plan.api.cli.token import token
from coop_plan.api.cli.warm import warm
from coop_plan.api.cli.worker import worker
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import Graph, InvalidInputError, Plan, format_bytes, parse_bytes


class DefaultGroup(click.Group):
    """Group with the default command `plan`: `coop-plan model.json --budget 12GiB`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command before arguments that name none."""
        own = {"--help", "-h", "--version"}
        if args and args[0] not in self.commands and args[0] not in own:
            meant = difflib.get_close_matches(args[0], self.commands, n=1)
            if meant and not Path(args[0]).exists():
                message = f"no command or file '{args[0]}': did you mean '{meant[0]}'?"
                raise click.UsageError(message)
            args = ["plan", *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The group's help, with the options of the default command."""
        default = self.commands["plan"]
        names = ctx.help_option_names
        with click.Context(default, info_name=ctx.info_name, help_option_names=names) as inner:
            default.format_usage(inner, formatter)
            self.format_help_text(ctx, formatter)
            default.format_options(inner, formatter)
        self.format_commands(ctx, formatter)


@click.group(cls=DefaultGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="coop-plan", prog_name="coop-plan")
def cli() -> None:
    """Plan one training step within a hard memory budget.

    GRAPH is a profiled graph (coop-plan/graph/1), or - for stdin. The plan's figures are printed;
    -o writes the plan.
    """


@cli.command()
@click.argument("graph")
@plan_options()
@click.option(
    "--server",
    metavar="URL",
    envvar="COOP_PLAN_SERVER",
    show_envvar=True,
    help="Let this planning service make the plan; its token is read from COOP_PLAN_TOKEN.",
)
@click.option(
    "--from",
    "start",
    metavar="PLAN",
    help="Start from this plan of GRAPH. If it fits the budget, the answer costs no more.",
)
@click.option("-o", "--output", metavar="PLAN", help="Write the plan to this file; - is stdout.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the plan as JSON; with -o, its figures only."
)
def plan(
    graph: str,
    ablate: tuple[str, ...],
    relax: bool,
    server: str | None,
    start: str | None,
    output: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Plan GRAPH within a budget (the default command)."""
    if server and start:
        raise click.UsageError("--from is for plans made here: leave --server out")
    if graph == start == "-":
        raise click.UsageError("only one of GRAPH and --from can be -")
    check_writable(output)
    options = parse_plan_options(values, ablate, relax)
    document = read_graph(graph)
    known = None if start is None else read_valid_plan(document, start)
    from coop_plan.planner.core.errors import InfeasibleBudgetError, infeasible_fields

    try:
        made = _request(server, document, options) if server else _make(document, options, known)
    except InfeasibleBudgetError as error:
        if as_json:
            click.echo(json.dumps({"error": "budget-infeasible"} | infeasible_fields(error)))
        fail(error, EXIT_INFEASIBLE)
    if output is not None and output != "-":
        write_whole(output, made.to_json() + "\n")
    if output == "-" or (as_json and output is None):
        click.echo(made.to_json())
    elif as_json:
        figures = {name: value for name, value in made.to_dict().items() if name != "steps"}
        click.echo(json.dumps(figures))
    else:
        print_plan(
            made, len(document.ops), _unmodelled(document, options), _link(made, document, options)
        )


def _make(graph: Graph, options: PlanOptions, start: Plan | None) -> Plan:
    from coop_plan.planner.planning import plan as make_plan

    with show_progress(options.time_limit) as progress, _without_gc():
        return make_plan(graph, options, progress=progress, start=start)


def _request(server: str, graph: Graph, options: PlanOptions) -> Plan:
    """The plan of a service."""
    with needs_extra("--server", "client"):
        from coop_plan.client.client import Client
        from coop_plan.client.protocol import ServerError
    try:
        with Client(server) as client:
            return client.plan(graph, options)
    except ServerError as error:
        fail(error, EXIT_ERROR)


def _link(made: Plan, graph: Graph, options: PlanOptions) -> str | None:
    """Reason for which a method that could use the copy engines did not; None otherwise."""
    from coop_plan.api.cli.link_report import unused_link_reason
    from coop_plan.planner.core.problem import Problem

    if not options.info.transfers:
        return None
    problem = Problem.from_graph(
        options.apply_link(graph), options.alignment, options.outputs, options.host_budget
    )
    return unused_link_reason(problem, made)


def _unmodelled(graph: Graph, options: PlanOptions) -> list[str]:
    """Features of the graph that the exact method does not model, so that it has no bound."""
    if options.method not in ("optimal", "auto"):
        return []
    from coop_plan.planner.core.problem import beyond_recomputation

    return options.info.unused(beyond_recomputation(options.apply_link(graph), options.host_budget))


@cli.command(short_help="Check PLAN against GRAPH by an independent replay.")
@click.argument("graph")
@click.argument("plan")
@click.option("--budget", metavar="SIZE", help="Check against this budget, not the plan's own.")
def verify(graph: str, plan: str, budget: str | None) -> None:
    """Replay PLAN on GRAPH with code that shares nothing with the methods; - is stdin.

    Exit code 0 if the plan is valid, 1 with its faults if not, 2 if a document cannot be read or
    the plan is for another graph.
    """
    from coop_plan.planner import find_faults

    if graph == plan == "-":
        raise click.UsageError("only one of GRAPH and PLAN can be -")
    limit_bytes = None if budget is None else parse_bytes(budget)
    document = read_graph(graph)
    made = read_plan(plan)
    if limit_bytes is not None:
        made = made.model_copy(update={"budget_bytes": limit_bytes})
    faults = find_faults(document, made)
    if not faults:
        peak, limit = format_bytes(made.peak_bytes), format_bytes(made.budget_bytes)
        click.echo(f"valid: {len(made.steps)} steps, peak {peak} within {limit}")
        return
    for fault in faults:
        click.echo(f"{plan}#{fault.pointer}: {fault.code}: {fault.message}", err=True)
    sys.exit(EXIT_INVALID if faults[0].code == "wrong-graph" else EXIT_ERROR)


@cli.command()
def methods() -> None:
    """List the planning methods, their sources and their switches."""
    from coop_plan.planner import METHODS

    for info in METHODS.values():
        click.echo(f"{info.name}: {info.summary} [{info.source}]")
        for switch, effect in info.switches.items():
            click.echo(f"  --ablate {switch}: {effect}")


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Context without cyclic garbage collection: a plan has many thousand objects and no cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


for _command in (compare, explain, export, calibrate, capture, fit, floor, import_):
    cli.add_command(_command)
for _command in (place, serve, show, token, warm, worker):
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; an error of usage or input ends in one line and an exit code."""
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    with interruptions() as interrupted:
        try:
            _run(arguments)
        except (click.Abort, KeyboardInterrupt):
            fail("interrupted", EXIT_INTERRUPTED)
        if interrupted:  # the method returned its best plan
            fail("interrupted: the plan is the best found until then", EXIT_INTERRUPTED)


def _run(arguments: list[str] | None) -> None:
    try:
        cli.main(args=arguments, prog_name="coop-plan", standalone_mode=False)
        sys.stdout.flush()
    except InvalidInputError as error:
        fail(error if error.source else option_message(error), EXIT_INVALID)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.UsageError as error:
        fail(f"{error.format_message()} (see coop-plan --help)", EXIT_INVALID)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(EXIT_ERROR)
    except TimeoutError as error:
        fail(error, EXIT_TIME)
    except OutputError as error:
        fail(error, EXIT_ERROR)
    except OSError as error:
        if error.errno not in WRITE_ERRNOS:
            raise
        with contextlib.suppress(OSError):  # otherwise Python fails again when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"stdout cannot be written: {error.strerror}", EXIT_ERROR)
