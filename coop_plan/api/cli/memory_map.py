"""Pictures of a placement: time to the right, addresses upwards, a rectangle a piece."""

import io
import math
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coop_plan.api.cli.exit_codes import OutputError, needs_extra
from coop_plan.api.cli.output import check_writable, write_whole
from coop_plan.planner.inspect.buffers import KINDS
from coop_plan.planner.inspect.drawing import drawing
from coop_plan.schemas import Graph, Plan, format_bytes
from coop_plan.web import page

if TYPE_CHECKING:
    from coop_plan.planner.importers.buffers_csv import Buffers

_COLOURS = ("#5b8fd6", "#b9a227", "#e07b39", "#8a5bb5", "#c25b8e", "#9aa3ad", "#3f9d6b")
"""By kind, as the page has them (web/palette.js)."""

WIDTH, HEIGHT = 1200, 700
"""Of the picture, in pixels."""

TICKS = 8
"""Most ticks on the axis of addresses."""


def check_drawable(target: str | None) -> None:
    """Refuse a picture that could not be drawn before the work begins; exits without matplotlib.

    Raises:
        OutputError: an unknown kind, or a place that cannot be written.
    """
    if target is None:
        return
    kind = Path(target).suffix.lower()
    if kind not in (".html", ".png", ".svg"):
        raise OutputError(f"{target}: a memory map is a .html, .png or .svg file")
    check_writable(target)
    if kind != ".html":
        with needs_extra(f"a {kind}", "plot"):
            import matplotlib  # noqa: F401


def draw(
    target: str, buffers: "Buffers", offsets: list[int], peak: int, capacity: int | None
) -> None:
    """Write the memory map of a placement; `peak` and `capacity` in bytes."""
    within = "" if capacity is None else f" within {capacity:,}"
    title = f"{len(offsets):,} buffers in {peak:,} bytes{within}"
    if target.lower().endswith(".html"):
        drawn = {
            "title": title,
            "figures": None,
            "map": _placement(buffers, offsets, peak, capacity),
        }
        write_whole(target, page("show.js", "Memory map", {"drawings": [drawn]}))
        return
    rectangles = [row[1:] for row in _rectangles(buffers, offsets)]
    colours = [_COLOURS[0]] * len(rectangles)
    write_whole(target, _picture(target, rectangles, colours, peak, capacity, title, "time"))


def draw_plans(target: str, graph: Graph, plans: dict[str, Plan]) -> None:
    """Write the page with the memory maps of plans, by title, side by side."""
    drawings = [drawing(graph, plan, title) for title, plan in plans.items()]
    name = graph.name or "a training step"
    write_whole(target, page("show.js", f"Memory of {name}", {"drawings": drawings}))


def draw_plan(target: str, graph: Graph, plan: Plan) -> None:
    """Write the memory map of one plan as a picture."""
    made = drawing(graph, plan)
    columns = made["map"]
    rows = zip(columns["begin"], columns["end"], columns["offset"], columns["size"], strict=True)
    colours = [_COLOURS[kind] for kind in columns["kind"]]
    picture = _picture(
        target,
        list(rows),
        colours,
        plan.arena_bytes,
        plan.budget_bytes - plan.resident_bytes - max(columns["outside"], default=0),
        made["title"],
        "step",
        set(columns["kind"]),
    )
    write_whole(target, picture)


def _rectangles(buffers: "Buffers", offsets: list[int]) -> list[tuple[int, int, int, int, int]]:
    """(buffer, begin, end, offset, size) of each piece of a lifetime that occupies bytes."""
    import numpy as np

    from coop_plan.planner.placement.windows import pieces

    lower, upper, size = np.array([buffers.lower, buffers.upper, buffers.size], np.int64)
    found = pieces(lower, upper, size, np.array(buffers.gaps, np.int64).reshape(-1, 5))
    owner = np.repeat(np.arange(len(offsets)), np.diff(found.start))
    bottom = np.array(offsets, np.int64)[owner] + found.low
    table = np.stack([owner, found.first, found.last, bottom, found.high - found.low], axis=1)
    return list(map(tuple, table.tolist()))


def _placement(
    buffers: "Buffers", offsets: list[int], peak: int, capacity: int | None
) -> dict[str, Any]:
    """The map's columns (see `planner.inspect.drawing`); each distinct time is a moment."""
    rectangles = _rectangles(buffers, offsets)
    times = sorted({*buffers.lower, *buffers.upper}.union(*(row[1:3] for row in rectangles)))
    moment = {time: position for position, time in enumerate(times)}
    change = [0] * (len(times) + 1)
    for _, first, last, _, size in rectangles:
        change[moment[first]] += size
        change[moment[last]] -= size
    live = list(accumulate(change))[: max(0, len(times) - 1)]
    return {
        "offset": [row[3] for row in rectangles],
        "size": [row[4] for row in rectangles],
        "begin": [moment[row[1]] for row in rectangles],
        "end": [moment[row[2]] for row in rectangles],
        "kind": None,
        "op": [-1] * len(rectangles),
        "tensor": [row[0] for row in rectangles],
        "live": live,
        "begin_us": [],
        "end_us": 0,
        "peak": max(range(len(live)), key=live.__getitem__, default=-1),
        "arena": peak,
        "outside": [0] * len(live),
        "resident": [],
        "budget": capacity or 0,
        "names": buffers.id,
        "ops": [],
        "sources": [],
    }


def _picture(
    target: str,
    rectangles: list[tuple[int, int, int, int]],
    colours: list[str],
    peak: int,
    capacity: int | None,
    title: str,
    across: str,
    kinds: set[int] | None = None,
) -> bytes:
    """A .png or .svg of rectangles (begin, end, offset, size)."""
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    corners = [
        [(begin, offset), (begin, offset + size), (end, offset + size), (end, offset)]
        for begin, end, offset, size in rectangles
    ]
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.3)
    )
    top = max(peak, 1)
    if capacity is not None and 0 < capacity <= 2 * top:
        axes.axhline(capacity, color="firebrick", linestyle="--", label="budget for the arena")
        top = max(top, capacity)
    axes.set_xlim(
        min((row[0] for row in rectangles), default=0),
        max((row[1] for row in rectangles), default=1),
    )
    axes.set_ylim(0, top * 1.02)
    axes.yaxis.set_major_locator(MultipleLocator(2 ** max(0, math.ceil(math.log2(top / TICKS)))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(int(value))))
    axes.set_xlabel(across)
    axes.set_ylabel("address")
    axes.set_title(title)
    if kinds:
        patches = [Patch(color=_COLOURS[kind], label=KINDS[kind]) for kind in sorted(kinds)]
        axes.legend(handles=patches, loc="upper left", ncols=len(patches))
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(target).suffix[1:].lower())
    return picture.getvalue()
