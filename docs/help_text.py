"""
The help texts shown in the documents are what the command prints: filled in here, checked by lint.

    python -m docs.help_text [--check]

In every page the lines after `$ coop-plan … --help` and `$ coop-plan methods` are replaced by what
the command prints. With --check nothing is written, and the exit status is 1 where a page differs.
"""

import re
import shlex
import sys
from pathlib import Path

from click.testing import CliRunner

from coop_plan.api.cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(r"^\$ coop-plan (.*--help|methods)\n((?:(?!```|\$ ).*\n)*)", re.MULTILINE)
WIDTH = 78


def renewed(text: str) -> str:
    """The page with what the commands print now."""

    def fill(found: re.Match[str]) -> str:
        arguments = shlex.split(found[1])
        done = CliRunner().invoke(cli, arguments, prog_name="coop-plan", terminal_width=WIDTH)
        return f"$ coop-plan {found[1]}\n{done.output}"

    return SHOWN.sub(fill, text)


def main() -> None:
    """Renew the pages, or tell which of them differ."""
    stale = [page for page in PAGES if renewed(page.read_text()) != page.read_text()]
    for page in stale:
        if "--check" in sys.argv:
            sys.stderr.write(
                f"{page.relative_to(ROOT)}: help texts differ: python -m docs.help_text\n"
            )
        else:
            page.write_text(renewed(page.read_text()))
    if stale and "--check" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
