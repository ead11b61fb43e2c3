"""The README shows what the commands print and code that runs."""

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from coop_plan.api.cli import cli
from coop_plan.schemas import load_graph, parse_graph

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_help_text_is_the_commands_own():
    shown = re.search(r"\$ coop-plan --help\n(.*?)\n```", TEXT, re.DOTALL)
    printed = CliRunner().invoke(cli, ["--help"], prog_name="coop-plan", terminal_width=78)
    assert shown[1].strip() == printed.output.strip()


def test_the_examples_run_and_the_training_loop_prints_the_loss_shown(
    tmp_path, monkeypatch, capsys, own_cache
):
    pytest.importorskip("torch")
    from coop_plan import runtime
    from coop_plan.runtime.capture.target import capture_target

    runtime.clear_reports()
    module, loop, planning = CODE
    (tmp_path / "train_step.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train_step", raising=False)
    graph = capture_target("train_step:example")
    Path("model.json").write_text(graph.to_json())
    assert load_graph("model.json") == parse_graph(graph.to_json())
    exec(compile(loop, "README.md", "exec"), {})
    loss, report = capsys.readouterr().out.strip().splitlines()
    assert f"\n{loss[:15]}" in TEXT
    assert "outside_bytes=0" in report
    exec(compile(planning, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) == 2
