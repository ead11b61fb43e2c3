"""The graphs of one iteration run by one plan, within one budget; another order is right, too."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coop_plan import runtime
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.execute.course import FIRST_ORDERS
from coop_plan.runtime.execute.step import PlannedStep
from tests.runtime.test_flight import forwards_again, model_itself
from tests.runtime.test_loops import Broken, Unshared, assert_equal, both, data, state_of

# Of Dynamo's own, where it looks at what is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def iterations():
    return [report for report in runtime.reports() if report.name.startswith("iteration")]


def twice(model, step, x):
    return (step(x) - step(x.flip(0))).square().mean()


@pytest.mark.parametrize("budget", ["min", "75%", "100%"])
def test_a_model_twice_for_one_loss_is_planned_as_one(budget):
    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, _ in data(5):
            optimizer.zero_grad()
            twice(model, step, x).backward()
            optimizer.step()
        return state_of(model, optimizer)

    both(loop, Unshared, wrap=model_itself, options={"budget": budget})
    (report,) = iterations()
    assert report.steps_run >= 2
    assert report.measured_peak_bytes <= report.budget_bytes
    assert len(report.graph.ops) == 2 * len(runtime.reports()[0].graph.ops)
    assert forwards_again() == 1  # while it was recorded


def test_each_step_has_orders_of_its_own():
    """However many came before in this thread, of which none is kept alive."""

    def steps():
        return [o for o in gc.get_objects() if type(o) is PlannedStep]

    there, model = set(map(id, steps())), Unshared()
    step = torch.compile(model, backend="coop", dynamic=False, options={"budget": "100%"})
    for size in range(2, 4 + FIRST_ORDERS):
        for x, _ in data(3):
            loss = twice(model, step, x[:size])
            loss.backward()
    assert [report.steps_run for report in iterations()] == [2] * (FIRST_ORDERS + 2)
    kept = twice(model, step, x[:size])  # whose pool lasts as long
    torch._dynamo.reset()
    del step, loss
    gc.collect()
    assert len([found for found in steps() if id(found) not in there]) == 1
    kept.backward()


def test_graph_breaks_are_planned_as_one():
    def loop(model, step):
        for x, y in data(4):
            F.cross_entropy(step(x), y).backward()
        return state_of(model)

    both(loop, Broken, wrap=model_itself, options={"budget": "100%"})
    (report,) = iterations()
    assert report.steps_run >= 1
    assert report.measured_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_another_order_on_the_way_is_right(budget):
    """Forwards left out, forwards more, backwards turned round, an exception between."""

    def loop(model, step):
        kept = []
        for i, (x, y) in enumerate(data(14)):
            if i == 5:
                kept.append(step(x))
            elif i == 6:
                kept.append(twice(model, step, x))
            elif i == 7:
                first, second = F.cross_entropy(step(x), y), F.cross_entropy(step(x + 1), y)
                first.backward()
                second.backward()
            elif i == 8:
                with pytest.raises(ValueError, match="on purpose"):
                    raise ValueError("on purpose", step(x))
            elif i == 9:
                (twice(model, step, x) + step(x).mean()).backward()
            elif i == 10:
                loss = twice(model, step, x)
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                twice(model, step, x).backward()
        kept[1].backward()
        kept[0].sum().backward()
        return state_of(model)

    both(loop, Unshared, wrap=model_itself, options={"budget": budget})


def test_a_recurrent_cell_is_planned_over_time():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 32)])

        def forward(self, x, hidden):
            return torch.tanh(self.layers[0](x) + self.layers[1](hidden))

    def loop(model, step):
        found = {}
        for i, (x, _) in enumerate(data(4)):
            hidden, x = torch.zeros(8, 32), x.requires_grad_()
            for part in x.split(8):
                hidden = step(part, hidden)
            hidden.sum().backward()
            found[str(i)] = x.grad
        return found

    both(loop, Cell, wrap=model_itself, options={"budget": "100%"})
    (report,) = iterations()
    assert report.steps_run >= 1
    assert report.measured_peak_bytes <= report.budget_bytes


def test_blocks_that_cannot_meet_a_share_each_are_planned_as_one(caplog):
    eager = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
    planned = copy.deepcopy(eager)
    for block in planned:
        block.compile(backend="coop", options={"budget": "40%"})
    for model in (eager, planned):
        for x, _ in data(3):
            model.zero_grad()
            model(x.repeat(1, 2)).square().mean().backward()
    assert_equal(state_of(planned), state_of(eager))
    assert "one of several graphs takes" in caplog.text
    (report,) = iterations()
    assert report.measured_peak_bytes <= report.budget_bytes


def test_a_generator_waits_while_its_critic_learns():
    """It gave its memory up when the critic was called; its iteration goes on with what it made."""

    def make():
        return nn.ModuleList(
            nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), last)
            for last in (nn.Linear(48, 16), nn.Linear(48, 1))
        )

    def loop(pair, _):
        generator, critic = pair
        made, judged = generator, critic
        if compiled:
            made, judged = (torch.compile(part, backend="coop", options=options) for part in pair)
        compiled.append(True)
        optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in pair]
        for x, _ in data(5):
            fake = made(x)
            optimizers[1].zero_grad()
            (F.softplus(-judged(x)).mean() + F.softplus(judged(fake.detach())).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-judged(fake)).mean().backward()
            optimizers[0].step()
        return state_of(pair)

    compiled, options = [], {"budget": "min"}
    both(loop, make)
    (report,) = iterations()
    assert report.steps_run >= 3
    assert report.name.startswith("iteration of 4 graphs")
    assert forwards_again() <= 3  # while it was recorded


def test_what_passes_back_between_layers_counts_once():
    """Layers without anything to run again: about what eager takes, not one more of each."""

    def train(layers, called):
        peaks = []
        for _ in range(5):
            for p in layers.parameters():
                p.grad = None
            x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
            before, _ = process_bytes()
            reset_peak()
            for layer in called:
                x = x + torch.tanh(layer(x))
            x.square().mean().backward()
            peaks.append(process_bytes()[1] - before)
        return peaks[-1], [p.grad for p in layers.parameters()]

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
    twin = copy.deepcopy(layers)
    options = {"budget": "100%"}
    called = [torch.compile(layer, backend="coop", options=options) for layer in layers]
    (peak, found), (eager, wanted) = train(layers, called), train(twin, twin)
    assert all(map(torch.equal, found, wanted))
    (report,) = iterations()
    assert report.steps_run >= 2
    assert peak <= eager
    there = sum(p.nbytes for p in layers.parameters())
    assert report.measured_peak_bytes <= 1.2 * (eager + there)
    assert report.measured_peak_bytes <= report.budget_bytes
