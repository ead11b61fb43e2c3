"""Steps in CUDA graphs. Without a device, test_cuda.py runs these on a pretended one."""

import copy
import ctypes
import gc
import re
from functools import partial

import pytest
import torch
from torch import nn

from coop_plan import runtime
from coop_plan.runtime.execute import find_plan
from coop_plan.runtime.execute.arena_pool import idle_arenas
from coop_plan.runtime.torch_internals import cuda
from tests.params import slow_after
from tests.runtime import simulated_graphs
from tests.runtime.networks import Mlp
from tests.runtime.strict_plans import check_plans
from tests.runtime.swapping import swap_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pretended = pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch is built for CUDA")


def counting(counts, name, method):
    def run(graph):
        method(graph)
        counts[name] += 1

    return run


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Graphs of the test: `captures` and `replays`, on a device, too."""
    if torch.cuda.get_device_name() == "Pretended":
        check_plans(monkeypatch)
    gc.collect()
    counts = {"captures": 0, "replays": 0}
    graph = torch.cuda.CUDAGraph
    for name, method in (("captures", "capture_end"), ("replays", "replay")):
        monkeypatch.setattr(graph, method, counting(counts, name, getattr(graph, method)))
    return counts


def compiled(step, budget="100%", **options):
    given = {"budget": budget, "cuda_graphs": True, **options}
    return torch.compile(step, backend="coop", fullgraph=True, options=given)


def batches(count=5, shape=(256, 64)):
    return [torch.randn(shape, device="cuda") for _ in range(count)]


def train(model, step, given, micro=1, set_to_none=True):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for number, batch in enumerate(given):
        loss = step(*batch) if isinstance(batch, tuple) else step(batch)
        loss.backward()
        losses.append(loss.detach().clone())
        if (number + 1) % micro == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    return losses


def check(model, given, counted, replays, micro=1, step=lambda model: model, **options):
    """Trains with and without graphs, which gives equal numbers."""
    other = copy.deepcopy(model)
    expected = train(model, compiled(step(model), cuda_graphs=False, **options), given, micro)
    torch._dynamo.reset()
    assert counted["replays"] == 0
    found = train(other, compiled(step(other), **options), given, micro)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    assert counted["replays"] == replays


@pytest.mark.parametrize("budget", ["100%", "60%", "min"])
def test_replayed_steps_have_the_numbers_of_plain_ones(budget, counted):
    """The first call of a plan runs plainly, the second one captures both halves."""
    check(Mlp().cuda(), batches(), counted, 8, budget=budget)
    assert counted["captures"] == 3  # the forward again for the backward's saved tensors
    report = runtime.reports()[-1]
    assert (report.steps_run, report.replayed_steps) == (5, 4)
    assert report.outside_bytes == 0
    assert report.measured_peak_bytes <= report.budget_bytes
    if torch.cuda.get_device_name() == "Pretended":  # graphs have memory of their results alone
        blocks = [block for graph in simulated_graphs._graphs for block in graph.pool_blocks]
        results = 4 + sum(value.nbytes for value in Mlp().parameters())
        assert sum(size for _, size in blocks) == results


class Kinds(nn.Module):
    """Saves outputs, parameters, inputs and views; a gradient is the output's own."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        self.dropout, self.norm = nn.Dropout(dropout), nn.BatchNorm1d(32)
        self.shift, self.table = nn.Parameter(torch.randn(32)), nn.Embedding(16, 32)

    def forward(self, x, ids, *, scale=1.0):
        y = x * scale + self.table(ids)
        for layer in self.layers:
            y = self.dropout(torch.sigmoid(layer(y)))
        y = self.norm(y).tanh()
        return y, y.t().exp(), (y.mean(0) + self.shift) * scale


