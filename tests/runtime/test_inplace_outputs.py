"""Results of ops lie in the place of inputs that die, and are eager's to the bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import coop_plan
from coop_plan.runtime import OptionsError, backend
from coop_plan.runtime.capture import op_replacements
from coop_plan.runtime.offline_capture.target import capture
from coop_plan.runtime.torch_internals.ops import out_overload
from tests.runtime.stepping import stepped

aten = torch.ops.aten


class Gated(nn.Module):
    """The MLP of a Llama."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def trained(options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated() for _ in range(3)))
    x = torch.randn(64, 16)
    step = lambda x: model(x).square().mean()  # noqa: E731
    if options is not None:
        torch._dynamo.reset()
        step = torch.compile(step, backend="coop", options=options)
    return stepped(model, step, x)


def test_a_step_with_variants_is_eagers_to_the_bit_and_smaller():
    eager = trained(None)
    for budget in ("60%", "min"):
        assert all(map(torch.equal, trained({"budget": budget, "variants": True}), eager))
    lean = coop_plan.reports()[-1]
    assert lean.measured_arena_bytes == lean.planned_arena_bytes
    assert lean.outside_bytes == 0
    assert any(op.inplace for op in lean.graph.ops)
    trained({"budget": "min"})
    assert lean.peak_bytes < coop_plan.reports()[-1].peak_bytes


def test_what_leaves_the_step_or_is_read_twice_is_not_overwritten():
    def step(x, w):
        kept = torch.sin(x @ w)
        twice = kept * kept
        return kept, (twice + 1).sum()

    graph = capture(step, (torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)), variants=True)
    kinds = {t.id: t.kind for t in graph.tensors}
    pairs = [pair for op in graph.ops for pair in op.inplace]
    assert pairs
    assert {kinds[t] for pair in pairs for t in pair} == {"activation"}
    plain = capture(step, (torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)))
    assert not any(op.inplace for op in plain.ops)


class Vocabulary(nn.Module):
    """The ends of a language model."""

    def __init__(self, reduction):
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 16), nn.Linear(16, 4096, bias=False)
        self.reduction = reduction

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.embed(x)), y, reduction=self.reduction).sum()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_large_vocabulary_is_there_once(monkeypatch, reduction):
    """Its smallest budget falls by more than its logits; rows of their gradient come in parts."""
    monkeypatch.setattr(op_replacements, "CHUNK_BYTES", 1 << 18)
    monkeypatch.setattr(backend, "heads_of", lambda _: [])  # the head is not run in chunks
    eager = Vocabulary(reduction)
    x, y = torch.randint(4096, (2, 512))
    loss = eager(x, y)
    loss.backward()
    peaks = []
    for variants in (False, True):
        planned = copy.deepcopy(eager)
        planned.zero_grad()
        torch._dynamo.reset()
        options = {"budget": "min", "variants": variants}
        step = torch.compile(planned, backend="coop", options=options)
        made = step(x, y)
        made.backward()
        assert torch.equal(made, loss)
        for ours, theirs in zip(planned.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        report = coop_plan.reports()[-1]
        assert report.measured_arena_bytes == report.planned_arena_bytes
        assert report.outside_bytes == 0
        peaks.append(report.peak_bytes)
    assert peaks[0] - peaks[1] > 1.5 * 512 * 4096 * 4


@pytest.mark.parametrize(
    ("op", "out"),
    [
        (aten.mul.Tensor, "aten.mul.out"),
        (aten.silu_backward.default, "aten.silu_backward.grad_input"),
        (aten.pow.Tensor_Scalar, "aten.pow.Tensor_Scalar_out"),
    ],
)
def test_the_overload_that_is_given_its_result(op, out):
    overload, name = out_overload(op)
    assert str(overload) == out
    assert name in ("out", "grad_input")


def test_variants_is_a_truth():
    with pytest.raises(Exception, match="variants must be true or false") as told:
        trained({"budget": "min", "variants": "yes"})
    assert isinstance(getattr(told.value, "inner_exception", told.value), OptionsError)


def test_a_relu_lies_over_its_input():
    """By its in-place overload: the one that is given its result makes another, and copies it."""
    w = torch.randn(8, 8, requires_grad=True)
    step = lambda x: torch.relu(x @ w).exp().sum()  # noqa: E731
    graph = capture(step, (torch.randn(4, 8),), variants=True)
    (relu,) = (op for op in graph.ops if op.name == "aten.relu.default")
    assert relu.inplace == [[relu.outputs[0], relu.inputs[0]]]
