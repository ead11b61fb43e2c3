"""Buffers with lifetimes in a CSV file.

The format is that of MiniMalloc (google/minimalloc): a header line, then a line per buffer, with
columns in any order. `id,lower,upper,size` are required: live in [lower, upper), size in bytes.
`buffer` and `buffer_id` are other names of `id`, `start` and `begin` of `lower`. A column `end` in
place of `upper` has the last moment of each lifetime, and so have the gaps of such a file.

Optional columns: `offset`, a fixed address, if not empty; `alignment` of the offset; `hint`, an
address to try first, if not negative; `gaps`, separated by spaces. In a gap `7-8` the buffer
occupies no bytes, in `7-8@1:17` only those from 1 to below 17.
"""

import csv
import io
import re
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm

from coop_plan.schemas.errors import InvalidInputError

COLUMNS = ("id", "lower", "upper", "size")
LIMIT = 1 << 62
"""Times, sizes, offsets and the sum of the sizes stay below this."""

ALIGNMENT_LIMIT = 1 << 40


@dataclass
class Buffers:
    """The lines of the file, in its order."""

    id: list[str] = field(default_factory=list)
    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    """-1 for none."""
    alignment: list[int] = field(default_factory=list)
    hint: list[int] = field(default_factory=list)
    """-1 for none."""
    gaps: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(position of the buffer, lower, upper, low, high), as `planner.placement.place` takes them"""


def read_buffers(text: str, source: str, alignment: int = 1) -> Buffers:
    """The buffers of a CSV text; `source` names it in errors.

    `alignment` holds for all offsets; `Buffers.alignment` is its common multiple with each line's.

    Raises:
        InvalidInputError: the number of the wrong line, and its fault.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    buffers = Buffers()
    names: dict[str, str] | None = None
    seen: set[str] = set()
    total = 0
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            cells = [cell.strip() for cell in row]
            if names is None:
                names = _header(cells)
                continue
            if len(cells) != len(names):
                raise ValueError(f"{len(cells)} values for the {len(names)} columns")
            values = dict(zip(names, cells, strict=True))
            if values["id"] in seen:
                raise ValueError(f"id {values['id']} is there twice")
            seen.add(values["id"])
            _add_buffer(buffers, values, names, alignment)
            total += buffers.size[-1] + buffers.alignment[-1] - 1
            if total >= LIMIT:
                raise ValueError("the sizes sum up to too much")
        if names is None:
            raise ValueError(f"no header: {','.join(COLUMNS)} expected")
    except (ValueError, csv.Error) as error:
        line = max(1, reader.line_num)
        raise InvalidInputError(f"line {line}: {error}", source=source) from None
    return buffers


def _add_buffer(
    buffers: Buffers, values: dict[str, str], names: dict[str, str], alignment: int
) -> None:
    """Append one line; `names` are the columns as the file has them."""
    lower, upper, size = (_whole(values[name], names[name]) for name in COLUMNS[1:])
    is_last = names["upper"] == "end"
    upper += is_last
    if lower >= upper:
        relation = "above" if is_last else "not below"
        raise ValueError(
            f"{names['lower']} {lower} is {relation} {names['upper']} {upper - is_last}"
        )
    if size < 0:
        raise ValueError("size is negative")
    own = _whole(values["alignment"], "alignment") if values.get("alignment") else 1
    if own < 1:
        raise ValueError(f"alignment {own} is below 1")
    each = lcm(own, alignment)
    if each > ALIGNMENT_LIMIT:
        raise ValueError(f"alignment {own}, with {alignment} of all offsets, is too large")
    offset = _whole(values["offset"], "offset") if values.get("offset") else -1
    if values.get("offset") and (offset < 0 or offset % each):
        raise ValueError(f"offset {offset} is not a multiple of {each} from 0 up")
    hint = _whole(values["hint"], "hint") if values.get("hint") else -1
    gaps = [_gap(gap, lower, upper, size, is_last) for gap in values.get("gaps", "").split()]
    for (_, before, *_), (begin, *_) in pairwise(sorted(gaps)):
        if begin < before:
            raise ValueError(f"two gaps overlap: {values['gaps'][:80]!r}")
    position = len(buffers.id)
    buffers.gaps += [(position, *gap) for gap in gaps if gap[0] < gap[1]]
    buffers.id.append(values["id"])
    buffers.lower.append(lower)
    buffers.upper.append(upper)
    buffers.size.append(size)
    buffers.offset.append(offset)
    buffers.alignment.append(each)
    buffers.hint.append(max(-1, hint))


def _header(cells: list[str]) -> dict[str, str]:
    """The file's own name of each column, in the file's order."""
    aliases = {
        "buffer": "id",
        "buffer_id": "id",
        "start": "lower",
        "begin": "lower",
        "end": "upper",
    }
    names = {aliases.get(cell.lower(), cell.lower()): cell.lower() for cell in cells}
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ValueError(f"the header has no column {missing[0]}: {','.join(COLUMNS)} expected")
    known = (*COLUMNS, "offset", "alignment", "hint", "gaps")
    other = [name for name in names if name not in known]
    if other or len(names) < len(cells):
        raise ValueError(f"column {other[0]!r} is unknown" if other else "a column is there twice")
    return names


def _gap(text: str, lower: int, upper: int, size: int, is_last: bool) -> tuple[int, int, int, int]:
    """A gap's time within the lifetime, empty if it lies outside, and the bytes occupied in it."""
    pattern = r"(-?\d{1,30})-(-?\d{1,30})(?:@(\d{1,30}):(\d{1,30}))?"
    found = re.fullmatch(pattern, text, re.ASCII)
    if not found:
        raise ValueError(f"gap {text[:80]!r} has not the form 7-8 or 7-8@1:17")
    begin, end, low, high = (int(number or 0) for number in found.groups())
    if begin > end:
        raise ValueError(f"gap {text[:80]!r} ends before it begins")
    if not low <= high <= size:
        raise ValueError(f"gap {text[:80]!r} keeps bytes that are not in 0:{size}")
    begin, end = max(begin, lower), min(end + is_last, upper)
    return begin, max(begin, end), low, high


def _whole(text: str, name: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 30:
        raise ValueError(f"{name} is not a whole number: {text[:40]!r}")
    value = int(text)
    if abs(value) >= LIMIT:
        raise ValueError(f"{name} {text} is too large")
    return value


def write_buffers(buffers: Buffers, offsets: list[int] | None) -> str:
    """The CSV text, with the given offsets; optional columns where a buffer needs them."""
    columns = {name: getattr(buffers, name) for name in COLUMNS}
    if any(unit != 1 for unit in buffers.alignment):
        columns["alignment"] = buffers.alignment
    if any(hint >= 0 for hint in buffers.hint):
        columns["hint"] = buffers.hint
    if buffers.gaps:
        written = [""] * len(buffers.id)
        for i, begin, end, low, high in buffers.gaps:
            window = f"@{low}:{high}" if low < high else ""
            written[i] += f"{' ' if written[i] else ''}{begin}-{end}{window}"
        columns["gaps"] = written
    if offsets is not None:
        columns["offset"] = offsets
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return out.getvalue()
