"""`coop-plan token`: a new API token for a client of a service."""

from pathlib import Path
from typing import cast

import click

from coop_plan.api.service.tokens import Scope, add


@click.command(short_help="Create an API token for a service.")
@click.argument("name")
@click.option("--tokens", required=True, metavar="FILE", help="Add the token's hash to this file.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(["plan", "read", "admin"]),
    default=["plan"],
    show_default=True,
    help="Scope of the token; may be repeated.",
)
def token(name: str, tokens: str, scopes: tuple[str, ...]) -> None:
    """Create a token named NAME and print it. FILE has only its hash: it cannot be printed again.

    Limits of a token may be added to FILE by hand. A server reads FILE again when it changes.
    """
    click.echo(add(Path(tokens), name, cast("list[Scope]", list(scopes))))
