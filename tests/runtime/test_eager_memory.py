"""Eager PyTorch's memory, counted on fake tensors, is that which its allocations have here."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from coop_plan.planner import plan
from coop_plan.runtime import CaptureError
from coop_plan.runtime.device import arena
from coop_plan.runtime.execute import gap
from coop_plan.runtime.offline_capture.eager_memory import StorageLog, count_eager
from coop_plan.runtime.offline_capture.eager_parts import PAGE, EagerMemory, EagerParts, most_pages
from coop_plan.runtime.offline_capture.optimizer_spec import OPTIMIZERS, OptimizerSpec
from coop_plan.runtime.offline_capture.optimizers import Update
from coop_plan.runtime.torch_internals.fakes import FakeTensorMode, convertible_modules
from coop_plan.schemas import Compute, InvalidInputError
from tests.support import make_graph

WIDTH = 256


@pytest.fixture(autouse=True)
def without_onednn(monkeypatch):
    """Products in bfloat16 without oneDNN, which packs weights into scratch with AVX-512."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def layers(reentrant=None, dtype=torch.float32, rows=512):
    """Blocks of a network, each with a checkpoint unless `reentrant` is None."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(4)
    ]
    model = nn.ModuleList(blocks).to(dtype)

    def step(x):
        for block in model:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return x.square().mean()

    return step, (torch.randn(rows, WIDTH, dtype=dtype).requires_grad_(reentrant is True),), model


def with_logits():
    """A loss, and the tensor that it is of, as a transformers model returns both."""
    _, args, model = layers()
    head = nn.Linear(WIDTH, 2048)

    def both(x):
        logits = head(model[0](x))
        return logits.square().mean(), logits

    return both, args, model


def test_a_loss_among_the_outputs_is_what_is_differentiated():
    make = with_logits

    def loss_alone():
        step, args, model = make()
        return lambda x: step(x)[0], args, model

    both, alone = counted(make), counted(loss_alone)
    logits = 512 * 2048 * 4
    assert alone.peak_bytes <= both.peak_bytes < alone.peak_bytes + logits
    assert both.without_loss == ()

    def no_loss():
        step, args, model = make()
        return lambda x: step(x)[1], args, model

    assert counted(no_loss).without_loss == (512, 2048)


def many():
    """A step with 200 small parameters."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(100)))
    x = torch.randn(4, 8, requires_grad=True)
    return (lambda x: model(x).sum()), (x,), model


def frozen():
    """A network of which the last layer alone is trained."""
    step, args, model = layers()
    for parameter in model[:-1].parameters():
        parameter.requires_grad_(False)
    return step, args, model


def recurrent():
    """Two layers of an LSTM, whose kernels keep a workspace and take scratch."""
    model = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
    return lambda x: model(x)[0].square().mean(), (torch.randn(8, 16, WIDTH),), model


@pytest.mark.parametrize("optimizer", [None, "momentum"])
def test_what_the_kernels_of_a_recurrent_layer_keep_is_counted(monkeypatch, optimizer):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    found, peaks = counted(recurrent, optimizer), measured(recurrent, optimizer)
    assert found.step.total == pytest.approx(peaks[0], rel=0.01)


def counted(make, optimizer=None, **options):
    log = StorageLog("cpu")
    with FakeTensorMode():
        with log, convertible_modules():
            step, args, _ = make()
        spec = optimizer and OptimizerSpec(name=optimizer, **options)
        return count_eager(log, step, args, spec)


def measured(make, optimizer=None, **options):
    """Peaks of the second iteration, of the step and of the update, above what was there before."""
    gc.collect()
    arena.reset_peak()
    before = arena.process_bytes()[0]
    step, args, model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    update = optimizer and Update(OptimizerSpec(name=optimizer, **options), trained)
    peaks = []
    for _ in range(2):
        arena.reset_peak()
        step(*args).backward()
        peaks = [arena.process_bytes()[1] - before]
        if update:
            arena.reset_peak()
            update.step()
            peaks.append(arena.process_bytes()[1] - before)
        for parameter in trained:
            parameter.grad = None
        args[0].grad = None
    return peaks


