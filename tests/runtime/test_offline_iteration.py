"""The modelled iteration of an absent device has the ops and the bytes of `train_iteration`'s."""

import json
from pathlib import Path

import pytest
import torch

from coop_plan import train_iteration
from coop_plan.api.cli.main import main
from coop_plan.planner import plan
from coop_plan.runtime.offline_capture.devices import DeviceSpec
from coop_plan.runtime.offline_capture.fake_device import CaptureRequest, OfflineCapture
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.runtime.whole_iteration import train_iteration as module

SOURCE = """
import torch
from torch import nn

def net(batch=8):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 3)
    )
    model[3].requires_grad_(False)
    return (lambda x: model(x).square().mean()), (torch.randn(batch, 16),), model

def step(batch=8):
    return net(batch)[:2]

def two(batch=8):
    model = net(batch)[2]
    return (lambda x: (model(x).square().mean(), model(x))), (torch.randn(batch, 16),)

def given(batch=8):
    loss, (x,) = step(batch)
    return loss, (x.requires_grad_(),)
"""

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p),
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}

CPU = {"kind": "cpu", "memory_bytes": 1 << 34, "flops": {"float32": 1e11}, "bytes_per_s": 1e10}


@pytest.fixture
def net(importable):
    return __import__(importable("offline_iteration_net", SOURCE))


def modelled(optimizer, clip, target="step", **device):
    request = CaptureRequest(
        target=f"offline_iteration_net:{target}",
        spec=DeviceSpec(name="here", **CPU, **device),
        batch=8,
        optimizer=OptimizerSpec(name=optimizer, clip_norm=clip),
        iteration=True,
    )
    with OfflineCapture() as captures:
        return captures.capture(request).graph


def facts(graph):
    """What a graph has whoever measures it: ops and their edges, and bytes of tensors."""
    ops = [(op.name, op.phase, op.inputs, op.outputs, op.mutates, op.inplace) for op in graph.ops]
    beside = {"runtime"}
    tensors = [(t.kind, t.bytes, t.movable) for t in graph.tensors if t.name not in beside]
    return ops, tensors


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ops_and_bytes_are_those_of_the_iteration_that_runs(net, monkeypatch, optimizer, clip):
    seen = []
    with_movable = module.with_movable

    def see(captured, residents):
        found = with_movable(captured, residents)
        seen.append(found.graph)
        return found

    monkeypatch.setattr(module, "with_movable", see)
    loss, (x,), model = net.net()
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"link": "8GB/s"} | ({"clip_norm": 1.0} if clip else {})
    train_iteration(loss, OPTIMIZERS[optimizer](trained), "100%", **options)(x)
    ours, theirs = facts(modelled(optimizer, clip)), facts(seen[-1])
    assert ours[1] == theirs[1]
    assert ours[0] == theirs[0]


def test_the_host_of_a_device_with_its_bandwidth_may_update(net):
    graph = modelled("adamw", clip=False, host_bytes_per_s=1e9)
    updates = [op for op in graph.ops if op.phase == "optimizer"]
    size = {t.id: t.bytes for t in graph.tensors}
    assert len(updates) == 6
    for op in updates:
        (variant,) = op.variants
        parameter = size[op.inputs[1]]
        states = 2 * parameter + 4  # two moments and a step
        moved = 3 * parameter + 2 * states
        assert (variant.engine, variant.cost_us) == ("host", pytest.approx(moved / 1e3))


def fit(capsys, *arguments):
    device = {**CPU, "memory_bytes": 36_000}
    Path("card.json").write_text(json.dumps(device))
    target = "offline_iteration_net:step", "--device", "card.json", "--margin", "0"
    code = 0
    try:
        main(["fit", *target, "--optimizer", "adamw", *arguments])
    except SystemExit as stop:
        code = stop.code or 0
    return (code, *capsys.readouterr())


def test_fit_plans_the_iteration_with_parameters_on_the_host(net, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = fit(capsys, "--iteration", "--link", "8GB/s", "--json")
    (row,) = json.loads(out)
    within = row["iteration"]["within"]
    graph = modelled("adamw", clip=False)
    expected = plan(graph, 36_000, link="8GB/s")
    assert code == 0
    assert within["peak_bytes"] == expected.peak_bytes <= 36_000
    assert within["host_bytes"] == expected.host_arena_bytes > 0
    assert row["iteration"]["smallest"]["peak_bytes"] <= expected.peak_bytes
    code, out, _ = fit(capsys, "--iteration", "--link", "8GB/s")
    assert "whole iteration in one plan, link 8GB/s: smallest" in out
    assert "on the host" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--link", "8GB/s"], "a link is that of a whole iteration"),
        (["--iteration", "--ema"], "no average"),
        (["--iteration", "--link", "fast"], "fast"),
    ],
)
def test_what_a_whole_iteration_has_not_is_refused(
    net, capsys, tmp_path, monkeypatch, arguments, text
):
    monkeypatch.chdir(tmp_path)
    code, _, err = fit(capsys, *arguments)
    assert code == 2
    assert text in err


def test_a_step_that_returns_more_than_its_loss_is_named(net):
    with pytest.raises(Exception, match="return its loss alone"):
        modelled("adamw", clip=False, target="two")


def test_an_input_that_requires_a_gradient_is_no_parameter_to_update(net):
    with pytest.raises(Exception, match=r"no nn\.Parameter"):
        modelled("adamw", clip=False, target="given")
