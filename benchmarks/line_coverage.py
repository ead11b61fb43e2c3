"""
Line coverage of the planner by its tests, compiled kernels included.

    python -m benchmarks.line_coverage [TEST ...] [--examples 5] [--seconds 30]

The tests run with NUMBA_DISABLE_JIT=1, so kernels are slow Python: properties run on few examples,
and a long test is stopped early (`tests/without_jit.py`). `build/coverage` gets the measurements,
`report.json`, and `table.md` with the files and the functions of which no line ran. A test may fail
here for lack of time; `make test` decides.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.report import table

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
    text = page(json.loads((OUT / "report.json").read_text()))
    (OUT / "table.md").write_text(text)
    print(text)
    sys.exit(0 if code in (TESTS_PASSED, TESTS_FAILED) else code)


def page(report: dict) -> str:
    """A row per file with lines, then the functions of which no line ran."""
    rows, never = [], []
    for path, found in sorted(report["files"].items()):
        if not found["summary"]["num_statements"]:
            continue
        rows.append(row(f"`{path}`", found["summary"]))
        names = [
            f"`{name}`"
            for name, part in found["functions"].items()
            if name and part["summary"]["num_statements"] and not part["summary"]["covered_lines"]
        ]
        if names:
            never.append(f"- `{path}`: {', '.join(names)}")
    text = table(["file", "lines", "covered", "%"], [*rows, row("all", report["totals"])])
    rest = ["", "Functions of which no line ran:", "", *never] if never else []
    return "\n".join([text, *rest]) + "\n"


def row(name: str, figures: dict) -> list[str]:
    lines, covered = figures["num_statements"], figures["covered_lines"]
    return [name, str(lines), str(covered), f"{100 * covered / lines:.1f}"]


if __name__ == "__main__":
    main()
