"""The commands that show and explain a plan."""

import json
from pathlib import Path

import pytest

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "graph.json")


def test_explain_names_what_holds_the_peak_with_its_source(run):
    code, out, _ = run("explain", EXAMPLE, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["holders"][0]["bytes"] == 4 << 20
    assert found["holders"][0]["source"].startswith("model.0, examples/train_step.py:")
    code, out, _ = run("explain", EXAMPLE)
    assert "model.0, examples/train_step.py:" in out


def test_explain_of_a_budget_that_cannot_be_met_names_the_blocker(run):
    code, out, err = run("explain", EXAMPLE, "--budget", "30MiB", "--json")
    assert code == 3
    assert json.loads(out)["infeasible"]["blocking_op_name"] == "aten.mul.Tensor"
    assert "aten.mul.Tensor" in err


def test_show_writes_a_page_of_two_plans_or_a_picture_of_one(run, folder):
    pytest.importorskip("matplotlib")
    for share in ("60%", "80%"):
        assert run(EXAMPLE, "--budget", share, "--method", "coop", "-o", f"{share}.json")[0] == 0
    assert run("show", EXAMPLE, "60%.json", "80%.json")[0] == 0
    assert '"title":"60%.json"' in (folder / "map.html").read_text()
    code, _, err = run("show", EXAMPLE, "60%.json", "80%.json", "--format", "svg")
    assert (code, "side by side" in err or ".html" in err) == (1, True)
    assert run("show", EXAMPLE, "60%.json", "--format", "svg", "-o", "paper")[0] == 0
    assert (folder / "paper.svg").read_bytes().startswith(b"<?xml")
    code, _, err = run("show", "graph.json", "60%.json")
    assert code == 2
    assert "wrong-graph" in err
