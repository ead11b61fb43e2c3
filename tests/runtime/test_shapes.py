"""Every input shape of a compiled function gives eager's numbers, and none escapes its budget."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from coop_plan import runtime
from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.runtime.capture import profiler
from coop_plan.runtime.capture.cost_scaling import CostHistory
from coop_plan.runtime.capture.op_timing import OpTimes
from coop_plan.runtime.dynamic_shapes import specialize, symbolic_trace
from coop_plan.runtime.execute import find_plan
from coop_plan.runtime.torch_internals.dynamo import SETTINGS_OF_THREADS

SIZES = [24, 24, 16, 24, 16, 7]
"""Batches of a run, with a short last one."""


class Net(nn.Module):
    """Normalizes over the batch, and computes with its size."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        n = x.shape[0]
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        return self.norm(x).view(2 * n, -1).square().sum() / (n + 1)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.recurrent(x)[0]).square().mean()


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8))
                for i in range(2)
            ]
        )

    def forward(self, x):
        for block in self.blocks:
            x = F.relu(block(x))
        return F.max_pool2d(x, 2).flatten(2).mean(2).square().sum()


def batches(sizes, *rest):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, *rest, generator=generator) for size in sizes]


def train(model, step, inputs):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for args in inputs:
        loss = step(*args) if isinstance(args, tuple) else step(args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def compiled(function, dynamic, budget="min", **options):
    options = {"budget": budget, **options}
    return torch.compile(function, backend="coop", fullgraph=True, dynamic=dynamic, options=options)


def assert_trains_like_eager(eager, inputs, dynamic, step_of=lambda model: model, **options):
    planned = copy.deepcopy(eager)
    losses = train(eager, step_of(eager), inputs)
    step = compiled(step_of(planned), dynamic, **options)
    planned_losses = train(planned, step, inputs)
    assert all(map(torch.equal, losses, planned_losses))
    state, planned_state = eager.state_dict(), planned.state_dict()
    assert all(torch.equal(state[name], planned_state[name]) for name in state)
    for report in runtime.reports():
        assert report.measured_arena_bytes == report.planned_arena_bytes
        assert report.peak_bytes <= report.budget_bytes


def planned_sizes():
    """The batch sizes that were planned, in order."""
    inputs = [
        [tensor.bytes for tensor in report.graph.tensors if tensor.kind == "input"]
        for report in runtime.reports()
    ]
    return [found[0] // (32 * 4) for found in inputs]


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_shapes_in_a_loop_are_each_planned(dynamic):
    assert_trains_like_eager(Net(), batches(SIZES, 32), dynamic)
    # What is met before Dynamo makes the size a symbol is planned a second time after that.
    assert planned_sizes() == ([24, 16, 24, 7] if dynamic is None else [24, 16, 7])


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_other_shapes_run_eagerly_as_the_option_says(dynamic, caplog):
    assert_trains_like_eager(Net(), batches(SIZES, 32), dynamic, shapes="eager")
    assert set(planned_sizes()) == {24}
    said = [r.getMessage() for r in caplog.records if r.name == "coop-plan"]
    assert [text.split("sizes ")[1].split(" run")[0] for text in said] == [
        "((16, 32),)",
        "((7, 32),)",
    ]
    assert all("test_shapes.py:" in text and "not within the budget" in text for text in said)


def test_another_function_is_not_another_shape():
    model = Net()
    step = compiled(model, None, shapes="eager")
    large, small = batches([24, 16], 32)
    with torch.no_grad():
        step(small)  # plans nothing, so it is not the first shape
    step(large).backward()
    model.eval()
    step(small).backward()
    assert planned_sizes() == [24, 16]


@pytest.mark.parametrize("dynamic", [None, False])
def test_a_shape_that_does_not_fit_is_refused_and_leaves_the_others_be(dynamic):
    step = compiled(Net(), dynamic, budget=90_000)
    step(torch.randn(16, 32)).backward()
    step(torch.randn(24, 32)).backward()
    error = torch._dynamo.exc.BackendCompilerFailed if dynamic is False else InfeasibleBudgetError
    with pytest.raises(error, match="cannot meet a budget of"):
        step(torch.randn(2000, 32))
    for size in (16, 24, 20):
        step(torch.randn(size, 32)).backward()


def test_sizes_can_steer_and_leave_the_function():
    def step_of(model):
        def step(x):
            if x.shape[0] > 10:
                x = x * x.shape[0]
            return model(x), x.shape[0] + 1, x.size(1)

        return step

    step = compiled(step_of(Net()), None)
    for x in batches([24, 16, 7], 32):
        loss, more, width = step(x)
        loss.backward()
        assert (more, width) == (len(x) + 1, 32)
    inputs = batches([24, 16, 7], 32)
    assert_trains_like_eager(Net(), inputs, None, lambda model: lambda x: step_of(model)(x)[0])


@pytest.mark.parametrize("numbers", [(1.0, 0.5, 0.3), (1, 5, 3)])
def test_numbers_that_change_give_eagers_results(numbers):
    inputs = [(x, number) for x, number in zip(batches([16] * 3, 32), numbers, strict=True)]
    assert_trains_like_eager(Net(), inputs, None, lambda model: lambda x, s: model(x) * s)


def test_many_plans_for_one_shape_are_pointed_out(caplog):
    step = compiled(lambda x, s: (x.abs() ** s).sum(), True)
    x = torch.randn(8, 4, requires_grad=True)
    for i in range(9):
        step(x, i / 7).backward()
    said = [r.getMessage() for r in caplog.records if "Python numbers" in r.getMessage()]
    assert len(said) == 1


def test_layouts_and_shared_memory_are_told_apart():
    data = torch.randn(40, 32, generator=torch.Generator().manual_seed(4))
    square = data[:32]
    pairs = [
        (square, data[:8]),
        (square.t(), data[32:]),
        (data[4:36], data[8:]),
        (square.clone(), data[:8].clone()),
    ]

    def step_of(model):
        return lambda x, y: model(x) + (x[:5] * y[:5]).mean()

    assert_trains_like_eager(Net(), pairs, True, step_of)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_gradients_reach_inputs():
    eager, (left, right) = Net(), batches([16, 7], 32)
    planned = copy.deepcopy(eager)
    step = compiled(planned, True)
    for x in (left, right):
        gradients = []
        for function in (eager, step):
            torch.manual_seed(2)
            leaf = x.clone().requires_grad_()
            function(2 * leaf).backward()
            gradients.append(leaf.grad)
        assert torch.equal(*gradients)


def test_pictures_of_changing_sizes():
    generator = torch.Generator().manual_seed(6)
    specialize = [(4, 3, 16, 16), (4, 3, 20, 16), (3, 3, 16, 24)]
    inputs = [torch.randn(shape, generator=generator) for shape in specialize]
    assert_trains_like_eager(Convolutional(), inputs, True)


def test_no_input_is_kept_alive():
    step = compiled(Net(), None)
    alive = []
    for size in (24, 16, 7):
        x = torch.randn(size, 32)
        alive.append(weakref.ref(x))
        step(x).backward()
        del x
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


def test_functions_that_share_code_do_not_share_dynamos_recompile_limit(caplog):
    """All of them are compiled as `torch._dynamo.external_utils.wrap_inline`'s inner function."""
    before = torch._dynamo.config.recompile_limit
    for i in range(before + 4):
        model = nn.Sequential(nn.Linear(8 + i, 8), nn.Tanh(), nn.Linear(8, 8))
        step = torch.compile(model, backend="coop", options={"budget": "100%"})
        step(torch.ones(4, 8 + i)).sum().backward()
    assert [r.steps_run for r in runtime.reports()] == [1] * (before + 4)
    assert torch._dynamo.config.recompile_limit == before
    assert "recompile_limit" not in caplog.text
    assert "nothing was planned" not in caplog.text


def test_dynamos_recompile_limit_is_no_way_out_of_the_budget(caplog):
    with torch._dynamo.config.patch(recompile_limit=2):
        assert_trains_like_eager(Net(), batches([16, 8, 7, 6], 32), False)
    assert planned_sizes() == [16, 8, 7, 6]
    assert "its recompile_limit is now 4" in caplog.text


@pytest.mark.parametrize(("kind", "budget"), [(nn.GRU, "min"), (nn.LSTM, "90%"), (nn.LSTM, "min")])
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_recurrent_layers_need_no_graph_break(kind, budget):
    # Eager's LSTM is one kernel of oneDNN, AOTAutograd's the ops that eager has without oneDNN.
    with torch.backends.mkldnn.flags(enabled=False):
        inputs = batches([8, 8, 5], 4, 16)
        assert_trains_like_eager(Recurrent(kind), inputs, None, budget=budget)


def test_a_wrong_option_is_named():
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match='shapes must be "plan"'):
        compiled(Net(), None, shapes="none")(torch.randn(8, 32))


def test_settings_of_dynamo_hold_in_calls_alone_and_in_every_thread():
    config = torch._dynamo.config
    before = config.optimize_ddp, config.allow_rnn
    step = torch.compile(Recurrent(nn.GRU), backend="coop", options={"budget": "90%"})
    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: step(torch.randn(4, 8, 16)).backward()).result()
    assert len(runtime.reports()) == 1
    kept = before if SETTINGS_OF_THREADS else (False, True)
    assert (config.optimize_ddp, config.allow_rnn) == kept


