"""How the command ends: its exit codes, and one line on stderr."""

import sys
from typing import NoReturn

import click

EXIT_ERROR, EXIT_INVALID, EXIT_INFEASIBLE, EXIT_TIME, EXIT_INTERRUPTED = 1, 2, 3, 4, 130


def fail(message: object, code: int) -> NoReturn:
    """End with one line on stderr."""
    click.echo(f"coop-plan: error: {' '.join(str(message).split())}", err=True)
    sys.exit(code)
