"""Buffers with lifetimes in a CSV file.

The format is that of MiniMalloc (google/minimalloc): a header line, then a line per buffer, with
the columns `id,lower,upper,size` in any order: live in [lower, upper), size in bytes. A column
`offset` gives the address of a buffer beforehand where it is not empty; the answer has it filled.
"""

import csv
import io
from dataclasses import dataclass

from coop_plan.schemas.errors import InvalidInputError

COLUMNS = ("id", "lower", "upper", "size")
LIMIT = 1 << 62
"""Times, sizes, offsets and the sum of the sizes stay below this."""


@dataclass
class Buffers:
    """The lines of the file, in its order."""

    id: list[str]
    lower: list[int]
    upper: list[int]
    size: list[int]
    offset: list[int]
    """-1 where none is given."""


def read_buffers(text: str, source: str, alignment: int = 1) -> Buffers:
    """The buffers of a CSV text; `source` names it in errors.

    Raises:
        InvalidInputError: with the number of the line that is wrong, and why.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    buffers = Buffers([], [], [], [], [])
    columns: list[str] | None = None
    seen: set[str] = set()
    total = 0
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            cells = [cell.strip() for cell in row]
            if columns is None:
                columns = _header(cells)
                continue
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} values for the {len(columns)} columns")
            values = dict(zip(columns, cells, strict=True))
            if values["id"] in seen:
                raise ValueError(f"id {values['id']} is there twice")
            seen.add(values["id"])
            lower, upper, size = (_whole(values, name) for name in COLUMNS[1:])
            offset = _whole(values, "offset") if values.get("offset") else -1
            total += size
            if lower >= upper:
                raise ValueError(f"lower {lower} is not below upper {upper}")
            if size < 0 or total >= LIMIT:
                raise ValueError("size is negative" if size < 0 else "the sizes sum up to too much")
            if values.get("offset") and (offset < 0 or offset % alignment):
                raise ValueError(f"offset {offset} is not a multiple of {alignment} from 0 up")
            buffers.id.append(values["id"])
            buffers.lower.append(lower)
            buffers.upper.append(upper)
            buffers.size.append(size)
            buffers.offset.append(offset)
        if columns is None:
            raise ValueError(f"no header: {','.join(COLUMNS)} expected")
    except (ValueError, csv.Error) as error:
        line = max(1, reader.line_num)
        raise InvalidInputError(f"line {line}: {error}", source=source) from None
    return buffers


def _header(cells: list[str]) -> list[str]:
    columns = [cell.lower() for cell in cells]
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise ValueError(f"the header has no column {missing[0]}: {','.join(COLUMNS)} expected")
    other = [name for name in columns if name not in (*COLUMNS, "offset")]
    if other or len(set(columns)) < len(columns):
        raise ValueError(f"column {other[0]!r} is unknown" if other else "a column is there twice")
    return columns


def _whole(values: dict[str, str], name: str) -> int:
    text = values[name]
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 30:
        raise ValueError(f"{name} is not a whole number: {text[:40]!r}")
    value = int(text)
    if abs(value) >= LIMIT:
        raise ValueError(f"{name} {text} is too large")
    return value


def write_buffers(buffers: Buffers, offsets: list[int] | None) -> str:
    """The CSV text, with an offset for every buffer where there are some."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    columns = [buffers.id, buffers.lower, buffers.upper, buffers.size]
    writer.writerow(COLUMNS if offsets is None else (*COLUMNS, "offset"))
    writer.writerows(zip(*columns, *([] if offsets is None else [offsets]), strict=True))
    return out.getvalue()
