"""The documents name only what is in the repository, and show what the command prints."""

import re
from pathlib import Path

import pytest

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
