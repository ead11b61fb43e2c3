"""Numbers that change from call to call: one plan where a tensor can stand for them."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coop_plan import runtime
from coop_plan.runtime.dynamic_shapes import specialize

WAYS = {
    "under": lambda h, a: a / (h + 4),
    "in place": lambda h, a: (h * 2).mul_(a).add_(a) * h,
    "compared": lambda h, a: torch.where(h < a / 10, h, h * 2) * (a > h) + h,
    "indices": lambda h, a: h * (torch.arange(16) * 10 >= a),
    "full": lambda h, a: h * torch.full((32, 1), a, dtype=h.dtype) + torch.full((), a).to(h.dtype),
    "full like": lambda h, a: h * torch.full_like(h, a) + torch.full_like(h[0], a),
    "made a tensor": lambda h, a: h * torch.tensor(a, dtype=torch.float64) + torch.tensor(a),
    "warmed up": lambda h, a: h * min(1.0, a / 5) + h * max(a, 3) - h * (a % 4),
    "cosine": lambda h, a: h * (0.5 * (1 + math.cos(math.pi * a / 10))),
    "decayed": lambda h, a: h * 0.9**a + h * (1 - 0.999 ** (2 * a)) + h * math.sqrt(a),
    "by a size": lambda h, a: h * (a / h.shape[0]) / h.numel(),
    "times": lambda h, a: h * a,
    "times, turned": lambda h, a: a * h,
    "over": lambda h, a: h / a,
    "plus and minus": lambda h, a: a - (h + a) - 2 * a,
    "methods": lambda h, a: h.mul(a).sub(a).div(a).add(a),
    "annealed": lambda h, a: h * (1 - a) + torch.tanh(h) * a,
    "of a scalar": lambda h, a: h + h.square().mean() * a,
}
BAKED = {
    "to the power": lambda h, a: (h.abs() + 1) ** a,
    "as a tensor": lambda h, a: h * torch.as_tensor(a),  # Dynamo has no symbol for it
    "as an option": lambda h, a: F.dropout(h, a),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
VALUES = {float: [0.9, 0.7, 0.3, 1 / 3, 0.1], int: [3, 2, 7, 4, 23]}


def outcome(model, step, values):
    torch.manual_seed(1)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(2))
    found = []
    for value in values:
        model.zero_grad()
        out = step(x.to(next(model.parameters()).dtype), value)
        out.square().mean().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


def both(way, dtype, values):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(dtype)
    planned = copy.deepcopy(eager)
    expected = outcome(eager, lambda x, a: way(eager(x), a), values)
    step = torch.compile(
        lambda x, a: way(planned(x), a), backend="coop", options={"budget": "min"}, fullgraph=True
    )
    for found, wanted in zip(outcome(planned, step, values), expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((float, dtype) for dtype in DTYPES), *((int, dtype) for dtype in DTYPES[:2])],
)
@pytest.mark.parametrize("name", WAYS)
def test_a_number_that_changes_is_an_input_of_one_plan(name, kind, dtype):
    both(WAYS[name], dtype, VALUES[kind])
    # Of bfloat16, scalars are rounded in another place, and so is what compares with integers.
    constant = name == "of a scalar" and dtype is torch.bfloat16
    constant |= name == "indices" and kind is float
    planned = len(runtime.reports())
    if constant:  # integers may be read from the call, as sizes are
        assert planned == len(VALUES[kind]) or (kind is int and 2 < planned < len(VALUES[kind]))
    else:
        assert planned == 2  # the first is one


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", BAKED)
def test_other_numbers_are_constants_of_a_plan_each(name, kind):
    if name == "as an option" and kind is int:
        pytest.skip("no probability")
    both(BAKED[name], torch.float32, VALUES[kind])
    assert len(runtime.reports()) == len(VALUES[kind])


def test_numbers_beside_lengths_are_traced_once_for_all(monkeypatch):
    """A number that is made of both, too; and the first step that is asked for is the only one."""
    traced = []
    first = specialize.ByShape._specialise
    monkeypatch.setattr(
        specialize.ByShape,
        "_specialise",
        lambda self, *args: traced.append(self._symbolic is not None) or first(self, *args),
    )
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def loss(x, step, scale):
        h = torch.tanh(x @ weight) * min(1.0, step / 6)
        return (h * scale).square().sum() / (len(x) * step)

    planned = torch.compile(loss, backend="coop", options={"budget": "100%"}, fullgraph=True)
    for step, length in enumerate([4, 6, 8, 10, 4, 12, 6, 14], start=2):
        x = torch.arange(8.0 * length).view(length, 8) / 100
        made, expected = (f(x, step, 0.5 + step / 10) for f in (planned, loss))
        (gradient,), (wanted,) = (torch.autograd.grad(v, weight) for v in (made, expected))
        assert torch.equal(made, expected)
        assert torch.equal(gradient, wanted)
    assert traced == [False, False, True, True, True, True]  # the first length of all has no symbol
    assert sum(report.steps_run for report in runtime.reports()) == 8


class Counting(nn.Module):
    """Counts its calls, and cools down."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.calls, self.heat = kind(2), 1.0

    def forward(self, x):
        self.calls += 1
        self.heat *= 0.9
        return torch.tanh(self.layer(x)) * min(1, self.calls / 5) / self.heat


@pytest.mark.parametrize("kind", [int, float])
def test_numbers_of_a_module_that_change_are_inputs_from_the_second_change_on(kind):
    """Those that the function itself changes, too: it returns them beside its tensors."""
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=False):
        torch.manual_seed(0)
        eager = Counting(kind)
        model = copy.deepcopy(eager)
        step = torch.compile(model, backend="coop", options={"budget": "min"}, fullgraph=True)
        for _ in range(7):
            x = torch.randn(4, 16)
            made, expected = (f(x).square().sum() for f in (step, eager))
            (gradient,) = torch.autograd.grad(made, model.layer.weight)
            (wanted,) = torch.autograd.grad(expected, eager.layer.weight)
            assert torch.equal(made, expected)
            assert torch.equal(gradient, wanted)
            assert (model.calls, model.heat) == (eager.calls, eager.heat)
            assert type(model.calls) is kind
        assert len(runtime.reports()) <= 4  # of seven


def test_a_number_is_no_shape(caplog):
    """With plans for the first shape alone, one that changes has them all the same."""
    weight = torch.randn(8, 8, requires_grad=True)
    options = {"budget": "100%", "shapes": "eager"}
    step = torch.compile(lambda x, a: (x @ weight * a).sum(), backend="coop", options=options)
    for value in (0.1, 0.2, 0.3, 0.4):
        step(torch.ones(4, 8), value).backward()
    assert [report.steps_run for report in runtime.reports()] == [1, 3]
    ours = [record.getMessage() for record in caplog.records if record.name == "coop-plan"]
    assert not [message for message in ours if "eager" in message]


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
