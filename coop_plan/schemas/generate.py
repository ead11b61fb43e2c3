"""Generator of the contract's JSON Schemas: `python -m coop_plan.schemas.generate`."""

import argparse
import json
import sys
from pathlib import Path

import msgspec

from coop_plan.schemas._parse import Model
from coop_plan.schemas.graph import Graph
from coop_plan.schemas.plan import Plan

DIALECT = "https://json-schema.org/draft/2020-12/schema"

DOCUMENTS: dict[str, tuple[type[Model], str, str]] = {
    "graph.schema.json": (Graph, "coop-plan/graph/1", "Profiled graph of one training step"),
    "plan.schema.json": (Plan, "coop-plan/plan/1", "Joint schedule of one training step"),
}
"""Per file name: the model, the document's `schema` field, and the title."""


def render(name: str) -> str:
    """The text of the schema file `name`."""
    model, contract, title = DOCUMENTS[name]
    head = {"$schema": DIALECT, "$id": f"urn:{contract.replace('/', ':')}", "title": title}
    document = msgspec.json.schema(model)
    # The document's own schema is the top level, those of its parts are `$defs`.
    own = document["$defs"].pop(model.__name__)
    whole = head | {key: value for key, value in own.items() if key not in head}
    whole["$defs"] = document["$defs"]
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def stale(folder: Path) -> list[str]:
    """Names of the schema files in `folder` that are missing or differ from the models."""
    return [
        name
        for name in DOCUMENTS
        if not (folder / name).is_file()
        or (folder / name).read_text(encoding="utf-8") != render(name)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or with `--check` only compare them; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m coop_plan.schemas.generate", description=__doc__
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is out of date")
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, help="folder of the schema files"
    )
    options = parser.parse_args(arguments)
    outdated = stale(options.folder)
    if options.check:
        if outdated:
            names = ", ".join(outdated)
            sys.stderr.write(f"out of date: {names}; run python -m coop_plan.schemas.generate\n")
        return 1 if outdated else 0
    for name in outdated:
        (options.folder / name).write_text(render(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
