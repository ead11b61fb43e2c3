"""Parameters and states with homes on the host: iterations are the loop's, at the planned peak."""

import copy
import gc
import io
import mmap

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_map

import coop_plan
from coop_plan.runtime import PartlyUpdatedError, RuntimeRefusalError
from coop_plan.runtime.capture.joint_graph import SAVED_HANDLE_BYTES
from coop_plan.runtime.device.arena import process_bytes
from coop_plan.runtime.device.copy_engines import FROM_HOST, TO_HOST, CpuCopyEngines
from coop_plan.runtime.whole_iteration import updates
from tests.params import slow_after
from tests.runtime.iterating import OPTIMIZERS, eager, equal, listed, preferring_host, state_of

WIDTH, ROWS, WORDS = 64, 8, 50


@pytest.fixture(autouse=True)
def updates_on_device(monkeypatch):
    """Of updates on the host: `test_host_updates`."""
    monkeypatch.setattr(updates, "host_us", lambda *_: None)


class Mlp(nn.Module):
    """Its weights take more bytes than its activations."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def loss(self, batch):
        x = batch
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    def batch(self, step, rows=ROWS):
        return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


class Gpt(nn.Module):
    """Blocks of attention, the weight of the embedding also that of the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))

    def loss(self, batch):
        words, following = batch
        x = self.words(words)
        shape = (*words.shape, 4, WIDTH // 4)
        for i in range(2):
            parts = self.mixes[i](self.norms[2 * i](x)).split(WIDTH, dim=2)
            q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.outs[i](mixed.transpose(1, 2).reshape(x.shape))
            x = x + self.downs[i](nn.functional.gelu(self.ups[i](self.norms[2 * i + 1](x))))
        logits = nn.functional.linear(x, self.words.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    def batch(self, step, rows=ROWS):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(0, WORDS, (2, rows + 1), generator=generator)
        return words[:, :-1], words[:, 1:]


class Pixels(nn.Module):
    """Weights that are not contiguous, a frozen one, running statistics, bfloat16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        convs = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3))
        self.convs = convs.to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.last = nn.Linear(32, 32, dtype=torch.bfloat16)

    def loss(self, batch):
        x = self.frozen(self.convs(batch).mean((2, 3)))
        return self.last(x.bfloat16()).float().logsumexp(1).mean()

    def batch(self, step, rows=ROWS):
        return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(step))


def checked(report):
    """The report of an iteration that had its planned peak, and nothing outside the plan."""
    assert report.peak_bytes - report.measured_peak_bytes in (0, SAVED_HANDLE_BYTES)
    assert report.peak_bytes <= report.budget_bytes
    assert report.outside_bytes == 0
    assert report.measured_arena_bytes == report.plan.arena_bytes
    if report.plan.homes:
        assert report.measured_host_arena_bytes == report.plan.host_arena_bytes
    return report


class Pair:
    """A model trained by `train_iteration`, and a copy of it trained by the loop."""

    def __init__(
        self, kind, optimizer, budget, clip_norm=None, link="8GB/s", device="cpu", **options
    ):
        self.ours, self.theirs, self.device = kind().to(device), kind().to(device), device
        make = OPTIMIZERS[optimizer]
        self.mine, self.other = make(self.ours.parameters()), make(self.theirs.parameters())
        self.clip_norm = clip_norm
        self.iteration = coop_plan.train_iteration(
            self.ours.loss, self.mine, budget, clip_norm=clip_norm, link=link, **options
        )

    def batch(self, step, rows=ROWS):
        return tree_map(lambda value: value.to(self.device), self.ours.batch(step, rows))

    def equal(self):
        return equal(state_of(self.ours, self.mine), state_of(self.theirs, self.other))

    def compare(self, batch):
        """Train on a batch, which need not be within the budget."""
        losses, _ = eager(self.theirs.loss, self.other, [batch], None)
        assert equal([self.iteration(batch)], losses)
        assert self.equal()

    def run(self, *steps, rows=ROWS, count=1):
        report = None
        for step in steps:
            batches = [self.batch(step + 100 * i, rows) for i in range(count)]
            losses, norm = eager(self.theirs.loss, self.other, batches, self.clip_norm)
            gc.collect()  # of earlier tests: the counter takes its frees for the step's
            made = self.iteration(*batches)
            assert equal(made if count > 1 else [made], losses)
            assert norm is None or torch.equal(self.iteration.grad_norm, norm)
            assert self.equal()
            report = checked(coop_plan.reports()[-1])
        return report


COMBINATIONS = [
    (kind, optimizer, clip_norm, ("2GB/s", "8GB/s")[(i + j + k) % 2], budget)
    for i, kind in enumerate((Mlp, Gpt))
    for j, optimizer in enumerate(("momentum", "adamw"))
    for k, (clip_norm, budget) in enumerate(
        [(None, "min"), (0.05, "min"), ((None, 0.05)[i ^ j], "60%"), ((0.05, None)[i ^ j], "40%")]
    )
]
"""Each budget with each model and optimizer; half of them with each link."""


@pytest.mark.parametrize(
    ("kind", "optimizer", "clip_norm", "link", "budget"),
    slow_after(4, [row for first in range(5) for row in COMBINATIONS[first::5]]),
)
def test_an_iteration_with_homes_is_the_loops(kind, optimizer, clip_norm, link, budget):
    report = Pair(kind, optimizer, budget, clip_norm, link).run(0, 1, 2)
    assert report.plan.homes or budget != "min"
    assert sum(span.bytes for span in report.copies) == report.plan.swapped_bytes


@pytest.mark.parametrize(
    ("method", "kind", "optimizer"), [("delta", Gpt, "adamw"), ("swap-only", Mlp, "momentum")]
)
def test_online_methods_move_residents(method, kind, optimizer):
    assert Pair(kind, optimizer, "min", 0.05, method=method).run(0, 1, count=2).plan.homes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_of_any_optimizer_may_have_homes(optimizer, monkeypatch):
    """All states of a parameter are one copy."""
    begin, begun = CpuCopyEngines._begin, []
    monkeypatch.setattr(
        CpuCopyEngines, "_begin", lambda links, *given: begun.append(given) or begin(links, *given)
    )
    pair = Pair(Mlp, optimizer, "min", 0.05)
    pair.run(0, 1)
    begun.clear()
    report = pair.run(2)
    assert len(begun) == len(report.copies)
    assert len(report.plan.homes) == sum(tensor.movable for tensor in report.graph.tensors)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from([Mlp, Gpt, Pixels]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    clip_norm=st.sampled_from([None, 0.05]),
    link=st.sampled_from(["100MB/s", "8GB/s"]),
    budget=st.sampled_from(["90%", "50%", "min"]),
    count=st.integers(1, 3),
    variants=st.booleans(),
)
def test_any_iteration_with_homes_is_the_loops(
    kind, optimizer, clip_norm, link, budget, count, variants
):
    torch._dynamo.reset()
    Pair(kind, optimizer, budget, clip_norm, link, variants=variants).run(0, 1, 2, count=count)


def copying(monkeypatch, direction, source):
    """Copies in a direction copy zeros, or with the source None nothing."""
    begin = CpuCopyEngines._begin

    def changed(links, towards, target, own, size, least_us):
        if towards == direction:
            own, size = (own, 0) if source is None else (source.data_ptr(), size)
        return begin(links, towards, target, own, size, least_us)

    monkeypatch.setattr(CpuCopyEngines, "_begin", changed)


def test_ops_read_the_copies_of_homes(monkeypatch):
    """With zeros for all weights the loss is zero."""
    pair = Pair(Mlp, "momentum", "min")
    pair.run(0)
    copying(monkeypatch, FROM_HOST, torch.zeros(1 << 20, dtype=torch.uint8))
    assert pair.iteration(pair.ours.batch(1)) == 0


def test_updates_reach_homes_by_their_copies_alone(monkeypatch):
    pair = Pair(Mlp, "adamw", "min")
    pair.run(0)
    before = copy.deepcopy(state_of(pair.ours, pair.mine))
    copying(monkeypatch, TO_HOST, None)
    pair.iteration(pair.ours.batch(1))
    assert equal(before, state_of(pair.ours, pair.mine))


def test_sizes_and_micro_batches_share_the_homes():
    """Each has a plan of its own, with homes at other offsets."""
    pair = Pair(Gpt, "adamw", "min", 0.05)
    for step, (rows, count) in enumerate([(8, 1), (16, 1), (8, 2), (16, 1), (8, 1)]):
        pair.run(step, rows=rows, count=count)
    offsets = {tuple(h.host_offset for h in r.plan.homes) for r in coop_plan.reports()}
    assert len(offsets) > 1


def test_two_iterations_train_one_model():
    pair = Pair(Mlp, "adamw", "min")
    first, second = pair.iteration, Pair(Mlp, "adamw", "60%").iteration
    second = coop_plan.train_iteration(pair.ours.loss, pair.mine, "60%", link="8GB/s")
    for step, pair.iteration in enumerate((first, second, first, second)):
        pair.run(step)


def test_frozen_weights_have_homes():
    pair = Pair(Mlp, "sgd", "min")
    for model in (pair.ours, pair.theirs):
        for layer in model.layers[:5]:
            layer.requires_grad_(False)
    report = pair.run(0, 1, 2)
    assert len(report.plan.homes) == 2 * 6
    assert report.peak_bytes < 5 * 4 * WIDTH * WIDTH


def test_states_are_saved_and_loaded_between_iterations(tmp_path):
    """Also those that the user still holds: they keep their numbers when others are loaded."""
    pair = Pair(Gpt, "adamw", "min")
    pair.run(0, 1)
    torch.save((pair.ours.state_dict(), pair.mine.state_dict()), tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_size < 2 * sum(
        value.nbytes for value in state_of(pair.ours, pair.mine)
    )
    held = [value for one in pair.mine.state.values() for value in one.values()]
    numbers = copy.deepcopy(held)
    twin = copy.deepcopy(pair.ours)
    pair.run(2)
    assert not equal(state_of(twin, []), state_of(pair.ours, []))
    held_after = copy.deepcopy(held)
    assert not equal(numbers, held_after)
    saved = torch.load(tmp_path / "saved")
    for model, optimizer in ((pair.ours, pair.mine), (pair.theirs, pair.other)):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert equal(state_of(twin, []), state_of(pair.ours, []))
    pair.run(3, 4)
    assert equal(held, held_after)


READERS = {
    "load": torch.load,
    "map": lambda path: torch.load(path, mmap=True),
    "safetensors": safetensors.torch.load_file,
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_read_from_a_file_has_a_home(reader, tmp_path):
    """As weights of `from_pretrained`, and states of a checkpoint, in its process or in another."""
    numbers, path, states = Mlp().state_dict(), tmp_path / "weights", tmp_path / "states"
    if reader == "safetensors":
        safetensors.torch.save_file(numbers, path)
    else:
        torch.save(numbers, path)

    def model():
        made = Mlp()
        made.load_state_dict(READERS[reader](path), assign=True)
        made.layers[0].requires_grad_(False)
        return made

    first, second = Pair(model, "momentum", "min"), Pair(model, "momentum", "min")
    first.run(0)
    torch.save(first.mine.state_dict(), states)
    before = copy.deepcopy(first.ours.state_dict())
    read = READERS["load" if reader == "safetensors" else reader](states)
    for pair in (first, second):
        for net, optimizer in ((pair.ours, pair.mine), (pair.theirs, pair.other)):
            optimizer.load_state_dict(copy.deepcopy(read))
            net.load_state_dict(before)
        pair.mine.load_state_dict(read)
        report = pair.run(1, 2)
        assert len(report.plan.homes) == 2 + 2 * 2 * 5
        read = READERS["load" if reader == "safetensors" else reader](states)


def shared_map(numbers, folder):
    path = folder / str(len([*folder.iterdir()]))
    torch.save(numbers, path)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, mmap=True)


def slices(numbers, _):
    return {name: slice_of(value) for name, value in numbers.items()}


def slice_of(value):
    """The value in a part of a storage, which is part of another one."""
    whole = torch.zeros(value.nbytes + 128, dtype=torch.uint8).untyped_storage()
    part = whole[64:][: value.nbytes]
    return torch.empty(0).set_(part, 0, value.shape, value.stride()).copy_(value)


@pytest.mark.parametrize("kept", [shared_map, slices])
def test_memory_that_others_have_stays(kept, tmp_path):
    """Memory of a file that is mapped to be written, and parts of memory that is not a file's."""

    def model():
        made = Mlp()
        numbers = {name: value.clone() for name, value in made.state_dict().items()}
        made.load_state_dict(kept(numbers, tmp_path), assign=True)
        return made

    pair = Pair(model, "momentum", "min")
    places = [parameter.data_ptr() for parameter in pair.ours.parameters()]
    pair.run(0, 2)
    assert [parameter.data_ptr() for parameter in pair.ours.parameters()] == places


def test_a_parameter_may_have_other_memory_between_iterations():
    pair = Pair(Mlp, "momentum", "min")
    pair.run(0)
    own = pair.ours.layers[0].weight.data
    for model in (pair.ours, pair.theirs):
        model.layers[0].weight.data = torch.full((WIDTH, WIDTH), 0.25)
    before = own.clone()
    pair.run(1, 2)
    assert torch.equal(own, before)


def test_memory_of_a_numpy_array_stays():
    """At its home, as long as the plan does; before the first iteration, where it is.

    Also of what was read from a file, and is one of PyTorch's since an array was made of it.
    """
    pair = Pair(Mlp, "momentum", "min")
    for layer in (pair.ours.layers[0], pair.theirs.layers[0]):
        written = io.BytesIO()
        torch.save(layer.weight.detach(), written)
        written.seek(0)
        layer.weight.data = torch.load(written)
    first, last = pair.ours.layers[0].weight, pair.ours.layers[-1].weight
    array = first.detach().numpy()
    report = pair.run(0)
    assert len(report.plan.homes) == 2 * 2 * 6 - 1
    assert (array == first.detach().numpy()).all()
    at_home = last.detach().numpy()
    pair.run(1)
    assert (at_home == last.detach().numpy()).all()
    before = state_of(pair.ours, pair.mine)
    with pytest.raises(RuntimeRefusalError, match="numpy array or another process"):
        pair.iteration(pair.ours.batch(2, 2 * ROWS))
    assert equal(before, state_of(pair.theirs, pair.other))
    batch = pair.ours.batch(2)
    eager(pair.theirs.loss, pair.other, [batch], None)
    pair.iteration(batch)
    assert pair.equal()


def test_states_of_another_size_are_refused():
    pair = Pair(Mlp, "momentum", "min")
    pair.run(0)
    weight = pair.ours.layers[0].weight
    state = pair.mine.state[weight]
    state["momentum_buffer"] = state["momentum_buffer"].double()
    before = copy.deepcopy(state_of(pair.ours, pair.mine))
    with pytest.raises(RuntimeRefusalError, match=r"states of a parameter of shape \(64, 64\)"):
        pair.iteration(pair.ours.batch(1))
    assert equal(before, state_of(pair.ours, pair.mine))
    state["momentum_buffer"] = state["momentum_buffer"].float()
    pair.run(1)


class Failure(Exception):
    pass


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    optimizer=st.sampled_from(["momentum", "adamw"]),
    budget=st.sampled_from(["60%", "min"]),
    calls=st.integers(0, 1),
    at=st.integers(0, 11),
    place=st.sampled_from(["before", "within", "copying"]),
    on_host=st.booleans(),
)
@example("adamw", "min", 1, 5, "within", True)
def test_each_parameter_is_that_of_before_or_of_after(optimizer, budget, calls, at, place, on_host):
    """A failure leaves the parameters that were updated before it as they are after the call."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        if on_host:
            preferring_host(patch)
        pair = Pair(Mlp, optimizer, budget)
        pair.run(*range(calls))
        check_failure(pair, calls, at, place)


def check_failure(pair, calls, at, place, engines=CpuCopyEngines):
    """An iteration fails at an update; the next ones are the loop's."""
    before = by_parameter(pair.ours, pair.mine)
    update, wait, updated = updates.ParameterUpdate.__call__, engines._wait, set()
    failed = []

    def failing(self, gradient):
        if (len(updated), place) == (at, "before"):
            raise Failure
        updated.add(id(self.parameter))
        update(self, gradient)
        if (len(updated), place) == (at + 1, "within"):
            raise Failure

    def waiting(links, handle):
        if len(updated) > at and place == "copying" and not failed:
            failed.append(handle)
            raise Failure
        return wait(links, handle)

    batch = pair.batch(calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.ParameterUpdate, "__call__", failing)
        patch.setattr(engines, "_wait", waiting)
        with pytest.raises((Failure, PartlyUpdatedError)) as found:
            pair.iteration(batch)
    eager(pair.theirs.loss, pair.other, [batch], None)
    after, now = by_parameter(pair.theirs, pair.other), by_parameter(pair.ours, pair.mine)
    for i, parameter in enumerate(pair.ours.parameters()):
        assert equal(now[i], (after if id(parameter) in updated else before)[i])
    assert found.type is PartlyUpdatedError or len(updated) in (0, len(now))
    del found  # its frames have tensors of the arena
    saved = copy.deepcopy((pair.ours.state_dict(), pair.mine.state_dict()))
    for model, optimizer in ((pair.ours, pair.mine), (pair.theirs, pair.other)):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    pair.run(2, 3)


def by_parameter(model, optimizer):
    """The bits of each parameter and its states."""
    return [
        [
            p.detach().clone(),
            *(v.clone() for one in listed(optimizer) for v in one.state.get(p, {}).values()),
        ]
        for p in model.parameters()
    ]


def test_the_slab_is_freed_with_the_parameters():
    before = process_bytes()[0]
    pair = Pair(Mlp, "momentum", "min")
    pair.run(0)
    own = sum(value.nbytes for value in state_of(pair.ours, pair.mine))
    state = copy.deepcopy(state_of(pair.ours, pair.mine))
    pair.iteration = None
    gc.collect()
    assert equal(state_of(pair.ours, pair.mine), state)
    del pair, state
    coop_plan.clear_reports()
    torch._dynamo.reset()
    gc.collect()
    assert process_bytes()[0] < before + own


def renew(model, optimizer, held):
    """A parameter is exchanged after a numpy array was made of it, which is held."""
    weight = model.layers[0].weight
    held.append(torch.from_numpy(weight.detach().numpy()))
    weight.data = weight.data.clone()


def hold(model, optimizer, held):
    held += state_of(model, optimizer)


def forget(model, optimizer, held):
    hold(model, optimizer, held)
    held.append(dict(optimizer.state))
    optimizer.state.clear()


def remember(model, optimizer, held):
    for states in held:
        if isinstance(states, dict):
            optimizer.state.update(states)


def flatten(model, optimizer, held):
    """All parameters become views of one tensor."""
    hold(model, optimizer, held)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())


