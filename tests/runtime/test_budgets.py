"""The table, page and plot of `benchmarks.budgets`, of the smallest model."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
from benchmarks.budgets import enough
from coop_plan.runtime.torch_internals import FUSED_SINCE, version

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(version() < FUSED_SINCE, reason="not supported before")
def test_modes_hold_the_bytes_that_they_are_asked_for(tmp_path):
    """Loose bytes run, too few are refused with an error that names bytes that are enough."""
    modes = ["checkpoint", "coop-eager", "InductorBudget"]
    asked = ["--model", "small", "--mode", *modes, "--share", "1.0", "0.1", "--rounds", "1"]
    files = ["--csv", str(tmp_path / "rows.csv"), "--output", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.budgets", *asked, *files]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == ["checkpoint", *modes[1:2] * 2, *modes[2:] * 2]
    for row in rows[1:]:
        if row["share"] == "1.0":
            assert int(row["got"]) <= int(row["asked"]) + 4096
            assert not row["enough"]
        else:
            assert int(row["enough"]) > int(row["asked"])
            assert not row["got"]
    page = (tmp_path / "budgets.md").read_text()
    assert all(f"| {mode} " in page for mode in modes)
    assert "(budgets.svg)" in page
    assert "<svg" in (tmp_path / "budgets.svg").read_text()


def test_an_error_without_bytes_is_raised():
    error = RuntimeError("wrapped")
    error.__cause__ = ValueError("the least budget is 17 bytes")
    assert enough(error) == 17
    with pytest.raises(KeyError):
        enough(KeyError("another fault"))
