"""Ops run in parts are ATen's to the bit, and results lie in the place of what was cut as they."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import coop_plan
from coop_plan.runtime.offline_capture.target import capture
from coop_plan.runtime.torch_internals.ops import tree_flatten
from coop_plan.runtime.variants import chunked
from coop_plan.runtime.variants.chunked_ops import (
    CHUNKED_OPS,
    SLICE_SPECS,
    chunk_regions,
    pack_layouts,
)
from coop_plan.runtime.variants.inplace_outputs import run_into_copies
from coop_plan.schemas import Compute
from tests.runtime.stepping import stepped

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
CONVOLUTION = [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def heads(count):
    """As a transformer's attention has them: heads lie side by side."""
    return [torch.randn(3, 16, 4, 8).transpose(1, 2) for _ in range(count)]


def attention(mask=None):
    q, k, v, gradient = heads(4)
    made = FLASH(q, k, v, 0.0, mask is None, attn_mask=mask)
    return (gradient, q, k, v, *made, 0.0, mask is None), {"attn_mask": mask}


def images(*channels):
    return [torch.randn(6, count, 8, 8) for count in channels]


CALLS = {
    "attention": (FLASH, (*heads(3), 0.0, True), {}),
    "attention's gradient": (FLASH_BACKWARD, *attention()),
    "attention's gradient, masked": (FLASH_BACKWARD, *attention(torch.randn(3, 1, 16, 16))),
    "convolution": (
        aten.convolution.default,
        (images(8)[0], torch.randn(16, 8, 3, 3), None, *CONVOLUTION),
        {},
    ),
    "convolution's gradients": (
        aten.convolution_backward.default,
        (*images(16, 24), torch.randn(16, 24, 3, 3), [16], *CONVOLUTION, [True, True, True]),
        {},
    ),
    "convolution's weights": (
        aten.convolution_backward.default,
        (*images(16, 24), torch.randn(16, 24, 3, 3), [16], *CONVOLUTION, [False, True, False]),
        {},
    ),
    "convolution's input": (
        aten.convolution_backward.default,
        (*images(8, 8), torch.randn(8, 8, 3, 3), [8], *CONVOLUTION, [True, False, False]),
        {},
    ),
    "batch norm's gradients": (
        aten.native_batch_norm_backward.default,
        (*images(5, 5), *(torch.rand(5) + 0.1 for _ in range(5)), True, 1e-5, [True] * 3),
        {},
    ),
    "group norm's gradients": (
        aten.native_group_norm_backward.default,
        (*images(4, 4), torch.rand(6, 2), torch.rand(6, 2), torch.rand(4), 6, 4, 64, 2, [True] * 3),
        {},
    ),
    "layer norm's gradients": (
        aten.native_layer_norm_backward.default,
        (
            *(torch.randn(6, 5, 16), torch.randn(6, 5, 16), [16]),
            *(torch.rand(6, 5, 1), torch.rand(6, 5, 1), torch.rand(16), torch.rand(16)),
            [True] * 3,
        ),
        {},
    ),
    "dropout's gradient": (
        aten.native_dropout_backward.default,
        (torch.randn(6, 7), torch.rand(6, 7) > 0.3, 1 / 0.7),
        {},
    ),
}


def layouts(results):
    return pack_layouts([None if r is None else (list(r.shape), list(r.stride())) for r in results])


def same(ours, theirs):
    return all(
        a is b if b is None else torch.equal(a, b) and a.stride() == b.stride()
        for a, b in zip(ours, theirs, strict=True)
    )


def test_every_op_that_is_cut_is_called_here():
    assert {op for op, _, _ in CALLS.values()} == set(SLICE_SPECS)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("width", [2, 4, 100])
