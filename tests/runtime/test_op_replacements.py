"""Ops that run in place of ATen's give ATen's numbers, by allocations that no data changes."""

import pytest
import torch

from coop_plan.runtime.capture import op_replacements, profiler
from coop_plan.runtime.capture.op_replacements import CROSS_ENTROPY_BACKWARD, REPLACEMENTS

aten = torch.ops.aten.masked_scatter_backward.default


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mask_shape", [(8, 16), (16,), (8, 1)])
def test_the_gradient_of_a_masked_scatter_is_atens(transposed, mask_shape):
    gradient = torch.randn(16, 8).t() if transposed else torch.randn(8, 16)
    for chance in (0.0, 0.3, 1.0):
        mask = torch.rand(mask_shape) < chance
        count = int(mask.expand_as(gradient).sum())
        for sizes in ([count], [count + 5], [2, count]):
            expected = aten(gradient, mask, sizes)
            found = REPLACEMENTS[aten](gradient, mask, sizes)
            assert found.stride() == expected.stride()
            assert torch.equal(found, expected)


def test_a_mask_does_not_move_the_result():
    """ATen's result is its third allocation with a full mask, its fourth with another."""

    def allocations(op, mask):
        made = profiler._measure(op, (torch.randn(64), mask, [64]), {})
        return [(allocation.bytes, allocation.output) for allocation in made.allocations]

    half = torch.arange(64) < 32
    full = torch.ones(64, dtype=torch.bool)
    assert allocations(aten, half) != allocations(aten, full)
    ours = REPLACEMENTS[aten]
    assert allocations(ours, half) == allocations(ours, full)
    assert allocations(ours, ~full) == allocations(ours, full)


def test_a_mask_that_selects_too_much_harms_nothing():
    """As stand-in data may."""
    full = torch.ones(64, dtype=torch.bool)
    assert REPLACEMENTS[aten](torch.randn(64), full, [3]).shape == (3,)


@pytest.mark.parametrize("part_bytes", [1, 600, 1 << 20])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_of_a_cross_entropy_is_atens(monkeypatch, dtype, reduction, part_bytes):
    """However many rows at a time, and also in the place of the log-probabilities."""
    monkeypatch.setattr(op_replacements, "CHUNK_BYTES", part_bytes)
    ops = torch.ops.aten
    output = ops._log_softmax.default(torch.randn(13, 50, dtype=dtype), 1, False)
    target = torch.randint(50, (13,))
    target[3:5] = -100
    gradient = torch.randn(13 if reduction == 0 else (), dtype=dtype)
    for weight in (None, torch.rand(50, dtype=dtype)):
        asked = target, weight, reduction, -100
        _, total = ops.nll_loss_forward.default(output, *asked)
        between = ops.nll_loss_backward.default(gradient, output, *asked, total)
        expected = ops._log_softmax_backward_data.default(between, output, 1, dtype)
        assert torch.equal(CROSS_ENTROPY_BACKWARD(gradient, output, *asked, total), expected)
        place = output.clone()
        out = torch.ops.coop_plan.cross_entropy_backward.out
        assert out(gradient, place, *asked, total, out=place) is place
        assert torch.equal(place, expected)
