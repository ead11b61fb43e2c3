"""Pictures of a placement: time to the right, addresses upwards, a rectangle per buffer."""

import html
import io
from pathlib import Path
from typing import TYPE_CHECKING

from coop_plan.api.output import OutputError, check_writable, write_whole

if TYPE_CHECKING:
    from coop_plan.api.buffers import Buffers

WIDTH, HEIGHT = 1200, 700
"""Of the picture, in pixels."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 1.5em; }}
svg {{ width: 100%; height: auto; background: #f4f4f4; }}
rect {{ stroke: #fff; stroke-width: 1; vector-effect: non-scaling-stroke; }}
rect:hover {{ stroke: #000; }}
line {{ stroke: #c00; stroke-dasharray: 6 4; }}
</style>
<p>{title}. Time to the right, addresses upwards; point at a buffer to see which it is.</p>
<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none">
{body}
</svg>
</html>
"""


def check_drawable(target: str | None) -> None:
    """Refuse a picture that could not be drawn before the work begins.

    Raises:
        OutputError: an unknown kind, a place that cannot be written, or a package that is missing.
    """
    if target is None:
        return
    kind = Path(target).suffix.lower()
    if kind not in (".html", ".png"):
        raise OutputError(f"{target}: a memory map is a .html or .png file")
    check_writable(target)
    if kind == ".png":
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            raise OutputError("a .png needs matplotlib: pip install 'coop-plan[plot]'") from None


def draw(
    target: str, buffers: "Buffers", offsets: list[int], peak: int, capacity: int | None
) -> None:
    """Write the memory map; `peak` and `capacity` in bytes."""
    if target.lower().endswith(".html"):
        write_whole(target, _page(buffers, offsets, peak, capacity))
    else:
        write_whole(target, _png(buffers, offsets, peak, capacity))


def _title(offsets: list[int], peak: int, capacity: int | None) -> str:
    within = "" if capacity is None else f" within {capacity:,}"
    return f"{len(offsets):,} buffers in {peak:,} bytes{within}"


def _hue(number: int) -> float:
    """Neighbours in the list get distant colours (golden ratio), as a share of the circle."""
    return number * 0.618034 % 1


def _page(buffers: "Buffers", offsets: list[int], peak: int, capacity: int | None) -> str:
    start, end = min(buffers.lower, default=0), max(buffers.upper, default=1)
    across, up = WIDTH / (end - start), HEIGHT / max(peak, capacity or 0, 1)
    body = []
    rows = zip(buffers.id, buffers.lower, buffers.upper, buffers.size, offsets, strict=True)
    for number, (name, lower, upper, size, offset) in enumerate(rows):
        label = f"{name}: {size:,} bytes at {offset:,}, live in [{lower}, {upper})"
        body.append(
            f'<rect x="{(lower - start) * across:.2f}" y="{HEIGHT - (offset + size) * up:.2f}"'
            f' width="{(upper - lower) * across:.2f}" height="{size * up:.2f}"'
            f' fill="hsl({_hue(number) * 360:.0f} 55% 62%)"><title>{html.escape(label)}</title>'
            "</rect>"
        )
    if capacity is not None:
        y = HEIGHT - capacity * up
        body.append(f'<line x1="0" x2="{WIDTH}" y1="{y:.2f}" y2="{y:.2f}"/>')
    return _PAGE.format(
        title=_title(offsets, peak, capacity), width=WIDTH, height=HEIGHT, body="\n".join(body)
    )


def _png(buffers: "Buffers", offsets: list[int], peak: int, capacity: int | None) -> bytes:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import hsv_to_rgb
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    rows = zip(buffers.lower, buffers.upper, buffers.size, offsets, strict=True)
    corners = [
        [(lower, offset), (lower, offset + size), (upper, offset + size), (upper, offset)]
        for lower, upper, size, offset in rows
    ]
    colours = [tuple(hsv_to_rgb((_hue(i), 0.5, 0.85))) for i in range(len(offsets))]
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.3)
    )
    if capacity is not None:
        axes.axhline(capacity, color="firebrick", linestyle="--")
    axes.set_xlim(min(buffers.lower, default=0), max(buffers.upper, default=1))
    axes.set_ylim(0, max(peak, capacity or 0, 1) * 1.02)
    axes.set_xlabel("time")
    axes.set_ylabel("address in bytes")
    axes.set_title(_title(offsets, peak, capacity))
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
