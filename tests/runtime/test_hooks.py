"""Optimizers that step in the backward: gradients are used up there, in eager's way and order."""

import copy
import gc
import logging
import random

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

from coop_plan import runtime
from coop_plan.planner import InfeasibleBudgetError
from coop_plan.planner.planning import plan
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.gradients.capture_adjust import BESIDE
from coop_plan.runtime.iteration.recorder import TOLERANCE
from coop_plan.schemas import Compute
from tests.support import random_plan

STEPS = 7
SLACK = 64 << 10


class Heavy(nn.Module):
    """More weights than activations, one of them of another layout than its gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(192, 192) for _ in range(8))
        self.turned = nn.Parameter(torch.randn(192, 192).t() / 20)
        self.scale = nn.Parameter(torch.ones(192))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return (x @ self.turned).square().mean()


def batches():
    source = torch.Generator().manual_seed(3)
    return [torch.randn(16, 192, generator=source) for _ in range(STEPS)]


def momentum(model):
    """What makes the hook of a leaf: an optimizer of its own."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    return update


def train(model, step, make=momentum, each=lambda i, model, handles: None):
    """Train with a hook for each leaf; the parameters, and the highest peak after two steps."""
    update = make(model)
    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    peaks = []
    for i, x in enumerate(batches()):
        each(i, model, handles)
        before = process_bytes()[0]
        reset_peak()
        step(x).backward()
        peaks.append(process_bytes()[1] - before)
    return [p.detach().clone() for p in model.parameters()], max(peaks[3:])


def both(budget, **given):
    """The same with eager's step and a planned one; what each left, and took."""
    torch.manual_seed(0)
    eager = Heavy()
    model = copy.deepcopy(eager)
    expected, most = train(eager, eager, **given)
    step = torch.compile(model, backend="coop", options={"budget": budget}, fullgraph=True)
    found, taken = train(model, step, **given)
    assert all(map(torch.equal, found, expected))
    return taken, most


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_gradients_that_an_optimizer_uses_up_are_never_there_at_once(budget):
    taken, most = both(budget)
    assert taken <= most + SLACK
    (report,) = runtime.reports()
    assert report.plans_made == 2
    assert report.measured_peak_bytes <= report.budget_bytes + TOLERANCE
    assert most < sum(p.nbytes for p in Heavy().parameters())  # it is less than all gradients


def test_a_budget_that_all_gradients_at_once_would_not_fit_into():
    torch.manual_seed(0)
    model = Heavy()
    budget = 2 * sum(p.nbytes for p in model.parameters()) - (300 << 10)
    step = torch.compile(model, backend="coop", options={"budget": budget}, fullgraph=True)
    with pytest.raises(Exception, match="cannot meet a budget") as failed:
        step(batches()[0])
    assert isinstance(failed.value.__cause__ or failed.value.inner_exception, InfeasibleBudgetError)
    torch._dynamo.reset()
    both(budget)
    (report,) = runtime.reports()
    assert report.budget_bytes == budget
    assert report.measured_peak_bytes <= budget + TOLERANCE


def test_hooks_that_come_and_go():
    """Removed, then others; an optimizer outside in between."""

    def each(i, model, handles):
        if i == 3:
            for handle in handles:
                handle.remove()
        if i == 4:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        if i == 5:
            update = momentum(model)
            handles[:] = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]

    both("100%", each=each)


def keep(model):
    """Let hooks take all gradients; what they took, with the names, as it comes."""
    found = []

    def taking(name):
        def take(p):
            found.append((name, p.grad))
            p.grad = None

        return take

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(taking(name))
    return found


def kept_alike(run):
    """Whether hooks are called for the same leaves with the same gradients, which then stay."""
    torch.manual_seed(0)
    eager = Heavy()
    model = copy.deepcopy(eager)
    step = torch.compile(model, backend="coop", options={"budget": "min"}, fullgraph=True)
    results = []
    for trained, called in ((model, step), (eager, eager)):
        found = keep(trained)
        run(trained, called)
        results.append(sorted(found, key=lambda call: call[0]))  # of one leaf in their order
    found, expected = results
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(torch.equal(made, wanted) for (_, made), (_, wanted) in zip(*results, strict=True))


def test_a_hook_is_called_once_with_all_of_a_gradient():
    """Of a leaf that something else has a gradient for, too; and for no other function's sake."""

    def run(model, step):
        for i, x in enumerate(batches()):
            loss = step(x)
            if i % 2:
                loss = loss + model.layers[0].weight.square().sum()
            if i == 4:
                torch.autograd.grad(loss, list(model.parameters()))
            else:
                loss.backward()

    kept_alike(run)


