"""The documents name only what is in the repository, and show what the command prints."""

import re
from pathlib import Path

import pytest

from coop_plan.planner import planning
from coop_plan.planner.registry import METHODS
from coop_plan.planner.verifier import verify
from coop_plan.schemas import load_graph
from docs import pictures
from docs.help_text import PAGES, renewed

ROOT = Path(__file__).parents[1]
WRITTEN = [*PAGES, ROOT / "CONTRIBUTING.md"]
FOLDERS = "api|benchmarks|coop_plan|docker|docs|examples|planner|runtime|schemas|tests"
NAMED = re.compile(rf"(?<![\w./~-])(?:{FOLDERS})/[\w./-]*|(?<![\w/.-])[A-Z]{{4,}}\.md\b")
"""Paths in the repository, and files like CHANGELOG.md."""

OURS = "coop_plan[.](?:api|planner|runtime|schemas)|planner|runtime|schemas|benchmarks|docs"
MODULE = re.compile(rf"`(?:python -m )?((?:{OURS})(?:\.[a-z]\w*)+)")
"""Modules, or what is in them, at the beginning of code."""

LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def sources():
    """Python files whose docstrings and comments name others."""
    return [p for f in FOLDERS.split("|") for p in sorted((ROOT / f).glob("**/*.py"))]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_help_texts_are_the_commands_own(page):
    assert renewed(page.read_text()) == page.read_text(), "run: python -m docs.help_text"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_links_and_paths_lead_to_files_of_the_repository(page):
    text = page.read_text()
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    names = {name.rstrip(".") for name in NAMED.findall(text)}
    missing += [name for name in sorted(names) if not (ROOT / name).exists()]
    missing += [name for name in MODULE.findall(text) if not leads_somewhere(name)]
    assert not missing


def test_the_sources_name_only_files_that_are_there():
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for name in NAMED.findall(path.read_text())
        if name.endswith((".py", ".md", ".cpp", ".h")) and not (ROOT / name).exists()
    }
    assert not missing


def leads_somewhere(name):
    """Whether a dotted name is a module of ours, or something in one."""
    parts = name.removeprefix("coop_plan.").split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        module = place.with_suffix(".py") if place.with_suffix(".py").exists() else None
        if module is None and place.is_dir():
            module = place / "__init__.py"
        if module is not None:
            rest = parts[count:]
            return not rest or (module.exists() and rest[0] in module.read_text())
    return False


def test_every_page_is_reachable_and_short():
    """Generated references may be long: the command's help and the changes."""
    config = (ROOT / "mkdocs.yml").read_text()
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert [page.name for page in pages if page.name not in config] == []
    long = {"cli.md", "changelog.md"}
    lengths = {page.name: len(page.read_text().splitlines()) for page in pages}
    assert {name: n for name, n in lengths.items() if n > 200 and name not in long} == {}


def test_messages_of_the_troubleshooting_page_are_those_of_the_sources():
    text = "\n".join(path.read_text() for path in sorted((ROOT / "coop_plan").glob("**/*.py")))
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # literals over several lines
    text = re.sub(r"\{[^{}]*\}", "…", text)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    shown = re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE)
    assert len(shown) > 10
    assert [message for message in shown if message not in text] == []


def test_the_method_of_the_contributors_page_plans(monkeypatch):
    page = (ROOT / "docs" / "extending.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = {}
    exec(code, names)
    method = names["CHEAP_AGAIN"]
    monkeypatch.setitem(METHODS, method.name, method)
    graph = load_graph(ROOT / "examples" / "graph.json")
    made = planning.plan(graph, "75%", method=method.name)
    assert (made.method, made.recomputed_ops > 0) == (method.name, True)
    assert not verify(graph, made)


def test_the_sketch_of_the_concepts_is_the_example_s_plan():
    graph = load_graph(ROOT / "examples" / "graph.json")
    made = planning.plan(graph, pictures.BUDGET)
    assert (ROOT / "docs" / "concepts.svg").read_text() == pictures.concepts(graph, made)
