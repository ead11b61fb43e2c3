"""Heads in chunks: eager's bits, chosen by the plan where they save bytes, and left elsewhere."""

import contextlib
import copy
import random

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import coop_plan
from coop_plan import runtime
from coop_plan.runtime import backend
from coop_plan.runtime.offline_capture.devices import DeviceSpec
from coop_plan.runtime.offline_capture.roofline import Roofline
from coop_plan.runtime.offline_capture.target import graphs_of
from coop_plan.runtime.torch_internals.fakes import FakeTensorMode, convertible_modules
from coop_plan.runtime.variants import linear_cross_entropy
from coop_plan.runtime.variants.linear_cross_entropy_ops import (
    INPUT_GRADIENT,
    LOSS,
    WEIGHT_GRADIENT,
    run_whole,
)
from tests.params import slow_after

CHUNKED = "coop_plan.linear_cross_entropy"


class Model(nn.Module):
    """Words, a layer, and logits of all words; `of_loss` are options of the cross entropy."""

    def __init__(self, classes, width, *, bias=False, tied=False, dtype=torch.float32, **of_loss):
        super().__init__()
        self.words = nn.Embedding(classes, width, dtype=dtype)
        self.layer = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU())
        self.layer.append(nn.Linear(2 * width, width)).to(dtype)
        self.head = nn.Linear(width, classes, bias=bias, dtype=dtype)
        if tied:
            self.head.weight = self.words.weight
        self.cut, self.of_loss = slice(None), of_loss

    def logits(self, words):
        return self.head(self.layer(self.words(words)))

    def forward(self, words, target):
        logits = self.logits(words).float()[:, self.cut].flatten(0, 1)
        return F.cross_entropy(logits, target[:, self.cut].flatten(), **self.of_loss)


def batch(classes, *shape, ignored=-100):
    words, target = torch.randint(0, classes, (2, *shape))
    target[:, -1] = ignored
    return words, target


def gradients(model, step, data):
    model.zero_grad()
    loss = step(*data)
    loss.sum().backward()
    own = [p.grad for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *(gradient.clone() for gradient in own)]


def steps_equal(model, budget, data, **options):
    """The report of a step within a budget; it equals eager's to the bit twice, within the plan."""
    eager = gradients(model, model, data)
    step = coop_plan.train_step(model, budget, **options)
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, step, data), eager))
    report = runtime.reports()[-1]
    assert report.measured_peak_bytes <= report.peak_bytes <= report.budget_bytes
    assert report.outside_bytes == 0
    return report


def in_chunks(report):
    return [op.name for op in report.graph.ops if op.name.startswith(CHUNKED)]


@pytest.mark.parametrize("seed", slow_after(3, range(10)))
def test_random_heads_equal_eager(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    classes, width = draw.randint(700, 2000), draw.choice([16, 32, 40])
    dtype = draw.choice([torch.float32, torch.bfloat16])
    bias, tied = draw.random() < 0.5, draw.random() < 0.3
    ignored = draw.choice([-100, 3])
    of_loss = {"reduction": draw.choice(["mean", "sum", "none"]), "ignore_index": ignored}
    model = Model(classes, width, bias=bias, tied=tied, dtype=dtype, **of_loss)
    if draw.random() < 0.3 and not tied:
        model.head.requires_grad_(False)
    elif draw.random() < 0.3 and not tied:
        model.words.requires_grad_(False)
        model.layer.requires_grad_(False)
    model.cut = draw.choice([slice(None), slice(0, -1), slice(1, None), slice(-20, -2)])
    data = batch(classes, draw.randint(1, 2), draw.randint(130, 190), ignored=ignored)
    report = steps_equal(model, draw.choice(["min", "60%"]), data, variants=draw.random() < 0.3)
    assert in_chunks(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("bias", "kept"), [(True, []), (False, [15, 1, 14])])
def test_chunks_of_any_size_are_near_the_whole(dtype, reduction, bias, kept):
    """Also where products differ in their bits, and with a last chunk of another size."""
    torch.manual_seed(0)
    rows, width, classes = 75, 24, 333
    hidden, weight = torch.randn(rows, width, dtype=dtype), torch.randn(classes, width, dtype=dtype)
    of_classes = torch.randn(classes, dtype=dtype) if bias else None
    target = torch.randint(0, classes, (rows,))
    target[::7] = 5
    target = target[: rows - 5] if kept else target
    given = hidden, weight.t(), of_classes, target, reduction, 5, kept
    loss_dtype = torch.promote_types(dtype, torch.float32)
    gradient = torch.randn(len(target) if reduction == 0 else (), dtype=loss_dtype)
    loss, total, *expected = run_whole(gradient, given, loss_dtype)
    for size in (1, 16, 50, 400):
        made, total_too, *sums = LOSS(*given, loss_dtype, size)
        torch.testing.assert_close(made, loss)
        assert total_too.equal(total)
        by_input = INPUT_GRADIENT(gradient, *given, total, loss_dtype, size)
        others = WEIGHT_GRADIENT(gradient, *given, total, *sums, loss_dtype, size)
        for found, value in zip((by_input, *others), expected, strict=True):
            assert (found is None) == (value is None)
            if value is not None:
                torch.testing.assert_close(found, value)


def test_min_falls_by_the_logits_and_their_gradient(monkeypatch):
    """128 k classes."""
    torch.manual_seed(0)
    classes, data = 1 << 17, batch(1 << 17, 1, 64)
    model = Model(classes, 8)
    model.words.requires_grad_(False)
    logits = data[0].numel() * classes * 4
    report = steps_equal(model, "min", data)
    assert in_chunks(report)
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "heads_of", lambda _: [])
    whole = steps_equal(model, "min", data)
    assert not in_chunks(whole)
    assert report.peak_bytes < whole.peak_bytes - 2 * logits


