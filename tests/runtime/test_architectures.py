"""Real architectures under budgets equal eager; `benchmarks.architectures` has more of them."""

import pytest

pytest.importorskip("transformers")
from benchmarks.architectures import Comparison, FusedComparison
from coop_plan.runtime.torch_internals import FUSED_SINCE, version

NAMES = ("gpt2", "bert", "llama", "t5", "vit", "swin", "resnet", "convnext", "unet", "lstm")


@pytest.mark.filterwarnings("ignore::Warning:torch")
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_equal_eager(name):
    comparison = Comparison(name)
    for budget in ("60%", "min"):
        row = comparison.under(budget)
        assert (row.result, row.held) == ("equal", True), row


@pytest.mark.slow
@pytest.mark.skipif(version() < FUSED_SINCE, reason="fused kernels are refused")
@pytest.mark.filterwarnings("ignore::Warning:torch")
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_fused_kernels_equal_themselves_and_are_near_eager(name):
    row = FusedComparison(name).under("60%")
    assert (row.result, row.held) == ("equal to itself", True), row
