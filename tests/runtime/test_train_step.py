"""`coop_plan.train_step`: planned, or an error."""

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import coop_plan
from coop_plan import runtime

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def make():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.Tanh())))


def test_a_step_is_planned_and_its_numbers_are_eagers():
    model = make()
    planned = copy.deepcopy(model)

    def loss(x, *, scale):
        return planned(x).square().mean() * scale

    step = coop_plan.train_step(loss, "min", alignment=128)
    with torch.no_grad():
        step(X, scale=2.0)  # nothing to plan yet
    for _ in range(2):
        step(X, scale=2.0).backward()
        (model(X).square().mean() * 2.0).backward()
    pairs = zip(model.parameters(), planned.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    (report,) = coop_plan.reports()
    assert report.steps_run == 2
    assert report.plan.alignment == 128
    assert step.__name__ == "loss"


def test_a_model_may_be_the_step():
    step = coop_plan.train_step(make(), "min")
    step(X).sum().backward()
    assert [report.steps_run for report in coop_plan.reports()] == [1]


@pytest.mark.parametrize(
    "step",
    [
        torch.func.grad(lambda x: x.square().sum()),
        lambda x: x * 2,
        lambda _: 3,
    ],
    ids=["gradients-within", "no-gradient", "no-op"],
)
def test_a_training_call_in_which_nothing_is_planned_is_an_error(step):
    called = coop_plan.train_step(step, 1000)
    for _ in range(2):
        with pytest.raises(runtime.NothingPlannedError, match="nothing was planned"):
            called(X)


def test_a_graph_break_is_an_error_that_names_the_line():
    model = make()

    def loss(x):
        h = model(x)
        torch._dynamo.graph_break()
        return h.sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"test_train_step.py"):
        coop_plan.train_step(loss, "min")(X)


@pytest.mark.parametrize("options", [{}, {"budget": "min", "bugdet": 1}])
def test_wrong_options_are_told_at_once(options):
    with pytest.raises(runtime.OptionsError):
        coop_plan.train_step(make(), **options)


def test_the_example_keeps_to_its_budget(capsys):
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "accumulate.py"))
    (report,) = coop_plan.reports()
    assert report.steps_run == 12
    assert report.plans_made == 2
    assert report.measured_peak_bytes <= report.budget_bytes
    assert f"{report.measured_peak_bytes} of {report.budget_bytes}" in capsys.readouterr().out
