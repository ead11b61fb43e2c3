"""Several steps in flight, in any order of their halves: eager's numbers, within the budget."""

import gc
import threading

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from coop_plan import runtime
from coop_plan.runtime.execute.invocation import live_invocations
from coop_plan.runtime.torch_internals.dynamo import block_other_compiles
from tests.runtime.test_loops import Broken, Net, Unshared, both, data, loss_step, state_of

# Of Dynamo's own, where it looks at what is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

BUDGETS = ["min", "100%"]


def model_itself(model):
    return model


def forwards_again():
    return sum(report.forwards_again for report in runtime.reports())


def fits_in_one(reports):
    """Whether what PyTorch had at most is within the budget of each step alone."""
    return all(report.measured_peak_bytes <= report.budget_bytes for report in reports)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_step_that_is_left_out_and_kept(budget):
    """A guard against NaN, whose `continue` keeps the loss until the next one takes its name."""

    def loop(model, step):
        for i, (x, y) in enumerate(data(6)):
            loss = step(x, y)
            if i % 2:
                continue
            model.zero_grad()
            loss.backward()
        return state_of(model)

    both(loop, options={"budget": budget})
    assert forwards_again() == 0


def test_evaluation_without_no_grad_and_predictions_that_are_kept():
    def loop(model, step):
        optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x, y in data(3):
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(step(x), y).backward()
            optimizer.step()
            model.eval()
            kept += [step(x) for x, _ in data(3, seed=8)]
        return state_of(model) | {str(i): value for i, value in enumerate(kept)}

    both(loop, wrap=model_itself)
    assert forwards_again() == 0
    assert fits_in_one(runtime.reports())


def test_a_kept_step_can_run_its_backward_later():
    """The last of them is even run first."""

    def loop(model, step):
        losses = [step(x, y) for x, y in data(3)]
        for loss in reversed(losses):
            loss.backward()
        first, second = (step(x, y) for x, y in data(2))
        first.backward()
        second.backward()
        return state_of(model)

    both(loop)
    assert forwards_again() == 4


def test_an_exception_that_is_kept():
    def loop(model, step):
        kept = []
        for i, (x, y) in enumerate(data(4)):
            try:
                loss = step(x, y)
                if i == 1:
                    raise ValueError(loss)
            except ValueError as error:
                kept.append(error)  # its traceback holds the loss, as a notebook's last error does
            else:
                model.zero_grad()
                loss.backward()
        return state_of(model)

    both(loop)
    assert forwards_again() == 0


def test_one_graph_twice_and_a_second_backward():
    def loop(model, step):
        for x, y in data(2):
            loss = step(x, y)
            loss.backward(retain_graph=True)
            loss.backward()
        return state_of(model)

    both(loop)
    assert forwards_again() == 2


@pytest.mark.parametrize("budget", BUDGETS)
def test_one_model_twice_for_one_loss(budget):
    """A siamese network; no weight is used twice, so that gradients are summed as in eager."""

    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, _ in data(3):
            optimizer.zero_grad()
            (step(x) - step(x.flip(0))).square().mean().backward()
            optimizer.step()
        return state_of(model, optimizer)

    both(loop, Unshared, wrap=model_itself, options={"budget": budget})


def test_a_cell_that_is_called_for_every_time_step():
    def loop(model, step):
        for x, _ in data(3):
            model.zero_grad()
            hidden = torch.zeros(8, 4)
            for part in x.split(8):
                hidden = step(part, hidden)
            hidden.sum().backward()
        return state_of(model)

    both(loop, lambda: nn.RNNCell(16, 4), wrap=model_itself)


def test_two_losses_with_two_backwards():
    def loop(model, step):
        for x, y in data(3):
            first, second = step(x, y), step(x + 1, y)
            first.backward()
            second.backward()
        return state_of(model)

    both(loop)


def test_generator_and_critic_of_one_class():
    def make():
        return nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 16))
            for _ in range(2)
        )

    def loop(pair, _):
        made, judged = pair
        if compiled:
            made, judged = (torch.compile(part, backend="coop", options=OPTIONS) for part in pair)
        compiled.append(True)
        for x, _ in data(3):
            judged(made(x)).square().mean().backward()
            (judged(made(x).detach()) - judged(x)).square().mean().backward()
        return state_of(pair)

    compiled, OPTIONS = [], {"budget": "min"}
    both(loop, make)


def test_layers_compiled_one_by_one():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

        def forward(self, x):
            return x + F.dropout(self.layers(x), 0.1, self.training)

    def loop(model, _):
        if compiled:
            for block in model:
                block.compile(backend="coop", options={"budget": "min"})
        compiled.append(True)
        for x, y in data(3):
            F.cross_entropy(model(x), y).backward()
        return state_of(model)

    compiled = []
    both(loop, lambda: nn.Sequential(*(Block() for _ in range(4))))


