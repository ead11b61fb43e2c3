"""Overhead over peak as text, for a terminal."""

from collections.abc import Mapping, Sequence

from coop_plan.schemas import format_bytes

WIDE, HIGH = 64, 14
MARKS = "ox+*#@%&"


def scatter(points: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """
    The points (bytes, overhead) of each name in a field of characters, a mark a name.

    Where several fall on one place, the first name's is seen.
    """
    every = [point for row in points.values() for point in row]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(0.0, *(y for _, y in every)), max(y for _, y in every)
    field = [[" "] * WIDE for _ in range(HIGH)]
    marks = {name: MARKS[place % len(MARKS)] for place, name in enumerate(points)}
    for name, row in reversed(list(points.items())):
        for x, y in row:
            across = round((x - left) / ((right - left) or 1) * (WIDE - 1))
            up = round((y - low) / ((high - low) or 1) * (HIGH - 1))
            field[HIGH - 1 - up][across] = marks[name]
    lines = []
    for place, line in enumerate(field):
        said = {0: f"{high:.1%}", HIGH - 1: f"{low:.1%}"}.get(place, "")
        lines.append(f"{said:>8} |{''.join(line)}".rstrip())
    lines.append(" " * 9 + "+" + "-" * WIDE)
    first, last = format_bytes(int(left)), format_bytes(int(right))
    lines.append(" " * 10 + first + last.rjust(WIDE - len(first)))
    lines.append(
        " " * 10 + "overhead over peak: " + "  ".join(f"{m} {n}" for n, m in marks.items())
    )
    return "\n".join(lines)
