"""`coop-plan warm`: compiles the planner's kernels, so that no later command does."""

import time

import click

from coop_plan.api.cli.exit_codes import EXIT_ERROR, fail
from coop_plan.api.cli.progress import show_progress


@click.command(short_help="Compile the planner's kernels, once on this machine.")
def warm() -> None:
    """Compile the kernels of all methods and of `place`, and keep them on disk.

    Without it a command compiles those that it needs at its first use; its planning time and time
    limit do not include that. NUMBA_CACHE_DIR names another folder for them.
    """
    from coop_plan.planner.kernels import can_keep, compile_modules

    began = time.monotonic()
    with show_progress() as progress:
        compiled = compile_modules(progress=progress)
    seconds = time.monotonic() - began
    done = f"{compiled} kernels compiled in {seconds:.0f} s" if compiled else "all are compiled"
    if not can_keep():
        fail(f"{done}, but cannot be kept: set NUMBA_CACHE_DIR to a writable folder", EXIT_ERROR)
    click.echo(done)
