"""Real architectures under budgets equal eager; `benchmarks.architectures` has more of them."""

import pytest
import torch

pytest.importorskip("transformers")
from benchmarks.architectures import LOSS, Comparison, FusedComparison, Trained
from coop_plan.runtime.torch_internals import FUSED_SINCE, version
from tests.params import slow_after

NAMES = ("gpt2", "resnet", "lstm", "bert", "llama", "t5", "vit", "swin", "convnext", "unet")


@pytest.mark.filterwarnings("ignore::Warning:torch")
@pytest.mark.parametrize("name", slow_after(3, NAMES))
def test_three_steps_equal_eager(name):
    comparison = Comparison(name)
    for budget in ("60%", "min"):
        row = comparison.under(budget)
        assert (row.result, row.held) == ("equal", True), row


@pytest.mark.slow
@pytest.mark.skipif(version() < FUSED_SINCE, reason="fused kernels are refused")
@pytest.mark.filterwarnings("ignore::Warning:torch")
@pytest.mark.parametrize("name", ["gpt2", "bert", "lstm"])
def test_fused_kernels_equal_themselves_and_are_near_eager(name):
    row = FusedComparison(name).under("60%")
    assert (row.result, row.held) == ("equal to itself", True), row
    assert row.error is not None and row.eager_peak is None


def test_a_gradient_that_is_zero_but_for_rounding_has_the_scale_of_the_largest():
    def results(**values):
        first = {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}
        return Trained([], {}, {}, torch.empty(0), first)

    exact = results(**{LOSS: 1.0}, weight=1.0, bias=1e-17)
    noise = results(**{LOSS: 1.0}, weight=1.0, bias=1e-7)
    assert noise.distance(exact, exact) == pytest.approx(1e-7)
    small = results(**{LOSS: 1.0}, weight=1.0, bias=1e-4)
    off = results(**{LOSS: 1.0}, weight=1.0, bias=1.01e-4)
    assert off.distance(small, small) == pytest.approx(1e-3)  # the scale is 1e-3 at least
