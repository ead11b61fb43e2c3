"""`coop_plan.train_iteration`: forwards, backwards and the optimizer's step as one plan."""

import copy
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import coop_plan
from coop_plan import runtime
from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime.device.arena import process_bytes
from coop_plan.runtime.whole_iteration import updates

WIDTH = 24
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
}


class Net(nn.Module):
    """Norms with running statistics, dropout, a weight that is read twice, one that is not used."""

    def __init__(self, depth=3, drop=0.2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.unused = nn.Linear(2, 2)
        self.drop = drop

    def forward(self, x):
        for block in self.blocks:
            x = nn.functional.dropout(self.norm(block(x)).tanh(), self.drop)
        return nn.functional.linear(x, self.blocks[0].weight.t())


def loss_of(model):
    def loss(batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    return loss


def batches_of(step, count, rows=32):
    generator = torch.Generator().manual_seed(step)
    return [
        (
            torch.randn(rows, WIDTH, generator=generator),
            torch.randint(0, WIDTH, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def eager(loss, optimizer, batches, clip_norm):
    """The losses and the norm of the loop."""
    optimizer.zero_grad()
    losses = []
    for batch in batches:
        made = loss(batch)
        made.backward()
        losses.append(made.detach())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = None
    if clip_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return losses, norm


def state_of(model, optimizer):
    """All that an iteration changes."""
    made = [*model.state_dict().values()]
    for parameter in model.parameters():
        made += [v for v in optimizer.state.get(parameter, {}).values() if torch.is_tensor(v)]
    return made


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def compared(optimizer, budget, count, clip_norm, *, steps=3, depth=3, model=Net, **options):
    """Train by the loop and by iterations; returns the last report."""
    torch._dynamo.reset()
    runtime.clear_reports()
    ours, theirs = model(depth), model(depth)
    mine, other = (
        OPTIMIZERS[optimizer](ours.parameters()),
        OPTIMIZERS[optimizer](theirs.parameters()),
    )
    mine_lr = torch.optim.lr_scheduler.ExponentialLR(mine, 0.7)
    other_lr = torch.optim.lr_scheduler.ExponentialLR(other, 0.7)
    given = {"method": "coop"} | options
    iteration = coop_plan.train_iteration(loss_of(ours), mine, budget, clip_norm=clip_norm, **given)
    for step in range(steps):
        batches = batches_of(step, count)
        torch.manual_seed(step)
        losses, norm = eager(loss_of(theirs), other, batches, clip_norm)
        torch.manual_seed(step)
        made = iteration(*batches)
        assert equal(made if count > 1 else [made], losses)
        assert equal(state_of(ours, mine), state_of(theirs, other))
        assert clip_norm is None or torch.equal(iteration.grad_norm, norm)
        assert all(p.grad is None for p in ours.parameters())
        (report,) = coop_plan.reports()
        assert report.measured_peak_bytes <= report.budget_bytes
        assert report.outside_bytes == 0
        mine_lr.step()
        other_lr.step()
    assert report.steps_run == steps
    return report


def test_memory_is_given_back_between_iterations():
    model = Net(drop=0.0)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    iteration = step_of(model, optimizer)
    batches = batches_of(0, 1)
    before, _ = process_bytes()
    iteration(*batches)
    (report,) = coop_plan.reports()
    states = sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values())
    assert process_bytes()[0] > before + states + 4096
    coop_plan.release()
    assert process_bytes()[0] <= before + states + 4096
    iteration(*batches_of(1, 1))
    assert report.steps_run == 2
    assert report.measured_peak_bytes <= report.budget_bytes


def step_of(model, optimizer, budget="80%", **options):
    given = {"method": "coop"} | options
    return coop_plan.train_iteration(loss_of(model), optimizer, budget, **given)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_iteration_is_the_loops(optimizer):
    compared(optimizer, "70%", 1, None)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_at_every_budget_with_clipping_and_micro_batches(budget, count, clip_norm):
    report = compared("adamw", budget, count, clip_norm)
    assert {op.phase for op in report.graph.ops} == {"forward", "backward", "optimizer"}


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    budget=st.sampled_from(["90%", "75%", "60%"]),
    count=st.integers(1, 4),
    clip_norm=st.sampled_from([None, 0.02, 100.0]),
    depth=st.integers(1, 4),
    variants=st.booleans(),
)
def test_any_iteration_is_the_loops(optimizer, budget, count, clip_norm, depth, variants):
    compared(optimizer, budget, count, clip_norm, steps=2, depth=depth, variants=variants)


def test_activations_move_to_the_host_in_the_same_plan():
    report = compared("adamw", "60%", 2, 0.05, link="8GB/s", method="coop-offline")
    assert report.plan.swapped_bytes


def test_sizes_may_change():
    model = Net()
    other = copy.deepcopy(model)
    optimizer, theirs = (
        OPTIMIZERS["adamw"](model.parameters()),
        OPTIMIZERS["adamw"](other.parameters()),
    )
    iteration = coop_plan.train_iteration(loss_of(model), optimizer, "80%")
    for step, rows in enumerate((32, 48, 32, 48)):
        batches = batches_of(step, 1, rows)
        torch.manual_seed(step)
        eager(loss_of(other), theirs, batches, None)
        torch.manual_seed(step)
        iteration(*batches)
        assert equal(state_of(model, optimizer), state_of(other, theirs))
    assert [report.steps_run for report in coop_plan.reports()] == [2, 2]


def test_states_that_are_loaded_are_continued():
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    eager(loss_of(model), optimizer, batches_of(0, 1), None)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    torch.manual_seed(1)
    eager(loss_of(model), optimizer, batches_of(1, 1), None)
    again = Net()
    loaded = OPTIMIZERS["adamw"](again.parameters())
    again.load_state_dict(kept[0])
    loaded.load_state_dict(kept[1])
    iteration = step_of(again, loaded)
    torch.manual_seed(1)
    iteration(*batches_of(1, 1))
    assert equal(state_of(again, loaded), state_of(model, optimizer))


def test_gradients_are_not_kept():
    """Weights dominate: beside them there is memory for a gradient, not for all of them."""
    torch.manual_seed(0)
    width, depth = 128, 8
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    iteration = coop_plan.train_iteration(lambda x: model(x).square().mean(), optimizer, "min")
    iteration(torch.randn(4, width))
    (report,) = coop_plan.reports()
    layer, rows = 4 * width * width, 4 * 4 * width
    assert report.plan.arena_bytes <= layer + 2 * depth * rows
    assert report.measured_peak_bytes <= report.budget_bytes


class Coupled(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in given) ** 0.5 if given else 1.0
        for parameter in given:
            parameter.sub_(parameter.grad / norm)


class Keeping(torch.optim.Optimizer):
    """Keeps the gradient itself."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["last"] = parameter.grad
                parameter.sub_(parameter.grad)


class Decaying(torch.optim.Optimizer):
    """Adds the weight decay to the gradient itself."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.add_(parameter, alpha=0.1), alpha=0.1)


def test_an_optimizer_may_change_the_gradient(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "decaying", Decaying)
    report = compared("decaying", "70%", 2, 0.05)
    updated = [op for op in report.graph.ops if op.phase == "optimizer"]
    assert all(op.inputs[0] in op.mutates for op in updated)


class Counting(torch.optim.Optimizer):
    """Counts its steps in `place`: a group, itself, or objects that all parameters share."""

    def __init__(self, groups, place):
        super().__init__(groups, {"lr": 0.1, "steps": 0})
        self.place, self.steps, self.shared = place, 0, {"steps": 0}
        self.total = torch.zeros(())

    def count(self, group):
        if self.place == "group":
            group["steps"] += 1
        elif self.place == "self":
            self.steps += 1
        elif self.place == "dict":
            self.shared["steps"] += 1
        elif self.place == "state":
            self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        elif self.place == "tensor":
            self.total += 1
        return max(group["steps"], self.steps, self.shared["steps"], self.total.item(), 1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            number = self.count(group)
            for parameter in group["params"]:
                if self.place == "each":
                    state = self.state[parameter]
                    number = state["steps"] = state.get("steps", 0) + 1
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / number)
                    if self.place == "adapted":
                        group["lr"] /= 1 + parameter.grad.norm().item()


class Late(torch.optim.Optimizer):
    """Makes its state in the second step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if "step" in state:
                    state.setdefault("last", torch.zeros_like(parameter)).copy_(parameter.grad)
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad, alpha=0.1)


class Replacing(torch.optim.Optimizer):
    """Computes its states out of place."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["mean"] = 0.9 * state.get("mean", 0.0) + parameter.grad
                parameter.sub_(state["mean"], alpha=0.1)


class Wrapping(torch.optim.Optimizer):
    """Updates by another optimizer."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


def in_groups(model):
    return [{"params": [*model.blocks.parameters()]}, {"params": [*model.norm.parameters()]}]


def test_steps_may_be_counted_in_a_group(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "counting", lambda p: Counting(p, "group"))
    compared("counting", "100%", 2, 0.05)


@pytest.mark.parametrize("place", ["self", "dict", "state", "tensor", "each", "adapted"])
def test_steps_that_are_counted_for_all_parameters_are_refused(place):
    model = Net()
    optimizer = Counting(in_groups(model), place)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), optimizer.shared))
    with pytest.raises(runtime.RuntimeRefusalError, match="share the count"):
        step_of(model, optimizer)(*batches_of(0, 1))
    assert optimizer.total == optimizer.steps == 0
    after = (model.state_dict(), optimizer.state_dict(), optimizer.shared)
    assert equal(before[0].values(), after[0].values())
    assert before[1:] == after[1:]


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", ["batch", "parameter"])
def test_each_loss_needs_a_gradient(kind, at):
    model = nn.Linear(4, 4)
    scale = nn.Parameter(torch.ones(()))
    other = (lambda x: x.sum()) if kind == "batch" else (lambda _: scale)
    optimizer = torch.optim.SGD([*model.parameters(), scale], 0.1)
    iteration = coop_plan.train_iteration(
        lambda batch: other(batch[1]) if batch[0] == at else (model(batch[1]) * scale).sum(),
        optimizer,
        "100%",
        method="coop",
    )
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(runtime.CaptureError, match="1 of 2 losses"):
        iteration(*((i, torch.randn(2, 4)) for i in range(2)))
    assert equal(before, [*model.parameters()])


def test_hooks_before_the_step_are_refused():
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    iteration, calls = step_of(model, optimizer), []
    handle = optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    with pytest.raises(runtime.RuntimeRefusalError, match="pre-hook"):
        iteration(*batches_of(0, 1))
    handle.remove()
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    iteration(*batches_of(0, 1))
    assert calls == ["after"]


@pytest.mark.parametrize("kind", ["parameter", "buffer", "batch"])
def test_memory_that_a_parameter_shares_is_refused(kind):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.rand(4, 4))
            rest = self.first.detach()[1:]
            self.rest = nn.Parameter(rest) if kind == "parameter" else nn.Buffer(rest)

        def forward(self, x):
            return (self.rest if kind != "batch" else x) @ self.first

    model = Shared()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    iteration = coop_plan.train_iteration(
        lambda x: model(x).tanh().sum(), optimizer, "100%", method="coop"
    )
    with pytest.raises(runtime.RuntimeRefusalError, match="share memory"):
        iteration(model.first.detach()[1:])
    assert equal(before, [*model.parameters()])


def test_parameters_groups_and_options_are_those_of_the_call():
    """One trace serves two models; groups change their order, options become used, a group goes."""

    def trained(made):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        groups = [{"params": [*m.parameters()], "lr": 0.1 + 0.2 * i} for i, m in enumerate(model)]
        optimizer = torch.optim.SGD(groups)
        model.used = model[0]
        call = made(lambda x: model.used(x).square().mean(), optimizer)
        found = []
        for step in range(6):
            model.used = model[step % 2]
            if step == 2:
                optimizer.param_groups.reverse()
            if step == 4:
                for group in optimizer.param_groups:
                    group.update(momentum=0.9, weight_decay=0.1)
            found.append(call(torch.randn(8, WIDTH)))
            found += [p.detach().clone() for p in model.parameters()]
            assert all(
                report.measured_peak_bytes <= report.budget_bytes for report in coop_plan.reports()
            )
        return found, call, model, optimizer

    def loop(loss, optimizer):
        return lambda batch: eager(loss, optimizer, [batch], None)[0][0]

    def planned(loss, optimizer):
        return coop_plan.train_iteration(loss, optimizer, "100%", method="coop")

    runtime.clear_reports()
    found, call, model, optimizer = trained(planned)
    assert equal(found, trained(loop)[0])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups = [g for g in optimizer.param_groups if g["lr"] == 0.1]
    with pytest.raises(runtime.CaptureError, match="in no group"):
        call(torch.randn(8, WIDTH))
    assert equal(before, [*model.parameters()])


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (Coupled, "by the others' gradients"),
        (Keeping, "keeps a gradient"),
        (Late, "after its first update"),
        (Replacing, "replaces the memory of its states"),
        (Wrapping, "wraps an optimizer"),
        (torch.optim.LBFGS, "LBFGS cannot update one parameter at a time"),
    ],
)
def test_an_optimizer_that_needs_more_than_a_parameter_is_refused(optimizer, said):
    model = Net()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(runtime.RuntimeRefusalError, match=said):
        step_of(model, optimizer(model.parameters()))(*batches_of(0, 1))
    assert equal(before, list(model.parameters()))


def test_what_cannot_be_trained_so_is_refused():
    model = Net()
    adamw = OPTIMIZERS["adamw"]
    some = adamw([*model.blocks[1:].parameters(), *model.norm.parameters()])
    with pytest.raises(runtime.CaptureError, match="in no group of the optimizer"):
        step_of(model, some)(*batches_of(0, 1))
    optimizer = adamw(model.parameters())
    for returned in (lambda x: model(x[0]), lambda x: (model(x[0]).sum(), x[0])):
        with pytest.raises(runtime.RuntimeRefusalError, match="return its loss alone"):
            coop_plan.train_iteration(returned, optimizer, "80%")(*batches_of(0, 1))
    with pytest.raises(runtime.RuntimeRefusalError, match="nothing to train"):
        coop_plan.train_iteration(lambda x: x[0].sum(), optimizer, "80%")(*batches_of(0, 1))
    with pytest.raises(runtime.RuntimeRefusalError, match="needs a micro-batch"):
        step_of(model, optimizer)()
    with pytest.raises(runtime.OptionsError, match="clip_norm"):
        step_of(model, optimizer, clip_norm=0.0)
    with pytest.raises(runtime.OptionsError, match="eager kernels"):
        step_of(model, optimizer, kernels="fused")
    with pytest.raises(InfeasibleBudgetError):
        step_of(model, optimizer, 1000)(*batches_of(0, 1))
    iteration = step_of(model, optimizer)
    handle = model.norm.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(runtime.RuntimeRefusalError, match="hook"):
        iteration(*batches_of(0, 1))
    handle.remove()
    iteration(*batches_of(0, 1))


def test_a_failed_iteration_changes_nothing():
    model = Net(drop=0.0)
    model.norm = nn.LayerNorm(WIDTH)  # running statistics are written in the forward, as in eager
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    iteration = step_of(model, optimizer)
    iteration(*batches_of(0, 2))
    before = copy.deepcopy(state_of(model, optimizer))
    first, (x, y) = batches_of(1, 2)
    with pytest.raises(IndexError):
        iteration(first, (x, y + WIDTH))
    assert equal(before, state_of(model, optimizer))
    iteration(*batches_of(1, 2))
    assert not equal(before, state_of(model, optimizer))


@pytest.fixture
def interruptible():
    """Python's handler of SIGINT: a shell's background process ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_last_update(monkeypatch, at):
    model, other = Net(), Net()
    optimizer, theirs = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, other))
    iteration = step_of(model, optimizer)
    numbers = iter(range(100))
    whole = updates.ParameterUpdate.__call__

    def interrupted(self, gradient):
        if next(numbers) == at:
            os.kill(os.getpid(), signal.SIGINT)
        whole(self, gradient)

    monkeypatch.setattr(updates.ParameterUpdate, "__call__", interrupted)
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        iteration(*batches_of(0, 1))
    torch.manual_seed(0)
    eager(loss_of(other), theirs, batches_of(0, 1), None)
    mine, expected = ([*m.parameters()] for m in (model, other))
    assert equal(mine, expected)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
