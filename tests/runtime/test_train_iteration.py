"""`coop_plan.train_iteration`: forwards, backwards and the optimizer's step as one plan."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import coop_plan
from coop_plan import runtime
from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime.device.arena import process_bytes
from coop_plan.runtime.whole_iteration import planned_iteration
from tests.runtime.iterating import (
    OPTIMIZERS,
    WIDTH,
    Net,
    batches_of,
    compared,
    eager,
    equal,
    loss_of,
    state_of,
    step_of,
)


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_iteration_is_the_loops(optimizer):
    compared(optimizer, "70%", 1, None)


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Mixed(nn.Module):
    """Layers of several dtypes, and a scalar of each."""

    def __init__(self, dtypes):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)
        self.scales = nn.ParameterList(torch.tensor(1.5, dtype=dtype) for dtype in dtypes)

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = scale * layer(x.to(scale.dtype)).tanh()
        return x.float()


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.permutations(DTYPES), st.permutations(DTYPES))
@example(DTYPES, DTYPES[:1])
def test_the_norm_of_gradients_of_any_dtypes_is_the_loops(first, last):
    compared("momentum", "min", 1, 0.05, steps=6, depth=[*first, *last], model=Mixed)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_at_every_budget_with_clipping_and_micro_batches(budget, count, clip_norm):
    report = compared("adamw", budget, count, clip_norm)
    assert {op.phase for op in report.graph.ops} == {"forward", "backward", "optimizer"}


@pytest.mark.slow
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


def test_many_iterations_and_sizes_in_one_process():
    """All iterations are of one code, which Dynamo compiles eight times: the ninth was an error."""
    kept = []
    for width in range(8, 19):
        model = nn.Linear(width, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        iteration = coop_plan.train_iteration(
            lambda x, model=model: model(x).square().mean(), optimizer, "100%"
        )
        iteration(torch.ones(4, width))
        kept.extend([weakref.ref(model), weakref.ref(model.weight), weakref.ref(optimizer)])
    for rows in range(5, 15):
        iteration(torch.ones(rows, width))
    assert sum(report.steps_run for report in coop_plan.reports()) == 21
    coop_plan.clear_reports()
    del model, optimizer, iteration
    gc.collect()
    assert not [each for each in kept if each() is not None]


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


@pytest.mark.parametrize(("optimizer", "plans"), [("sgd", 1), ("momentum", 2)])
def test_a_plan_is_lowered_again_only_for_calls_that_make_states(monkeypatch, optimizer, plans):
    made = []
    lower = planned_iteration.CompiledPlan
    monkeypatch.setattr(
        planned_iteration, "CompiledPlan", lambda *given: made.append(lower(*given)) or made[-1]
    )
    model = Net()
    iteration = step_of(model, OPTIMIZERS[optimizer](model.parameters()))
    for step in range(3):
        iteration(*batches_of(step, 1))
    assert len(made) == plans


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
    with pytest.raises(runtime.OptionsError, match=r"eager kernels|PyTorch 2\.13"):
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


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "kept_of",
    [
        lambda model, loss: loss * 2,
        lambda model, loss: loss.expand(3) + 1,
        lambda model, loss: model.unused.weight.square().sum(),
    ],
)
def test_a_kept_tensor_with_a_gradient_is_refused(count, kept_of):
    """It would be trained as a loss is."""
    model, kept = Net(drop=0.0), []
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def loss_fn(batch):
        loss = loss_of(model)(batch)
        kept.append(kept_of(model, loss))
        return loss

    before = copy.deepcopy(state_of(model, optimizer))
    with pytest.raises(runtime.CaptureError, match="detach"):
        coop_plan.train_iteration(loss_fn, optimizer, "70%", method="coop")(*batches_of(0, count))
    assert equal(before, state_of(model, optimizer))


def test_anomaly_detection_is_refused():
    """Autograd would not see the backward's NaN."""
    model = Net()
    iteration = step_of(model, OPTIMIZERS["sgd"](model.parameters()))
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(runtime.RuntimeRefusalError, match="detect_anomaly"),
    ):
        iteration(*batches_of(0, 1))