def exchange(model, optimizer, held):
    first, second = model.layers[1].weight, model.layers[2].weight
    first.data, second.data = second.data, first.data
    states = optimizer.state
    states[first], states[second] = states[second], states[first]


def reload(model, optimizer, held):
    hold(model, optimizer, held)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


CHANGES = [renew, hold, forget, remember, flatten, exchange, reload]


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    optimizer=st.sampled_from(["momentum", "adamw"]),
    changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.sampled_from([8, 16])), max_size=5),
)
@example("adamw", [(forget, 8), (remember, 8)])
@example("momentum", [(renew, 8), (hold, 16)])
@example("momentum", [(flatten, 8), (renew, 16)])
def test_what_the_user_does_between_iterations_is_as_in_eager(optimizer, changes):
    """Tensors that the user still holds have the numbers that they have in eager."""
    torch._dynamo.reset()
    check_changes(Pair(Mlp, optimizer, "min"), changes)


def check_changes(pair, changes):
    ours, theirs = [], []
    pair.run(0)
    for step, (change, rows) in enumerate(changes):
        change(pair.ours, pair.mine, ours)
        change(pair.theirs, pair.other, theirs)
        pair.compare(pair.batch(step + 1, rows))
        tensors = [[v for v in held if torch.is_tensor(v)] for held in (ours, theirs)]
        assert equal(*tensors)