def test_parts_are_atens_to_the_bit(call, width):
    op, args, named = CALLS[call]
    expected = tree_flatten(op(*args, **named))[0]
    part = [width] * len(next(iter(SLICE_SPECS[op].arguments.values())))
    part += [8] if SLICE_SPECS[op].sums else []
    own = (part, layouts(expected), *args), named
    assert same(tree_flatten(CHUNKED_OPS[op](*own[0], **named))[0], expected)
    tensors = [v for v in tree_flatten((args, named))[0] if isinstance(v, torch.Tensor)]
    first = expected[0]
    alike = [
        i
        for i, v in enumerate(tensors)
        if first is not None
        if (v.shape, v.stride(), v.dtype) == (first.shape, first.stride(), first.dtype)
    ]
    for position in alike:
        kept = [v.clone() for v in tensors]
        made, taken = run_into_copies(CHUNKED_OPS[op], own, {0: position})
        assert same(made, expected)
        assert 0 not in {allocation.output for allocation in taken}
        assert all(map(torch.equal, kept, tensors))  # written_over gives it copies


def test_all_gradients_of_an_attention_lie_over_what_it_reads():
    args, named = attention()
    expected = FLASH_BACKWARD(*args, **named)
    own = ([1, 2], layouts(expected), *args), named
    for places in itertools.permutations(range(5), 3):
        made, _ = run_into_copies(CHUNKED_OPS[FLASH_BACKWARD], own, dict(enumerate(places)))
        assert same(made, expected)


def test_parts_cover_every_slice_once():
    cut = SLICE_SPECS[FLASH]
    seen = torch.zeros(3, 5)
    for region in chunk_regions(cut, {"query": torch.empty(3, 5, 2, 2)}, [2, 4]):
        seen[region] += 1
    assert seen.eq(1).all()


class Small(nn.Module):
    """Convolutions, norms, pooling and an attention: what can be cut."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.batch, self.group = nn.BatchNorm2d(16), nn.GroupNorm(4, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.layer = nn.LayerNorm(16)

    def forward(self, x):
        x = F.relu(self.batch(self.first(x)))
        x = F.max_pool2d(F.silu(self.group(self.second(x))), 2)
        rows = x.flatten(2).transpose(1, 2)
        q, k, v = (part(rows).view(*rows.shape[:2], 2, 8).transpose(1, 2) for part in self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.dropout(self.layer(rows + mixed), 0.1).square().mean()


def trained(options):
    torch.manual_seed(0)
    model, x = Small(), torch.randn(8, 8, 16, 16)
    step = model
    if options is not None:
        torch._dynamo.reset()
        step = torch.compile(model, backend="coop", options=options)
    return stepped(model, step, x)


def test_a_step_in_parts_is_eagers_to_the_bit_and_smaller():
    eager = trained(None)
    peaks = []
    for variants in (False, True):
        assert all(map(torch.equal, trained({"budget": "min", "variants": variants}), eager))
        report = coop_plan.reports()[-1]
        assert report.measured_arena_bytes == report.planned_arena_bytes
        assert report.outside_bytes == 0
        peaks.append(report.peak_bytes)
    assert peaks[1] < 0.9 * peaks[0]
    run = {step.variant for step in report.plan.steps if isinstance(step, Compute)}
    assert any(name and name.startswith(chunked.NAME) for name in run)


def convolving(x, w):
    return F.conv2d(F.conv2d(x, w), w.flip(0)).square().sum()


def test_what_is_not_the_same_is_not_offered(monkeypatch):
    arguments = torch.randn(8, 8, 16, 16), torch.randn(8, 8, 3, 3, requires_grad=True)
    found = capture(convolving, arguments, variants=True)
    assert any(op.variants for op in found.ops)
    monkeypatch.setattr(chunked, "all_bitwise_equal", lambda *_: False)
    monkeypatch.setattr(chunked, "cached_check", lambda what, key, kind, attempt: attempt())
    assert not any(op.variants for op in capture(convolving, arguments, variants=True).ops)


def test_results_that_leave_the_step_lie_in_no_place():
    """The input's gradient is one, and its place would be the input's, which is not the step's."""
    x, w = torch.randn(8, 8, 16, 16, requires_grad=True), torch.randn(8, 8, 3, 3)
    graph = capture(lambda x: F.conv2d(x, w, padding=1).sum(), (x,), variants=True)
    kinds = {tensor.id: tensor.kind for tensor in graph.tensors}
    pairs = [pair for op in graph.ops for v in op.variants for pair in v.inplace]
    assert all(kinds[t] == "activation" for pair in pairs for t in pair)
