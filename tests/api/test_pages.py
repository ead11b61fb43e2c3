"""The pages in a real browser: what they show, by pointer and by keyboard, without an error."""

import base64
import gzip
import itertools
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from coop_plan.api.cli.main import cli
from coop_plan.api.cli.memory_map import draw_plans
from coop_plan.planner import plan
from coop_plan.planner.inspect.buffers import KINDS, replay_plan
from coop_plan.planner.inspect.drawing import drawing
from coop_plan.schemas import load_graph
from coop_plan.web import page as whole_page
from tests.api.server import serving
from tests.planner.test_host_updates import iteration

playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[2]
EXAMPLE = load_graph(ROOT / "examples" / "graph.json")


@pytest.fixture
def page(browser):
    """A page without a network, whose errors fail the test."""
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 800})
    opened = context.new_page()
    wrong = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda line: line.type == "error" and wrong.append(line.text))
    yield opened
    context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def plans():
    return {f"within {share}": plan(EXAMPLE, share) for share in ("50%", "70%")}


@pytest.fixture(scope="module")
def two_maps(plans, tmp_path_factory):
    path = tmp_path_factory.mktemp("maps") / "map.html"
    draw_plans(str(path), EXAMPLE, plans)
    return path.as_uri()


def faults(page):
    """Accessibility faults of any impact that axe-core finds in a page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page).response["violations"]
    return [f["id"] for f in found]


def test_pointing_at_a_rectangle_shows_tensor_op_module_line_size_and_steps(page, two_maps, plans):
    page.goto(two_maps)
    assert page.locator("h2").all_inner_texts() == list(plans)
    drawn = drawing(EXAMPLE, plans["within 50%"])["map"]
    widest = max(range(len(drawn["size"])), key=lambda i: drawn["end"][i] - drawn["begin"][i])
    canvas = page.locator("canvas").first
    x, y = page.evaluate(
        """(i) => {
        const map = document.querySelector("canvas").map;
        const d = map.data;
        return [(map.x(d.begin[i]) + map.x(d.end[i])) / 2, map.y(d.offset[i] + d.size[i] / 2)];
    }""",
        widest,
    )
    canvas.hover(position={"x": x, "y": y})
    tip = page.locator(".tip").first.inner_text()
    op = EXAMPLE.ops[drawn["op"][widest]]
    name = EXAMPLE.tensors[drawn["tensor"][widest]].name
    life = f"steps {drawn['begin'][widest]} to {drawn['end'][widest] - 1}"
    for word in (f"{name} (kept)", op.name, op.source, "4.00 MiB", life):
        assert word in tip


def test_the_map_shows_the_plan_s_peak_where_it_is(page, two_maps, plans):
    """With its parts, on one axis with the budget."""
    page.goto(two_maps)
    made = plans["within 50%"]
    drawn = drawing(EXAMPLE, made)["map"]
    used, peak, order = page.evaluate("""() => {
        const map = document.querySelector("canvas").map;
        const all = map.data.live.map((_, m) => map.used(m));
        const levels = [map.data.budget, Math.max(...all), 0].map((v) => map.level(v));
        const rising = levels[0] < levels[1] && levels[1] < levels[2];
        return [Math.max(...all), all.indexOf(Math.max(...all)), rising];
    }""")
    assert (used, peak, order) == (made.peak_bytes, drawn["peak"], True)
    parts = page.locator(".map .help").first.inner_text()
    for words in (f"peak {made.peak_bytes / 2**20:.2f} MiB", f"step {peak}", "parameters", "arena"):
        assert words in parts


@pytest.mark.parametrize("axis", ["step", "time"])
@pytest.mark.parametrize("window", [None, [20, 60]])
def test_the_map_paints_each_rectangle_in_its_place_and_colour(page, two_maps, axis, window):
    page.goto(two_maps)
    page.get_by_label("horizontal axis").select_option(axis)
    seen, wrong = page.evaluate(
        """(window) => {
        const map = document.querySelector("canvas").map;
        if (window) map.set({ window, addresses: [map.top / 8, map.top] });
        const pen = map.canvas.getContext("2d");
        const { begin, end, offset, size, kind } = map.data;
        const two = (part) => part.toString(16).padStart(2, "0");
        const hex = (pixel) => "#" + [...pixel.slice(0, 3)].map(two).join("");
        let seen = 0;
        const wrong = [];
        for (let i = 0; i < map.count; i += 1) {
            const left = Math.max(map.x(begin[i]), map.left);
            const right = Math.min(map.x(end[i]), map.left + map.width);
            const top = Math.max(map.y(offset[i] + size[i]), map.bottom - map.height);
            const low = Math.min(map.y(offset[i]), map.bottom);
            if (right - left < 4 || low - top < 4) continue;
            const pixel = pen.getImageData((left + right) / 2, (top + low) / 2, 1, 1).data;
            seen += 1;
            if (hex(pixel) !== map.pixelsOf.kinds[kind[i]]) wrong.push(i);
        }
        return [seen, wrong];
    }""",
        window,
    )
    assert seen > 10
    assert wrong == []


def test_a_walk_by_keyboard_leaves_no_trace(page, two_maps):
    page.goto(two_maps)
    picture = "document.querySelector('canvas').toDataURL()"
    canvas = page.locator("canvas").first
    canvas.focus()
    before = page.evaluate(picture)
    for key in ("ArrowRight", "ArrowRight", "PageDown", "ArrowLeft"):
        canvas.press(key)
    assert page.evaluate(picture) != before
    canvas.press("Escape")
    assert page.evaluate(picture) == before


def test_the_keyboard_alone_selects_zooms_and_filters(page, two_maps):
    page.goto(two_maps)
    page.keyboard.press("Tab")  # the search
    page.keyboard.type("model.13")
    for _ in range(3):  # over its two buttons
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")  # by time
    for _ in range(9):  # over the differences and seven kinds to the first map
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    status = page.locator(".status").first
    assert "model.13, examples/train_step.py" in status.inner_text()
    before = status.inner_text()
    page.keyboard.press("ArrowRight")
    assert status.inner_text() != before
    page.keyboard.press("+")
    wide = "(() => { const m = document.querySelector('canvas').map; return m.window; })()"
    low, high = page.evaluate(wide)
    page.keyboard.press("Home")
    assert page.evaluate(wide) != [low, high]
    page.keyboard.press("Escape")
    assert status.inner_text() == ""


@pytest.mark.parametrize("width", [380, 1366, 1920], ids=["phone", "laptop", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_maps_have_no_fault_of_accessibility(browser, two_maps, scheme, width):
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = context.new_page()
    page.goto(two_maps)
    assert faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def cpu_seconds(page):
    """Function that returns the CPU time of the page's main thread so far."""
    metrics = page.context.new_cdp_session(page)
    metrics.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu():
        found = metrics.send("Performance.getMetrics")["metrics"]
        return {entry["name"]: entry["value"] for entry in found}["TaskDuration"]

    return cpu


