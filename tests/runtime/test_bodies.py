"""Plans that name other bodies of ops than the default."""

import msgspec
import pytest
import torch

from coop_plan.planner import InvalidPlanError, plan
from coop_plan.runtime import CaptureError
from coop_plan.runtime.execute import planning
from coop_plan.schemas import Compute


def tiled(graph, options):
    """As another version might have planned the graph that it captured."""
    made = plan(graph, options)
    number = next(i for i, step in enumerate(made.steps) if isinstance(step, Compute))
    steps = list(made.steps)
    steps[number] = msgspec.structs.replace(steps[number], variant="tiled")
    return msgspec.structs.replace(made, steps=steps)


@pytest.mark.parametrize("verified", [True, False])
def test_a_plan_with_a_body_that_is_not_known_is_refused(monkeypatch, verified):
    monkeypatch.setattr(planning, "plan", tiled)
    if not verified:
        monkeypatch.setattr(planning, "verify", lambda *_: None)
    torch._dynamo.reset()
    w = torch.randn(8, 8, requires_grad=True)
    options = {"budget": "min"}
    step = torch.compile(lambda x: torch.sin(x @ w).sum(), backend="coop", options=options)
    what = "op 0 has no variant 'tiled'"
    if not verified:
        what = r"runs op 0 \(aten.mm.default\) as 'tiled', which is not known here: plan the graph"
    with pytest.raises(Exception, match=what) as told:
        step(torch.randn(4, 8))
    error = getattr(told.value, "inner_exception", told.value)
    assert isinstance(error, InvalidPlanError if verified else CaptureError)
