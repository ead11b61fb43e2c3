"""A step that PyTorch recorded, through `coop-plan import`."""

import json
import os
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from coop_plan.api.cli.main import main
from coop_plan.planner import find_faults, plan
from coop_plan.schemas import load_graph


def imported(*arguments):
    try:
        main(["import", *map(str, arguments)])
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # of PyTorch 2.11
def test_a_recorded_step_is_planned(tmp_path, capsys):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 16 * 16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))

    def step():
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    et, kineto, out = (tmp_path / name for name in ("et.json", "kineto.json", "model.json"))
    observer = ExecutionTraceObserver().register_callback(str(et))
    with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer) as recorded:
        step()
    recorded.export_chrome_trace(str(kineto))
    assert imported(et, "--kineto", kineto, "-o", out) == 0
    graph = load_graph(out)
    ops = len(graph.ops)
    assert f"{ops} ops, {len(graph.tensors)} tensors; {ops} of {ops} ops have measured times" in (
        capsys.readouterr().err
    )
    sizes = {tensor.id: tensor.bytes for tensor in graph.tensors}
    held = sum(tensor.nbytes for tensor in (x, y, *model.parameters(), *model.buffers()))
    resident = sum(tensor.bytes for tensor in graph.tensors if tensor.resident)
    assert held <= resident <= held + 32  # numbers of Python are tensors of 8 bytes
    gradients = [parameter.nbytes for parameter in model.parameters()]
    left = [tensor.bytes for tensor in graph.tensors if tensor.kind == "output"]
    assert Counter(left) == Counter([*gradients, 4])  # and the loss
    names = [op.name for op in graph.ops]
    assert "aten::addmm" in names  # and not what it is made of
    assert not {"aten::linear", "aten::t", "aten::detach", "aten::empty"} & set(names)
    [convolution] = [op for op in graph.ops if op.name == "aten::convolution_backward"]
    assert convolution.phase == "backward"
    assert {sizes[tensor] for tensor in convolution.outputs} >= {8 * 3 * 3 * 3 * 4, 8 * 4}
    assert any(op.rng for op in graph.ops)
    assert {op.phase for op in graph.ops} == {"forward", "backward", "optimizer"}
    made = plan(graph, "min")
    assert made.recomputed_ops
    assert not find_faults(graph, made)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "bad.json: not JSON"),
        ('{"nodes": [{"id": 1}]}', "bad.json#/nodes/0/name: a node must have a name"),
        ("\x80", "bad.json: not a memory snapshot"),
    ],
)
def test_a_bad_file_is_named_with_the_place(tmp_path, capsys, content, said):
    bad = tmp_path / "bad.json"
    bad.write_bytes(content.encode("latin-1"))
    assert imported(bad, "-o", "-") == 2
    assert said in capsys.readouterr().err


def test_a_bad_kineto_trace_is_named_and_not_the_other(tmp_path, capsys):
    tensor = {"values": [[1, 2, 0, 4, 4, "cpu"]], "types": ["Tensor(float)"], "shapes": [[4]]}
    none = {"values": [], "types": []}
    node = {"id": 2, "ctrl_deps": 1, "name": "aten::randn", "inputs": none, "outputs": tensor}
    et, kineto = tmp_path / "et.json", tmp_path / "kineto.json"
    et.write_text(json.dumps({"nodes": [node]}))
    event = {"ph": "X", "cat": "kernel", "ts": 1, "dur": "x"}
    kineto.write_text(json.dumps({"traceEvents": [event]}))
    assert imported(et, "--kineto", kineto, "-o", "-") == 2
    assert f"{kineto}#/traceEvents/0/dur: dur must be a number of µs" in capsys.readouterr().err
    kineto.write_text("null")
    out = tmp_path / "out.json"
    assert imported(et, "--kineto", kineto, "-o", out) == 2
    assert "not a Kineto trace" in capsys.readouterr().err
    assert not out.exists()
    named = tmp_path / os.fsdecode(b"\xff.json")
    named.write_bytes(et.read_bytes())
    assert imported(named, "-o", out) == 0
    assert load_graph(out).name == "?.json"
