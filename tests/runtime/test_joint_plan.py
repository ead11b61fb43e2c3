"""The graphs of one iteration run by one plan, within one budget; another order is right, too."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coop_plan import runtime
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.execute.planned_step import PlannedStep
from coop_plan.runtime.iteration import joint_plan, recorder
from coop_plan.runtime.iteration.joint_plan import RELEASE
from coop_plan.runtime.iteration.recorder import ORDERS_PLANNED_AT_ONCE
from tests.runtime.stepping import backward_that_does_more_than_add, hooked
from tests.runtime.test_invocation import forwards_again, model_itself
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
    ops = [op for op in report.graph.ops if op.name != RELEASE]
    assert len(ops) == 2 * len(runtime.reports()[0].graph.ops)
    assert forwards_again() == 1  # while it was recorded


@pytest.mark.parametrize("cut", [True, False])
def test_a_joint_plan_keeps_variants_and_inplace_pairs(cut, monkeypatch):
    """If its parts cannot be separated, the default variants are planned together."""

    def cut_without_variants(layout, plan):
        return None if any(op.variants for op in layout.graph.ops) else separate(layout, plan)

    def loop(model, step):
        for x, _ in data(5):
            model.zero_grad()
            twice(model, step, x).backward()
        return state_of(model)

    separate = joint_plan._Layout.cut
    if not cut:
        monkeypatch.setattr(joint_plan._Layout, "cut", cut_without_variants)
    both(loop, Unshared, wrap=model_itself, options={"budget": "min", "variants": True})
    (report,) = iterations()
    alone = runtime.reports()[0].graph
    for pairs in ("inplace", "variants"):
        count = sum(len(getattr(op, pairs)) for op in report.graph.ops)
        kept = cut or pairs == "inplace"
        assert count == (2 * sum(len(getattr(op, pairs)) for op in alone.ops) if kept else 0)
    assert any(op.variants for op in alone.ops)
    assert report.steps_run >= 2


def test_each_step_has_orders_of_its_own():
    """However many came before in this thread, of which none is kept alive."""

    def steps():
        return [o for o in gc.get_objects() if type(o) is PlannedStep]

    there, model = set(map(id, steps())), Unshared()
    step = torch.compile(model, backend="coop", dynamic=False, options={"budget": "100%"})
    for size in range(2, 4 + ORDERS_PLANNED_AT_ONCE):
        for x, _ in data(3):
            loss = twice(model, step, x[:size])
            loss.backward()
    assert [report.steps_run for report in iterations()] == [2] * (ORDERS_PLANNED_AT_ONCE + 2)
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
    assert "this graph cannot meet its share and takes" in caplog.text
    (report,) = iterations()
    assert report.measured_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("budget", ["60%", "min"])
def test_a_strict_share_of_blocks_is_of_their_iteration(budget, caplog):
    """Before its joint plan the blocks exceed what each of them takes: a line tells."""
    model = of_blocks()
    for block in model:
        block.compile(backend="coop", options={"budget": budget, "strict": True})
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(256, 16)).square().mean().backward()
    assert "the next one is planned" in caplog.text
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


def of_blocks():
    """Blocks to be compiled one by one, with more weights than activations."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 16)) for _ in range(4))
    )


def both_by_blocks(loop, budget="min", outputs="gradients"):
    """Run `loop(model)` in eager, and with each block compiled by itself."""
    options = {"budget": budget, "outputs": outputs}
    compiled = []

    def by_blocks(model, _):
        if compiled:
            for block in model:
                block.compile(backend="coop", options=options)
        compiled.append(True)
        return loop(model)

    return both(by_blocks, of_blocks)


def use_up(p):
    with torch.no_grad():
        p.sub_(p.grad, alpha=0.01)
    p.grad = None


def loss_of(model, x):
    return model(x[:8]).square().mean()


def gradient_bytes(model):
    return sum(p.nbytes for p in model.parameters())


def test_gradients_held_by_blocks_are_added_to_where_they_are():
    peaks = []

    def loop(model):
        for i, (x, _) in enumerate(data(6)):
            held = [p.grad for p in model.parameters()]
            before, _ = process_bytes()
            reset_peak()
            loss_of(model, x).backward()
            if i:
                assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
            peak = process_bytes()[1] - before
        peaks.append((peak, gradient_bytes(model)))
        return state_of(model)

    both_by_blocks(loop)
    (eager, _), (peak, size) = peaks
    (report,) = iterations()
    assert report.steps_run >= 3
    assert report.held_bytes == size
    assert report.measured_peak_bytes <= report.budget_bytes
    assert report.planned_arena_bytes < size / 2
    assert peak <= eager