class Waves(Mlp):
    """Two complex weights, one of which is a conjugate of its memory."""

    def __init__(self):
        super().__init__()
        self.waves = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64)) for _ in range(2)
        )
        self.waves[0].data = self.waves[0].data.conj()

    def loss(self, batch):
        return super().loss((batch.to(torch.complex64) @ self.waves[0] @ self.waves[1]).abs())


def test_complex_weights_may_be_conjugates():
    pair = Pair(Waves, "sgd", "min")
    for step in range(3):
        pair.compare(pair.ours.batch(step))
    assert len(coop_plan.reports()[-1].plan.homes) == 2 * 6 + 1


class Masked(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH))

    def loss(self, batch):
        return super().loss(batch @ self.mask)


def test_buffers_that_are_exchanged_share_a_plan():
    pair = Pair(Masked, "momentum", "min")
    held, report = [], pair.run(0)
    assert len(report.plan.homes) == 2 * 2 * 6 + 1
    for step in range(1, 4):
        for model in (pair.ours, pair.theirs):
            held.append(model.mask)
            model.mask = torch.full((WIDTH, WIDTH), 0.1 * step)
        assert pair.run(step) is report
    assert equal(held[::2], held[1::2])


@pytest.mark.parametrize("kind", ["float32", "numpy"])
def test_states_that_cannot_have_homes_stay(kind):
    """Those of another dtype than measured, and those that are a numpy array's memory."""
    pair = Pair(Mlp, "momentum", "min")
    for model, optimizer in ((pair.ours, pair.mine), (pair.theirs, pair.other)):
        eager(model.loss, optimizer, [model.batch(0)], None)
        if kind == "float32":
            model.double()
            continue
        for one in optimizer.state.values():
            one["momentum_buffer"] = torch.from_numpy(one["momentum_buffer"].numpy())
    for step in range(3):
        pair.compare(pair.ours.batch(step).to(pair.ours.layers[0].weight.dtype))
    assert len(coop_plan.reports()[-1].plan.homes) == 2 * 6


@pytest.mark.parametrize("planned", [False, True])
def test_a_state_that_is_a_parameter_is_not_moved_twice(planned):
    """It stays on the device if the plan knows of it, else the call is refused."""
    pair = Pair(Mlp, "momentum", "min")
    for model, optimizer in ((pair.ours, pair.mine), (pair.theirs, pair.other)):
        if planned:
            eager(model.loss, optimizer, [model.batch(0)], None)
            weight = model.layers[0].weight
            optimizer.state[weight]["momentum_buffer"] = weight.data
    pair.run(0)
    if planned:
        assert len(coop_plan.reports()[-1].plan.homes) == 2 * (2 * 6 - 1)
        return
    weight = pair.ours.layers[0].weight
    pair.mine.state[weight]["momentum_buffer"] = weight.data
    before = copy.deepcopy(pair.ours.state_dict())
    with pytest.raises(RuntimeRefusalError, match="share"):
        pair.iteration(pair.ours.batch(1))
    assert equal([*before.values()], [*pair.ours.state_dict().values()])
