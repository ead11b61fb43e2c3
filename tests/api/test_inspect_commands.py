"""The commands that show and explain a plan."""

import csv
import json
import multiprocessing
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coop_plan.api.cli.compare_cells import compare
from coop_plan.api.cli.export import FORMS
from coop_plan.api.cli.floor import floor_of
from coop_plan.planner import PlanOptions, plan
from coop_plan.planner.inspect import exports
from coop_plan.schemas import load_graph
from tests.strategies import graphs

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "graph.json")


def test_explain_names_what_holds_the_peak_with_its_source(run):
    code, out, _ = run("explain", EXAMPLE, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["holders"][0]["bytes"] == 4 << 20
    assert found["holders"][0]["source"].startswith("model.0, examples/train_step.py:")
    code, out, _ = run("explain", EXAMPLE)
    assert "model.0, examples/train_step.py:" in out
    assert "bytes), proved" in out.splitlines()[2]


def test_explain_of_a_budget_that_cannot_be_met_names_the_blocker(run):
    code, out, err = run("explain", EXAMPLE, "--budget", "30MiB", "--json")
    assert code == 3
    assert json.loads(out)["infeasible"]["blocking_op_name"] == "aten.mul.Tensor"
    assert "aten.mul.Tensor" in err


def test_prices_are_those_of_the_plan_s_link_and_outputs(run, folder):
    options = ("--budget", "60%", "--link", "25GB/s", "--outputs", "arena", "-o", "moved.json")
    assert run(EXAMPLE, *options)[0] == 0
    made = json.loads((folder / "moved.json").read_text())
    found = json.loads(run("explain", EXAMPLE, "moved.json", "--json")[1])
    assert found["moves"]
    prices = {price["budget_bytes"]: price["overhead"] for price in found["prices"]}
    assert prices[made["budget_bytes"]] == pytest.approx(made["overhead"])


def test_explain_prints_no_name_that_moves_the_cursor_or_has_no_end(run, folder):
    graph = json.loads(Path(EXAMPLE).read_text())
    graph["tensors"] = [
        tensor | {"name": "\x1b[31m\u202ename" + "n" * 9999} for tensor in graph["tensors"]
    ]
    Path("names.json").write_text(json.dumps(graph))
    code, out, _ = run("explain", "names.json")
    assert code == 0
    assert "[31m" in out
    assert not {"\x1b", "\u202e"} & set(out)
    assert max(map(len, out.splitlines())) == 200


@pytest.mark.parametrize("keep", [0, 3])
def test_explain_of_a_step_without_bytes(run, folder, keep):
    graph = json.loads(Path(EXAMPLE).read_text())
    graph["tensors"] = [t | {"bytes": 0} for t in graph["tensors"] if keep]
    graph["ops"] = [op | {"workspace_bytes": 0} for op in graph["ops"] if keep]
    Path("nothing.json").write_text(json.dumps(graph))
    code, out, err = run("explain", "nothing.json")
    assert (code, err) == (0, "")
    assert "peak 0 B" in out


def test_floor_prints_the_bound_of_the_smallest_plan_without_a_search(run, monkeypatch):
    smallest = plan(load_graph(EXAMPLE), "min")

    def search(*_, **__):
        raise AssertionError("floor searches no plan")

    monkeypatch.setattr("coop_plan.planner.planning.plan", search)
    code, out, err = run("floor", EXAMPLE, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["budget_lower_bound_bytes"] == smallest.budget_lower_bound_bytes
    assert found["resident_bytes"] == smallest.resident_bytes
    assert found["op_name"] == "aten.mul.Tensor"
    code, out, _ = run("floor", EXAMPLE)
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "resident",
        "outputs",
        "largest working set",
        "budget at least",
    ]
    assert f"({found['budget_lower_bound_bytes']} bytes), proved" in out
    assert "of op 21 (aten.mul.Tensor), examples/train_step.py:" in out
    inside = json.loads(run("floor", EXAMPLE, "--json", "--outputs", "arena")[1])
    assert inside["outside_bytes"] == 0 < inside["output_bytes"] == found["outside_bytes"]
    code, _, err = run("floor", EXAMPLE, "--alignment", "3")
    assert (code, "--alignment" in err) == (2, True)


@given(graphs(), st.sampled_from(["outside", "arena", "gradients"]))
def test_the_floor_is_below_every_plan(graph, outputs):
    made = plan(graph, "min", method="keep-all", outputs=outputs, alignment=4)
    found = floor_of(graph, 4, outputs)
    assert found.budget_lower_bound_bytes == made.budget_lower_bound_bytes <= made.peak_bytes
    assert found.resident_bytes + found.outside_bytes <= found.budget_lower_bound_bytes


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


def test_a_picture_s_ticks_are_round_sizes(run, folder):
    pytest.importorskip("matplotlib")
    assert run(EXAMPLE, "--budget", "60%", "-o", "plan.json")[0] == 0
    assert run("show", EXAMPLE, "plan.json", "-o", "map.svg")[0] == 0
    ticks = re.findall(r"<!-- ([\d.]+ [KMG]?i?B) -->", (folder / "map.svg").read_text())
    assert len(ticks) > 3
    assert all(float(tick.split()[0]).is_integer() for tick in ticks)


def test_a_comparison_s_figures_are_the_plans_in_every_form(run, folder, chain):
    reports = ("-o", "all.html", "-o", "all.json", "-o", "all.csv")
    budgets, methods = ("--budgets", "100%,10%,min"), ("--methods", "coop,keep-all")
    code, out, _ = run("compare", "graph.json", *budgets, *methods, *reports)
    assert code == 0
    assert "overhead over peak: o coop  x keep-all" in out
    page = (folder / "all.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    rows = json.loads((folder / "all.json").read_text())
    table = list(csv.DictReader((folder / "all.csv").read_text().splitlines()))
    assert len(data["cells"]) == len(rows) == len(table) == 6
    for cell, row, line in zip(data["cells"], rows, table, strict=True):
        if cell["asked"] == "10%":
            assert (cell["state"], cell["figures"]) == ("infeasible", None)
            assert cell["least_bytes"] is None
            continue
        made = plan(chain, cell["asked"], method=cell["method"]).to_dict()
        timed = ("steps", "solve_seconds", "versions")
        assert {k: v for k, v in cell["figures"].items() if k not in timed} == {
            k: v for k, v in made.items() if k not in timed
        }
        assert row["overhead"] == float(line["overhead"]) == made["overhead"]
    assert "http" not in page


@pytest.mark.parametrize(("budget", "code"), [("1KiB", 3), ("70%", 0)])
def test_a_comparison_without_a_plan_says_why_and_fails(run, folder, budget, code):
    options = ("--methods", "coop,dtr", "--budgets", budget, "-o", folder / "report.html")
    found, out, err = run("compare", EXAMPLE, *options)
    assert found == code
    for method in ("coop", "dtr") if code else ():
        assert f"{method} within {budget}: {method} cannot meet a budget" in err
    assert ("infeasible" in out) == bool(code)


@pytest.mark.parametrize("report", ["report.html", "report.json"])
def test_a_comparison_resumes(run, folder, monkeypatch, report):
    """Cells of the report are not planned again; the result is that of a whole comparison."""
    methods = ("--methods", "coop,keep-all")
    assert run("compare", EXAMPLE, *methods, "--budgets", "100%,1KiB", "-o", report)[0] == 0
    asked = []

    def recorded(graph, questions, processes):
        asked.extend((str(each.budget_), each.method) for each in questions)
        return compare(graph, questions, processes)

    monkeypatch.setattr("coop_plan.api.cli.compare_cells.compare", recorded)
    whole = (*methods, "--budgets", "100%,1KiB,70%")
    code, out, err = run("compare", EXAMPLE, *whole, "-o", report, "--resume")
    assert code == 0
    assert asked == [("70%", "coop"), ("70%", "keep-all")]
    assert "coop within 1KiB: coop cannot meet a budget" in err
    asked.clear()
    code, again, _ = run("compare", EXAMPLE, *whole, "-o", report, "--resume")
    assert (code, again, asked) == (0, out, [])
    if report.endswith(".html"):
        data = re.search(r'id="data">(.*?)</script>', Path(report).read_text(), re.DOTALL)[1]
        cells = json.loads(data)["cells"]
        assert all(cell["map"] for cell in cells if cell["state"] == "planned")
    run(
        "compare",
        EXAMPLE,
        *methods,
        "--budgets",
        "100%",
        "--time-limit",
        "9",
        "-o",
        report,
        "--resume",
    )
    assert len(asked) == 2


def test_a_comparison_resumes_only_its_own_report(run, folder):
    few = ("--methods", "keep-all", "--budgets", "100%", "--resume")
    assert run("compare", EXAMPLE, *few, "-o", "new.json")[0] == 0  # nothing to resume yet
    code, _, err = run("compare", "graph.json", *few, "-o", "new.json")
    assert (code, "new.json: the report is of another graph" in err) == (2, True)
    Path("no.html").write_text("<p>")
    code, _, err = run("compare", EXAMPLE, *few, "-o", "no.html")
    assert (code, "no.html: this is no report" in err) == (2, True)
    code, _, err = run("compare", EXAMPLE, *few, "-o", "only.csv")
    assert (code, "--resume needs the .html or .json report" in err) == (2, True)


def test_a_comparison_that_is_stopped_ends_its_processes(chain):
    asked = [PlanOptions.of({"budget": b, "method": "keep-all"}) for b in ("min", "100%")]
    cells = compare(chain, asked, 1)
    assert next(cells).state == "planned"
    cells.close()
    for child in multiprocessing.active_children():
        child.join(60)
    assert multiprocessing.active_children() == []


def test_export_writes_a_file_and_knows_its_forms(run, folder):
    assert run("graph.json", "--budget", "min", "--method", "coop", "-o", "plan.json")[0] == 0
    code, _, err = run("export", "graph.json", "plan.json", "--to", "csv", "-o", "plan.csv")
    assert code == 0
    assert "plan.csv: " in err
    assert (folder / "plan.csv").read_text().startswith("buffer,tensor,kind")
    assert run("export", "graph.json", "plan.json", "--to", "svg", "-o", "x")[0] == 2
    assert tuple(exports.EXPORTERS) == FORMS  # the command names them without loading the planner