def whole(storage):
    return torch.empty(0, device="cuda").set_(storage, 0, (storage.nbytes() // 4,), (1,))


class Loop:
    """A loop that a seed draws: what is held, accumulated, skipped, kept and moved.

    `seen` has all that was held at its end, and what it was before.
    """

    def __init__(self, model, step, seed):
        self.model, self.step, self.held, self.storages = model, step, [], []
        self.draw = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def chance(self, share):
        return torch.rand((), generator=self.draw).item() < share

    def hold(self, *tensors):
        if self.chance(0.3):  # without the tensor
            storages = [tensor.untyped_storage() for tensor in tensors]
            self.storages += [(storage, whole(storage).clone()) for storage in storages]
        else:
            self.held += [(tensor.detach(), tensor.detach().clone()) for tensor in tensors]

    def call(self, rows):
        x = torch.randn(rows, 32, generator=self.draw).cuda()
        ids = torch.randint(16, (rows,), generator=self.draw).cuda()
        made = self.step(x, ids, scale=0.5 if self.chance(0.2) else 1.0)
        if self.chance(0.3):
            self.hold(*made)
        return sum(value.square().mean() for value in made)

    def run(self, steps=12):
        torch.manual_seed(1)
        losses = []
        for _ in range(steps):
            rows = 48 if self.chance(0.3) else 64
            pending = [self.call(rows) for _ in range(2 if self.chance(0.2) else 1)]
            if self.chance(0.1):
                continue  # no backward
            if self.chance(0.2):
                self.optimizer.zero_grad()
            if self.chance(0.1):  # between the halves
                weight = self.model.layers[0].weight
                weight.data = weight.data.clone() * 1.01
                torch.manual_seed(len(losses))
            for loss in pending[::-1]:
                twice = self.chance(0.1)
                loss.backward(retain_graph=twice)
                if twice:
                    loss.backward()
                losses.append(loss.detach().clone())
            if self.chance(0.6):
                self.optimizer.step()
                if to_none := self.chance(0.8):
                    self.hold(*(p.grad for p in self.model.parameters() if self.chance(0.3)))
                self.optimizer.zero_grad(to_none)
            if self.chance(0.1):
                parameter = self.model.shift
                parameter.data = parameter.data.clone()
        assert all(torch.equal(value, before) for value, before in self.held)
        assert all(torch.equal(whole(value), before) for value, before in self.storages)
        return [*losses, *(value for value, _ in self.held), *self.model.state_dict().values()]


@pytest.mark.parametrize("seed", slow_after(2, [5, 0, 1, 2, 3, 4]))
def test_loops_have_the_numbers_of_plain_steps(seed, counted):
    model = Kinds(dropout=0.3 * (seed % 2))
    other = copy.deepcopy(model).cuda()
    model.cuda()
    budget = ("100%", "80%", "min")[seed // 2]
    expected = Loop(model, compiled(model, budget, cuda_graphs=False), seed).run()
    torch._dynamo.reset()
    found = Loop(other, compiled(other, budget), seed).run()
    assert all(map(torch.equal, found, expected))
    assert counted["replays"] > 4


def test_results_that_are_held_are_not_overwritten(counted):
    model, held = Mlp().cuda(), []
    step = compiled(lambda x: (model(x), model.layers[0](x)))
    for batch in batches():
        outputs = step(batch)
        (outputs[0] + outputs[1].mean()).backward()
        results = [*outputs, outputs[1][3:], *(p.grad for p in model.parameters())]
        held += [(value.detach(), value.detach().clone()) for value in results]
        model.zero_grad()
    assert all(torch.equal(value, before) for value, before in held)
    assert counted["replays"] == 8


def test_results_that_are_held_as_storages_are_not_overwritten(counted):
    model, held = Mlp().cuda(), []
    step = compiled(model.layers[0])
    for batch in batches():
        storage = step(batch).untyped_storage()
        held.append((storage, whole(storage).clone()))
    assert all(torch.equal(whole(storage), before) for storage, before in held)
    assert counted["replays"] == 4


def test_a_parameter_that_moves_between_the_halves_is_read_where_it_is(counted):
    model, given = Mlp().cuda(), batches()
    other = copy.deepcopy(model)

    def run(model, step):
        found = []
        for number, batch in enumerate(given):
            loss = step(batch)
            if number > 2:
                weight = model.layers[3].weight
                weight.data = weight.data.clone() + 1
            loss.backward()
            found += [p.grad for p in model.parameters()]
            model.zero_grad()
        return found

    expected = run(model, compiled(model, cuda_graphs=False))
    torch._dynamo.reset()
    assert all(map(torch.equal, run(other, compiled(other)), expected))
    assert counted["replays"] == 6


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients(set_to_none, counted):
    model, given = Mlp().cuda(), batches(12)
    other = copy.deepcopy(model)
    train(model, compiled(model, cuda_graphs=False), given, 3, set_to_none)
    torch._dynamo.reset()
    train(other, compiled(other), given, 3, set_to_none)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert counted["replays"] >= 16


def test_each_replay_draws_a_mask(counted):
    model, batch = Mlp(0.3).cuda(), batches(1)[0]
    check(model, [batch] * 5, counted, 8)
    losses = train(model, compiled(model), [batch] * 4)
    assert len({loss.item() for loss in losses}) == 4


def test_recomputed_random_ops_draw_again_what_they_drew(counted):
    """In each replay another mask; elsewhere in the step other random ops draw, too."""
    model, batch = Mlp(0.3).cuda(), batches(1)[0]
    options = {"budget": "min", "host_budget": 0}
    check(model, [batch] * 5, counted, 8, **options)
    plan = runtime.reports()[-1].plan
    runs = [step.op for step in plan.steps if step.do == "compute"]
    random = [op.id for op in runtime.reports()[-1].graph.ops if op.rng]
    assert sum(map(runs.count, random)) > len(random)
    before, step = counted["replays"], compiled(model, **options)
    losses = []
    for _ in range(6):
        loss = step(batch)
        loss.backward()
        losses.append(loss.item())
    assert len(set(losses)) == 6
    assert counted["replays"] > before


def test_a_random_op_on_the_cpu_runs_plainly(counted, caplog):
    step = lambda model: lambda x: model(x) * torch.rand(())  # noqa: E731
    check(Mlp().cuda(), batches(), counted, 0, step=step)
    assert "aten.rand.default draws its random numbers on the CPU" in caplog.text


def test_a_backward_runs_once_before_it_is_captured(counted):
    """The first call has none."""
    model = Mlp(0.3).cuda()
    other = copy.deepcopy(model)
    given = batches()

    def run(model, step):
        step(given[0])
        return train(model, step, given)

    expected = run(model, compiled(model, "min", cuda_graphs=False, host_budget=0))
    torch._dynamo.reset()
    found = run(other, compiled(other, "min", host_budget=0))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert counted["replays"] == 9


def test_two_shapes_have_graphs_in_one_arena(counted):
    """After the second shape Dynamo compiles the first one again, whose first call runs plainly."""
    check(Mlp().cuda(), [*batches(3), *batches(3, (128, 64)), *batches(4)], counted, 14)


def test_shapes_in_turn_keep_their_graphs_if_they_have_one_budget(counted):
    """The third call of the function compiles a step for the first shape again."""
    shapes = [256, 128] * 6
    given = [torch.randn(rows, 64, device="cuda") for rows in shapes]
    check(Mlp().cuda(), given, counted, 18, budget="1MiB")
    assert counted["captures"] <= 9


def test_a_tensor_that_is_left_in_the_arena_is_not_overwritten(counted, caplog):
    """An update's hook keeps a temporary, which lies in the arena while that is lent."""
    model, batch = Mlp().cuda(), batches(1)[0]
    step = compiled(model)
    train(model, step, [batch] * 3)
    before = dict(counted)
    (memory,) = idle_arenas()
    assert memory.lend()
    kept = torch.ones(1000, device="cuda")
    assert memory.live_offsets
    train(model, step, [batch] * 2)
    assert kept.eq(1).all()
    assert counted == before
    assert caplog.text.count("CUDA graph: a tensor that outlived a step or an update") == 1
    del kept
    train(model, step, [batch])
    assert counted["replays"] == before["replays"] + 2


def test_a_parameter_that_moved_is_captured_again(counted, caplog):
    model = Mlp().cuda()
    step = compiled(model)
    for k, batch in enumerate(batches(12)):
        expected = copy.deepcopy(model)(batch)
        assert torch.equal(step(batch), expected)
        weight = model.layers[k % 6].weight
        weight.data = weight.data.clone() + 1
    assert counted["captures"] == 8
    assert caplog.text.count("without a CUDA graph: its parameters, arena or numbers changed") == 1


@torch.library.custom_op("coop_tests::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    return x * (1 if x.sum().item() > 0 else 2)


reads.register_fake(torch.empty_like)
reads.register_autograd(lambda _, gradient: gradient.clone())


@torch.library.custom_op("coop_tests::reads_later", mutates_args=())
def reads_later(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


reads_later.register_fake(torch.empty_like)
reads_later.register_autograd(lambda _, gradient: reads(gradient))


@pytest.mark.parametrize("op", [reads, reads_later])
def test_an_op_that_makes_the_host_wait_runs_plainly(op, counted, caplog):
    step = lambda model: lambda x: model(op(model.layers[0](x)))  # noqa: E731
    check(Mlp().cuda(), batches(), counted, 0, step=step)
    assert counted["captures"] == 0
    assert caplog.text.count("runs without a CUDA graph: ") == 1
    assert re.search(r"test_graph_replay.py:\d+ makes the host wait for the device", caplog.text)


@pytest.mark.parametrize("op", [reads, reads_later])
def test_a_capture_that_fails_is_named_and_the_step_runs(op, counted, caplog, monkeypatch):
    """A wait of the host that PyTorch does not tell of."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    step = lambda model: lambda x: model(op(model.layers[0](x)))  # noqa: E731
    check(Mlp(0.3).cuda(), batches(), counted, int(op is reads_later), step=step)
    assert caplog.text.count("runs without a CUDA graph: ") == 1
    assert "coop_tests.reads.default: CUDA error: operation not permitted" in caplog.text
    torch.cuda.empty_cache()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "as late as can be"])
@pytest.mark.parametrize("ahead", [2, 8], ids=["within a half", "across the halves"])
def test_copies_to_the_host_are_captured(ahead, late, monkeypatch, request, counted):
    if torch.cuda.get_device_name() == "Pretended":
        library = ctypes.CDLL(str(cuda.CUDA_LIBRARY))
        request.addfinalizer(lambda: library.pretended_late(False))
        library.pretended_late(late)
    monkeypatch.setattr(find_plan, "plan", partial(swap_plan, ahead=ahead))
    check(Mlp(0.3).cuda(), batches(), counted, 8, link="1GB/s")
    assert runtime.reports()[-1].plan.swapped_bytes > 0


def test_a_call_that_waits_for_its_backward_keeps_its_graphs(counted, caplog):
    model, (batch, *given) = Mlp().cuda(), batches(6)
    step = compiled(model, "1GiB")  # room for two arenas
    train(model, step, [batch] * 3)
    waiting, other = step(batch), copy.deepcopy(model)
    before = dict(counted)

    def gradients(model, loss):
        loss.backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    for each in given:
        assert all(map(torch.equal, gradients(model, step(each)), gradients(other, other(each))))
    assert counted == before
    assert caplog.text.count("CUDA graph: another call of it waits for its backward") == 1
    assert all(map(torch.equal, gradients(model, waiting), gradients(other, other(batch))))
    assert counted["replays"] == before["replays"] + 1


def capture(function):
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin()
        made = function()
        graph.capture_end()
    return graph, made


@pretended
def test_the_stand_in_runs_nothing_in_a_capture_and_checks_addresses():
    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    given = [x]
    graph, made = capture(partial(lambda given: (y.add_(given[0]), given[0] * 2)[1], given))
    assert made.isnan().all()
    assert y.eq(1).all()
    graph.replay()
    assert made.eq(2).all()
    assert y.eq(2).all()
    given.clear()
    del x
    with pytest.raises(AssertionError, match="was freed"):
        graph.replay()


def test_memory_stays_within_the_budget(counted):
    model, batch = Mlp().cuda(), batches(1)[0]
    step = compiled(model, "70%")
    own = batch.nbytes + sum(parameter.nbytes for parameter in model.parameters())
    before = torch.cuda.memory_stats()["requested_bytes.all.current"] - own
    for number in range(6):
        if number == 1:
            torch.cuda.reset_peak_memory_stats()
        step(batch).backward()
        model.zero_grad()
        if number == 3:  # the old graphs are freed before new ones are captured
            model.layers[0].weight.data = model.layers[0].weight.data.clone()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert counted == {"captures": 6, "replays": 10}
    assert peak <= runtime.reports()[0].budget_bytes


def test_an_expanded_input_has_a_place_of_its_strides(counted):
    model = Mlp().cuda()
    given = [batch[:1].expand(256, 64) for batch in batches()]
    check(model, given, counted, 8)


def test_an_overwritten_result_is_an_error_as_without_graphs():
    x = torch.randn(64, device="cuda", requires_grad=True)
    step = compiled(lambda x: (x * 2).exp())
    for number in range(4):
        y = step(x)
        if number == 3:
            y.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()


def test_gradients_in_the_arena_run_plainly(counted, caplog):
    check(Mlp().cuda(), batches(), counted, 0, outputs="gradients")
    assert 'without a CUDA graph: outputs="gradients"' in caplog.text