def frame_ms(page, frames=50):
    """CPU time of a frame of almost the whole plan, of the page's main thread, ms.

    Each is shown, so that the browser's own drawing is in it.
    """
    cpu = cpu_seconds(page)
    begin = cpu()
    page.evaluate(
        """async (frames) => {
        const map = document.querySelector("canvas").map;
        for (let i = 0; i < frames; i += 1) {
            await new Promise(requestAnimationFrame);
            map.set({ window: [i, map.moments - frames + i] });
        }
        await new Promise(requestAnimationFrame);
    }""",
        frames,
    )
    return 1000 * (cpu() - begin) / frames


def test_fifty_thousand_buffers_are_drawn_and_found(page, tmp_path):
    count = 50_000
    columns = {
        "offset": [(i * 7919 % 1000) << 10 for i in range(count)],
        "size": [1 << 10] * count,
        "begin": list(range(count)),
        "end": [i + 40 for i in range(count)],
        "kind": [i % 5 for i in range(count)],
        "op": [-1] * count,
        "tensor": list(range(count)),
        "live": [40 << 10] * (count + 40),
        "begin_us": [],
        "end_us": 0,
        "peak": 0,
        "arena": 1000 << 10,
        "outside": [0] * (count + 40),
        "resident": [],
        "budget": 0,
        "names": [f"t{i}" for i in range(count)],
        "ops": [],
        "sources": [],
    }
    drawings = [{"title": "many", "figures": None, "map": columns}]
    (tmp_path / "many.html").write_text(whole_page("show.js", "many", {"drawings": drawings}))
    cpu = cpu_seconds(page)
    before = cpu()
    page.goto((tmp_path / "many.html").as_uri())
    opened = cpu() - before
    assert 0 < opened < 1  # a plan of Llama-3-8B is a tenth of it
    found = page.evaluate("""() => {
        const map = document.querySelector("canvas").map;
        map.set({ window: [25000, 25100] });
        const i = 25050;
        const at = map.find(map.x(i) + 1, map.y(map.data.offset[i] + 512));
        return map.data.begin[at] <= i && i < map.data.end[at];
    }""")
    assert found
    # Forty of a thousand rows are in use at any moment; a row takes a pixel, and most is free.
    painted = page.evaluate("""() => {
        const map = document.querySelector("canvas").map;
        map.set({ window: [0, map.moments] });
        const { pixels, wide, high } = map.raster;
        return pixels.filter((pixel) => pixel).length / (wide * high);
    }""")
    assert 0.039 < painted < 0.2
    box = page.locator("canvas").first.bounding_box()
    assert min(frame_ms(page) for _ in range(3)) < 8  # 2.8 to 4.8 ms while others work
    page.evaluate("document.querySelector('canvas').map.set({ window: [1000, 2000] })")
    page.mouse.move(box["x"] + 500, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 200)
    page.mouse.up()
    low, high = page.evaluate("document.querySelector('canvas').map.window")
    assert (low > 1000, high - low) == (True, 1000)


