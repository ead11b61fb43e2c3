"""Optimizers within `train_iteration`: those of a user's own, and those that are refused."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import coop_plan
from coop_plan import runtime
from tests.runtime.iterating import (
    OPTIMIZERS,
    WIDTH,
    Net,
    batches_of,
    compared,
    eager,
    equal,
    listed,
    state_of,
    step_of,
)


class PerParameter(torch.optim.Optimizer):
    """Calls `update` for each parameter of its group that has a gradient."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.update(parameter)


class Coupled(PerParameter):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in given) ** 0.5 if given else 1.0
        for parameter in given:
            parameter.sub_(parameter.grad / norm)


class Keeping(PerParameter):
    """Keeps the gradient itself."""

    def update(self, parameter):
        self.state[parameter]["last"] = parameter.grad
        parameter.sub_(parameter.grad)


class Decaying(PerParameter):
    """Adds the weight decay to the gradient itself."""

    def update(self, parameter):
        parameter.sub_(parameter.grad.add_(parameter, alpha=0.1), alpha=0.1)


def test_an_optimizer_may_change_the_gradient(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "decaying", Decaying)
    report = compared("decaying", "70%", 2, 0.05)
    updated = [op for op in report.graph.ops if op.phase == "optimizer"]
    assert all(op.inputs[0] in op.mutates for op in updated)


def test_memory_of_an_update_that_takes_more_later():
    """RAdam scales by the second moment from its sixth step on."""
    compared("radam", "60%", 1, None, steps=8, depth=2)


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


class Late(PerParameter):
    """Makes its state in the second step."""

    def update(self, parameter):
        state = self.state[parameter]
        if "step" in state:
            state.setdefault("last", torch.zeros_like(parameter)).copy_(parameter.grad)
        state["step"] = state.get("step", 0) + 1
        parameter.sub_(parameter.grad, alpha=0.1)


class Replacing(PerParameter):
    """Computes its states out of place."""

    def update(self, parameter):
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


def test_several_optimizers_step_in_their_order():
    """The norm is that of all gradients; each optimizer's step is counted and refused alone."""
    compared("muon-adamw", "60%", 2, 0.05)
    model = Net()
    muon, adamw = OPTIMIZERS["muon-adamw"](model.parameters())
    calls = []
    for name, optimizer in (("muon", muon), ("adamw", adamw)):
        optimizer.register_step_post_hook(lambda *_, name=name: calls.append(name))
    step_of(model, [muon, adamw])(*batches_of(0, 1))
    assert calls == ["muon", "adamw"]
    coupled = Coupled([*model.norm.parameters()])
    with pytest.raises(runtime.RuntimeRefusalError, match="by the others' gradients"):
        step_of(model, [muon, coupled])(*batches_of(0, 1))
    with pytest.raises(runtime.RuntimeRefusalError, match="in two optimizers"):
        step_of(model, [muon, adamw, coupled])(*batches_of(0, 1))
    with pytest.raises(runtime.CaptureError, match="in no group"):
        step_of(model, [muon])(*batches_of(0, 1))
    with pytest.raises(runtime.OptionsError, match="needs an optimizer"):
        step_of(model, [])


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


def test_hooks_of_this_package_are_allowed(monkeypatch):
    """As those that measure a step, or lend an arena to it."""
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def before(*_):
        """Nothing."""

    monkeypatch.setattr(before, "__module__", "coop_plan.runtime.any")
    optimizer.register_step_pre_hook(before)
    step_of(model, optimizer)(*batches_of(0, 1))


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


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


class Mixed(nn.Module):
    """A layer of each dtype given, whose gradients have the loss's scale."""

    def __init__(self, dtypes, scale):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)
        self.scale = scale

    def loss(self, batch):
        x = batch[0]
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.float().square().mean() * self.scale


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    scale=st.sampled_from([1.0, 2.0**-8, 2.0**-16]),
    rate=st.sampled_from([0.0, 1e-4, 1e-2]),
)
@example("adafactor", [torch.float32, torch.bfloat16], 1.0, 0.0)
@example("adafactor", [torch.float64, torch.float32], 2.0**-16, 1e-4)
@example("adafactor", [torch.bfloat16, torch.bfloat16], 1.0, 1e-2)
@example("adamw", [torch.bfloat16, torch.float32], 2.0**-16, 1e-4)
def test_a_group_of_several_dtypes_is_the_loops_or_refused(optimizer, dtypes, scale, rate):
    """Adafactor updates all parameters of a group with the epsilon of the first one's dtype."""
    torch._dynamo.reset()
    ours, theirs = Mixed(dtypes, scale), Mixed(dtypes, scale)
    make = torch.optim.Adafactor if optimizer == "adafactor" else OPTIMIZERS[optimizer]
    mine, other = make(ours.parameters()), make(theirs.parameters())
    iteration = coop_plan.train_iteration(ours.loss, mine, "80%", method="coop")
    for step in range(2):
        for one in (*listed(mine), *listed(other)):
            for group in one.param_groups:
                group["lr"] = rate if step == 0 else 1e-2
        batches = batches_of(step, 1)
        try:
            made = iteration(*batches)
        except runtime.RuntimeRefusalError as error:
            assert optimizer == "adafactor" and len(set(dtypes)) > 1
            assert "needs a group for each dtype" in str(error)
            assert equal(state_of(ours, mine), state_of(theirs, other))
            return
        losses, _ = eager(theirs.loss, other, batches, None)
        assert equal([made], losses)
        assert equal(state_of(ours, mine), state_of(theirs, other))
