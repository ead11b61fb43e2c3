"""Steps on a CUDA device. Without one, test_cuda.py runs these on a pretended one."""

import contextlib
import copy
import ctypes
import functools
import gc
import importlib
import itertools
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from coop_plan import runtime
from coop_plan.planner import plan
from coop_plan.planner.planning import least_at_any_costs
from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import SERVED_OUTSIDE, Arena, Memory, Run
from coop_plan.runtime.device.build import arena as extension
from coop_plan.runtime.device.copy_engines import (
    FROM_HOST,
    TO_HOST,
    CudaCopyEngines,
    cuda_streams,
    measure_link,
)
from coop_plan.runtime.execute import find_plan, gap
from coop_plan.runtime.execute.rng_state import CudaGenerator
from coop_plan.runtime.offline_capture.devices import device
from coop_plan.runtime.offline_capture.fake_device import CaptureRequest, OfflineCapture
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.runtime.torch_internals import cuda as library
from tests.params import slow_after
from tests.runtime.networks import Mlp
from tests.runtime.strict_plans import check_plans
from tests.runtime.swapping import swap_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SIZE = 4000
"""Bytes of a tensor of a thousand floats."""


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [(nn.Conv2d(3 if i == 0 else 8, 8, 3), nn.BatchNorm2d(8)) for i in range(3)]
        self.blocks = nn.Sequential(*[layer for block in blocks for layer in block])

    def forward(self, x):
        return self.blocks(x).relu().square().mean()


@pytest.fixture(autouse=True)
def checked_plans(monkeypatch):
    if torch.cuda.get_device_name() == "Pretended":
        check_plans(monkeypatch)


@pytest.fixture
def x():
    cuda.install_allocator()
    return torch.ones(1000, device="cuda")


def run_in(run, memory, function):
    run.begin(memory, fresh=True)
    try:
        run.arena.enter(0)
        return function()
    finally:
        run.arena.leave()


def test_a_slot_is_served_at_its_address(x):
    memory, run = Memory(), Run(Arena(8192, [[(SIZE, 4096)]], [False], 0))
    y = run_in(run, memory, lambda: x + x)
    begin = memory._block.address
    assert (y.data_ptr() - begin, y.device) == (4096, x.device)
    assert torch.equal(y, 2 * x)
    counters = run.counters()
    assert (counters.high_water_bytes, counters.outside_bytes) == (4096 + SIZE, 0)
    assert counters.process_bytes == 8192
    view = y[10:]
    del y
    assert len(memory.live_offsets) == 1
    del view
    assert memory.live_offsets == []


def test_what_is_not_as_planned_lies_outside_and_is_counted(x):
    memory, run = Memory(), Run(Arena(4096, [[(SIZE, SERVED_OUTSIDE), (SIZE - 4, 0)]], [False], 0))
    y, z = run_in(run, memory, lambda: (x + x, x * 3))
    assert memory.live_offsets == []
    assert run.counters().outside_bytes == SIZE  # of z
    assert run.counters().process_bytes == 4096 + 2 * SIZE
    assert torch.equal(y + x, z)


def test_the_cpu_is_not_served_in_an_op_on_cuda(x):
    memory, run = Memory(), Run(Arena(4096, [[(SIZE, 0)]], [False], 0))
    on_cpu, y = run_in(run, memory, lambda: (torch.ones(1000), x + x))
    assert len(memory.live_offsets) == 1
    assert run.counters().outside_bytes == 0
    assert torch.equal(y.cpu(), 2 * on_cpu)


def test_allocations_of_the_device_are_recorded_and_given_back(x):
    ext = extension()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    ext.record_begin(True)
    y = x + x
    torch.ones(10)
    pointer = y.data_ptr()
    del y
    assert ext.record_end() == [(1, pointer, SIZE), (0, pointer, 0)]
    ext.record_begin(True)
    y = x + x
    assert ext.record_end() == [(1, y.data_ptr(), SIZE)]
    del y
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == before