def test_a_second_backward_of_a_step():
    def run(_, step):
        for x in batches():
            loss = step(x)
            loss.backward(retain_graph=True)
            loss.backward()

    kept_alike(run)


def test_a_hook_that_fails_is_called_again_in_the_next_step():
    class Stop(Exception):
        pass

    def run(model, step):
        failing = set()

        def update(p):
            if failing and p is model.layers[4].weight:
                raise Stop
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.1)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        for i, x in enumerate(batches()):
            if i == 4:
                failing.add(True)
                with pytest.raises(Stop):
                    step(x).backward()
                failing.clear()
                model.zero_grad()
                with torch.no_grad():  # in which order leaves came is autograd's: begin again
                    for p in model.parameters():
                        p.fill_(0.01)
            step(x).backward()
        return [p.detach() for p in model.parameters()]

    eager = Heavy()
    model = copy.deepcopy(eager)
    step = torch.compile(model, backend="coop", options={"budget": "100%"}, fullgraph=True)
    assert all(map(torch.equal, run(model, step), run(eager, eager)))


def test_a_hook_that_a_hook_adds_is_called_from_the_next_backward_on():
    """Before or after accumulation; one that renews itself too."""

    def run(model, step):
        called = []

        def renewing(name, p):
            def renew(p):
                called.append((name, p.grad))
                p.grad = None
                handle.remove()
                renewing(name, p)

            handle = p.register_post_accumulate_grad_hook(renew)

        for name, p in model.named_parameters():
            renewing(name, p)
        for i, x in enumerate(batches()):
            if i == 4:
                for p in model.layers[3].parameters():
                    p.register_post_accumulate_grad_hook(
                        lambda p: p.register_hook(lambda gradient: gradient * 0.5) and None
                    )
            step(x).backward()
        return sorted(called, key=lambda call: call[0])

    eager = Heavy()
    model = copy.deepcopy(eager)
    step = torch.compile(model, backend="coop", options={"budget": "min"}, fullgraph=True)
    found, expected = run(model, step), run(eager, eager)
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(
        torch.equal(made, wanted) for (_, made), (_, wanted) in zip(found, expected, strict=True)
    )


def test_a_hook_that_renews_those_of_all_leaves():
    def run(model, step):
        called, handles, parameters = [], [], [*model.parameters()]

        def renew():
            while handles:
                handles.pop().remove()
            handles.extend(p.register_post_accumulate_grad_hook(hook) for p in parameters)

        def hook(p):
            called.append(p.grad is None)
            p.grad = None
            if len(called) % len(parameters) == 0:
                renew()

        renew()
        for x in batches():
            step(x).backward()
        return called

    eager, model = Heavy(), Heavy()
    step = torch.compile(model, backend="coop", options={"budget": "min"}, fullgraph=True)
    assert run(model, step) == run(eager, eager)


@pytest.mark.parametrize("kept", [torch.clone, torch.Tensor.bfloat16])
def test_what_hooks_keep_in_each_step_is_in_the_budget(kept):
    """Other than states of an optimizer, which are kept once."""
    torch.manual_seed(0)
    model, found, peaks = Heavy(), [], []

    def keep(p):
        found.append(kept(p.grad))
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(keep)
    step = torch.compile(model, backend="coop", options={"budget": "100%"}, fullgraph=True)
    resident = sum(p.nbytes for p in model.parameters())
    for x in batches():
        found.clear()
        before = process_bytes()[0] - resident - x.nbytes
        reset_peak()
        step(x).backward()
        peaks.append(process_bytes()[1] - before)
    (report,) = runtime.reports()
    assert max(peaks[4:]) <= report.budget_bytes + TOLERANCE
    assert max(peaks[4:]) <= report.measured_peak_bytes + TOLERANCE


KINDS = "linear", "norm", "tied", "turned", "wide"


