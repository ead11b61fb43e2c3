"""Buffers that a step overwrites have eager's values, and cost the memory that eager takes."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from coop_plan import fit
from coop_plan.runtime import clear_reports, reports

WIDTH = 16


class Norm(nn.Module):
    """One batch norm, of which the statistics are updated as often as it is called."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        for _ in range(self.calls):
            x = torch.relu(self.norm(self.linear(x)))
        return x


class Average(nn.Module):
    """An average of what it is given, read before, after or not at all."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = self.linear(x)
        before = self.average * 1.5
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
            self.calls.add_(1)
        if self.read == "before":
            return torch.tanh(x * before)
        # A clone, since eager refuses the backward of one that the next forward updates.
        after = self.average.clone() * self.calls.clone()
        return torch.tanh(x * after if self.read == "after" else x)


class Exchange(nn.Module):
    """Two buffers that change places, one of which is then read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.full((WIDTH,), 0.5))
        self.register_buffer("b", torch.full((WIDTH,), 1.5))

    def forward(self, x):
        kept = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(kept)
        return torch.sigmoid(x * self.a.clone()) * x


class Statistics(nn.Module):
    """A batch norm whose mean goes into the result as well, from before or after its update."""

    def __init__(self, before):
        super().__init__()
        self.before, self.norm = before, nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        mean = self.norm.running_mean
        earlier = mean.sin() if self.before else 0.0
        return torch.sin(self.norm(x) + (earlier if self.before else mean))


BLOCKS = st.one_of(
    st.builds(Norm, st.integers(1, 2)),
    st.builds(Average, st.sampled_from(["before", "after", ""])),
    st.builds(Exchange),
    st.builds(Statistics, st.booleans()),
)


def trained(model, step, order):
    """What three iterations leave; each runs its forwards and backwards in this order."""
    torch.manual_seed(1)
    seen, waiting = [], []
    for _ in range(3):
        model.zero_grad()
        for forward in order:
            if forward:
                waiting.append(step(torch.randn(64, WIDTH)).square().mean())
                seen += [waiting[-1].detach().clone(), *(b.clone() for b in model.buffers())]
            else:
                waiting.pop().backward()
        seen += [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return seen


ORDERS = [(True, False), (True, False, True, False), (True, True, False, False)]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    blocks=st.lists(BLOCKS, min_size=1, max_size=4),
    budget=st.sampled_from(["100%", "60%", "min"]),
    order=st.sampled_from(ORDERS),
)
def test_buffers_are_eagers_to_the_bit(blocks, budget, order):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *copy.deepcopy(blocks)).train()
    expected = trained(plain := copy.deepcopy(model), plain, order)
    torch._dynamo.reset()
    found = trained(model, torch.compile(model, backend="coop", options={"budget": budget}), order)
    assert all(map(torch.equal, expected, found))


def test_an_exception_leaves_the_buffers_that_eager_leaves():
    """What raises is an op after the first batch norm and before the second."""

    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
            self.table = nn.Embedding(4, WIDTH)

        def forward(self, x, ids):
            return self.second(self.first(x) + self.table(ids)).square().mean()

    torch.manual_seed(0)
    origin, x = Looked(), torch.randn(8, WIDTH)
    seen = []
    for compiled in (False, True):
        step = model = copy.deepcopy(origin)
        if compiled:
            step = torch.compile(model, backend="coop", options={"budget": "60%"})
        step(x, torch.arange(8) % 4).backward()
        with pytest.raises(IndexError):
            step(x + 1, torch.arange(8))
        step(x + 2, torch.arange(8) % 4).backward()
        seen.append([*(b.clone() for b in model.buffers()), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *seen))


def test_a_new_value_dies_when_it_is_written():
    """A step with many updated buffers plans none of them as outputs."""
    model = nn.Sequential(*[Norm(1) for _ in range(4)])
    torch._dynamo.reset()
    clear_reports()
    step = torch.compile(model, backend="coop", options={"budget": "100%"})
    step(torch.randn(64, WIDTH)).square().mean().backward()
    graph = reports()[-1].graph
    made = {t for op in graph.ops if op.phase == "forward" for t in op.outputs}
    left = [t for t in graph.tensors if t.kind == "output" and t.id in made]
    assert len(left) == 1
    assert sum(op.name == "coop_plan.write_input" for op in graph.ops) == 4 * 3


SOURCE = """
import torch
from torch import nn

def chain(depth, width, calls=1, momentum=0.1):
    blocks = [
        nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width, momentum=momentum))
        for _ in range(depth)
    ]
    head = nn.Linear(width, 4)
    def step(x):
        for block in blocks:
            for _ in range(calls):
                x = torch.relu(block(x))
        return head(x.mean((2, 3))).square().mean()
    return step

def narrow(batch=2):
    return chain(12, 8), (torch.randn(batch, 8, 4, 4),)

def wide(batch=2):
    return chain(6, 512), (torch.randn(batch, 512, 2, 2),)

def shared(batch=2):
    return chain(4, 64, calls=3), (torch.randn(batch, 64, 4, 4),)
"""


@pytest.mark.parametrize("name", ["narrow", "wide", "shared"])
def test_keeping_everything_takes_no_more_than_eager(name, importable):
    importable("norm_steps", SOURCE)
    (row,) = fit(f"norm_steps:{name}", ["a100-80gb"], 2)
    assert row["error"] is None
    assert row["keep_all"]["peak_bytes"] <= row["eager"]["peak_bytes"]