def train(model, step, batch, steps=4):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = step(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        torch.cuda.synchronize()
    return losses


def compiled(model, budget, **options):
    return torch.compile(
        model, backend="coop", fullgraph=True, options={"budget": budget, **options}
    )


@pytest.mark.parametrize("budget", ["100%", "60%", "min"])
@pytest.mark.parametrize(
    ("model", "shape"),
    [(lambda: Mlp(0.3), (256, 64)), (Convolutional, (4, 3, 24, 24))],
    ids=["dropout", "convolution"],
)
def test_training_gives_the_joint_graphs_numbers_in_the_planned_arena(model, shape, budget):
    if model is Convolutional and budget == "60%":
        budget = "80%"  # one op takes more than 60 %
    joint, batch = model(), torch.randn(shape, device="cuda")
    planned = copy.deepcopy(joint).cuda()
    joint.cuda()
    losses = train(joint, torch.compile(joint, backend="aot_eager"), batch)
    torch._dynamo.reset()
    planned_losses = train(planned, compiled(planned, budget), batch)
    exact = {} if model is Convolutional else {"rtol": 0, "atol": 0}  # cuDNN adds in any order
    torch.testing.assert_close(planned_losses, losses, **exact)
    torch.testing.assert_close(planned.state_dict(), joint.state_dict(), **exact)
    (report,) = runtime.reports()
    assert report.graph.device.kind == "cuda"
    assert report.plan.outputs == "outside"
    assert report.measured_arena_bytes == report.planned_arena_bytes
    assert report.outside_bytes == 0
    assert report.measured_peak_bytes <= report.budget_bytes
    assert report.last_step_us > 0
    if not report.plan.swapped_bytes:  # a wait for a copy is overhead, too
        assert (report.measured_overhead > 0) == (report.plan.recomputed_ops > 0)


def test_gradients_held_across_steps_are_never_overwritten():
    model = Mlp().cuda()
    step = compiled(model, "min")
    held = []
    for k in range(3):
        step(torch.randn(256, 64, device="cuda") + k).backward()
        held += [(p.grad, p.grad.clone()) for p in model.parameters()]
        model.zero_grad()
    assert all(torch.equal(gradient, copied) for gradient, copied in held)


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_gradients_lie_in_the_arena_if_asked(budget):
    model, batch = Mlp().cuda(), torch.randn(256, 64, device="cuda")
    other = copy.deepcopy(model)
    losses = train(model, torch.compile(model, backend="aot_eager"), batch)
    torch._dynamo.reset()
    assert all(map(torch.equal, losses, train(other, compiled(other, budget), batch)))
    torch._dynamo.reset()
    model.load_state_dict(other.state_dict())
    compiled(model, budget, outputs="gradients")(batch).backward()
    outside, inside = runtime.reports()
    assert inside.plan.outputs == "gradients"
    assert inside.outside_bytes == 0
    assert inside.peak_bytes < outside.peak_bytes
    assert inside.measured_peak_bytes <= inside.budget_bytes
    begin = torch.cuda.memory_stats()["requested_bytes.all.current"]
    model.zero_grad()
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == begin


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_gradients_in_the_arena_that_are_kept_move_out_of_it(budget):
    """Every holder of the storage sees the same numbers at the same new address."""
    model = Mlp().cuda()
    step = compiled(model, budget, outputs="gradients")
    held = []
    for k in range(3):
        step(torch.randn(256, 64, device="cuda") + k).backward()
        held += [(p.grad, p.grad.view(-1)[1:], p.grad.clone()) for p in model.parameters()]
        model.zero_grad()
    assert all(torch.equal(gradient, copied) for gradient, _, copied in held)
    assert all(view.data_ptr() == gradient.data_ptr() + 4 for gradient, view, _ in held)
    assert runtime.reports()[-1].outside_bytes == 0


def test_gradients_that_leave_the_arena_take_no_more_than_the_budget():
    """The arena of the first step is freed before its gradients have memory of their own."""
    model, batch = Mlp().cuda(), torch.randn(256, 64, device="cuda")
    expected = copy.deepcopy(model)
    budget = "min"
    for _ in range(2):
        step = compiled(model, budget, outputs="gradients")
        model.zero_grad()
        gc.collect()
        own = batch.nbytes + sum(parameter.nbytes for parameter in model.parameters())
        before = torch.cuda.memory_stats()["requested_bytes.all.current"] - own
        for k in range(3):
            step(batch).backward()
            if k == 0:  # it measured ops
                torch.cuda.reset_peak_memory_stats()
        budget = runtime.reports()[-1].budget_bytes
        step = None
        torch._dynamo.reset()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert peak <= budget
    for _ in range(3):
        expected(batch).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, gradients, [p.grad for p in expected.parameters()]))


