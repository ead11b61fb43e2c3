"""Real architectures under budgets equal eager; `benchmarks.architectures` has more of them."""

import pytest

pytest.importorskip("transformers")
from benchmarks.architectures import Comparison

NAMES = ("gpt2", "bert", "llama", "t5", "vit", "swin", "resnet", "convnext", "unet", "lstm")


@pytest.mark.filterwarnings("ignore::Warning:torch")
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_equal_eager(name):
    comparison = Comparison(name)
    for budget in ("60%", "min"):
        row = comparison.under(budget)
        assert (row.result, row.held) == ("equal", True), row
