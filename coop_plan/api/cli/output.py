"""Output of the commands: atomically written files, tables for people, figures for programs."""

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import click

from coop_plan.api.cli.exit_codes import OutputError
from coop_plan.schemas import Plan, format_bytes


def check_writable(target: str | None) -> None:
    """Check that an output file can be written, before planning.

    Raises:
        OutputError: the folder is missing, the target is a folder or a disk, or permission is
            missing.
    """
    if target is not None and target != "-" and not _streams(target):
        _regular(target)


def write_whole(target: str, content: str | bytes) -> None:
    """Write a file atomically: an interruption leaves the old file or none.

    A link is followed, and an existing file keeps its mode. A pipe, a terminal or /dev/null is
    written to as it is, and /dev/fd/N after what was written to it before; - is stdout.

    Raises:
        OutputError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    if target == "-":
        click.echo(data, nl=False)
        return
    if _streams(target):
        with _os_errors(target), _open_stream(target) as stream:
            stream.write(data)
        return
    path = _regular(target)
    with _os_errors(target), _temporary(path) as temporary:
        temporary.write_bytes(data)
        if path.exists():
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        temporary.replace(path)


_DESCRIPTOR = re.compile(r"/dev/fd/(\d+)|/proc/self/fd/(\d+)|/dev/std(?:(out)|err)")
"""Names of the process's own open files, as of process substitution: `>(gzip)`."""


def _streams(target: str) -> bool:
    """True for an open file of the process, and for a pipe or a character device."""
    if _DESCRIPTOR.fullmatch(target):
        return True
    try:
        mode = Path(target).stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _open_stream(target: str) -> IO[bytes]:
    found = _DESCRIPTOR.fullmatch(target)
    if found is None:
        return Path(target).open("wb", buffering=0)
    number = found[1] or found[2] or (1 if found[3] else 2)
    return os.fdopen(os.dup(int(number)), "wb")  # a second open would begin at the file's start


def _regular(target: str) -> Path:
    """The path of `target`, an existing regular file or a new one in an existing folder.

    Renaming the temporary file would replace a disk or a socket, so these are refused.
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
        homes = [("homes", f"{len(plan.homes)} residents on the host")] if plan.homes else []
        rows[7:7] = [
            *homes,
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
        bound = plan.lower_bound_us / plan.base_cost_us - 1
        limited = ", in program order" if plan.lower_bound_model == "program-order" else ""
        rows.insert(6, ("overhead at least", f"{bound:z.2%}{limited}"))
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