@pytest.fixture
def timed(monkeypatch):
    """What grows by one with each op that is timed; nothing is known from before."""
    monkeypatch.setattr(profiler, "_profiles", {})
    monkeypatch.setattr(profiler, "session", lambda: None)
    times = []
    monkeypatch.setattr(profiler, "time_op", lambda *_: times.append(1) or OpTimes(5.0, 5.0))
    return times


def test_an_op_that_was_timed_at_three_sizes_is_not_timed_at_a_fourth(timed):
    net = Convolutional()
    step = torch.compile(net, backend="coop", dynamic=True, options={"budget": "70%"})
    counts = []
    for size in (16, 24, 32, 20, 200):
        before = len(timed)
        step(torch.rand(2, 3, size, size)).backward()
        counts.append(len(timed) - before)
    assert min(counts[:3]) > 10
    # What reads the gradients of parameters alone has no size of its own; 200 is far from all.
    assert counts[3] < 3 < counts[4]
    assert runtime.reports()[3].planned_overhead >= 0


@pytest.mark.parametrize("variants", [False, True])
def test_a_trace_for_all_sizes_has_the_times_of_the_traces_before_it(timed, variants):
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    options = {"budget": "100%", "variants": variants}
    step = torch.compile(nn.Sequential(*layers), backend="coop", options=options)
    counts = []
    for length in (16, 24, 32, 20, 28):
        before = len(timed)
        step(torch.rand(4, length, 32)).square().mean().backward()
        counts.append(len(timed) - before)
    assert min(counts[:3]) > 10
    assert counts[3:] == [0, 0]