def test_a_budget_that_needs_no_chunks_has_none():
    model, data = Model(1000, 32), batch(1000, 2, 64)
    assert not in_chunks(steps_equal(model, "100%", data))


def test_a_head_that_needs_less_than_other_ops_is_planned_whole_at_min():
    model, data = Model(40, 64), batch(40, 2, 40)
    assert not in_chunks(steps_equal(model, "min", data))


def test_bytes_that_the_whole_head_cannot_meet():
    model, data = Model(1500, 16), batch(1500, 2, 64)
    keep_all = steps_equal(model, "100%", data).budget_bytes
    assert in_chunks(steps_equal(model, keep_all // 3, data))
    with pytest.raises(Exception, match="cannot meet a budget of 1000 bytes"):
        coop_plan.train_step(model, 1000)(*data).backward()


@pytest.mark.parametrize("seed", slow_after(1, range(4)))
def test_a_head_beyond_the_budget_is_never_measured_whole(seed, monkeypatch):
    """Neither its ops nor the bits of its chunks; eager's bits all the same."""
    draw = random.Random(seed)
    classes, rows, width = draw.choice([1000, 2500]), 128 * draw.choice([2, 5]), 16
    rows *= torch.get_num_threads()
    model, data = Model(classes, width, bias=draw.random() < 0.5), batch(classes, 2, rows // 2)
    logits = rows * classes * 4
    checked = []

    def checks(gradient, given, dtype):
        checked.append(len(given[0]))
        return run_whole(gradient, given, dtype)

    monkeypatch.setattr(linear_cross_entropy, "run_whole", checks)
    before = sum(p.nbytes for p in model.parameters())
    report = steps_equal(model, 2 * before + logits // 2, data)
    assert in_chunks(report)
    assert all(count < rows for count in checked)
    made = max(tensor.bytes for tensor in report.graph.tensors if not tensor.resident)
    assert made < logits


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [512, 777, 1024])
def test_bits_of_odd_rows_are_compared_on_all_rows(rows, threads, monkeypatch):
    """Of other numbers of rows, or on two threads, the last ones may have other bits than in fewer.

    If no chunks have the bits of all rows, a budget that needs chunks is refused.
    """
    classes, width, checked = 1000 + 10 * threads + rows % 7, 48, []

    def checks(gradient, given, dtype):
        checked.append(len(given[0]))
        return run_whole(gradient, given, dtype)

    monkeypatch.setattr(linear_cross_entropy, "run_whole", checks)
    model, data = Model(classes, width), batch(classes, 1, rows)
    budget = 2 * sum(p.nbytes for p in model.parameters()) + rows * classes * 7
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    refused = threads == 2 or rows % 64  # on processors whose bits differ
    errors = (BackendCompilerFailed,) if refused else ()
    try:
        with contextlib.suppress(*errors):
            steps_equal(model, budget, data)
    finally:
        torch.set_num_threads(before)
    (count,) = checked
    assert (count < rows) == (threads == 1 and rows % 64 == 0)


def test_a_model_of_an_absent_device_counts_chunks_as_they_are():
    """Workspace of an op in chunks is that of this CPU, but for what products allocate."""
    model, data = Model(1500, 16, bias=True), batch(1500, 2, 64)
    keep_all = steps_equal(model, "100%", data).budget_bytes
    measured = steps_equal(model, keep_all // 3, data).graph
    spec = DeviceSpec(kind="cpu", memory_bytes=2**34, flops={"float32": 1e9}, bytes_per_s=1e10)
    with FakeTensorMode(), convertible_modules():
        absent, fakes = Model(1500, 16, bias=True), batch(1500, 2, 64)
    graphs = graphs_of(absent, fakes, model=Roofline(spec), chunks=True)
    found = [op for op in graphs["chunked"].ops if op.name.startswith(CHUNKED)]
    others = [op for op in measured.ops if op.name.startswith(CHUNKED)]
    assert [op.name for op in found] == [op.name for op in others]
    for op, other in zip(found, others, strict=True):
        assert op.workspace_bytes == pytest.approx(other.workspace_bytes, rel=0.25)
    product = max(op.cost_us for op in graphs["eager"].ops if op.name == "aten.addmm.default")
    assert all(product < op.cost_us < 3 * product for op in found)


def smoothed(model, words, target):
    return F.cross_entropy(model.logits(words).flatten(0, 1), target.flatten(), label_smoothing=0.1)


def weighted(model, words, target):
    weight = torch.linspace(0.5, 1, model.head.out_features)
    return F.cross_entropy(model.logits(words).flatten(0, 1), target.flatten(), weight)


def scaled(model, words, target):
    return F.cross_entropy(30 * model.logits(words).flatten(0, 1), target.flatten())


def also_the_largest(model, words, target):
    logits = model.logits(words).flatten(0, 1)
    return F.cross_entropy(logits, target.flatten()) + logits.amax()


def twice(model, words, target):
    logits = model.logits(words).flatten(0, 1)
    return F.cross_entropy(logits, target.flatten()) + F.cross_entropy(logits, words.flatten())


def by_samples(model, words, target):
    return F.cross_entropy(model.logits(words).transpose(1, 2), target)


@pytest.mark.parametrize("loss", [smoothed, weighted, scaled, also_the_largest, twice, by_samples])
def test_other_losses_are_planned_whole(loss):
    model, data = Model(900, 16), batch(900, 2, 40)

    def step(words, target):
        return loss(model, words, target)

    eager = gradients(model, step, data)
    planned = coop_plan.train_step(step, "min")
    assert all(map(torch.equal, gradients(model, planned, data), eager))
    assert not in_chunks(runtime.reports()[-1])


def test_a_head_whose_products_differ_in_chunks_is_left(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "all_bitwise_equal", lambda *_: False)
    model, data = Model(1100, 16), batch(1100, 2, 40)
    assert not in_chunks(steps_equal(model, "min", data))


def test_frozen_weights_need_no_chunks_of_classes(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "WEIGHT_GRADIENT", None)
    model, data = Model(1300, 16), batch(1300, 2, 40)
    model.head.weight.requires_grad_(False)
    assert in_chunks(steps_equal(model, "min", data))


def test_a_target_out_of_range_is_eagers_error():
    model, (words, target) = Model(1200, 16), batch(1200, 2, 40)
    step = coop_plan.train_step(model, "min")
    step(words, target).backward()
    assert in_chunks(runtime.reports()[-1])
    target[0, 3] = 1200
    with pytest.raises(IndexError, match="Target 1200 is out of bounds"):
        step(words, target)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_whole_iteration(batches, clip_norm):
    torch.manual_seed(0)
    models = [Model(1500, 16)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    data = [batch(1500, 2, 48) for _ in range(batches)]
    iteration = coop_plan.train_iteration(
        lambda given: models[0](*given), optimizers[0], "min", clip_norm=clip_norm
    )
    for _ in range(3):
        iteration(*data)
        optimizers[1].zero_grad()
        for given in data:
            models[1](*given).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(models[1].parameters(), clip_norm)
        optimizers[1].step()
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    report = runtime.reports()[-1]
    assert len(in_chunks(report)) == 3 * batches
    assert report.measured_peak_bytes <= report.peak_bytes <= report.budget_bytes


def test_autocast():
    torch.manual_seed(0)
    model, data = Model(1400, 32), batch(1400, 2, 48)

    def step(words, target):
        with torch.autocast("cpu", torch.bfloat16):
            return model(words, target)

    eager = gradients(model, step, data)
    planned = coop_plan.train_step(step, "min")
    assert all(map(torch.equal, gradients(model, planned, data), eager))
    assert in_chunks(runtime.reports()[-1])
