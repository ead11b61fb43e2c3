"""The documentation's site in a real browser: accessible in both schemes, and its search finds."""

import functools
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

ROOT = Path(__file__).parents[1]
KINDS = ["index", "cli", "benchmarks-methods", "extending"]
"""Pages with a picture, the command's output, wide tables, code."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder and address of the built site; warnings of the build are errors."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(built)]
    subprocess.run(command, cwd=ROOT, check=True)
    handler = functools.partial(SilentHandler, directory=str(built))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield built, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def faults(browser, site, names, scheme, width):
    """Faults of any impact that axe-core finds, and pages wider than the window."""
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 800}, reduced_motion="reduce"
    )
    page = context.new_page()
    found = []
    page.on("pageerror", lambda error: found.append((page.url, str(error))))
    for name in names:
        page.goto(f"{site[1]}/{name}.html")
        page.locator(".md-search[aria-label]").wait_for(state="attached")
        for fault in axe.Axe().run(page).response["violations"]:
            found += [(name, fault["id"], node["html"][:100]) for node in fault["nodes"]]
        if page.evaluate("document.documentElement.scrollWidth") > width:
            found.append((name, "wider than the window"))
    context.close()
    return found


@pytest.mark.parametrize(("scheme", "width"), [("light", 380), ("dark", 1200), ("dark", 380)])
def test_no_kind_of_page_has_a_fault(browser, site, scheme, width):
    assert faults(browser, site, KINDS, scheme, width) == []


@pytest.mark.slow
def test_no_page_has_a_fault_on_a_light_desk(browser, site):
    names = sorted(page.stem for page in site[0].glob("*.html"))
    assert len(names) > 25
    assert faults(browser, site, names, "light", 1200) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_search_finds_and_code_is_copied(browser, site, scheme):
    allowed = ["clipboard-read", "clipboard-write"]
    context = browser.new_context(permissions=allowed, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{site[1]}/index.html")
    page.keyboard.press("/")
    page.keyboard.type("pinned")
    page.locator("a.md-search-result__link").first.wait_for()
    page.get_by_text("matching documents").wait_for()
    assert [fault["id"] for fault in axe.Axe().run(page).response["violations"]] == []
    page.keyboard.press("Escape")
    page.goto(f"{site[1]}/quickstart.html")
    block = page.locator(".highlight").first
    block.hover()
    block.get_by_role("button").click()
    page.get_by_text("Copied to clipboard").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").strip() in block.inner_text()
    context.close()
