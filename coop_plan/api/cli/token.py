"""`coop-plan token`: a new token for whoever may ask a service."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

if TYPE_CHECKING:
    from coop_plan.api.service.tokens import Scope


@click.command(short_help="Make a token for a service.")
@click.argument("name")
@click.option("--tokens", required=True, metavar="FILE", help="Where its hash is added.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(["plan", "read", "admin"]),
    default=["plan"],
    show_default=True,
    help="What it is for; may be given several times.",
)
def token(name: str, tokens: str, scopes: tuple[str, ...]) -> None:
    """Make a token named NAME and print it, once: FILE has its hash alone.

    Limits of a token are written into FILE by hand; a server reads it when it starts.
    """
    from coop_plan.api.service.tokens import add

    click.echo(add(Path(tokens), name, cast("list[Scope]", list(scopes))))
