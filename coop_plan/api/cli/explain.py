"""`coop-plan explain`: the peak of a step, its smallest budget, and the price of memory."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from coop_plan.api.cli.exit_codes import EXIT_INFEASIBLE, fail, printable
from coop_plan.api.cli.input import read_graph, read_valid_plan
from coop_plan.api.cli.progress import show_progress
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import format_bytes

if TYPE_CHECKING:
    from coop_plan.planner.inspect.explain import Blocker, Explanation, PeakTensor


@click.command(short_help="Explain the peak, the smallest budget and the price of memory.")
@click.argument("graph")
@click.argument("plan", required=False)
@click.option(
    "--budget", metavar="SIZE", help="Explain the plan within this budget, or why there is none."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(graph: str, plan: str | None, budget: str | None, as_json: bool) -> None:
    """List the tensors at the peak of PLAN, or of GRAPH's step with everything kept.

    Then list the working set that no budget can be below, with advice; the recomputed ops, by the
    bytes that each frees; and the overhead for each GiB less. Exit code 3 if --budget cannot be
    met.
    """
    from coop_plan.planner.core.errors import InfeasibleBudgetError, infeasible_fields
    from coop_plan.planner.inspect.explain import explain as explain_plan
    from coop_plan.planner.inspect.explain import price_list
    from coop_plan.planner.planning import plan as make_plan

    if plan is not None and budget is not None:
        raise click.UsageError("PLAN has a budget of its own: give PLAN or --budget, not both")
    options = PlanOptions.of({"budget": budget or "min"})
    document = read_graph(graph)
    given = None if plan is None else read_valid_plan(document, plan)
    if given is not None:
        options = PlanOptions.of_plan(given, budget="min")
    refused: InfeasibleBudgetError | None = None
    with show_progress() as progress:
        keep_all = msgspec.structs.replace(options, budget_="min", method="keep-all")
        everything = make_plan(document, keep_all, progress=progress)
        made = given or everything
        if budget is not None:
            try:
                made = make_plan(document, options, progress=progress)
            except InfeasibleBudgetError as error:
                refused = error
        prices = price_list(document, options, everything.peak_bytes, progress)
    found = explain_plan(document, made, prices)
    if as_json:
        printed: dict[str, Any] = msgspec.to_builtins(found)
        if refused is not None:
            printed["infeasible"] = infeasible_fields(refused)
        click.echo(json.dumps(printed))
    else:
        _print(found)
    if refused is not None:
        fail(refused, EXIT_INFEASIBLE)


MAX_LINE = 200
"""Characters of a line; names may be longer."""


def _echo(*lines: str) -> None:
    for line in lines:
        click.echo(printable(line if len(line) <= MAX_LINE else line[: MAX_LINE - 1] + "…"))


def _print(found: "Explanation") -> None:
    from coop_plan.planner.inspect.explain import slopes

    def at(op: str, source: str) -> str:
        return op + (f" ({source})" if source else "")

    def omitted(name: str) -> None:
        if name in found.omitted:
            count, size = found.omitted[name]
            _echo(f"  {format_bytes(size):>11}  in {count:,} more")

    least = found.budget_lower_bound_bytes
    parts = {f"{kind}s": size for kind, size in found.residents.items()}
    parts |= {"arena": found.arena_bytes, "outputs outside it": found.outside_bytes}
    _echo(
        f"{found.method}: peak {format_bytes(found.peak_bytes)}, overhead {found.overhead:.2%}",
        f"  first at step {found.peak_moment}, {at(found.peak_op, found.peak_source)}",
        f"  budget at least {format_bytes(least)}  ({least} bytes), proved",
        *(f"  {format_bytes(size):>11}  {name}" for name, size in parts.items() if size),
    )
    if found.holders:
        full = f"{format_bytes(found.live_bytes)} of {format_bytes(found.arena_bytes)}"
        _echo("", f"The arena is fullest ({full}) while {at(found.at_op, found.at_source)} runs")
        _table(found.holders)
        omitted("holders")
    if found.modules:
        _echo("", "by module")
        for entry in found.modules:
            _echo(f"  {format_bytes(entry.bytes):>11}  {entry.module}")
        omitted("modules")
    if found.blocker is not None:
        _print_blocker(found.blocker)
    if found.reruns:
        _echo("", "Recomputed, the most memory first")
        for rerun in found.reruns:
            share = rerun.cost_us / found.base_cost_us if found.base_cost_us else 0.0
            freed = format_bytes(rerun.bytes)
            _echo(
                f"  {freed:>11}  {rerun.op}  {rerun.times} x, {share:.2%} of the step"
                + (f"  {rerun.source}" if rerun.source else "")
            )
        omitted("reruns")
    if found.moves:
        _echo("", "Moved to the host, the most memory first")
        for move in found.moves:
            waits = f"{move.times} x, waits of {move.stall_us / 1e3:.3g} ms"
            made = f"{move.op}  {move.source}".rstrip()
            _echo(f"  {format_bytes(move.bytes):>11}  {move.tensor}  {waits}  {made}".rstrip())
        omitted("moves")
    if len(found.prices) > 1:
        unit = 1 << (30 if found.prices[0].budget_bytes > 1 << 30 else 20)
        _echo("", "Price of memory")
        for price, slope in zip(found.prices, [None, *slopes(found.prices)], strict=True):
            overhead = "cannot be met" if price.overhead is None else f"{price.overhead:.2%}"
            further = (
                "" if slope is None else f"  {slope * unit:+.2%} a {format_bytes(unit)[5:]} less"
            )
            _echo(f"  {format_bytes(price.budget_bytes):>11}  {overhead:>13}{further}")


def _print_blocker(blocker: "Blocker") -> None:
    where = f" ({blocker.source})" if blocker.source else ""
    _echo(
        "",
        f"No plan has an arena below {format_bytes(blocker.bytes)}, the working set of",
        f"{blocker.op}{where}",
    )
    _table(blocker.parts)
    _echo(f"  To change: {blocker.advice}.")


def _table(holders: Iterable["PeakTensor"]) -> None:
    for holder in holders:
        made = f"{holder.op}  {holder.source}".rstrip()
        _echo(f"  {format_bytes(holder.bytes):>11}  {holder.tensor}  {holder.kind}  {made}")
