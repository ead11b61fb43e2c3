"""
Command line, table and CSV file of a benchmark, with its columns declared once.

A row is a mapping. A column names a field of it and the format of its cells; the CSV file has the
same fields without a format, those without a title included.
"""

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Column(NamedTuple):
    """Field of the rows; `head` is its title, the field's name if None, and "" hides it."""

    field: str
    head: str | None = None
    form: str | Callable[[Any], str] = ""
    """Format specification, or a function of the value."""

    @property
    def title(self) -> str:
        return self.field.replace("_", " ") if self.head is None else self.head

    def cell(self, row: Mapping[str, Any]) -> str:
        """Formatted value; empty if the row has none."""
        value = row.get(self.field)
        if value is None:
            return ""
        return self.form(value) if callable(self.form) else format(value, self.form)


def scaled(factor: float, form: str) -> Callable[[float], str]:
    """Format of a value that is multiplied by `factor` first: bytes as MB, seconds as ms."""
    return lambda value: format(value * factor, form)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown table with aligned columns: text to the left, numbers to the right."""
    aligned = []
    for head, *cells in zip(heads, *rows, strict=True):
        width = max(3, len(head), *map(len, cells))
        text = any(cell and not re.match(r"[-+]?\d|-$", cell) for cell in cells)
        rule = "-" * width if text else "-" * (width - 1) + ":"
        aligned.append([f"{c:<{width}}" if text else f"{c:>{width}}" for c in (head, rule, *cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*aligned, strict=True))


def write_csv(path: Path | None, fields: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write these fields of the rows, unless there is no path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        print(f"written: {path}")


class Report:
    """Rows of a benchmark; with `progress` each is printed on stderr as soon as it is known."""

    def __init__(self, *columns: Column | str, title: str = "", progress: bool = False) -> None:
        self.columns = [Column(c) if isinstance(c, str) else c for c in columns]
        self.title, self.progress = title, progress
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        if self.progress:
            cells = [column.cell(row) for column in self.columns if column.title]
            print(" | ".join(cells), file=sys.stderr, flush=True)

    def finish(self, path: Path | None = None) -> None:
        """Print the table, and write the CSV file if there is a path."""
        shown = [column for column in self.columns if column.title]
        heads = [column.title for column in shown]
        if self.title:
            print(self.title)
        print(table(heads, [[column.cell(row) for column in shown] for row in self.rows]))
        write_csv(path, [column.field for column in self.columns], self.rows)


def parser(documentation: str | None, csv_file: str | None = None) -> argparse.ArgumentParser:
    """Command line of a benchmark: its docstring as help, and `--csv` with this default."""
    made = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = Path(csv_file) if csv_file else None
    made.add_argument("--csv", type=Path, default=path, help="file for the rows, unformatted")
    return made
