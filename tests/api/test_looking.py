"""The commands that show and explain a plan."""

import json
from pathlib import Path


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
