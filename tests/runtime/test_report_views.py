"""A report as a table, in a notebook and in TensorBoard."""

import dataclasses
from pathlib import Path

import pytest

from coop_plan.planner import plan
from coop_plan.runtime.reports import StepReport
from coop_plan.schemas import load_graph


@pytest.fixture(scope="module")
def report():
    graph = load_graph(Path(__file__).parents[2] / "examples" / "graph.json")
    made = plan(graph, "60%", method="coop")
    return StepReport(
        name="<step 0>",
        budget_bytes=made.budget_bytes,
        peak_bytes=made.peak_bytes,
        planned_arena_bytes=made.arena_bytes,
        resident_bytes=made.resident_bytes,
        planned_overhead=made.overhead,
        method=made.method,
        status=made.status,
        graph=graph,
        plan=made,
        measured_peak_bytes=1 << 20,
    )


def test_it_prints_planned_beside_measured(report, capsys):
    report.show()
    peak = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("peak"))
    assert peak.split() == ["peak", "55.22", "MiB", "1.00", "MiB"]


def test_its_title_is_one_line(report, capsys):
    dataclasses.replace(report, name="step of a model with a long name " + "n" * 60).show()
    title = capsys.readouterr().out.splitlines()[0]
    assert title.startswith("step of a model")
    assert title.endswith("(feasible), 0 steps run")


def test_a_notebook_gets_the_table_and_the_map_in_a_frame(report):
    text = report._repr_html_()
    assert "&lt;step 0&gt;" in text
    assert "<script" not in text  # it is in the frame, escaped
    assert "&lt;script" in text


def test_tensorboard_gets_what_is_known(report):
    written = {}

    class Writer:
        def add_scalar(self, tag, scalar_value, global_step):
            written[tag] = (scalar_value, global_step)

    report.write_scalars(Writer(), 7)
    assert written["coop/<step 0>/measured_peak_bytes"] == (float(1 << 20), 7)
    assert "coop/<step 0>/measured_overhead" not in written