class Turned(nn.Module):
    """Product with a weight whose layout may be another one than its gradient's."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).t() / width)

    def forward(self, x):
        return x @ self.weight


class Drawn(nn.Module):
    """Layers of these kinds; those that are tied share one weight."""

    def __init__(self, kinds, width):
        super().__init__()
        shared = nn.Linear(width, width)
        self.layers = nn.ModuleList(self.layer(kind, width, shared) for kind in kinds)

    def layer(self, kind, width, shared):
        if kind == "wide":
            return nn.Sequential(
                nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
            )
        if kind in ("norm", "tied"):
            return nn.LayerNorm(width) if kind == "norm" else shared
        return Turned(width) if kind == "turned" else nn.Linear(width, width)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p),
    "foreach adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


class Loop:
    """Training of a drawn network whose hooks update each parameter after `micro` batches."""

    def __init__(self, kinds, width, rule, micro):
        gc.collect()
        self.base = process_bytes()[0]
        torch.manual_seed(0)
        self.model = Drawn(kinds, width)
        self.micro = micro
        self.steps = dict.fromkeys(self.model.parameters(), 0)
        self.optimizers = {p: RULES[rule]([p]) for p in self.model.parameters()}
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, p):
        self.steps[p] += 1
        if self.steps[p] % self.micro == 0:
            self.optimizers[p].step()
            self.optimizers[p].zero_grad()

    def states(self):
        states = [s for one in self.optimizers.values() for s in one.state.values()]
        return sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor))

    def run(self, step, batch, width, numbers):
        """Run steps with these numbers; the peak of each without states of the optimizers."""
        peaks = []
        for i in numbers:
            x = torch.randn(batch, width, generator=torch.Generator().manual_seed(i))
            reset_peak()
            step(x).backward()
            peaks.append(process_bytes()[1] - self.base - self.states())
        return peaks


def check_budget(caplog, kinds, width, batch, rule, micro, budget):
    """Train as in eager within a budget; the last report."""
    torch._dynamo.reset()
    runtime.clear_reports()
    caplog.clear()
    steps = 3 + 2 * micro
    eager = Loop(kinds, width, rule, micro)
    eager.run(eager.model, batch, width, range(steps))
    loop = Loop(kinds, width, rule, micro)
    step = torch.compile(loop.model, backend="coop", options={"budget": budget}, fullgraph=True)
    with caplog.at_level(logging.WARNING, logger="coop-plan"):
        loop.run(step, batch, width, range(1))
        (report,) = runtime.reports()
        first_exceeds = report.measured_peak_bytes > report.budget_bytes + TOLERANCE
        assert not (first_exceeds and budget == "min")
        peaks = loop.run(step, batch, width, range(1, steps))
    assert all(map(torch.equal, loop.model.parameters(), eager.model.parameters()))
    assert max(peaks) <= report.budget_bytes + TOLERANCE
    assert sum("of its budget" in line for line in caplog.messages) == first_exceeds
    return report


@pytest.mark.slow
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=5),
    width=st.sampled_from([64, 128]),
    batch=st.sampled_from([4, 64, 256]),
    rule=st.sampled_from(sorted(RULES)),
    micro=st.sampled_from([1, 1, 2]),
    share=st.floats(0, 1),
)
@example(["linear"] * 6, 128, 256, "adamw", 1, 0.0)
@example(["turned", "norm", "wide", "tied", "tied"], 128, 4, "foreach adamw", 1, 0.0)
@example(["linear", "norm", "wide"], 64, 64, "adam", 2, 0.5)
def test_hooks_keep_to_any_budget(caplog, kinds, width, batch, rule, micro, share):
    """Gradients beside the arena and temporaries of the optimizers included."""
    smallest = check_budget(caplog, kinds, width, batch, rule, micro, "min")
    least, most = smallest.budget_bytes, plan(smallest.graph, "100%").budget_bytes
    tight = plan(smallest.graph, least + int(share * (most - least))).peak_bytes
    try:
        check_budget(caplog, kinds, width, batch, rule, micro, tight)
    except torch._dynamo.exc.BackendCompilerFailed as error:  # found from above, it may be missed
        assert isinstance(error.inner_exception, InfeasibleBudgetError)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=3, max_size=7))
@example(["linear"] * 6)
def test_in_any_order_gradients_beside_the_arena_are_as_counted(kinds):
    torch._dynamo.reset()
    runtime.clear_reports()
    loop = Loop(kinds, 64, "sgd", 1)
    step = torch.compile(loop.model, backend="coop", options={"budget": "100%"}, fullgraph=True)
    loop.run(step, 8, 64, range(3))
    (report,) = runtime.reports()
    graph, size = report.graph, {t.id: t.bytes for t in report.graph.tensors}
    handed = {op.inputs[0]: op for op in graph.ops if op.name == "coop_plan.hand_over"}
    assert handed
    (counted,) = (t.bytes for t in graph.tensors if t.name == BESIDE)
    for seed in range(20):
        steps = random_plan(graph, random.Random(seed)).steps
        alive, done = set(), set()
        for op in (graph.ops[step.op] for step in steps if isinstance(step, Compute)):
            alive |= handed.keys() & set(op.outputs) - done
            assert sum(size[handed[t].inputs[1]] for t in alive) <= counted
            if handed.get(op.inputs[0]) is op:
                alive.discard(op.inputs[0])
                done.add(op.inputs[0])
