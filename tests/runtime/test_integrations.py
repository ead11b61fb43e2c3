"""Frameworks train within a budget, with the numbers that they have with backend="aot_eager"."""

import itertools
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import coop_plan
from coop_plan import runtime
from coop_plan.environment import VARIABLE
from tests.runtime.iterating import assert_within_budget

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("trainer", "accelerate", "lightning", "peft")
NEEDS = {"trainer": "accelerate"}  # transformers' Trainer is made of it

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own


def run(name, example="with"):
    """What an example leaves behind: its names, and bytes of all that it trained."""
    torch._dynamo.reset()
    if find_spec("accelerate"):  # it keeps the first plugin of a process
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    names = runpy.run_path(str(ROOT / "examples" / f"{example}_{name}.py"))
    return [p.detach().clone() for p in names["model"].parameters()]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_trains_within_half_of_the_peak(name, monkeypatch, tmp_path):
    pytest.importorskip(NEEDS.get(name, name))
    monkeypatch.chdir(tmp_path)
    found = run(name)
    reports = coop_plan.reports()
    assert sum(report.steps_run for report in reports) == 4
    for report in reports:
        assert report.outside_bytes == 0
        assert report.measured_peak_bytes <= report.budget_bytes
        assert report.plan.recomputed_ops > 0

    plain = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda *args, options, **others: plain(*args, **others | {"backend": "aot_eager"}),
    )
    if name in ("trainer", "lightning"):  # these insist on a plan
        door = __import__(f"coop_plan.runtime.integrations.{name}", fromlist=["steps_run"])
        monkeypatch.setattr(door, "steps_run", itertools.count().__next__)
    coop_plan.clear_reports()
    expected = run(name)
    assert not coop_plan.reports()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_a_framework_runs_whole_iterations_within_half_of_the_peak(name, monkeypatch, tmp_path):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    found = run(name, "iterations_with")
    assert_within_budget(3)

    integration = __import__(f"coop_plan.runtime.integrations.{name}", fromlist=["coop"])
    if name == "lightning":
        callback = __import__(name).Callback
        monkeypatch.setattr(integration, "IterationBudget", lambda _: callback())
    else:
        monkeypatch.setattr(integration, "plan_iterations", loop_in_eager)
    coop_plan.clear_reports()
    expected = run(name, "iterations_with")
    assert not coop_plan.reports()
    assert all(map(torch.equal, found, expected))


def loop_in_eager(accelerator, loss_fn, optimizer, _, clip_norm):
    """The loop that `plan_iterations` of Accelerate stands for."""
    (model,) = accelerator._models

    def iteration(batch):
        loss = loss_fn(batch)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return [loss]

    return iteration


def test_wrong_options_are_told_when_the_door_is_made():
    pytest.importorskip("accelerate")
    from coop_plan.runtime.integrations.accelerate import budget_plugin
    from coop_plan.runtime.integrations.trainer import Budget

    for door in (budget_plugin, Budget):
        with pytest.raises(runtime.OptionsError, match="unknown option 'bugdet'"):
            door("50%", bugdet=1)
        with pytest.raises(runtime.OptionsError, match=VARIABLE):
            door()


UNTOUCHED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.Tanh())])

    def forward(self, x):
        return self.layers(x).square().mean()

torch.manual_seed(0)
made = Net()
model = torch.compile(made) if COMPILED else made
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.eval()
with torch.no_grad():
    model(torch.ones(4, 32)).item()
model.train()
for _ in range(3):
    model(torch.randn(512, 32)).backward()
    optimizer.step()
    optimizer.zero_grad()
print(sum(p.double().sum() for p in made.parameters()).item().hex())
"""
REPORT = "import coop_plan; print([r.steps_run for r in coop_plan.reports()])"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_budget_in_the_environment_for_scripts_that_say_nothing(compiled):
    """`autoload` is what PyTorch calls when it is imported."""

    def printed(budget):
        environment = os.environ | ({VARIABLE: budget} if budget else {})
        load = "from coop_plan.environment import autoload; autoload()" if budget else ""
        script = f"{load}\nCOMPILED = {compiled and bool(budget)}\n{UNTOUCHED}\n{REPORT}"
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    eager, nothing = printed("")
    planned, steps = printed("60%")
    assert (planned, nothing, steps) == (eager, "[]", "[3]")


def test_the_environment_is_looked_at_without_loading_anything():
    script = (
        "import sys; from coop_plan.environment import autoload; autoload();"
        f" print([m for m in {('torch', 'numpy', 'msgspec', 'pydantic')} if m in sys.modules])"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=True,
    )
    assert done.stdout.strip() == "[]"