class Attentive(nn.Module):
    """A mask of its length's, a slice of all there is, an output beside the loss."""

    def __init__(self):
        super().__init__()
        self.parts, self.head = nn.Linear(32, 96), nn.Linear(32, 8)
        self.unused = nn.Linear(32, 8)

    def forward(self, x):
        length = x.shape[1]
        parts = self.parts(x).view(2, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = F.dropout(x[:, slice(0, None)] * (torch.arange(length) % 3)[:, None], 0.1)
        return self.head(x).square().mean() / length, self.unused(x)


def train_at(symbolic_trace, model, step):
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    losses = []
    for length in symbolic_trace:
        optimizer.zero_grad()
        losses.append(step(torch.randn(2, length, 32))[0])
        losses[-1].backward()
        optimizer.step()
    return [*losses, *model.parameters(), torch.get_rng_state()]


def count_traces(monkeypatch):
    counts, trace = [], fx.Tracer.trace
    monkeypatch.setattr(fx.Tracer, "trace", lambda *args: counts.append(1) or trace(*args))
    return counts


def test_from_the_fourth_length_on_nothing_is_traced(monkeypatch):
    """30 is the largest, and its plan runs at 18; the third call at 28 gets a plan of its own."""
    symbolic_trace = [16, 20, 24, 24, 28, 30, 28, 28, 18]
    model = Attentive()
    twin = copy.deepcopy(model)
    step = torch.compile(model, backend="coop", options={"budget": "100%"}, fullgraph=True)
    found = train_at(symbolic_trace[:4], model, step)
    counts = count_traces(monkeypatch)
    found = train_at(symbolic_trace, model, step)
    train_at(symbolic_trace[:4], twin, twin)
    assert all(map(torch.equal, found, train_at(symbolic_trace, twin, twin)))
    assert counts == []
    reports = runtime.reports()
    # 16 comes again as one of many, and 28 a third time.
    assert len(reports) == len({16, 20, 24, 28, 30}) + len({16, 28})
    assert all(report.measured_peak_bytes <= report.budget_bytes for report in reports)


class Graphs(nn.Module):
    """A graph network: numbers of nodes and of edges."""

    def __init__(self):
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def forward(self, x, ends):
        for message, norm in zip(self.messages, self.norms, strict=True):
            sent = torch.relu(message(torch.cat([x[ends[0]], x[ends[1]]], -1)))
            x = norm(x + torch.zeros_like(x).index_add(0, ends[1], sent))
        return x.square().mean()

    @staticmethod
    def inputs(size):
        edges = 3 * size + int(torch.randint(50, ()))
        return torch.randn(size, 16), torch.randint(0, size, (2, edges))


class Bags(nn.Module):
    """Bags of ids: numbers of ids and of bags."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(300, 32, mode="mean")
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU())

    def forward(self, ids, begins):
        return self.layers(self.table(ids, begins)).square().mean()

    @staticmethod
    def inputs(size):
        begins = torch.randint(0, 4 * size, (size,)).sort()[0]
        begins[0] = 0
        return torch.randint(0, 300, (4 * size,)), begins


class Square(nn.Module):
    """Sizes that are equal to the width by chance: 32 x 32 is transposed, cut, and multiplied."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(32, 32)
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        length = x.shape[1]
        x = torch.tanh(self.last(x)[:, :length]) @ self.weight
        x = self.first(x).view(2, length, 32, 2).transpose(1, 2).reshape(2, 32, length, 2)
        x = F.gelu(x).sum(-1).transpose(1, 2)
        x = F.softmax(x @ x.transpose(1, 2) / length, -1) @ x
        return F.dropout(x, 0.1).square().mean() + x.std() / (length + 1)

    @staticmethod
    def inputs(size):
        return (torch.randn(2, size, 32),)


@pytest.mark.parametrize(
    ("kind", "budget", "variants"),
    [(Graphs, "60%", True), (Graphs, "min", False), (Bags, "60%", False), (Square, "min", True)],
)
def test_where_no_two_batches_are_alike_hardly_any_is_planned(kind, budget, variants):
    torch.manual_seed(4)
    model = kind()
    twin = copy.deepcopy(model)
    options = {"budget": budget, "variants": variants}
    step = torch.compile(model, backend="coop", fullgraph=True, options=options)
    for size in (12, 16, 30, 32, 13, 24, 31, 9, 17, 28, 21, 11, 14):
        inputs = kind.inputs(size)
        found = []
        for of, run in ((model, step), (twin, twin)):
            torch.manual_seed(size)
            of.zero_grad()
            loss = run(*inputs)
            loss.backward()
            found.append([loss, *(p.grad for p in of.parameters())])
        assert all(map(torch.equal, *found)), size
        del found, loss
        for report in runtime.reports():
            assert report.measured_peak_bytes <= report.budget_bytes
    # 12 and 16 were traced; numbers of edges are not in the order of those of nodes.
    assert len(runtime.reports()) <= 6


@pytest.mark.parametrize("kind", [Graphs, Square])
def test_with_all_dynamic_hardly_any_is_planned_either(kind):
    """dynamic=True makes symbols of widths and of floats, as of a dropout, too."""
    torch.manual_seed(4)
    model = kind()
    twin = copy.deepcopy(model)
    step = torch.compile(model, backend="coop", dynamic=True, options={"budget": "min"})
    for size in (12, 20, 30, 33, 13, 24, 31, 9, 17, 28):
        inputs = kind.inputs(size)
        for of, run in ((model, step), (twin, twin)):
            torch.manual_seed(size)
            of.zero_grad()
            run(*inputs).backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(torch.equal(own.grad, other.grad) for own, other in pairs), size
    assert len(runtime.reports()) <= 7


def test_cut_batches_share_plans():
    """Inputs are cut from larger tensors, as in `batch[:, 1:length]`: their strides change, too."""
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    twin = copy.deepcopy(layers)
    step = torch.compile(
        lambda x, y: (layers(x) - y).square().sum(), backend="coop", options={"budget": "80%"}
    )
    for length in (12, 16, 40, 13, 9, 33, 20, 28, 37):
        batch = torch.randn(2, length + int(torch.randint(9, ())) + 1, 8)
        x, y = batch[:, :length], batch[:, 1 : length + 1]
        step(x, y).backward()
        (twin(x) - y).square().sum().backward()
        pairs = zip(layers.parameters(), twin.parameters(), strict=True)
        assert all(torch.equal(own.grad, other.grad) for own, other in pairs), length
        layers.zero_grad(), twin.zero_grad()
    assert len(runtime.reports()) <= 6
    assert all(r.measured_peak_bytes <= r.budget_bytes for r in runtime.reports())


def test_a_length_for_which_the_trace_does_not_hold_is_traced(monkeypatch):
    """The function decides by its length, where Dynamo does not see it."""

    @torch.library.custom_op("coop_tests::halves", mutates_args=())
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x.clone() if x.shape[1] % 2 else x[:, ::2].clone()

    @halves.register_fake
    def _(x):
        return torch.empty_like(x) if x.shape[1] % 2 else torch.empty_like(x[:, ::2])

    def set_up(ctx, inputs, output):
        ctx.length = inputs[0].shape[1]

    def backward(ctx, gradient):
        return gradient if ctx.length % 2 else gradient.repeat_interleave(2, 1)

    halves.register_autograd(backward, setup_context=set_up)
    layer = nn.Linear(8, 8)
    twin = copy.deepcopy(layer)
    step = torch.compile(
        lambda x: halves(layer(x)).square().sum(), backend="coop", options={"budget": "100%"}
    )
    counts = count_traces(monkeypatch)
    for length in (4, 6, 8, 10, 7, 12, 9):
        x = torch.randn(2, length, 8)
        before = len(counts)
        step(x).backward()
        halves(twin(x)).square().sum().backward()
        assert torch.equal(layer.weight.grad, twin.weight.grad)
        assert (len(counts) > before) is (length in (4, 6, 8, 7, 9)), length


def test_a_trace_for_all_sizes_that_differs_is_not_used(monkeypatch):
    signed = symbolic_trace.signature
    monkeypatch.setattr(specialize, "signature", lambda joint: [*signed(joint), "and more"])
    model = Net()
    step = torch.compile(model, backend="coop", dynamic=True, options={"budget": "100%"})
    counts = count_traces(monkeypatch)
    for size in (8, 10, 12, 14, 16):
        before = len(counts)
        step(torch.randn(size, 32)).backward()
        assert len(counts) > before


def test_a_plan_of_one_length_serves_others(monkeypatch):
    searched = []
    monkeypatch.setattr(
        find_plan, "plan", lambda graph, options: searched.append(1) or plan(graph, options)
    )

    def run(step, net):
        torch.manual_seed(2)
        for size in (40, 44, 48, 52, 56):  # none runs by the plan of a larger one
            net.zero_grad()
            step(torch.randn(size, 32)).backward()
        return [p.grad for p in net.parameters()]

    torch.manual_seed(1)
    net = Net()
    twin = copy.deepcopy(net)
    step = torch.compile(net, backend="coop", dynamic=True, options={"budget": "85%"})
    found = run(step, net)
    assert all(map(torch.equal, found, run(twin, twin)))
    assert len(runtime.reports()) == 5
    assert len(searched) < 5
    for report in runtime.reports():
        assert report.plan.recomputed_ops > 0
        assert report.measured_peak_bytes <= report.budget_bytes


def test_what_each_size_takes_more_is_warned_of_once(caplog):
    net, options = Net(), {"budget": "85%", "outputs": "gradients"}
    step = torch.compile(net, backend="coop", dynamic=True, options=options)
    for size in (16, 20, 24):
        for _ in range(2):  # gradients are kept
            step(torch.randn(size, 32)).backward()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for words in ("as first planned", "cannot meet its share"):
        assert len([text for text in said if words in text]) == 1


def test_no_code_is_made_of_what_is_only_traced(monkeypatch):
    """Of a new shape: Dynamo's graph, and the joint one of AOTAutograd."""
    made, recompile = [], fx.GraphModule.recompile
    net = Net()
    step = torch.compile(net, backend="coop", dynamic=True, options={"budget": "min"})
    first, second = batches((3, 5), 32)
    step(first).backward()
    monkeypatch.setattr(
        fx.GraphModule, "recompile", lambda module: made.append(module) or recompile(module)
    )
    step(second).backward()
    inputs = [[node.name for node in m.graph.find_nodes(op="placeholder")] for m in made]
    kinds = [{name.split("_")[0] for name in names} for names in inputs]
    assert len(runtime.reports()) == 2  # the halves are no modules
    assert not any("l" in of_one or {"primals", "tangents"} <= of_one for of_one in kinds)


def test_stand_ins_are_positive_and_have_no_equal_rows():
    for count in (0, 1, profiler.RANDOM_PERIOD, 40 * profiler.RANDOM_PERIOD + 7):
        flat = torch.full((count,), -1.0)
        profiler._fill_random(flat)
        assert ((flat >= 0.05) & (flat <= 1.0)).all()
    rows = flat[: 128 * 1024].view(128, 1024)
    assert rows.unique(dim=0).shape[0] == 128


def test_an_op_is_recorded_twice_only_where_threads_beside_it_allocate(monkeypatch):
    runs, beside = [], iter((0, 5, 3))
    extension = profiler.extension()

    class Recorder:
        record_begin, record_end = extension.record_begin, extension.record_end
        workers_peak = staticmethod(lambda: next(beside))

    monkeypatch.setattr(profiler, "extension", Recorder)
    args = (torch.ones(8),), {}
    found = [profiler._measure(lambda x: runs.append(1) or x + 1, *args, 1.0) for _ in range(2)]
    assert [facts.worker_bytes for facts in found] == [0, 3]
    assert len(runs) == 3
    assert found[0].allocations == found[1].allocations


def test_times_between_and_beyond_sizes():
    costs = CostHistory()
    for size in (100, 400):
        costs.record("mm", size, size / 10)
    assert costs.estimate("mm", 200) is None
    costs.record("mm", 200, 40.0)
    assert costs.estimate("mm", 200) == pytest.approx(40)
    assert costs.estimate("mm", 50) == pytest.approx(2.5)  # as steep as from 100 to 200: squared
    assert costs.estimate("mm", 800) == pytest.approx(40)  # it did not get dearer from 200 to 400
    assert costs.estimate("mm", 49) is None
    assert costs.estimate("mm", 801) is None
    assert costs.estimate("bmm", 200) is None


@pytest.mark.parametrize(
    ("mode", "by"),
    [("nearest", "size"), ("nearest-exact", "scale"), ("bilinear", "size"), ("bicubic", "scale")],
)
def test_an_interpolation_to_sizes_that_change_shares_plans(mode, by):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.down, self.last = nn.Conv2d(8, 8, 3, 2, padding=1), nn.Conv2d(8, 3, 3, padding=1)

        def forward(self, x):
            h = torch.relu(self.first(x))
            low = torch.relu(self.down(h))
            given = {"size": h.shape[-2:]} if by == "size" else {"scale_factor": 2.0}
            return self.last(h + F.interpolate(low, mode=mode, **given)).square().mean()

    eager = Decoder()
    planned = copy.deepcopy(eager)
    step = torch.compile(planned, backend="coop", options={"budget": "min"})
    for n, k in ((16, 20), (20, 24), (40, 36), (38, 34), (26, 30), (18, 34)):
        x = torch.randn(2, 3, n, k)
        for model, function in ((eager, eager), (planned, step)):
            model.zero_grad()
            function(x).backward()
        pairs = zip(planned.parameters(), eager.parameters(), strict=True)
        assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)
    reports = runtime.reports()
    assert len(reports) <= 4  # of the first three sizes, and one for those after
    assert all(report.measured_peak_bytes <= report.budget_bytes for report in reports)