WINDOW = "document.querySelector('canvas').map.window"
ADDRESSES = "document.querySelector('canvas').map.addresses"


def in_map(page, moment, address=0.0):
    """Place of a moment and a share of the addresses in the first map, in pixels of the canvas."""
    return page.evaluate(
        """([moment, share]) => {
        const map = document.querySelector("canvas").map;
        return { x: (map.x(moment) + map.x(moment + 1)) / 2, y: map.y(share * map.top) };
    }""",
        [moment, address],
    )


def click(page, moment):
    page.locator("canvas").first.click(position=in_map(page, moment, 0.5))


def test_a_click_lists_all_bytes_of_its_moment(page, two_maps, plans):
    """They sum to the plan's peak, whatever the moment: the arena counts whole."""
    page.goto(two_maps)
    made = plans["within 50%"]
    view = replay_plan(EXAMPLE, made)
    click(page, view.fullest)
    table = page.locator(".moment").first
    used = sum(view.resident.values()) + made.arena_bytes + view.outside[view.fullest]
    assert f"step {view.fullest}," in table.locator("h3").inner_text()
    assert f"{used / 2**20:.2f} MiB" in table.locator("h3").inner_text()
    text = page.evaluate("document.querySelector('canvas').map.table.text()").splitlines()
    heads, rows = text[0].split("\t"), [line.split("\t") for line in text[1:]]
    assert heads == ["tensor", "bytes", "share", "state", "op", "module", "line"]
    assert sum(int(row[1]) for row in rows) == used
    largest = view.at(view.fullest)[0]
    op = EXAMPLE.ops[largest.op]
    assert [EXAMPLE.tensors[largest.tensor].name, largest.kind, op.name] in [
        [row[0], *row[3:5]] for row in rows
    ]
    sizes = [int(row[1]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    table.get_by_role("button", name="tensor").click()
    names = table.locator("tbody td:first-child").all_inner_texts()
    assert names == sorted(names, key=str.lower)
    table.get_by_label("sums by module").check()
    sums = page.evaluate("document.querySelector('canvas').map.table.sorted()")
    assert sum(row["bytes"] for row in sums) == used
    assert len({row["module"] for row in sums}) == len(sums)
    page.locator("canvas").first.press("Escape")
    assert not table.is_visible()


def test_copied_rows_are_a_table(browser, two_maps):
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(two_maps)
    click(page, 10)
    page.locator(".moment").first.get_by_role("button", name="copy").click()
    page.get_by_role("button", name="copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.evaluate("document.querySelector('canvas').map.table.text()")
    context.close()


def test_wheel_box_and_double_click_zoom_both_maps(page, two_maps):
    page.goto(two_maps)
    canvas = page.locator("canvas").first
    whole, tall = page.evaluate(WINDOW), page.evaluate(ADDRESSES)
    spot = in_map(page, 30, 0.5)
    canvas.hover(position=spot)
    page.mouse.wheel(0, -300)
    low, high = page.evaluate(WINDOW)
    assert low <= 30 < high
    assert high - low < whole[1]
    others = "[...document.querySelectorAll('canvas[tabindex]')].map((c) => c.map)"
    shares = page.evaluate(f"{others}.map((map) => map.window[1] / map.moments)")
    assert shares[0] == pytest.approx(shares[1], abs=0.05)
    windows = page.evaluate(f"{others}.map((map) => map.window)")
    page.get_by_label("horizontal axis").select_option("time")
    page.get_by_label("horizontal axis").select_option("step")
    assert page.evaluate(f"{others}.map((map) => map.window)") == windows  # by no rounding
    canvas.hover(position=spot)
    page.keyboard.down("Alt")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Alt")
    assert page.evaluate(ADDRESSES)[1] - page.evaluate(ADDRESSES)[0] < tall[1]
    canvas.dblclick(position=in_map(page, (low + high) // 2))
    assert (page.evaluate(WINDOW), page.evaluate(ADDRESSES)) == (whole, tall)
    box = canvas.bounding_box()
    (a, b) = in_map(page, 20, 0.75), in_map(page, 40, 0.25)
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + a["x"], box["y"] + a["y"])
    page.mouse.down()
    page.mouse.move(box["x"] + b["x"], box["y"] + b["y"], steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    assert page.evaluate(WINDOW) == [20, 41]
    low, high = page.evaluate(ADDRESSES)
    assert (low / tall[1], high / tall[1]) == pytest.approx((0.25, 0.75), abs=0.01)


def test_a_tap_pins_and_a_pinch_zooms(browser, two_maps):
    context = browser.new_context(has_touch=True, viewport={"width": 380, "height": 800})
    page = context.new_page()
    page.goto(two_maps)
    canvas = page.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    spot = in_map(page, 30, 0.5)
    page.touchscreen.tap(box["x"] + spot["x"], box["y"] + spot["y"])
    assert "step 30," in page.locator(".moment h3").first.inner_text()
    touch = context.new_cdp_session(page)

    def send(kind, *xs):
        points = [{"x": box["x"] + x, "y": box["y"] + spot["y"], "id": i} for i, x in enumerate(xs)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    send("touchStart", 150)
    send("touchStart", 150, 250)
    send("touchMove", 120, 280)
    send("touchMove", 100, 300)
    send("touchEnd")
    low, high = page.evaluate(WINDOW)
    assert (high - low) / page.evaluate("document.querySelector('canvas').map.moments") < 0.6
    assert faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    context.close()


def test_a_search_counts_its_matches_and_walks_them(page, two_maps):
    page.goto(two_maps)
    field = page.get_by_label("search for a module, op or tensor")
    field.fill("model.13")
    count = page.locator(".search output")
    total = int(count.inner_text().split()[0])
    assert total > 2
    field.press("Enter")
    assert count.inner_text() == f"1 of {total}"
    page.get_by_label("next match").click()
    assert count.inner_text() == f"2 of {total}"
    assert "model.13" in page.locator(".status").first.inner_text()
    page.get_by_label("previous match").click()
    page.get_by_label("previous match").click()
    assert count.inner_text() == f"{total} of {total}"


def test_legend_and_map_follow_the_theme(page, two_maps):
    page.goto(two_maps)
    look = """() => {
        const swatches = [...document.querySelectorAll(".legend .swatch")];
        const picture = document.querySelector("canvas").toDataURL();
        return [...swatches.map((s) => s.style.background), picture];
    }"""
    follows = f"(known) => ({look})().every((one, i) => (one === known[i]) === EQUAL)"
    light = page.evaluate(look)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(follows.replace("EQUAL", "false"), arg=light)
    page.emulate_media(color_scheme="light")
    page.wait_for_function(follows.replace("EQUAL", "true"), arg=light)


def test_kinds_are_switches_and_differences_are_found(page, two_maps, plans):
    page.goto(two_maps)
    shown = """() => {
        const map = document.querySelector("canvas").map;
        return map.matches().map((i) => [map.data.tensor[i], map.data.kind[i]]);
    }"""
    recomputed = KINDS.index("recomputed")
    assert any(kind == recomputed for _, kind in page.evaluate(shown))
    page.get_by_role("button", name="recomputed").click()
    assert not any(kind == recomputed for _, kind in page.evaluate(shown))
    page.get_by_role("button", name="recomputed").click()
    page.get_by_label("differences only").check()
    left = {tensor for tensor, _ in page.evaluate(shown)}
    kinds = []
    for made in plans.values():
        found = {}
        for rectangle in replay_plan(EXAMPLE, made).rectangles:
            if rectangle.tensor >= 0:
                found.setdefault(rectangle.tensor, []).append((rectangle.begin, rectangle.kind))
        kinds.append({t: [kind for _, kind in sorted(lives)] for t, lives in found.items()})
    assert left == {t for t in kinds[0] if kinds[0][t] != kinds[1].get(t)}


def test_a_link_leads_to_the_same_view(page, two_maps):
    page.goto(two_maps)
    page.get_by_label("search for a module, op or tensor").fill("model.13")
    page.get_by_label("horizontal axis").select_option("time")
    page.locator("canvas").first.hover(position=in_map(page, 30, 0.5))
    page.mouse.wheel(0, -300)
    click(page, 30)
    state = "(({ window, pinned, byTime, filter }) => [window, pinned, byTime, filter])"
    state = f"{state}(document.querySelector('canvas').map)"
    page.wait_for_function("location.hash.includes('at=30')")
    before, address = page.evaluate(state), page.url
    page.goto("about:blank")
    page.goto(address)
    assert page.evaluate(state) == before
    assert before[1:] == [30, True, "model.13"]
    page.goto("about:blank")
    page.goto(two_maps + "#steps=9-3&at=x&axis=%%")  # a spoilt one
    assert page.evaluate(state)[1:3] == [-1, False]


def test_picture_and_data_are_downloads(page, two_maps, plans):
    page.goto(two_maps)
    with page.expect_download() as data:
        page.get_by_role("button", name="data").first.click()
    columns = drawing(EXAMPLE, plans["within 50%"])["map"]
    assert json.loads(Path(data.value.path()).read_text()) == columns
    with page.expect_download() as picture:
        page.get_by_role("button", name="picture").first.click()
    assert picture.value.suggested_filename == "within-50-.png"
    assert Path(picture.value.path()).read_bytes()[:4] == b"\x89PNG"


def test_the_minimap_moves_the_window(page, two_maps):
    page.goto(two_maps)
    page.evaluate("document.querySelector('canvas').map.set({ window: [0, 10] })")
    strip = page.locator("canvas.minimap").first
    box = strip.bounding_box()
    strip.click(position={"x": box["width"] * 0.7, "y": 10})
    low, high = page.evaluate(WINDOW)
    assert (high - low, low > 20) == (10, True)


def test_phases_modules_and_engines_have_bands(page, tmp_path):
    made = plan(EXAMPLE, "50%", link="25GB/s")
    assert any(step.do == "prefetch" for step in made.steps)
    draw_plans(str(tmp_path / "map.html"), EXAMPLE, {"swapped": made})
    page.goto((tmp_path / "map.html").as_uri())
    bands = "document.querySelector('canvas').map.bands"
    assert all(page.evaluate(f"{bands}.heights"))
    phases = page.evaluate(f"{bands}.stretches({bands}.phases)")
    assert [text for _, _, text in phases] == ["forward", "backward"]
    modules = {text for _, _, text in page.evaluate(f"{bands}.moduleStretches()")}
    assert any(name.startswith("model") for name in modules)
    view = replay_plan(EXAMPLE, made)
    copies = [m for m, moment in enumerate(view.moments) if moment.engine != "compute"]
    assert page.evaluate(f"{bands}.copies") == copies


def test_updates_on_the_host_have_a_lane(page, tmp_path):
    graph = iteration()
    made = plan(graph, 8000, alignment=1)
    view = replay_plan(graph, made)
    assert any(moment.engine == "host" for moment in view.moments)
    draw_plans(str(tmp_path / "map.html"), graph, {"on the host": made})
    page.goto((tmp_path / "map.html").as_uri())
    bands = "document.querySelector('canvas').map.bands"
    lanes = ["compute", "to host", "from host", "on host"]
    assert page.evaluate(f"{bands}.lanesUsed") == lanes


def test_a_page_holds_whatever_a_name_contains(page, tmp_path):
    text = whole_page("show.js", "</title><script>alert(1)</script>", {"drawings": []})
    data = {"name": "</script><script>throw 1</script>"}
    hostile = whole_page("show.js", "t", {"drawings": [], **data})
    assert json.dumps(data["name"])[1:-1] not in hostile
    (tmp_path / "page.html").write_text(text)
    page.goto((tmp_path / "page.html").as_uri())
    assert page.title() == "</title><script>alert(1)</script>"


def test_the_report_opens_the_map_of_a_plan(page, tmp_path, plans):
    columns = drawing(EXAMPLE, plans["within 50%"])
    once = {name: columns["map"].pop(name) for name in ("names", "ops", "sources", "phases")}
    packed = base64.b64encode(gzip.compress(json.dumps(columns["map"]).encode())).decode()
    figures = columns["figures"]
    cell = {
        "asked": "50%",
        "method": "coop-offline",
        "state": "planned",
        "bound": 0.1,
        "map": packed,
    }
    cell |= figures | {"figures": figures, "least_bytes": None, "why": ""}
    refused = {"asked": "1%", "method": "coop", "state": "infeasible", "why": "too small"}
    data = {"name": "mlp", "cells": [cell, refused], "once": once}
    (tmp_path / "report.html").write_text(whole_page("report.js", "Plans", data))
    page.goto((tmp_path / "report.html").as_uri())
    overhead = 100 * plans["within 50%"].overhead
    assert f"{overhead:.2f} %" in page.locator("tbody tr").first.inner_text()
    page.get_by_role("button", name="map of coop-offline, 50%").press("Enter")
    page.locator(".map canvas[tabindex]").wait_for()
    assert page.locator("h2").inner_text() == "coop-offline within 50%"
    assert page.evaluate("document.activeElement === document.querySelector('.map canvas')")
    assert page.evaluate("document.activeElement.getBoundingClientRect().top < innerHeight")
    assert "coop within 1%: too small" in page.get_by_label("failures").inner_text()
    assert faults(page) == []
    page.evaluate("document.querySelector('.opened').replaceChildren()")
    page.locator("section canvas").first.click(
        position=page.evaluate("""() => {
        const plot = document.querySelector("section canvas").plot;
        return { x: plot.x(plot.cells[0].peak_bytes), y: plot.y(plot.cells[0].overhead) };
    }""")
    )
    page.locator(".map canvas[tabindex]").wait_for()


def test_points_of_a_report_are_joined_by_steps(page, tmp_path):
    """Between two plans nothing is known but that the smaller one meets the larger budget, too."""
    once = {"state": "planned", "method": "coop", "bound": None, "map": None, "why": ""}
    rest = {"budget_bytes": 1, "fragmentation": 0.0, "least_bytes": None, "solve_seconds": 0.0}
    cells = [
        once | rest | {"asked": f"{peak}", "peak_bytes": peak << 20, "overhead": overhead}
        for peak, overhead in ((10, 0.4), (20, 0.25), (30, 0.3), (40, 0.0))
    ]
    text = whole_page("report.js", "Plans", {"name": "mlp", "cells": cells, "once": {}})
    (tmp_path / "report.html").write_text(text)
    page.goto((tmp_path / "report.html").as_uri())
    path, points = page.evaluate("""() => {
        const { plot } = document.querySelector("section canvas");
        const path = [];
        const pen = { beginPath() {}, stroke() {}, fill() {}, arc() {} };
        plot.line({ ...pen, lineTo: (...at) => path.push(at) }, "coop", "red", 4);
        return [path, plot.cells.map((cell) => [plot.x(cell.peak_bytes), plot.y(cell.overhead)])];
    }""")
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(path))
    assert all(point in path for point in (points[0], points[1], points[3]))
    assert points[2] not in path  # the plan of 20 MiB costs less


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    options = ("--store", str(folder / "plans.db"), "--solvers", "2", "--max-time-limit", "300")
    with serving(folder, *options) as server:
        yield server


class Visit:
    """A page of a service, with its requests and its errors."""

    def __init__(self, browser, server, **context):
        self.at = str(server.base_url).rstrip("/")
        self.context = browser.new_context(**{"viewport": {"width": 380, "height": 800}} | context)
        self.page = self.context.new_page()
        self.requests, self.wrong = [], []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda line: line.type == "error" and self.wrong.append(line.text))
        self.page.on("request", lambda request: self.requests.append(request))

    def __enter__(self):
        self.page.goto(self.at)
        return self

    def __exit__(self, *_):
        self.context.close()

    def sent(self, method, path):
        """Requests of a method whose path begins so."""
        paths = [(r.method, r.url.removeprefix(self.at)) for r in self.requests]
        return [path_ for method_, path_ in paths if method_ == method and path_.startswith(path)]

    def open_sample(self):
        self.page.get_by_role("button", name="Sample graph").click()
        self.page.get_by_text("perceptron of 12 layers: 61 ops").wait_for()

    def choose(self, *methods, budgets=None, **fields):
        for box in self.page.locator("fieldset input").all():
            box.set_checked(box.get_attribute("value") in methods)
        if budgets is not None:
            self.page.get_by_label("Budgets").fill(budgets)
        for name, value in fields.items():
            self.page.locator(f"#{name}").fill(value)

    def plan(self):
        self.page.get_by_role("button", name="Plan", exact=True).press("Enter")

    def status(self, text):
        self.page.locator(".status", has_text=text).first.wait_for(timeout=90_000)

    def error_of(self, field):
        shown = self.page.locator(f"#{field}-error")
        playwright.expect(shown).not_to_be_empty()
        return shown.inner_text()


def same_map(page, place, known):
    drawn = page.evaluate(f"document.querySelectorAll('.map canvas[tabindex]')[{place}].map.data")
    assert {k: v for k, v in drawn.items() if not k.endswith("_us")} == {
        k: v for k, v in known.items() if not k.endswith("_us")
    }
    assert drawn["begin_us"] == pytest.approx(known["begin_us"], abs=0.01)


def test_the_page_of_the_interface_names_its_example(browser, service):
    with Visit(browser, service) as visit:
        visit.page.goto(f"{visit.at}/docs")
        operation = visit.page.locator("#operations-plans-post_plan_plan_post")
        operation.locator("button").first.click()
        visit.page.get_by_text("perceptron of 2 layers").first.wait_for()
        assert faults(visit.page) == []
        assert visit.wrong == []


def test_the_service_s_page_plans_a_graph_and_shows_what_the_planner_makes(browser, service):
    with Visit(browser, service) as visit:
        page = visit.page
        assert faults(page) == []
        page.set_input_files("#graph", ROOT / "examples" / "graph.json")
        page.get_by_text("53 ops, 72 tensors").wait_for()
        visit.choose("coop", "dtr", budgets="60%, 60MiB", time_limit="100")
        visit.plan()
        visit.status("4 of 4 plans")
        page.locator(".map canvas[tabindex]").first.wait_for()
        for button in page.get_by_role("button", name="map of", pressed=True).all():
            button.press("Enter")  # whichever came first
        for budget in ("60%", "60MiB"):
            page.get_by_role("button", name=f"map of coop within {budget}").press("Enter")
        for place, budget in enumerate(("60%", "60MiB")):
            known = drawing(EXAMPLE, plan(EXAMPLE, budget, method="coop"))["map"]
            same_map(page, place, known)
        page.get_by_label("differences only").check()
        assert f"{visit.at}/plan" in page.locator("pre").first.inner_text()
        assert (
            'graph, "60%", method="coop", time_limit=100' in page.locator("pre").last.inner_text()
        )
        assert faults(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        with page.expect_download() as saved:
            page.get_by_role("button", name="download of coop within 60%").press("Enter")
        assert json.loads(saved.value.path().read_text())["method"] == "coop"
        assert len(visit.sent("PUT", "/graphs/")) == 1
        bodies = [r.post_data for r in visit.requests if r.url.endswith("/plan")]
        assert bodies
        assert max(map(len, bodies)) < 300  # the graph by its digest
        page.reload()
        visit.status("4 of 4 plans")
        assert page.locator("fieldset input:checked").count() == 2
        assert page.get_by_label("Budgets").input_value() == "60%, 60MiB"
        assert page.locator("#time_limit").input_value() == "100"
        page.locator(".map canvas[tabindex]").nth(1).wait_for()
        assert page.locator("h2").all_inner_texts()[:2] == ["coop within 60%", "coop within 60MiB"]
        assert visit.wrong == []
        assert all(r.url.startswith((visit.at, "blob:", "data:")) for r in visit.requests)


def test_a_sample_begins_and_plans_appear_as_they_come(browser, service):
    with Visit(browser, service) as visit:
        page = visit.page
        assert "not the graph itself" in page.get_by_label("request").inner_text()
        assert page.get_by_role("button", name="Plan", exact=True).is_disabled()
        visit.open_sample()
        visit.choose("coop", "auto", budgets="50%", time_limit="200")
        visit.plan()
        visit.status("1 of 2 plans")  # the other one still runs
        page.locator(".map canvas[tabindex]").wait_for()
        page.get_by_text(re.compile(r"\d+ s left")).wait_for()
        stop = page.get_by_role("button", name="Cancel", exact=True)
        assert faults(page) == []
        stop.press("Enter")
        visit.status("1 of 2 plans, 1 cancelled")
        playwright.expect(stop).to_be_disabled()
        [job] = set(visit.sent("DELETE", "/jobs/"))
        assert service.get(job).json()["state"] == "cancelled"
        assert visit.wrong == []


def test_a_bad_graph_is_one_error_at_its_field(browser, service):
    damaged = json.loads((ROOT / "examples" / "graph.json").read_bytes())
    damaged["ops"][3]["inputs"] = [999]
    bad = {"name": "bad.json", "mimeType": "application/json"}
    with Visit(browser, service) as visit:
        visit.page.set_input_files("#graph", bad | {"buffer": json.dumps(damaged).encode()})
        error = visit.error_of("graph")
        assert "bad.json" in error
        assert "/ops/3/inputs/0" in error
        assert visit.page.get_by_role("button", name="Plan", exact=True).is_disabled()
        assert len([line for line in visit.wrong if "422" in line]) == len(visit.wrong) == 1
        visit.page.set_input_files("#graph", bad | {"buffer": b"no json"})
        visit.page.locator("#graph-error", has_text="JSON").wait_for()
        visit.open_sample()
        assert visit.page.locator("#graph-error").inner_text() == ""
        assert visit.sent("POST", "/plan") == []


@pytest.mark.parametrize(
    ("field", "options", "error", "requests"),
    [
        ("methods", {}, "choose at least one method", 0),
        ("budgets", {"budgets": " , "}, "at least one budget", 0),
        ("budgets", {"budgets": "60%, a lot"}, '"a lot" is not a budget', 0),
        ("budgets", {"budgets": "5 parsecs"}, "'5 parsecs' is not a budget", 1),
        ("time_limit", {"time_limit": "-1"}, "number of seconds", 0),
        ("time_limit", {"time_limit": "301"}, "the time limit on this server is 300 s", 1),
        ("host_budget", {"host_budget": "lots"}, "'lots' is not a size", 1),
    ],
)
def test_an_error_is_at_the_field_that_it_is_of(browser, service, field, options, error, requests):
    with Visit(browser, service) as visit:
        visit.open_sample()
        methods = () if field == "methods" else ("coop",)
        visit.choose(*methods, **{"budgets": "90%"} | options)
        visit.plan()
        assert error in visit.error_of(field)
        assert len(visit.sent("POST", "/plan")) == requests
        others = {"graph", "token", "budgets", "time_limit", "host_budget", "methods"} - {field}
        assert {visit.page.locator(f"#{other}-error").inner_text() for other in others} == {""}
        assert faults(visit.page) == []
        visit.choose("keep-all", budgets="100%", time_limit="", host_budget="")
        visit.plan()
        visit.status("1 of 1 plans")
        assert visit.page.locator(f"#{field}-error").inner_text() == ""


def test_a_missing_and_an_unknown_token_read_differently(browser, tmp_path):
    tokens = tmp_path / "tokens.json"
    made = CliRunner().invoke(
        cli, ["token", "page", "--tokens", str(tokens), "--scope", "plan", "--scope", "read"]
    )
    options = ("--tokens", str(tokens), "--store", str(tmp_path / "plans.db"), "--solvers", "1")
    with serving(tmp_path, *options) as server, Visit(browser, server) as visit:
        assert "needs a token" in visit.error_of("token")
        token = visit.page.get_by_label("Token")
        visit.page.get_by_role("button", name="Sample graph").click()
        token.fill("coop_wrong")
        token.press("Tab")
        visit.page.locator("#token-error", has_text="does not know this token").wait_for()
        token.fill(made.output.split()[-1])
        token.press("Tab")
        visit.status("61 ops")  # the sample that was refused is uploaded now
        assert visit.page.locator("#token-error").inner_text() == ""
        assert visit.page.locator(".wrong:not(:empty)").count() == 0


def test_a_page_without_sha_256_asks_the_service_for_the_digest(browser, service):
    with Visit(browser, service) as visit:
        visit.page.add_init_script("Object.defineProperty(crypto, 'subtle', { value: undefined })")
        visit.page.reload()
        visit.open_sample()
        assert len(visit.sent("PUT", "/graphs/")) == 2
        assert "graph=sha256" in visit.page.url


def test_a_disabled_button_looks_disabled(browser, service):
    with Visit(browser, service) as visit:
        look = "(b) => [getComputedStyle(b).opacity, getComputedStyle(b).cursor]"
        button = visit.page.get_by_role("button", name="Plan", exact=True)
        disabled = button.evaluate(look)
        visit.open_sample()
        assert disabled == ["0.6", "not-allowed"]
        assert button.evaluate(look) == ["1", "pointer"]