def requested(which):
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


class Widths(nn.Module):
    """Layers of these widths: large ones last, so that gradients lie between gaps."""

    def __init__(self, *widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize("seed", slow_after(2, range(10)))
def test_an_update_runs_in_the_idle_arena(seed):
    """At most what the arena cannot hold is allocated; numbers and states are those of eager."""
    draw = random.Random(seed)
    outputs, budget = draw.choice(["outside", "gradients"]), draw.choice(["100%", "min"])
    rows = draw.choice([4, 64, 700])
    widths = [draw.choice([8, 60, 64, 129]) for _ in range(draw.randint(3, 6))]
    model = Widths(*widths).cuda()
    batch = torch.randn(rows, widths[0], device="cuda")
    other = copy.deepcopy(model)
    loops = [
        (model, torch.compile(model, backend="aot_eager"), []),
        (other, compiled(other, budget, outputs=outputs), []),
    ]
    for module, step, extra in loops:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=True)
        for turn in range(4):
            step(batch).backward()
            held, view = module.layers[0].weight.grad, module.layers[0].weight.grad.view(-1)[1:]
            before = requested("current")
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            assert torch.equal(held.view(-1)[1:], view)
            extra.append((requested("peak") - before, requested("current") - before))
            optimizer.zero_grad() if turn < 2 else optimizer.zero_grad(set_to_none=False)
            del held, view
        for state in optimizer.state.values():
            extra.append((state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    (_, _, eager), (_, _, ours) = loops
    for (exp, square), (exp_too, square_too) in zip(eager[4:], ours[4:], strict=True):
        assert torch.equal(exp, exp_too) and torch.equal(square, square_too)
    states = eager[0][1]
    assert ours[0][1] == states  # none of them is in the arena
    (report,) = runtime.reports()
    taken = report.planned_arena_bytes - sum(map(cuda_size, other.parameters()))
    temporaries = eager[1][0]
    if taken > temporaries + 512 * len(widths) * 4:
        assert [peak for peak, _ in ours[1:4]] == [0, 0, 0]
        assert ours[0][0] <= states
    assert all(mine[0] <= theirs[0] for mine, theirs in zip(ours[:4], eager[:4], strict=True))


LOANS = """
import torch
from torch import nn

def __getattr__(name):
    if not name.startswith("of_"):
        raise AttributeError(name)
    widths = list(map(int, name[3:].split("_")))
    def step_of_widths(batch):
        layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.Tanh())]
        model = nn.Sequential(*layers)
        return (lambda x: model(x).square().mean()), (torch.randn(batch, widths[0]),)
    return step_of_widths
"""


@pytest.fixture(scope="module")
def captures():
    """One process for all captures: the first one in a process takes half a second more."""
    with OfflineCapture() as running:
        yield running


@pytest.mark.parametrize("seed", slow_after(2, range(8)))
def test_the_smallest_budget_of_fit_has_room_for_the_update(seed, importable, captures):
    """An arena of the plan's bytes lacks a few for a temporary, which then lies outside it."""
    draw = random.Random(seed)
    widths = [draw.choice([32, 60, 129, 300]) for _ in range(draw.randint(3, 6))]
    rows, update = draw.choice([1, 16, 200]), draw.choice(["plain", "foreach"])
    importable("loans_of", LOANS)
    name = "of_" + "_".join(map(str, widths))
    spec = OptimizerSpec(name="adamw", update=update)
    asked = {"spec": device("a100-80gb"), "batch": rows, "optimizer": spec, "eager": True}
    graphs, eager = captures.capture(CaptureRequest(target=f"loans_of:{name}", **asked))
    graph = graphs["eager"]
    least = least_at_any_costs(graph, outputs="gradients", link=0)
    promised = eager.with_plan(graph, least, rests=False)
    libraries = eager.step.other - cuda_size(torch.empty(rows, widths[0]))  # here they take nothing
    budget = eager.step_bytes(graph, least, rests=False) - libraries
    assert promised <= eager.peak_bytes + 512  # the last bytes of the arena

    before = requested("current")
    step, (x,) = getattr(importlib.import_module("loans_of"), name)(rows)
    model, x = step.__closure__[0].cell_contents.cuda(), x.cuda()
    planned = compiled(step, budget, outputs="gradients", link=0)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=update == "foreach")
    for turn in range(4):
        if turn == 1:  # the first call measured ops
            torch.cuda.reset_peak_memory_stats()
        planned(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert requested("peak") - before <= promised - libraries


@pytest.mark.parametrize("seed", slow_after(2, range(9)))
def test_an_iteration_takes_no_more_than_fit_promises(seed, importable, captures):
    """Any optimizer and update, also in the backward, after one or three micro-batches.

    Beside an idle arena lie norms of a clipping. An update in the backward lies beside a full one.
    """
    draw = random.Random(seed)
    widths = [draw.choice([32, 60, 129, 300]) for _ in range(draw.randint(3, 6))]
    rows = draw.choice([1, 16, 200])
    update = ("backward", "plain", "foreach")[seed % 3]
    micro = 1 if update == "backward" else draw.choice([1, 3])
    name = "adamw" if update == "backward" else draw.choice(["sgd", "momentum", "adamw"])
    clips = update != "backward" and draw.choice([True, False])
    importable("loans_of", LOANS)
    target = "of_" + "_".join(map(str, widths))
    request = CaptureRequest(
        target=f"loans_of:{target}",
        spec=device("a100-80gb"),
        batch=rows,
        optimizer=OptimizerSpec(name=name, update=update, clip_norm=clips),
        eager=True,
        accumulates=micro > 1,
    )
    graphs, eager = captures.capture(request)
    graph = graphs["eager"]
    makers = {
        "sgd": functools.partial(torch.optim.SGD, lr=1e-3),
        "momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        "adamw": torch.optim.AdamW,
    }
    make = functools.partial(makers[name], foreach=update == "foreach")
    if draw.choice([True, False]):
        made = plan(graph, "100%", method="keep-all", outputs="gradients")
        beside = 1024 + clips * eager.unlent_bytes + (update == "backward") * made.arena_bytes
        assert eager.with_plan(graph, made, rests=False) <= eager.peak_bytes + beside
    else:
        made = least_at_any_costs(graph, outputs="gradients", link=0)
    promised = eager.with_plan(graph, made, rests=False)
    libraries = eager.step.other - cuda_size(torch.empty(rows, widths[0]))  # here they take nothing
    budget = eager.step_bytes(graph, made, rests=False) - libraries

    before = requested("current")
    step, (x,) = getattr(importlib.import_module("loans_of"), target)(rows)
    model, x = step.__closure__[0].cell_contents.cuda(), x.cuda()
    planned = compiled(step, budget, outputs="gradients", link=0)

    def complete(parameter, own):
        own.step()
        own.zero_grad()

    if update == "backward":
        for parameter in model.parameters():
            own = make([parameter])
            parameter.register_post_accumulate_grad_hook(functools.partial(complete, own=own))
    optimizer = make(model.parameters())
    for turn in range(4):
        if turn == 1:  # the first call measured ops
            torch.cuda.reset_peak_memory_stats()
        for _ in range(micro):
            planned(x).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    taken = requested("peak") - before
    assert taken <= promised - libraries
    if update == "backward":  # its temporaries were counted twice
        assert promised - libraries - taken < max(16384, eager.update_bytes // 2)


def test_an_update_that_fails_leaves_nothing_lent():
    model, batch = Mlp().cuda(), torch.randn(256, 64, device="cuda")
    step = compiled(model, "100%", outputs="gradients")

    class Failing(torch.optim.SGD):
        __module__ = "torch.optim.sgd"

        def step(self, closure=None):
            self.kept = torch.ones(1000, device="cuda")
            raise ValueError("fails")

    expected = []
    optimizer = Failing(model.parameters())
    for _ in range(3):
        step(batch).backward()
        with pytest.raises(ValueError, match="fails"):
            optimizer.step()
        expected.append([p.grad.clone() for p in model.parameters()])
        optimizer.zero_grad()
        assert torch.equal(optimizer.kept, torch.ones(1000, device="cuda"))
    assert all(map(torch.equal, expected[0], expected[2]))
    torch.optim.SGD(model.parameters()).step()
    before = requested("current")
    held = torch.ones(1000, device="cuda")
    assert requested("current") == before + held.nbytes


@pytest.mark.parametrize("module", ["torch.optim.own", "own"])
def test_who_borrows_nothing(module, monkeypatch):
    """An optimizer that is not PyTorch's, and a step in a CUDA graph."""
    model, batch = Mlp().cuda(), torch.randn(256, 64, device="cuda")

    class Own(torch.optim.Optimizer):
        __module__ = module

        def step(self, closure=None):
            self.temporary = torch.ones(1000, device="cuda")

    compiled(model, "100%")(batch).backward()
    optimizer = Own(model.parameters(), {})
    if module != "own":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = requested("current")
    optimizer.step()
    assert requested("current") == before + SIZE


@pytest.mark.parametrize("kind", ["pre", "post", "all"])
def test_what_a_hook_of_the_step_keeps_is_not_in_the_arena(kind):
    model, batch = Mlp().cuda(), torch.randn(256, 64, device="cuda")
    step, optimizer = compiled(model, "100%"), torch.optim.SGD(model.parameters())
    register = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "all": register_optimizer_step_post_hook,
    }[kind]
    kept = []
    handle = register(lambda *_: kept.append(torch.ones(1000, device="cuda")))
    step(batch).backward()
    before = requested("current")
    optimizer.step()
    handle.remove()
    assert requested("current") == before + kept[0].nbytes
    step(batch).backward()
    assert torch.equal(kept[0], torch.ones(1000, device="cuda"))


def test_another_thread_s_arena_is_not_lent():
    """Its gradients would move while that thread reads them."""
    parameter = nn.Parameter(torch.ones(1000, device="cuda"))
    parameter.grad = torch.ones(1000, device="cuda")
    optimizer = torch.optim.SGD([parameter], weight_decay=0.1, foreach=True)

    def train():
        model = Widths(8, 8, 129).cuda()
        compiled(model, "100%", outputs="gradients")(torch.ones(700, 8, device="cuda")).backward()
        return model

    def peak():
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        optimizer.step()
        return requested("peak") - before

    alone = peak()
    with ThreadPoolExecutor(1) as executor:
        model = executor.submit(train).result()
        places = [p.grad.data_ptr() for p in model.parameters()]
        assert peak() == alone
    assert places == [p.grad.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("seed", range(5))
def test_temporaries_are_placed_as_they_are_counted(x, seed):
    """First fit in one gap, as `coop-plan fit` counts the update of an idle arena."""
    draw = random.Random(seed)
    memory = Memory()
    memory.reserve(50 * 512, 0)
    changes, alive = [], []
    before, most = requested("current"), 0
    assert memory.lend()
    for _ in range(200):
        if alive and draw.random() < 0.5:
            number, tensor = alive.pop(draw.randrange(len(alive)))
            changes.append(-1 - number)
            del tensor
        else:
            size = 512 * draw.choice([1, 2, 3, 9, 20])
            number = sum(change > 0 for change in changes)
            alive.append((number, torch.empty(size, dtype=torch.uint8, device="cuda")))
            changes.append(size)
        most = max(most, requested("current") - before)
    assert most == gap.beyond(changes, 50 * 512)
    memory.recall([tensor for _, tensor in alive])
    assert memory.live_offsets == []


def cuda_size(tensor):
    return -(-tensor.nbytes // 512) * 512


def test_gradients_in_the_arena_cannot_be_captured(capturing):
    step = compiled(Mlp().cuda(), "100%", outputs="gradients")
    batch = torch.randn(256, 64, device="cuda")
    step(batch).backward()
    capturing(True)
    with pytest.raises(runtime.CudaGraphError, match='outputs="outside"'):
        step(batch)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_step_that_is_kept_runs_its_forward_again():
    model = Mlp().cuda()
    step = compiled(model, "60%")
    batch = torch.randn(256, 64, device="cuda")
    loss = step(batch)
    loss.backward(retain_graph=True)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    step(batch).backward()
    model.zero_grad()
    loss.backward()
    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))
    assert runtime.reports()[-1].forwards_again == 1


def test_steps_on_other_streams_wait_for_each_other():
    step, losses = compiled(Mlp().cuda(), "60%"), []
    batch = torch.randn(256, 64, device="cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = step(batch)
            loss.backward()
            losses.append(loss.detach())
        torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_a_scalar_on_the_cpu_may_be_an_input():
    model, scale = Mlp().cuda(), torch.tensor(3.0)
    batch = torch.randn(256, 64, device="cuda")
    loss = compiled(lambda x: model(x) * scale, "60%")(batch)
    loss.backward()
    (report,) = runtime.reports()
    assert report.outside_bytes == 0
    assert torch.equal(loss, model(batch) * scale)


def test_an_op_on_the_cpu_is_refused():
    def step(x, y):
        return (x.sum() + (y * y).to("cuda").sum()).square()

    x = torch.randn(8, device="cuda", requires_grad=True)
    with pytest.raises(Exception, match="computes on the CPU in a step on cuda:0"):
        compiled(step, "100%")(x, torch.randn(8))


def test_an_alignment_below_that_of_the_device_is_refused():
    with pytest.raises(Exception, match="multiple of 512"):
        compiled(Mlp().cuda(), "100%", alignment=64)(torch.randn(8, 64, device="cuda"))


@pytest.fixture
def capturing(monkeypatch):
    """Lets the runtime believe that a CUDA graph is being captured, or not."""
    return lambda flag: monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: flag)


def test_recomputed_dropout_cannot_be_captured(capturing):
    step = compiled(Mlp(0.2).cuda(), "min", host_budget=0)
    batch = torch.randn(256, 64, device="cuda")
    step(batch).backward()
    capturing(True)
    with pytest.raises(runtime.CudaGraphError, match="native_dropout"):
        step(batch)


def test_dropout_that_runs_once_can_be_captured(capturing, monkeypatch):
    """PyTorch does not tell the state of a generator meanwhile."""
    step, batch = compiled(Mlp(0.2).cuda(), "100%"), torch.randn(256, 64, device="cuda")
    step(batch).backward()
    capturing(True)
    refused = RuntimeError("Cannot call CUDAGeneratorImpl::get_offset during CUDA graph capture")
    monkeypatch.setattr(CudaGenerator, "state", Mock(side_effect=refused))
    loss = step(batch)
    loss.backward(retain_graph=True)
    with pytest.raises(runtime.CudaGraphError, match="would have to run again"):
        loss.backward()


def test_cudnn_tries_no_kernels_in_a_step(monkeypatch, caplog):
    """It would do so in each thread, with any workspace."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    cuda.warn_of_benchmark.cache_clear()
    found, mark = [], cuda.Clock.mark

    def seen(clock, kind):
        found.append(torch.backends.cudnn.benchmark)
        mark(clock, kind)

    monkeypatch.setattr(cuda.Clock, "mark", seen)
    compiled(Mlp().cuda(), "100%")(torch.randn(256, 64, device="cuda")).backward()
    assert len(found) > 2
    assert found.count(True) == 2  # the mark that ends each half
    assert torch.backends.cudnn.benchmark
    assert "cudnn.benchmark" in caplog.text


def test_gradients_that_are_kept_twice_are_planned_for():
    """The graph of a loss that is kept has a hold on the nodes that add to `.grad`."""
    gc.collect()  # an arena that was captured would be taken for this step too
    model, batch, losses = Mlp().cuda(), torch.randn(256, 64, device="cuda"), []
    step = compiled(model, "100%")
    for _ in range(3):
        losses.append(step(batch))
        losses[-1].backward()
    (report,) = runtime.reports()
    assert report.held_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert report.measured_peak_bytes <= report.budget_bytes
    assert report.outside_bytes == 0


KEPT = None
"""What `keeps` keeps, if it is to."""


@torch.library.custom_op("coop_tests::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    if KEPT is not None:
        KEPT.append(made.detach())
    return made


keeps.register_fake(torch.empty_like)
keeps.register_autograd(lambda _, gradient: gradient.clone())


@pytest.mark.parametrize("strict", [False, True])
def test_what_lies_elsewhere_than_planned_is_told(strict, monkeypatch, caplog):
    monkeypatch.undo()  # `checked_plans` would tell first
    model, batch = Mlp().cuda(), torch.randn(256, 64, device="cuda")
    step = compiled(lambda x: model(keeps(model.layers[0](x))), "100%", strict=strict)
    for _ in range(4):
        step(batch).backward()
        model.zero_grad()
    assert "may have been exceeded" not in caplog.text
    monkeypatch.setattr(sys.modules[__name__], "KEPT", [])
    told = pytest.raises(runtime.BudgetExceededError, match="may have been exceeded")
    with told if strict else contextlib.nullcontext():
        step(batch).backward()
        step(batch).backward()
    report = runtime.reports()[-1]
    assert "still referenced" in report.outside_plan
    if not strict:
        assert report.outside_bytes > 0
        assert "may have been exceeded" in caplog.text
        assert "of a result of 'coop_tests.keeps.default' at " in caplog.text


SWAPPED = False
"""True if `pair` allocates its results in another order than when it was profiled."""


@torch.library.custom_op("coop_tests::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if SWAPPED:
        second, first = x * 2, x + 1
    else:
        first, second = x + 1, x * 2
    return first, second


pair.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
pair.register_autograd(lambda _, first, second: first + second)


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [("KEPT", [], "outlive their plan"), ("SWAPPED", True, r"run \d+ .*pair.* lies at")],
)
def test_the_pretended_device_tells_of_another_life_and_order(flag, value, told, monkeypatch):
    if torch.cuda.get_device_name() != "Pretended":
        pytest.skip("a device checks no plans")
    model, batch = Mlp().cuda(), torch.randn(256, 64, device="cuda")
    step = compiled(lambda x: model(torch.mul(*pair(keeps(model.layers[0](x))))), "100%")
    step(batch).backward()
    monkeypatch.setattr(sys.modules[__name__], flag, value)
    with pytest.raises(AssertionError, match=told):
        step(batch).backward()


def test_an_arena_does_not_move_once_it_was_captured(capturing):
    model = Mlp()
    model.cuda()
    step, batch = compiled(model, "60%"), torch.randn(256, 64, device="cuda")
    step(batch).backward()
    capturing(True)
    step(batch).backward()
    with pytest.raises(Exception, match="run the step once before"):
        step(torch.randn(512, 64, device="cuda"))
    capturing(False)
    with pytest.raises(runtime.CudaGraphError, match="largest step before the capture"):
        step(torch.randn(512, 64, device="cuda"))
    step(batch).backward()


@pytest.mark.skipif(not hasattr(torch._C, "_cuda_getDeviceCount"), reason="a pretended device")
def test_a_cuda_graph_of_a_step_gives_its_numbers():
    model, batch = Mlp().cuda(), torch.randn(256, 64, device="cuda")
    step, side = compiled(model, "60%"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            loss = step(batch)
            loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    expected = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    del loss
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(batch)
        loss.backward()
    graph.replay()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    assert all(map(torch.equal, found, expected))


def pretended():
    return ctypes.CDLL(str(library.CUDA_LIBRARY))


runs = itertools.count()


@torch.library.custom_op("coop_tests::unsteady", mutates_args=())
def unsteady(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 1e-6 * (next(runs) % 7))


@torch.library.custom_op("coop_tests::steady", mutates_args=())
def steady(x: torch.Tensor) -> torch.Tensor:
    return x * 2


for op in (unsteady, steady):
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda _, gradient: gradient * 2)


@pytest.mark.parametrize("budget", ["min", "70%"])
def test_an_op_whose_runs_differ_is_not_recomputed(budget):
    """None that PyTorch lists: its profile shows it."""
    model, batch = Mlp(0.3).cuda(), torch.randn(256, 64, device="cuda")
    layer = model.layers[0]
    step = compiled(lambda x: model(unsteady(layer(steady(layer(x))))), budget, host_budget=0)
    train(model, step, batch)
    report = runtime.reports()[-1]
    once = {op.name for op in report.graph.ops if not op.recomputable}
    assert once == {"coop_tests.unsteady.default"}
    assert report.plan.recomputed_ops > 0
    (op,) = (op.id for op in report.graph.ops if op.name in once)
    assert [s.op for s in report.plan.steps if s.do == "compute"].count(op) == 1


@pytest.mark.parametrize("late", [False, True], ids=["at once", "as late as can be"])
def test_copies_whenever_they_happen(late, monkeypatch, request):
    """A copy may happen at any time from where it is asked for to the wait for it."""
    if torch.cuda.get_device_name() == "Pretended":  # a device decides for itself
        request.addfinalizer(lambda: pretended().pretended_late(False))
        pretended().pretended_late(late)
    monkeypatch.setattr(find_plan, "plan", swap_plan)
    model = Mlp(0.3).cuda()
    other, batch = copy.deepcopy(model), torch.randn(256, 64, device="cuda")
    losses = train(model, model, batch)
    again = train(other, compiled(other, "100%", link="1GB/s"), batch)
    assert all(map(torch.equal, losses, again))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    (report,) = runtime.reports()
    plan = report.plan
    assert plan.swapped_bytes > 0
    assert report.outside_bytes == 0
    assert report.measured_host_arena_bytes == plan.host_arena_bytes
    assert report.measured_makespan_us >= report.last_step_us


def waits():
    """Of a pretended device, which stream waited for which."""
    library, found = pretended(), []
    while torch.cuda.get_device_name() == "Pretended":
        found.append((library.pretended_wait(len(found), 0), library.pretended_wait(len(found), 1)))
        if found[-1] == (-1, -1):
            return found[:-1]
    return found


def test_each_direction_has_a_stream_that_waits_for_the_step(monkeypatch):
    monkeypatch.setattr(find_plan, "plan", swap_plan)
    other, batch = Mlp().cuda(), torch.randn(256, 64, device="cuda")
    begun, begin = [], CudaCopyEngines._begin

    def seen(links, direction, *copy):
        begun.append(direction)
        return begin(links, direction, *copy)

    monkeypatch.setattr(CudaCopyEngines, "_begin", seen)
    before = len(waits())
    compiled(other, "100%", link="1GB/s")(batch).backward()
    assert set(begun) == {TO_HOST, FROM_HOST}
    streams = cuda_streams(0)
    assert streams[TO_HOST] != streams[FROM_HOST]
    if torch.cuda.get_device_name() == "Pretended":
        current = torch.cuda.current_stream().cuda_stream
        asked = [(streams[direction].cuda_stream, current) for direction in begun]
        assert [wait for wait in waits()[before:] if wait[0] != current] == asked


def test_the_launch_of_a_copy_is_measured(monkeypatch):
    begin = CudaCopyEngines._begin

    def slow(*given):
        time.sleep(2e-3)
        return begin(*given)

    monkeypatch.setattr(CudaCopyEngines, "_begin", slow)
    found = measure_link(torch.device("cuda", 0), functools.partial(cuda.device_us, 0))
    assert found["copy_launch_us"] >= 2000 > found["launch_us"]


def test_the_link_is_measured():
    found = measure_link(torch.device("cuda", 0), functools.partial(cuda.device_us, 0))
    assert found["copy_latency_us"] >= 0
    assert found["d2h_bytes_per_s"] > 0
    assert found["h2d_bytes_per_s"] > 0
