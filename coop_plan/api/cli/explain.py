"""`coop-plan explain`: what holds the memory of a step, and what would change it."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from coop_plan.api.cli.exit_codes import EXIT_INFEASIBLE, fail, printable
from coop_plan.api.cli.input import read_graph, read_valid_plan

if TYPE_CHECKING:
    from coop_plan.planner.inspect.explain import Blocker, Explanation, PeakTensor


@click.command(short_help="Say what holds the peak, what blocks a budget, what bytes cost.")
@click.argument("graph")
@click.argument("plan", required=False)
@click.option("--budget", help="Explain the plan within this, or why there is none.")
@click.option("--json", "as_json", is_flag=True, help="Print for programs.")
def explain(graph: str, plan: str | None, budget: str | None, as_json: bool) -> None:
    """Say what holds the peak of PLAN, or of GRAPH's step with everything kept.

    Then which op no budget can go below and what to change about it, what runs again and what for,
    and what each further GiB buys. Exit 3 when --budget cannot be met.
    """
    from coop_plan.planner.core.errors import InfeasibleBudgetError
    from coop_plan.planner.inspect.explain import explain as explain_plan
    from coop_plan.planner.inspect.explain import price_list
    from coop_plan.planner.options import PlanOptions
    from coop_plan.planner.planning import plan as make_plan

    if plan is not None and budget is not None:
        raise click.UsageError("a PLAN has its budget: give PLAN or --budget")
    asked = PlanOptions.of({"budget": budget or "min"})
    document = read_graph(graph)
    everything = make_plan(document, "min", method="keep-all")
    refused: InfeasibleBudgetError | None = None
    made = everything
    if plan is not None:
        made = read_valid_plan(document, plan)
    elif budget is not None:
        try:
            made = make_plan(document, asked)
        except InfeasibleBudgetError as error:
            refused = error
    found = explain_plan(document, made, price_list(document, asked, everything.peak_bytes))
    if as_json:
        click.echo(json.dumps(_document(found, refused)))
    else:
        _print(found)
    if refused is not None:
        fail(refused, EXIT_INFEASIBLE)


LONGEST = 200
"""Characters of a line: a name may have any number of them."""


def say(*lines: str) -> None:
    for line in lines:
        click.echo(printable(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"))


def _document(found: "Explanation", refused: Any) -> dict[str, Any]:
    import msgspec

    made: dict[str, Any] = msgspec.to_builtins(found)
    if refused is not None:
        made["infeasible"] = {
            "budget_bytes": refused.budget_bytes,
            "min_feasible_bytes": refused.min_feasible_bytes,
            "budget_lower_bound_bytes": refused.budget_lower_bound_bytes,
            "blocking_op": refused.blocking_op,
            "blocking_op_name": refused.blocking_op_name,
            "working_set_bytes": refused.working_set_bytes,
            "held": refused.held,
        }
    return made


def _print(found: "Explanation") -> None:
    from coop_plan.planner.inspect.explain import slopes
    from coop_plan.schemas import format_bytes

    at = found.at_op + (f" ({found.at_source})" if found.at_source else "")
    say(
        f"{found.method}: peak {format_bytes(found.peak_bytes)}, overhead {found.overhead:.2%}",
        f"  resident {format_bytes(found.resident_bytes)}, arena"
        f" {format_bytes(found.arena_bytes)}, outputs outside {format_bytes(found.outside_bytes)}",
    )
    if found.holders:
        say("", f"At its fullest, while {at} runs, the arena holds")
        _table(found.holders)
    if found.modules:
        say("", "by module")
        for name, size in found.modules:
            say(f"  {format_bytes(size):>11}  {name}")
    if found.blocker is not None:
        _say_blocker(found.blocker)
    if found.reruns:
        say("", "Runs again, the most memory first")
        for rerun in found.reruns:
            share = rerun.cost_us / found.base_cost_us if found.base_cost_us else 0.0
            freed = format_bytes(rerun.bytes)
            say(
                f"  {freed:>11}  {rerun.op}  {rerun.times} x, {share:.2%} of the step"
                + (f"  {rerun.source}" if rerun.source else "")
            )
    if len(found.prices) > 1:
        unit = 1 << (30 if found.prices[0].budget_bytes > 1 << 30 else 20)
        say("", "What bytes cost")
        for price, slope in zip(found.prices, [None, *slopes(found.prices)], strict=True):
            overhead = "cannot be met" if price.overhead is None else f"{price.overhead:.2%}"
            further = (
                "" if slope is None else f"  {slope * unit:+.2%} a {format_bytes(unit)[5:]} less"
            )
            say(f"  {format_bytes(price.budget_bytes):>11}  {overhead:>13}{further}")


def _say_blocker(blocker: "Blocker") -> None:
    from coop_plan.schemas import format_bytes

    where = f" ({blocker.source})" if blocker.source else ""
    say(
        "",
        f"No plan goes below {format_bytes(blocker.bytes)} of arena: {blocker.op}{where} reads",
        "and makes at once",
    )
    _table(blocker.parts)
    say(f"  To change: {blocker.advice}.")


def _table(holders: Iterable["PeakTensor"]) -> None:
    from coop_plan.schemas import format_bytes

    for holder in holders:
        made = f"{holder.op}  {holder.source}".rstrip()
        say(f"  {format_bytes(holder.bytes):>11}  {holder.tensor}  {holder.kind}  {made}")