MAKERS = {
    "plain": layers,
    "frozen": frozen,
    "checkpoints": lambda: layers(reentrant=False),
    "reentrant": lambda: layers(reentrant=True),
    "bfloat16": lambda: layers(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("optimizer", [None, "momentum", "adamw"])
def test_what_is_counted_is_what_is_allocated(make, optimizer):
    found, peaks = counted(make, optimizer), measured(make, optimizer)
    assert found.step.total == pytest.approx(peaks[0], rel=0.01)
    if optimizer:
        assert found.update.total == pytest.approx(peaks[1], rel=0.01)


@pytest.mark.parametrize("update", ["plain", "foreach"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_temporaries_of_each_optimizer(optimizer, update):
    try:
        found = counted(layers, optimizer, update=update)
    except InvalidInputError as error:
        assert update == "foreach"
        assert "has no foreach update" in str(error)
        return
    assert found.update.total == pytest.approx(
        measured(layers, optimizer, update=update)[1], rel=0.01
    )


@pytest.mark.parametrize("update", ["plain", "foreach"])
def test_an_average_is_kept_beside_the_states(update):
    found = counted(layers, "adamw", update=update, ema=True)
    without = counted(layers, "adamw", update=update)
    assert found.step.states == pytest.approx(1.5 * without.step.states, rel=0.01)
    peak = measured(layers, "adamw", update=update, ema=True)[1]
    assert found.update.total == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("update", ["plain", "foreach"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_temporaries_of_clipping_are_counted(optimizer, update):
    found = counted(many, optimizer, update=update, clip_norm=True)
    assert found.update_bytes >= counted(many, optimizer, update=update).update_bytes
    assert found.update_bytes >= 64 * 200  # a norm of each, rounded up
    peak = measured(many, optimizer, update=update, clip_norm=True)[1]
    assert peak <= found.update.total <= peak + 64 * 200 * 5


def test_masters_are_weights_and_their_gradients_temporaries():
    found = counted(MAKERS["bfloat16"], "adamw", masters=True, update="foreach")
    weights = counted(MAKERS["bfloat16"]).step.weights
    assert found.step.weights == pytest.approx(3 * weights, rel=0.01)
    assert found.step.states == pytest.approx(4 * weights, rel=0.01)
    assert found.update_bytes == pytest.approx(4 * weights, rel=0.01)


@given(st.integers(1, 3), st.integers(1, 8))
def test_a_loss_lives_until_the_update_ends(outputs, rows):
    """A loop has it in a variable; outputs that are no losses may be of any size."""

    def step_of(reduced):
        def make():
            model = nn.Linear(16, 16)

            def step(x):
                found = [model(x) * (number + 1) for number in range(outputs)]
                return [value.square().mean() for value in found] if reduced else found

            return step, (torch.randn(rows, 16),), model

        return counted(make, "adamw")

    with_losses, without = step_of(True), step_of(False)
    assert with_losses.update.total == without.update.total + 64 * outputs
    assert without.without_loss == (rows, 16)


def test_an_optimizer_in_the_backward_frees_each_gradient():
    found, after = (
        counted(lambda: layers(rows=8), "adamw", update=update) for update in ("backward", "plain")
    )
    assert found.update is None
    assert found.step.states == after.step.states
    assert found.step.gradients < after.step.gradients / 2
    assert found.peak_bytes < after.peak_bytes


def test_scratch_on_the_host_takes_no_memory_of_a_gpu():
    """Images that a step for a GPU augments on the CPU have their scratch there."""
    for kind in ("cpu", "cuda"):
        log = StorageLog(kind)
        with FakeTensorMode() as fake, log:
            torch.ops.aten.native_dropout(fake.from_tensor(torch.ones(1 << 16)), 0.5, True)
        assert (log.peak(0, log.moment()).total > 0) == (kind == "cpu")


def test_checkpoints_are_honoured():
    sizes = [counted(MAKERS[name]).step.activations for name in ("plain", "checkpoints")]
    assert sizes[1] < 0.6 * sizes[0]


def test_loading_counts_what_is_cast():
    found = counted(MAKERS["bfloat16"])
    assert found.loading_bytes > 1.9 * found.step.weights
    assert found.dtype == "bfloat16"


def test_a_step_without_gradients_is_refused():
    with pytest.raises(CaptureError, match="needs no gradient"):
        counted(lambda: (lambda x: x.sum(), (torch.ones(4),), None))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(1, 40)), max_size=60))
def test_bytes_beyond_a_gap(drawn):
    """Nothing is beyond a gap that holds all by first fit, and all is beyond none."""
    changes, alive = [], []
    for frees, which, size in drawn:
        if frees and alive:
            changes.append(-1 - alive.pop(which % len(alive)))
        else:
            alive.append(sum(change > 0 for change in changes))
            changes.append(512 * size)
    enough = gap.gap_for(changes)
    assert gap.peak(changes) <= enough
    assert gap.beyond(changes, enough) == 0
    assert gap.beyond(changes, 0) == gap.peak(changes)
    for part in range(0, enough, 5 * 512):
        beyond = gap.beyond(changes, part)
        assert gap.peak(changes) - part <= beyond <= gap.peak(changes)


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=8), st.integers(0, 20_000))
def test_an_update_on_a_cpu_has_the_pages_of_the_gradients(sizes, activation):
    """Each page counts once: it was counted as two of every gradient, more than eager has."""
    tensors = {0: ("parameter", 64), 1: ("activation", activation)}
    tensors |= {2 + number: ("output", size) for number, size in enumerate(sizes)}
    ops = [{"id": 0, "inputs": [0], "outputs": [1]}]
    ops += [{"inputs": [1], "outputs": [t], "phase": "backward"} for t in list(tensors)[2:]]
    graph = make_graph(tensors, [op | {"id": number} for number, op in enumerate(ops)])
    made = plan(graph, "100%", method="keep-all", outputs="gradients")
    parts = EagerParts(weights=64, gradients=sum(sizes), states=1 << 30, update=1 << 20)
    eager = EagerMemory(step=EagerParts(), update=parts, resident_bytes=64)
    writes = [write for step in made.steps if isinstance(step, Compute) for write in step.writes]
    spans = [range(w.offset, w.offset + w.bytes) for w in writes if w.tensor > 1]
    pages = {offset // PAGE for span in spans for offset in (*span[::PAGE], span[-1])}
    held = PAGE * len(pages)
    assert eager.with_plan(graph, made, rests=True) == parts.total - sum(sizes) + held
    scattered = eager.with_plan(graph, made, rests=True, scattered=True)
    assert parts.total - sum(sizes) + held <= scattered


@given(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 99)), min_size=1, max_size=9))
def test_scattered_gradients_hold_the_pages_of_any_plan(drawn):
    """A plan at other costs left them in more pages than the one whose budget was printed."""
    tensors = {0: ("parameter", 64)}
    tensors |= {1 + number: ("output", size) for number, (size, _) in enumerate(drawn)}
    ops = [
        {"id": number, "inputs": [0], "outputs": [1 + number], "phase": "backward"}
        for number in range(len(drawn))
    ]
    pages, end = set(), 0
    for size, gap_before in drawn:
        begin = -(-end // 64) * 64 + 64 * gap_before
        end = begin + size
        pages |= set(range(begin // PAGE, (end - 1) // PAGE + 1))
    assert PAGE * len(pages) <= most_pages(make_graph(tensors, ops))


def test_an_update_on_a_gpu_is_that_of_eager_with_the_arena_for_the_gradients():
    """A tangent is resident in a graph, and is gone when the optimizer's step begins."""
    graph = make_graph(
        {0: ("parameter", 1024), 1: ("input", 4), 2: ("output", 512)},
        [{"id": 0, "inputs": [0, 1], "outputs": [2], "phase": "backward"}],
    )
    made = plan(graph, "100%", method="keep-all", outputs="gradients")
    parts = EagerParts(weights=1024, gradients=512, states=2048, update=4096)
    eager = EagerMemory(
        step=EagerParts(weights=1024), update=parts, update_bytes=4096, resident_bytes=1028
    )
    assert made.arena_bytes == parts.gradients
    assert eager.with_plan(graph, made, rests=False) == parts.total


def test_a_budget_on_a_gpu_leaves_the_update_s_temporaries_room():
    """They lie in the arena if it is large enough, else beside it."""
    eager = EagerMemory(
        step=EagerParts(weights=1024, states=2048),
        update=EagerParts(gradients=1024, update=2048),
        update_bytes=2048,
        lent=(1024, 1024, -1, -2),
        resident_bytes=1024,
    )
    graph = make_graph(
        {0: ("parameter", 1024), 1: ("output", 512)}, [{"id": 0, "inputs": [0], "outputs": [1]}]
    )
    enough = 1024 + 1024 + 2048 + 1024
    assert eager.step_budget(graph, 2048 + enough, rests=False) == enough
    assert eager.step_budget(graph, 2048 + enough - 1, rests=False) == enough - 1 - 2048
    assert eager.step_budget(graph, 2048 + enough - 1, rests=True) == enough - 1