def test_graph_breaks():
    def loop(model, step):
        for x, y in data(3):
            step(x, y).backward()
        return state_of(model)

    both(loop, Broken)


def test_a_backward_without_ops():
    """All that the graph's backward does is to pass its gradient on."""

    def loop(model, step):
        x = data(1)[0][0].requires_grad_()
        for _ in range(2):
            step(x).sum().backward()
        return {"grad": x.grad}

    both(loop, wrap=lambda _: lambda x: x + 1)


def test_what_cannot_run_again_is_an_error():
    x, y = data(1)[0]
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    step = torch.compile(loss_step(model), backend="coop", options={"budget": "min"})
    loss = step(x, y)
    step(x, y).backward()
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(runtime.StepSpentError, match="modified by an inplace operation since"):
        loss.backward()
    step(x, y).backward()  # the iteration before it is not planned: it has no second backward


def test_an_output_that_is_overwritten_is_an_error():
    x = data(1)[0][0].requires_grad_()
    out = torch.compile(torch.exp, backend="coop", options={"budget": "min"})(x)
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_flights_end_with_their_losses():
    x, y = data(1)[0]
    step = torch.compile(loss_step(Net()), backend="coop", options={"budget": "100%"})
    gc.collect()
    before = len(live_invocations())
    losses = [step(x, y) for _ in range(3)]
    assert len(live_invocations()) == before + 3
    losses[1].backward()
    losses[2].square().backward(retain_graph=True)
    assert len(live_invocations()) == before + 2
    losses.clear()
    assert len(live_invocations()) == before


def test_a_loss_may_be_dropped_by_any_thread():
    x, y = data(1)[0]
    step = torch.compile(loss_step(Net()), backend="coop", options={"budget": "min"})
    gc.collect()
    before = len(live_invocations())
    held = [step(x, y)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(live_invocations()) == before
    step(x, y).backward()


class Tanh(nn.Sequential):
    """Without dropout: threads share one stream of random numbers."""

    def __init__(self):
        super().__init__(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())


def test_two_models_of_one_class_in_two_threads():
    """They have one graph and one plan, and each its own memory."""

    def train(model, step, found, key):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(data(1)[0][0])
        for x, _ in data(8, seed=key) * 25:
            optimizer.zero_grad()
            step(x).square().mean().backward()
            optimizer.step()
        found[key] = list(model.parameters())

    models, expected, found, threads = [Tanh(), Tanh()], {}, {}, []
    for i, model in enumerate(models):
        eager = Tanh()
        eager.load_state_dict(model.state_dict())
        train(eager, eager, expected, i)
        step = torch.compile(model, backend="coop", options={"budget": "min"})
        threads.append(threading.Thread(target=train, args=(model, step, found, i)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key, parameters in expected.items():
        assert all(map(torch.equal, found[key], parameters))


def test_a_compiled_function_may_be_called_while_another_thread_traces():
    reached, called = threading.Event(), threading.Event()

    @torch.library.custom_op("coop_tests::waits", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @waits.register_fake
    def _(x):
        if fx._symbolic_trace.is_fx_tracing() and x.shape[0] == 7:
            reached.set()
            assert called.wait(60)
        return torch.empty_like(x)

    waits.register_autograd(lambda _, gradient: gradient * 2)
    model = Tanh()
    traced = torch.compile(
        lambda x: waits(model(x)).sum(), backend="coop", dynamic=True, options={"budget": "100%"}
    )
    traced(torch.randn(5, 16)).backward()
    other = torch.compile(Tanh(), backend="coop", options={"budget": "100%"})
    other(torch.randn(3, 16)).sum().backward()
    thread = threading.Thread(target=lambda: traced(torch.randn(7, 16)).backward())
    thread.start()
    try:
        assert reached.wait(60)
        other(torch.randn(3, 16)).sum().backward()
    finally:
        called.set()
        thread.join()
    assert sum(report.steps_run for report in runtime.reports()) == 4


def test_nothing_else_is_compiled_while_a_new_size_is_traced():
    """Or Dynamo would find what a trace puts into `torch.nn.Module` meanwhile."""
    free = []

    def look():
        free.append(block_other_compiles().acquire(blocking=False))

    @torch.library.custom_op("coop_tests::looks", mutates_args=())
    def looks(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @looks.register_fake
    def _(x):
        if x.shape[0] == 7:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        return torch.empty_like(x)

    looks.register_autograd(lambda _, gradient: gradient * 2)
    traced = torch.compile(
        lambda x: looks(x).sum(), backend="coop", dynamic=True, options={"budget": "100%"}
    )
    for size in (5, 7):
        traced(torch.randn(size, 16, requires_grad=True)).backward()
    assert free
    assert not any(free)