def test_what_is_used_up_between_blocks_is_not_planned_to_be_kept():
    """And where it is kept after all, from some iteration on, it is not overwritten."""
    arenas = []

    def loop(model):
        kept = []
        handles = [p.register_post_accumulate_grad_hook(use_up) for p in model.parameters()]
        for i, (x, _) in enumerate(data(9)):
            if i == 4:
                for handle in handles:
                    handle.remove()
            loss_of(model, x).backward()
            kept += [p.grad for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            arenas.extend(report.planned_arena_bytes for report in iterations())
        assert len(kept) == 5 * len(list(model.parameters()))
        return state_of(model) | {f"kept.{i}": g.clone() for i, g in enumerate(kept)}

    model = both_by_blocks(loop)
    size = sum(v.nbytes for name, v in model.items() if name.startswith("model."))
    assert arenas[0] < size / 2
    assert arenas[-1] >= size


def test_what_blocks_pass_on_lies_in_the_arena_while_it_is_there():
    """None of it is there when the iteration is over."""

    def loop(model):
        for x, _ in data(5):
            model.zero_grad()
            h = x.repeat(8, 1)
            for block in model:
                h = torch.tanh(block(h))
            h.square().mean().backward()
        return state_of(model)

    both_by_blocks(loop)
    (report,) = iterations()
    made = {t for op in report.graph.ops if op.phase == "forward" for t in op.outputs}
    assert not any(t.kind == "output" for t in report.graph.tensors if t.id in made)
    assert report.steps_run >= 2
    assert report.outside_bytes == 0
    assert report.measured_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("when", [2, 3])
def test_an_output_that_is_kept_for_once_is_not_overwritten(when):
    """Where a plan has something else by then: it is planned anew, and for longer."""

    def loop(model):
        found, kept = {}, []
        for i, (x, _) in enumerate(data(7)):
            h = x
            for k, block in enumerate(model):
                h = block(h)
                if i == when and k < 2:
                    kept.append(h.detach())
            h.square().mean().backward()
            del h
            model.zero_grad()
            found |= {f"{i}.{j}": value.clone() for j, value in enumerate(kept)}
        return state_of(model) | found

    both_by_blocks(loop)
    (report,) = iterations()
    assert report.outside_bytes == 0


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(
    "way", ["hook", "after", "grad", "inputs", "create_graph", "outside", "retain", "twice"]
)
def test_gradients_held_by_blocks_are_left_to_autograd_where_it_does_more_than_add(way):
    def loop(model):
        found = {}
        weights = [block[0].weight for block in model]
        hooked(way, weights[1])
        for i, (x, _) in enumerate(data(6)):
            loss, another = loss_of(model, x), lambda x=x: loss_of(model, x.flip(0))
            beside = backward_that_does_more_than_add(way, loss, weights, another)
            found |= {f"{i}.{j}": g for j, g in enumerate(beside)}
        return state_of(model) | found

    both_by_blocks(loop)


@pytest.mark.parametrize("budget", ["min", "100%"])
def test_blocks_are_right_whatever_comes_between(budget):
    """Gradients and outputs kept, evaluation, an exception, a loss left out, zeros in between."""

    def loop(model):
        kept, found = [], {}
        for i, (x, _) in enumerate(data(16)):
            loss = loss_of(model, x)
            if i % 5 == 4:
                model.zero_grad()
            if i == 6:
                with torch.no_grad():
                    found["evaluated"] = model(x)
            if i == 7:
                kept.append(loss)  # a backward that comes later
                continue
            if i == 8:
                hidden = model[0](x)
                kept.append(hidden)
                loss = loss + model[1:](hidden).mean()
            if i == 9:
                with pytest.raises(ValueError, match="on purpose"):
                    raise ValueError("on purpose", model[1](model[0](x)))
            loss.backward()
            if i in (3, 10):
                found[f"kept.{i}"] = model[2][0].weight.grad  # and another takes its place
                model[2][0].weight.grad = None
        kept[0].backward()
        found["hidden"] = kept[1].detach()
        runtime.clear_reports()  # one was planned anew since it was measured
        return state_of(model) | found

    both_by_blocks(loop, budget)


def test_what_a_process_groups_threads_may_still_hold_has_room(monkeypatch):
    """The buffers of two collectives, beside the parameters that are gathered for two halves.

    Each has the parameters of a call, of this rank and of all.
    """
    plan_jointly, found = recorder.plan_jointly, []
    monkeypatch.setattr(joint_plan, "world_size", lambda: 4)

    def plan_with(calls, *rest, **options):
        made = [
            plan_jointly([replace(call, lent=lent) for call in calls], *rest, **options)
            for lent in ((0, 1), ())
        ]
        between = [
            sum(t.bytes for t in plan.report.graph.tensors if t.name == "between") for plan in made
        ]
        found.append((between, [sum(c.input_bytes[p] for p in (0, 1)) for c in calls]))
        return made[1]

    monkeypatch.setattr(recorder, "plan_jointly", plan_with)
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])
    for block in blocks:
        block.compile(backend="coop", options={"budget": "100%"})
    for x, _ in data(3):
        blocks.zero_grad()
        blocks(x).square().mean().backward()
    (lent, without), gathered = found[0]
    size = (16 * 16 + 16) * 4
    assert gathered == [size, size]
    assert lent - without == 2 * size + 2 * (size + size // 4)


def test_a_reset_of_dynamo_gives_idle_memory_back():
    """The code after a graph break outlives it, and what it would run in."""
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)

    def step(x):
        x = torch.tanh(first(x))
        torch._dynamo.graph_break()
        return torch.tanh(second(x)).square().mean()

    torch._dynamo.reset()
    gc.collect()  # what earlier tests left is not given back between the two readings
    compiled = torch.compile(step, backend="coop", options={"budget": "100%"})
    before = process_bytes()[0]
    for _ in range(4):
        compiled(torch.ones(1024, 64)).backward()
    first.zero_grad()
    second.zero_grad()
    assert process_bytes()[0] > before + 1024 * 64 * 4
    torch._dynamo.reset()
    assert process_bytes()[0] < before + 4096
    runtime.clear_reports()
    compiled(torch.ones(1024, 64)).backward()
    assert not iterations()  # none of before is planned now
