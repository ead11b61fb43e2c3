"""Of fake tensors the values are known that follow from numbers alone, and no others."""

import pytest
import torch
from torch import nn

from coop_plan.runtime.offline_capture.constant_values import MAX_ELEMENTS, ConstantValues
from coop_plan.runtime.torch_internals.fakes import DataDependentOutputException, FakeTensorMode


@pytest.fixture(autouse=True)
def fake():
    with FakeTensorMode(), ConstantValues():
        yield


def test_rates_are_numbers():
    """As stochastic depth has them (transformers' ConvNext, timm)."""
    assert torch.linspace(0, 0.3, 4).tolist() == pytest.approx([0, 0.1, 0.2, 0.3])
    assert [x.item() for x in torch.arange(3).split(1)] == [0, 1, 2]
    assert int(torch.tensor([2, 3]).prod()) == 6
    assert (torch.zeros(3) == 0).all()


def test_what_is_written_through_a_view_is_known():
    values = torch.tensor([1, 2, 3])
    values[0] = 7
    values.view(3)[1:].add_(1)
    assert values.tolist() == [7, 3, 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(1),
        lambda: torch.empty(1),
        lambda: torch.zeros(1).uniform_(),
        lambda: torch.ones(1).copy_(torch.rand(1)),
        lambda: nn.Linear(1, 1).weight.sum(),
        lambda: torch.zeros(1) + torch.rand(1),
        lambda: torch.zeros(2 * MAX_ELEMENTS)[0],
    ],
)
def test_nothing_else_is(make):
    with pytest.raises(DataDependentOutputException):
        make().item()


def test_a_view_of_what_was_overwritten_is_not_known():
    values = torch.zeros(4)
    part = values[:2]
    values.normal_()
    with pytest.raises(DataDependentOutputException):
        part[0].item()
