"""Output of the commands: atomically written files, tables for people, figures for programs."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from coop_plan.planner.core.errors import InfeasibleBudgetError
from coop_plan.schemas import Plan, format_bytes


class OutputError(Exception):
    """The output file cannot be written."""


def check_writable(target: str | None) -> None:
    """Check that an output file can be written, before planning.

    Raises:
        OutputError: the folder is missing, the file is not a regular one, or permission is missing.
    """
    if target is not None and target != "-":
        _regular(target)


def write_whole(target: str, content: str | bytes) -> None:
    """Write a file atomically: an interruption leaves the old file or none.

    A link is followed, and an existing file keeps its mode.

    Raises:
        OutputError: the file cannot be written.
    """
    path = _regular(target)
    data = content.encode() if isinstance(content, str) else content
    with _os_errors(target), _temporary(path) as temporary:
        temporary.write_bytes(data)
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)


def _regular(target: str) -> Path:
    """The path of `target`, an existing regular file or a new one in an existing folder.

    Renaming the temporary file would replace a device or a pipe, so these are refused.
    """
    if not target:
        raise OutputError("the name of the output file is empty")
    with _os_errors(target):
        path = Path(target).resolve()
        if path.is_dir():
            raise OutputError(f"{target} is a folder, not a file")
        if path.exists() and not path.is_file():
            raise OutputError(f"{target} is not a regular file (- is stdout)")
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent} is not a folder: create it first")
        if not os.access(path.parent, os.W_OK):
            raise OutputError(f"{path.parent} cannot be written")
    return path


@contextlib.contextmanager
def _os_errors(target: str) -> Iterator[None]:
    """Context that turns the errors of writing `target` into `OutputError`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        shown = target if len(target) <= 100 else f"{target[:100]}..."
        raise OutputError(f"{shown} cannot be written: {reason}") from None


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".coop-plan.")
    os.close(handle)
    temporary = Path(name)
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(0o666 & ~mask)  # the mode of other new files; mkstemp's is private
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def figures(plan: Plan) -> dict[str, Any]:
    """A plan without its steps."""
    return {name: value for name, value in plan.to_dict().items() if name != "steps"}


def print_plan(
    plan: Plan, op_count: int, unmodelled: Sequence[str] = (), link: str | None = None
) -> None:
    """Print a plan's figures as a table.

    `unmodelled` are the features that keep the method from a bound; `link` says why it did not use
    the copy engines.
    """
    free = plan.budget_bytes - plan.peak_bytes
    rows = [
        ("method", f"{plan.method} ({plan.status})"),
        ("budget", f"{format_bytes(plan.budget_bytes)}  ({plan.budget_bytes} bytes)"),
        ("peak", f"{format_bytes(plan.peak_bytes)}  ({format_bytes(free)} below the budget)"),
        ("resident", format_bytes(plan.resident_bytes)),
        ("arena", f"{format_bytes(plan.arena_bytes)}  ({plan.arena_bytes} bytes)"),
        ("overhead", f"{plan.overhead:.2%}"),
        ("recomputed ops", f"{plan.recomputed_ops} of {op_count}"),
        ("fragmentation", f"{plan.fragmentation:.2%}"),
        ("planning time", f"{plan.solve_seconds:.2f} s"),
    ]
    if plan.swapped_bytes:
        prefetch = f"{plan.prefetch_stall_us / 1e3:.2f} ms for prefetches"
        offload = f"{plan.offload_stall_us / 1e3:.2f} ms for offloads"
        rows[7:7] = [
            ("swapped", f"{format_bytes(plan.swapped_bytes)}, both ways together"),
            (
                "host arena",
                f"{format_bytes(plan.host_arena_bytes)}  ({plan.host_arena_bytes} bytes)",
            ),
            ("stalls", f"{prefetch}, {offload}"),
        ]
    elif link is not None:
        rows.insert(7, ("swapped", link))
    if plan.lower_bound_us is not None and plan.base_cost_us:
        bound = max(0.0, plan.lower_bound_us / plan.base_cost_us - 1)
        limited = ", in program order" if plan.lower_bound_model == "program-order" else ""
        rows.insert(6, ("overhead at least", f"{bound:.2%}{limited}"))
    elif unmodelled:
        rows.insert(6, ("overhead at least", f"not known: {', '.join(unmodelled)} not modelled"))
    if plan.budget_lower_bound_bytes is not None:
        least = plan.budget_lower_bound_bytes
        rows.insert(2, ("budget at least", f"{format_bytes(least)}  ({least} bytes), proved"))
    if plan.eviction_free_ratio is not None:
        rows.insert(-1, ("evictions", f"{plan.evictions}"))
        rows.insert(-1, ("free at evictions", f"{plan.eviction_free_ratio:.2%}"))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}")


def infeasible_document(error: InfeasibleBudgetError) -> dict[str, Any]:
    """An infeasible budget for programs."""
    return {
        "budget_bytes": error.budget_bytes,
        "min_feasible_bytes": error.min_feasible_bytes,
        "met_bytes": error.met_bytes,
        "budget_lower_bound_bytes": error.budget_lower_bound_bytes,
        "blocking_op": error.blocking_op,
        "blocking_op_name": error.blocking_op_name,
        "working_set_bytes": error.working_set_bytes,
        "held": error.held,
    }
