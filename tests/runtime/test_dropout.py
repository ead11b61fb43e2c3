"""Dropout of ours on the CPU: the numbers of ATen's, from the same state of the generator."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import coop_plan
from coop_plan.runtime.capture import op_replacements
from coop_plan.runtime.capture.op_replacements import DROPOUT, DROPOUT_BACKWARD
from coop_plan.runtime.device import bernoulli
from coop_plan.runtime.offline_capture.target import capture
from tests.runtime.stepping import eager_and_compiled

aten = torch.ops.aten


class Mean(nn.Module):
    def forward(self, x):
        return x.square().mean()


COUNTS = st.sampled_from([0, 1, 2, 311, 312, 313, 623, 624, 625, 1248]) | st.integers(0, 5000)
PROBABILITIES = st.sampled_from([0.0, 1.0, 0.5, 2.0**-53, math.nextafter(1, 0)]) | st.floats(0, 1)


@given(st.integers(0, 2**63), COUNTS, PROBABILITIES, st.lists(st.integers(1, 700), max_size=3))
def test_draws_are_atens_and_so_is_the_state_after_them(seed, count, p, drawn):
    """Whatever was drawn before: numbers of 64 bits, of 32, normal ones of which one is kept."""
    if not bernoulli.matches_aten():
        pytest.skip("MKL draws here")
    torch.manual_seed(seed)
    for kind, before in enumerate(drawn):
        (torch.rand, torch.randn, torch.randperm)[kind](before)
    state = torch.get_rng_state()
    expected = torch.empty(count, dtype=torch.bool).bernoulli_(p)
    rest = torch.get_rng_state(), torch.randn(3), torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(bernoulli._sample(torch.empty(count, dtype=torch.bool), p), expected)
    assert all(map(torch.equal, (torch.get_rng_state(), torch.randn(3), torch.rand(3)), rest))


def test_threads_draw_one_after_the_other():
    """No number is drawn twice: the state after it all is that of as many draws of one thread."""
    if not bernoulli.matches_aten():
        pytest.skip("MKL draws here")
    count, each, threads = 20_000, 40, 4
    torch.manual_seed(2)
    for _ in range(each * threads):
        torch.empty(count, dtype=torch.bool).bernoulli_(0.5)
    expected = torch.get_rng_state()
    torch.manual_seed(2)
    start = threading.Barrier(threads)

    def work(_):
        start.wait()
        for _ in range(each):
            bernoulli.bernoulli_(torch.empty(count, dtype=torch.bool), 0.5)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert torch.equal(torch.get_rng_state(), expected)


def test_where_another_draws_it_is_asked(monkeypatch):
    monkeypatch.setattr(bernoulli, "matches_aten", lambda: False)
    monkeypatch.setattr(bernoulli, "_sample", None)
    torch.manual_seed(1)
    expected = torch.empty(4096, dtype=torch.bool).bernoulli_(0.3)
    torch.manual_seed(1)
    assert torch.equal(bernoulli.bernoulli_(torch.empty(4096, dtype=torch.bool), 0.3), expected)


@pytest.mark.parametrize("p", [-0.5, 1.5, math.nan])
def test_what_is_no_probability_is_atens_error(p):
    with pytest.raises(RuntimeError, match="expects p to be in"):
        bernoulli.bernoulli_(torch.empty(4096, dtype=torch.bool), p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5, 128), (40, 10, 9)])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("train", [True, False, None])
def test_a_dropout_in_parts_is_atens(monkeypatch, dtype, shape, p, train):
    monkeypatch.setattr(op_replacements, "CHUNK_ELEMENTS", 1 << 10)
    values, gradient = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    for tensor in (values, gradient):
        if tensor.numel() > 3:
            tensor.view(-1)[:3] = torch.tensor([float("inf"), -0.0, float("nan")])
    state = torch.get_rng_state()
    expected = aten.native_dropout.default(values, p, train)
    torch.set_rng_state(state)
    found = DROPOUT(values, p, train)
    expected += (aten.native_dropout_backward.default(gradient, expected[1], 1 / 0.7),)
    found += (DROPOUT_BACKWARD(gradient, found[1], 1 / 0.7),)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))


@pytest.mark.parametrize("transposed", ["values", "gradient", "mask"])
def test_what_is_not_in_order_is_atens(transposed):
    made = {name: torch.randn(40, 50) for name in ("values", "gradient", "mask")}
    made[transposed] = made[transposed].t().contiguous().t()
    state = torch.get_rng_state()
    expected = aten.native_dropout.default(made["values"], 0.3, True)
    torch.set_rng_state(state)
    found = DROPOUT(made["values"], 0.3, True)
    assert all(map(torch.equal, found, expected))
    mask = made["mask"] > 0
    back = aten.native_dropout_backward.default(made["gradient"], mask, 2.0)
    assert torch.equal(DROPOUT_BACKWARD(made["gradient"], mask, 2.0), back)


def test_a_step_on_the_cpu_takes_it():
    """Its scratch is of parts; the gradient may lie in the place of the one it is computed from."""
    w = torch.randn(512, 512, requires_grad=True)
    graph = capture(
        lambda x: torch.dropout((x @ w), 0.1, True).square().sum(),
        (torch.randn(512, 512),),
        variants=True,
    )
    ops = {op.name: op for op in graph.ops}
    forward = ops["aten.native_dropout.default"]
    backward = ops["aten.native_dropout_backward.default"]
    part = op_replacements.CHUNK_ELEMENTS * 4
    if bernoulli.matches_aten():  # MKL takes a mask of integers
        assert part <= forward.workspace_bytes <= part + 8192
    assert part <= backward.workspace_bytes <= part + 8192
    assert forward.rng
    assert backward.inplace


def test_a_compiled_step_takes_it(monkeypatch):
    """Nothing of the trial whether it can is the step's."""
    bernoulli.matches_aten.cache_clear()
    drawn = []
    monkeypatch.setattr(
        bernoulli,
        "_sample",
        lambda mask, p, draw=bernoulli._sample: drawn.append(p) or draw(mask, p),
    )
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.25), nn.Tanh()), torch.randn(512, 64)
    seen = eager_and_compiled(nn.Sequential(model, Mean()), x, {"budget": "100%"})
    assert all(map(torch.equal, *seen))
    assert drawn.count(0.75) >= bernoulli.matches_aten()
    report = coop_plan.reports()[-1]
    assert report.outside_bytes == 0
    assert report.measured_arena_bytes == report.planned_arena_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_noise_is_drawn_in_the_order_of_the_memory(dtype, order, p):
    weight = torch.randn(5, 5, requires_grad=True)
    values = torch.randn(6, 7, 5)

    def loss(values):
        product = (values.to(dtype) @ weight.to(dtype)).permute(order)
        return nn.functional.dropout(product, p).float().square().mean()

    found = []
    for step in (loss, coop_plan.train_step(loss, "100%", method="coop")):
        torch.manual_seed(1)
        made = step(values)
        found += [made.detach(), *torch.autograd.grad(made, [weight])]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
