"""Numbers that change from call to call: one plan where a tensor can stand for them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coop_plan import runtime

WAYS = {
    "times": lambda h, a: h * a,
    "times, turned": lambda h, a: a * h,
    "over": lambda h, a: h / a,
    "plus and minus": lambda h, a: a - (h + a) - 2 * a,
    "methods": lambda h, a: h.mul(a).sub(a).div(a).add(a),
    "annealed": lambda h, a: h * (1 - a) + torch.tanh(h) * a,
    "of a scalar": lambda h, a: h + h.square().mean() * a,
}
BAKED = {
    "under": lambda h, a: a / (h + 4),
    "to the power": lambda h, a: (h.abs() + 1) ** a,
    "as an option": lambda h, a: F.dropout(h, a),
}
VALUES = [0.9, 0.7, 0.3, 1 / 3, 0.1]


def outcome(model, step):
    torch.manual_seed(1)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(2))
    found = []
    for value in VALUES:
        model.zero_grad()
        out = step(x.to(next(model.parameters()).dtype), value)
        out.square().mean().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


def both(way, dtype):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(dtype)
    planned = copy.deepcopy(eager)
    expected = outcome(eager, lambda x, a: way(eager(x), a))
    step = torch.compile(
        lambda x, a: way(planned(x), a), backend="coop", options={"budget": "min"}, fullgraph=True
    )
    for found, wanted in zip(outcome(planned, step), expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", WAYS)
def test_a_number_that_changes_is_an_input_of_one_plan(name, dtype):
    both(WAYS[name], dtype)
    of_a_scalar = name == "of a scalar" and dtype is torch.bfloat16  # is rounded in another place
    assert len(runtime.reports()) == (len(VALUES) if of_a_scalar else 2)  # the first is a constant


@pytest.mark.parametrize("name", BAKED)
def test_other_numbers_are_constants_of_a_plan_each(name):
    both(BAKED[name], torch.float32)
    assert len(runtime.reports()) == len(VALUES)


def test_arrays_of_numpy_are_tensors_and_no_numbers():
    """Dynamo passes both in tensors."""

    def train(step):
        torch.manual_seed(0)
        weight = torch.randn(8, requires_grad=True)
        for length in (4, 5, 6, 6):
            x = torch.arange(8.0 * length).view(length, 8)
            mask = np.arange(length) % 2 == 0
            step(x, mask, weight).backward()
        return weight.grad

    def loss(x, mask, weight):
        return (x * weight)[torch.from_numpy(mask).to(torch.long)].square().sum()

    step = torch.compile(loss, backend="coop", options={"budget": "100%"}, fullgraph=True)
    assert torch.equal(train(step), train(loss))
    assert sum(report.steps_run for report in runtime.reports()) == 4
