"""HTML pages: modules of JavaScript and a style sheet, bundled into one file.

The modules need no build, and a page needs no network. A page has them as one script, in the order
of their imports and without the words import and export, so that top-level names of all modules
must differ.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Collection
from importlib import resources
from typing import Any

if __name__ != "coop_plan.web":  # found by a link of a checkout
    raise ImportError(f"import coop_plan.web, not {__name__}")

IMPORT = re.compile(r'^import (?:\{[^}]*\} from )?"\./([a-z]+\.js)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
{styles}
</head>
<body>
<main>
<h1>{title}</h1>
{content}</main>
{scripts}
</body>
</html>
"""

_ENTRY = """<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>"""


def page(entry: str, title: str, data: Any) -> str:
    """The HTML page that calls `start(data)` of the module `entry` (`show.js`)."""
    # In a script element only "</" and "<!--" could end or change what follows.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    styles = f"<style>{_source('page.css')}</style>"
    scripts = _ENTRY.format(data=text, script=script(entry))
    return _PAGE.format(title=html.escape(title), styles=styles, content="", scripts=scripts)


def linked_page(title: str, content: str, files: Collection[str]) -> str:
    """The HTML page with this content that links the style sheets and scripts of `files`."""
    styles = [f'<link rel="stylesheet" href="{file}">' for file in files if file.endswith(".css")]
    scripts = [f'<script src="{file}"></script>' for file in files if file.endswith(".js")]
    return _PAGE.format(
        title=html.escape(title),
        styles="\n".join(styles),
        content=f"{content}\n",
        scripts="\n".join(scripts),
    )


def script(entry: str) -> str:
    """The module `entry` with its imports as one script, which calls `start`."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        for needed in IMPORT.findall(_source(name)):
            visit(needed)
        order.append(name)

    visit(entry)
    parts = [EXPORT.sub("", IMPORT.sub("", _source(name))) for name in order]
    parts.append('start(JSON.parse(document.getElementById("data").textContent));\n')
    return "\n" + "\n".join(parts)


def security_policy(entry: str) -> str:
    """The Content-Security-Policy that allows only the script and style of a page of `entry`."""
    script_hash, style_hash = _hash(script(entry)), _hash(_source("page.css"))
    return (
        f"default-src 'none'; script-src {script_hash}; style-src {style_hash};"
        " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _source(name: str) -> str:
    return (resources.files(__name__) / name).read_text("utf-8")
