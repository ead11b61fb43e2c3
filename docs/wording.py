"""
Check of the wording rules of CONTRIBUTING.md: `python -m docs.wording --check`.

Two counts must be 0: first lines of docstrings that begin with a free relative ("What is kept
..."), and names that contain a word which the field does not use. The longest sentences of
documents and docstrings are listed for the next editor; no sentence is cut to please this list.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = 10
CHECKED = ("coop_plan", "benchmarks", "docs", "examples")

FREE_RELATIVE = re.compile(r"(?:What|Where|Whether|Who|Which|How|When|Why)(?:ever)?\b")

FIELD_WORD = {
    "alike": "same, equal",
    "anything": "the noun that is meant",
    "astray": "infeasible streak",
    "at_hand": "response cache",
    "bench": "job executor",
    "board": "job store",
    "clairvoyant": "offline (Belady-style) eviction",
    "climb": "hill climbing",
    "course": "iteration recorder",
    "crowded": "layout conflict",
    "desk": "plan service",
    "doorkeeper": "host check",
    "door": "module, entry point, integration",
    "flight": "invocation",
    "gone": "evicted, dead",
    "heard": "notify",
    "heat": "temperature",
    "lasting": "gradients across steps",
    "lesson": "learned correction",
    "lives": "liveness",
    "news": "progress, notification",
    "outline": "residency outline",
    "rebody": "re-select variants",
    "said": "notify",
    "say": "progress callback, log",
    "squeeze": "feasibility phase",
    "steep": "penalty weight",
    "steeper": "penalty weight",
    "suits": "cost-compatible",
    "tell": "progress callback, notify",
    "ticket": "saved handle",
    "told": "notify",
    "touch": "mark dirty, access",
    "trial": "candidate",
    "tried": "bitwise-check cache, attempted",
    "walk": "Metropolis search",
    "want": "request",
    "withdraw": "undo",
}
"""Words that no name contains, and the field's term for each (singular forms)."""

ALLOWED = {"hill_climb", "os.walk", "ast.walk"}
"""Names that contain such a word and are the field's."""


def definitions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each class, function, parameter, variable and attribute that is defined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def odd_words(name: str) -> list[str]:
    """Words of `FIELD_WORD` in a name in any case; plurals count, too."""
    snake = "_".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)).lower()
    if snake.strip("_") in ALLOWED:
        return []
    spelled = re.sub(r"hill_climb", "", snake)
    return [word for word in FIELD_WORD if re.search(rf"(?:^|_){word}s?(?:_|$)", spelled)]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those below a variable or a field included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            text = ast.get_docstring(node)
            if text:
                yield body[0].lineno, text
            yield from (
                (below.lineno, below.value.value.strip())
                for above, below in pairwise(body)
                if isinstance(above, ast.Assign | ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            )


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose; code blocks, tables, headings and list marks are left out."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        if not re.match(r"\s*(?:\||#|    )", paragraph):
            for item in re.split(r"\n\s*(?:[-*]|\d+\.)\s", paragraph):
                yield from re.split(r"(?<=[.:;?!])\s+", " ".join(item.split()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.wording", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a count is not 0")
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in CHECKED])
    arguments = parser.parse_args()
    openings, names, long = [], [], []
    files = [f for p in arguments.paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    for path in files:
        tree = ast.parse(path.read_text())
        place = path.resolve().relative_to(ROOT)
        names += [f"{place}: {place.stem}" for _ in odd_words(path.stem)]
        for line, name in definitions(tree):
            names += [f"{place}:{line}: {name} ({FIELD_WORD[word]})" for word in odd_words(name)]
        for line, text in docstrings(tree):
            if FREE_RELATIVE.match(text):
                openings.append(f"{place}:{line}: {text.splitlines()[0]}")
            long += [(len(s.split()), f"{place}:{line}", s) for s in sentences(text)]
    for page in sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")}):
        if not page.is_symlink():
            text = page.read_text()
            long += [(len(s.split()), str(page.relative_to(ROOT)), s) for s in sentences(text)]
    for found in (*openings, *names):
        print(found)
    print(
        f"{len(openings)} docstrings begin with a free relative, {len(names)} names have odd words"
    )
    for words, place, sentence in sorted(long, reverse=True)[:LONGEST]:
        print(f"{words} words, {place}: {sentence[:160]}")
    return int(arguments.check and bool(openings or names))


if __name__ == "__main__":
    sys.exit(main())
