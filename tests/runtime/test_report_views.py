"""A report as a table, in a notebook and in TensorBoard."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from coop_plan import runtime
from coop_plan.planner import plan
from coop_plan.planner.inspect.drawing import drawing
from coop_plan.planner.inspect.explain import explain
from coop_plan.runtime.reports import StepReport
from coop_plan.schemas import format_bytes, load_graph, load_plan


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


class Transformer(nn.Module):
    """Two encoder layers, small enough for a step of milliseconds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2)]
        )

    def forward(self, tokens):
        return self.layers(tokens).square().mean()


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"budget": "60%"},
        {"budget": "min"},
        {"budget": "60%", "link": "100GB/s"},
        {"budget": "60%", "link": "100GB/s", "host_budget": "1MiB"},
        {"budget": "80%", "outputs": "gradients"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_the_peak_of_a_step_and_its_parts_are_those_of_explanation_and_map(
    options, backwards, tmp_path, capsys
):
    """Those of the saved plan, also if gradients are added to earlier ones."""
    torch.manual_seed(0)
    step = torch.compile(Transformer(), backend="coop", fullgraph=True, options=options)
    for _ in range(2):
        for _ in range(backwards):
            step(torch.randn(8, 32, 64)).backward()
        step.zero_grad()
    (report,) = runtime.reports()
    (tmp_path / "graph.json").write_text(report.graph.to_json())
    (tmp_path / "plan.json").write_text(report.plan.to_json())
    graph, made = load_graph(tmp_path / "graph.json"), load_plan(tmp_path / "plan.json")
    assert (made.swapped_bytes > 0) == ("link" in options)
    found = explain(graph, made)
    drawn = drawing(graph, made)["map"]
    parts = (sum(found.residents.values()), found.arena_bytes, found.outside_bytes)
    fixed = sum(size for _, size in drawn["resident"])
    assert (fixed, drawn["arena"], drawn["outside"][drawn["peak"]]) == parts
    assert report.peak_bytes == found.peak_bytes == sum(parts)
    assert report.peak_moment == found.peak_moment == drawn["peak"]
    assert report.peak_parts == parts
    capsys.readouterr()
    report.show()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"first at step {found.peak_moment}" in lines
    for name, size in zip(("resident", "arena", "outputs"), parts, strict=True):
        assert [line for line in lines if line.startswith(f"{name} {format_bytes(size)}")]
