"""
Lines of the planner that its tests run, compiled kernels included.

    python -m benchmarks.line_coverage [TEST ...] [--examples 5] [--seconds 30]

The tests run with NUMBA_DISABLE_JIT=1, so that kernels are Python, and slow: properties are tried
on few examples, and a long test is ended early (`tests/without_jit.py`). Everything is written to
`build/coverage`: the measurements, `report.json`, and `table.md`, a table of the files with the
functions of which no line ran. A test may fail here for want of time: `make test` is what judges.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

OUT = Path("build/coverage")
TESTS_PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes; others mean that it did not run
TESTS = [
    "tests/planner",
    "tests/api/test_request_handler.py",
    "tests/api/test_response_cache.py",
    "tests/api/test_cli.py",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tests", nargs="*", default=TESTS)
    parser.add_argument("--examples", type=int, default=5, help="of each property")
    parser.add_argument("--seconds", type=float, default=30, help="after which a test is ended")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "NUMBA_DISABLE_JIT": "1",
        "COOP_PLAN_EXAMPLES": str(arguments.examples),
        "COOP_PLAN_SECONDS": str(arguments.seconds),
    }

    def coverage(*command: str) -> int:
        full = [sys.executable, "-m", "coverage", *command]
        return subprocess.run(full, env=environment, check=False).returncode

    coverage("erase")
    plain = ["-p", "no:cacheprovider", "-p", "tests.without_jit", "-n", "0", "--timeout", "0", "-q"]
    code = coverage("run", "-m", "pytest", *plain, "--hypothesis-seed=0", *arguments.tests)
    coverage("combine", "--quiet")
    coverage("json", "--quiet", "-o", str(OUT / "report.json"))
    text = table(json.loads((OUT / "report.json").read_text()))
    (OUT / "table.md").write_text(text)
    print(text)
    sys.exit(0 if code in (TESTS_PASSED, TESTS_FAILED) else code)


def table(report: dict) -> str:
    """A row per file with lines, and below it the functions that never ran."""
    rows = ["| file | lines | covered | % |", "| --- | --- | --- | --- |"]
    never = []
    for path, found in sorted(report["files"].items()):
        figures = found["summary"]
        if not figures["num_statements"]:
            continue
        rows.append(row(f"`{path}`", figures))
        names = [
            name
            for name, part in found["functions"].items()
            if name and part["summary"]["num_statements"] and not part["summary"]["covered_lines"]
        ]
        if names:
            never.append(f"- `{path}`: " + ", ".join(f"`{name}`" for name in names))
    rows.append(row("all", report["totals"]))
    if never:
        rows += ["", "Functions of which no line ran:", "", *never]
    return "\n".join(rows) + "\n"


def row(name: str, figures: dict) -> str:
    lines, covered = figures["num_statements"], figures["covered_lines"]
    return f"| {name} | {lines} | {covered} | {100 * covered / lines:.1f} |"


if __name__ == "__main__":
    main()
