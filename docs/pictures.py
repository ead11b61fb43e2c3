"""Pictures of the documents, made by `make pictures` in headless Chromium.

`map.png` is the memory map of examples/graph.json, `concepts.svg` a sketch of the bytes of a step.
"""

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from coop_plan.api.cli.memory_map import draw_plans
from coop_plan.planner import plan
from coop_plan.planner.inspect.buffers import PlanView, replay_plan
from coop_plan.schemas import Graph, Plan, load_graph

DOCS = Path(__file__).parent
EXAMPLE = DOCS.parent / "examples" / "graph.json"
BUDGET = "50%"
WIDE, TALL = 720, 300
LEFT, RIGHT, TOP, BELOW = 12, 150, 24, 34
COLOURS = {"resident": "#8d97a2", "arena": "#c9d6ea", "live": "#5b8fd6", "outside": "#3f9d6b"}


def main() -> None:
    """Make all pictures again."""
    graph = load_graph(EXAMPLE)
    made = plan(graph, BUDGET)
    sketch = DOCS / "concepts.svg"
    sketch.write_text(concepts(graph, made))
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("docs.pictures: needs chromium, to draw map.png")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        target = Path(folder) / "map.html"
        draw_plans(str(target), graph, {f"{graph.name}, {BUDGET}": made})
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 760}, color_scheme="light")
        page.goto(f"{target.as_uri()}#at={replay_plan(graph, made).fullest}")
        page.locator("main").screenshot(path=str(DOCS / "map.png"))
        browser.close()


def concepts(graph: Graph, made: Plan) -> str:
    """The bytes of a step over its moments, stacked, with budget and peak, as SVG."""
    view = replay_plan(graph, made)
    resident = sum(view.resident.values())
    layers = [
        ("resident", [resident] * len(view.live)),
        ("arena", [resident + view.arena_bytes] * len(view.live)),
        ("live", [resident + live for live in view.live]),
    ]
    top = max(made.budget_bytes, view.peak_bytes) * 1.06
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {TALL}"'
        ' font-family="system-ui, sans-serif" font-size="13" role="img"'
        ' aria-label="Bytes of a step over time">'
    )
    parts = [
        head,
        f'<rect width="{WIDE}" height="{TALL}" fill="#ffffff"/>',
        _area(view, [size + resident + view.arena_bytes for size in view.outside], top, "outside"),
        *(_area(view, sizes, top, name) for name, sizes in (layers[1], layers[2], layers[0])),
        _line(made.budget_bytes, top, "#b3261e", "budget"),
        _line(view.peak_bytes, top, "#1c232b", "peak"),
    ]
    right = WIDE - RIGHT + 8
    for text, size in (
        ("outputs outside", view.peak_bytes - max(view.outside) / 2),
        ("arena (free part pale)", resident + view.arena_bytes / 2),
        ("resident", resident / 2),
    ):
        parts.append(f'<text x="{right}" y="{_y(size, top) + 4:.1f}" fill="#1c232b">{text}</text>')
    steps = f"forward, then backward: {len(view.moments)} steps"
    parts.append(f'<text x="{LEFT}" y="{TALL - 12}" fill="#56616d">{steps}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _y(size: float, top: float) -> float:
    return TALL - BELOW - size / top * (TALL - BELOW - TOP)


def _area(view: PlanView, sizes: list[int], top: float, name: str) -> str:
    across = (WIDE - LEFT - RIGHT) / max(1, len(view.live))
    path = [f"M{LEFT} {TALL - BELOW}"]
    for moment, size in enumerate(sizes):
        path.append(f"V{_y(size, top):.1f}H{LEFT + (moment + 1) * across:.1f}")
    return f'<path d="{"".join(path)}V{TALL - BELOW}Z" fill="{COLOURS[name]}"/>'


def _line(size: int, top: float, colour: str, name: str) -> str:
    y, end = _y(size, top), WIDE - RIGHT
    return (
        f'<path d="M{LEFT} {y:.1f}H{end}" stroke="{colour}" stroke-dasharray="6 4" fill="none"/>'
        f'<text x="{end + 8}" y="{y + 4:.1f}" fill="{colour}">{name}</text>'
    )


if __name__ == "__main__":
    main()
