"""Budgets in bytes for graphs that Inductor compiles as a whole."""

import gc
import random
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._inductor.custom_graph_pass import CustomKnapsackSolver
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

import coop_plan
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.errors import BudgetExceededError, OptionsError
from coop_plan.runtime.inductor_budget import budget as module
from coop_plan.runtime.inductor_budget.budget import InductorBudget, loosest_within
from coop_plan.runtime.inductor_budget.saved_sets import levels
from coop_plan.runtime.inductor_budget.wrapper_code import Storage, WrapperCodeError, memory_usage
from coop_plan.runtime.torch_internals import FUSED_SINCE, version
from tests.params import slow_after

pytestmark = pytest.mark.skipif(version() < FUSED_SINCE, reason="not supported before")

ROWS, WIDTH = 512, 64


class Layers(nn.Module):
    """Residual layers with a norm, GELU and dropout: much to recompute cheaply, some dearly."""

    def __init__(self, layers=4):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + F.dropout(down(F.gelu(up(norm(x)))), 0.1)
        return x.square().mean()


def built(layers=4):
    torch.manual_seed(0)
    return Layers(layers), torch.randn(ROWS, WIDTH)


def compiled(model, budget):
    torch._dynamo.reset()
    return torch.compile(model, dynamic=False, options={"custom_partitioner_fn": budget})


class Recorder(InductorBudget):
    """The peaks of all candidates; the loosest one runs. PyTorch copies it, without graphs."""

    seen = []  # of the class

    def __call__(self, gm, joint_inputs, **rest):
        found = module.Candidates(gm, joint_inputs, rest)
        self.peaks = [found.peak(i) for i in range(found.useful)]
        self.seen.append(found)
        return found.modules(0)


@pytest.fixture(scope="module")
def recorded():
    model, x = built()
    recorder = Recorder(1)
    compiled(model, recorder)(x).backward()
    return recorder


# The choice among candidates


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 60), st.integers(0, 60)
)
def test_a_choice_is_within_the_budget_and_monotone(peaks, one, other):
    """Also where peaks are out of order."""
    less, more = sorted((one, other))
    tight, loose = (loosest_within(peaks.__getitem__, len(peaks), b) for b in (less, more))
    for budget, index in ((less, tight), (more, loose)):
        if index is None:
            assert peaks[0] > budget
            assert peaks[-1] > budget
        else:
            assert peaks[index] <= budget
    assert loose is not None or tight is None
    if tight is not None and loose is not None:
        assert loose <= tight


@given(st.integers(1, 200), st.data())
def test_few_peaks_are_computed(count, data):
    asked = []
    budget = data.draw(st.integers(0, count))
    loosest_within(lambda i: asked.append(i) or count - i, count, budget)
    assert len(set(asked)) <= 2 + count.bit_length()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_the_least_budget_is_that_of_no_candidate_in_vain(peaks):
    """The last ones may take more than those before: they are left out."""
    asked = []
    count = module.up_to_least(lambda i: asked.append(i) or peaks[i], len(peaks))
    assert peaks[count - 1] == min(peaks[-module.TAIL :])
    assert len(set(asked)) <= module.TAIL
    found = loosest_within(peaks.__getitem__, count, peaks[count - 1])
    assert found is not None


# Memory of the generated code


class Buffer:
    live = peak = 0

    def __init__(self, size):
        self.size = size
        Buffer.live += size
        Buffer.peak = max(Buffer.peak, Buffer.live)

    def __del__(self):
        Buffer.live -= self.size


@st.composite
def programs(draw):
    """Code in the forms of Inductor's, whose buffers know their bytes; sizes; saved storages.

    Storages of inputs may have names of buffers: they are those of the other graph's code.
    """
    sizes = {"primals_1": draw(st.integers(0, 9))}
    saved = [Storage(draw(st.sampled_from(["buf0", "buf1"])), draw(st.integers(0, 9)))]
    saved.append(draw(st.sampled_from([saved[0], Storage("buf2", draw(st.integers(0, 9)))])))
    sizes |= {"saved_1": saved[0].size, "saved_2": saved[1].size}
    lines, alive = [], ["saved_1", "saved_2", "primals_1"]
    forms = ["new", "same", "view", "several", "single", "del"]
    lines.append("saved_1, saved_2, primals_1 = args")
    lines.append("args.clear()")
    for number in range(draw(st.integers(1, 15))):
        name, form = f"buf{number}", draw(st.sampled_from(forms))
        sizes[name] = draw(st.integers(0, 9))
        source = draw(st.sampled_from(alive)) if alive else None
        if form == "del" and source is not None:
            lines.append(f"del {source}")
            alive.remove(source)
            continue
        if form == "same" and source is not None:
            lines.append(f"{name} = {source}; del {source}  # reuse")
            alive.remove(source)
        elif form == "view" and source is not None:
            lines.append(f"{name} = reinterpret_tensor({source}, (1,), (1,), 0)")
        elif form in ("several", "single"):
            part, index = f"{name}a", "[0]" if form == "several" else ""
            sizes[part] = sizes.pop(name)  # all results together have no buffer
            lines.append(f"{name} = {form}({sizes[part]})")
            if source is not None and draw(st.booleans()):
                lines.append(f"del {source}")
                alive.remove(source)
            lines += [f"{part} = {name}{index}", f"del {name}"]
            name = part
        else:
            lines.append(f"{name} = empty_strided_cpu({sizes[name]})")
        alive.append(name)
    body = "\n        ".join([*lines, f"return [{', '.join(alive)}]"])
    return f"class Runner:\n    def call(self, args):\n        {body}\n", sizes, saved


@given(programs())
def test_the_walk_counts_what_the_code_allocates(made):
    code, sizes, saved = made

    class View:
        def __init__(self, of):
            self.of = of

    def root(value):
        while isinstance(value, View):
            value = value.of
        return value

    names = {
        "empty_strided_cpu": Buffer,
        "reinterpret_tensor": lambda of, *_: View(of),
        "several": lambda size: (Buffer(size),),
        "single": Buffer,
    }
    exec(code, names)
    base = Buffer.live
    kept = Buffer(0)
    kept.size = sizes["primals_1"]  # an input that the caller keeps
    storages = {storage: Buffer(storage.size) for storage in saved}
    args = [*(View(storages[storage]) for storage in saved), kept]
    del storages
    Buffer.peak = Buffer.live
    result = names["Runner"]().call(args)
    expected = Buffer.peak - base
    held = {id(root(value)): root(value) for value in result}
    held.pop(id(kept), None)
    found = memory_usage(code, sizes, lambda _: 0, saved)
    assert found.peak == expected
    returned = {storage for storage in found.returned if storage}
    assert sum(storage.size for storage in returned) == sum(each.size for each in held.values())
    assert [storage is None for storage in found.returned] == [root(v) is kept for v in result]
    kept.size = 0
    del result, args, kept, held
    Buffer.live = 0


def test_scratch_counts_while_its_op_runs():
    code = (
        "def call(args):\n    a = empty_strided_cpu()\n    del a\n    b = op()\n    return (b,)\n"
    )
    assert memory_usage(code, {"a": 5, "b": 3}, lambda call: 4 * (call.func.id == "op")).peak == 7


def test_other_code_is_refused():
    with pytest.raises(WrapperCodeError, match="call"):
        memory_usage("x = 1", {}, lambda _: 0)


# The saved sets


def test_levels_fall_in_peak_and_rise_in_recomputation(recorded):
    found = recorded.seen[-1]._levels
    assert len(found) > 3
    assert all(a.peak > b.peak and a.cost <= b.cost for a, b in pairwise(found))


def test_a_backward_reads_what_it_can_compute(recorded):
    """Random numbers are saved or functions of a saved seed, and no value is saved in vain."""
    model = recorded.seen[-1]._model
    for level in recorded.seen[-1]._levels:
        assert model.completed(level.saved) == level.saved
        again = model.simulate(level.saved).recomputed
        assert all(model.recomputable[i] or model.is_input[i] for i in again)


def test_levels_do_not_depend_on_the_order_of_a_set(recorded):
    model = recorded.seen[-1]._model
    start = recorded.seen[-1]._levels[0].saved
    assert levels(model, frozenset(sorted(start, reverse=True))) == recorded.seen[-1]._levels


# Steps within a budget


def test_steps_are_within_their_budgets(recorded):
    """Counted from outside, parameters and input included; gradients as Inductor's own."""
    top, least = recorded.peaks[0], min(recorded.peaks)
    assert least < 0.85 * top
    gradients = []
    for budget in (top, (top + least) // 2, least):
        model, x = built()
        asked = InductorBudget(budget)
        step = compiled(model, asked)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            gc.collect()
            before = process_bytes()[0]
            reset_peak()
            step(x).backward()
            peak = process_bytes()[1] - before
        resident = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4
        assert peak + resident <= asked.planned_bytes + 4096
        assert asked.planned_bytes <= budget
        gradients.append([p.grad for p in model.parameters()])
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0], rtol=1e-5, atol=1e-7)


class Images(nn.Module):
    """Convolutions, whose activations and weights Inductor copies to the layout of its library."""

    def __init__(self, channels, kernels):
        super().__init__()
        sizes = zip([3, *channels[:-1]], channels, kernels, strict=True)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2) for a, b, k in sizes)
        self.up = nn.ConvTranspose2d(channels[-1], 4, 2, stride=2)

    def forward(self, x):
        for layer in self.layers:
            x = F.silu(layer(x))
            x = torch.cat([x, x.relu()], 1)[:, : x.shape[1]] if x.shape[1] % 2 else x
        return self.up(x).square().mean(), x


@pytest.mark.parametrize("seed", slow_after(1, range(3)))
def test_a_planned_peak_of_convolutions_is_the_measured_one(seed):
    """Saved tensors, and the scratch of library ops, are in the layouts that Inductor chose."""
    draw = random.Random(seed)
    depth = draw.randint(2, 4)
    channels = [draw.choice([8, 15, 16, 24, 32]) for _ in range(depth)]
    kernels = [draw.choice([1, 3, 5]) for _ in range(depth)]
    torch.manual_seed(0)
    model, x = Images(channels, kernels), torch.randn(draw.randint(2, 5), 3, 32, 32)
    asked = InductorBudget("1GiB")
    step = compiled(model, asked)
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        before = process_bytes()[0]
        reset_peak()
        loss, kept = step(x)
        loss.backward()
        peak = process_bytes()[1] - before
        del loss, kept
    resident = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4
    assert abs(peak + resident - asked.planned_bytes) <= 4096


def test_plans_are_monotone_in_the_budget(recorded):
    peaks = recorded.peaks
    budgets = [min(peaks) + k * (peaks[0] - min(peaks)) // 19 for k in range(20)]
    got = [loosest_within(peaks.__getitem__, len(peaks), budget) for budget in budgets]
    planned = [peaks[i] for i in got if i is not None]
    assert planned == sorted(planned)
    assert all(a is None or peaks[a] <= b for a, b in zip(got, budgets, strict=True))


def test_an_error_names_the_least_budget(recorded):
    model, x = built()
    with pytest.raises(Exception, match="the least budget is") as caught:
        compiled(model, InductorBudget(recorded.peaks[-1] // 2))(x)
    text = str(caught.value)
    named = int(text.split("the least budget is ")[1].split(" bytes")[0])
    assert named == min(recorded.peaks)
    assert "BudgetExceededError" in text or isinstance(caught.value, BudgetExceededError)


def test_a_step_beyond_its_budget_is_an_error(recorded):
    """Of a loop that keeps more than the graph knows, once it is measured."""
    model, x = built()
    step = compiled(model, InductorBudget(recorded.peaks[0]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = step(x)
    kept = torch.empty(2_000_000)
    loss.backward()
    with pytest.raises(BudgetExceededError, match="least budget is about"):
        optimizer.step()
    assert kept.numel()
    optimizer.zero_grad()
    step(x).backward()
    optimizer.step()  # measured once


def test_only_an_optimizer_of_the_graphs_parameters_is_measured(recorded):
    """Not other training in the process, whatever it keeps."""
    model, x = built()
    step = compiled(model, InductorBudget(recorded.peaks[0]))
    step(x).backward()
    other = torch.optim.SGD([torch.zeros(3, requires_grad=True)], 0.1)
    other.step()
    kept = torch.empty(2_000_000)
    other.step()
    assert kept.numel()


def test_no_hook_before_a_step_is_left():
    """Of all optimizers, or of the one whose step was measured."""
    model, x = built(1)
    step = compiled(model, InductorBudget("1GiB"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    of_all, seen = dict(_global_optimizer_pre_hooks), []
    for _ in range(3):
        step(x).backward()
        optimizer.step()
        seen.append(len(optimizer._optimizer_step_pre_hooks))
        optimizer.zero_grad()
    assert seen == [1, 0, 0]
    assert dict(_global_optimizer_pre_hooks) == of_all


def test_an_optimizer_is_not_kept_alive():
    model, x = built(1)
    step = compiled(model, InductorBudget("1GiB"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        step(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("budget", ["50%", "min"])
def test_a_budget_is_in_bytes(budget):
    with pytest.raises(OptionsError, match="takes bytes"):
        coop_plan.InductorBudget(budget)


def test_changing_sizes_are_refused():
    model, x = built(1)
    torch._dynamo.reset()
    options = {"custom_partitioner_fn": InductorBudget("1GiB")}
    with pytest.raises(Exception, match="dynamic=False"):
        torch.compile(model, dynamic=True, options=options)(x)


def test_no_cache_skips_the_plan():
    """`None` as the uuid of a partitioner does not."""
    planned = []
    for _ in range(2):
        model, x = built(1)
        asked = InductorBudget("1GiB")
        compiled(model, asked)(x).backward()
        planned.append(asked.planned_bytes)
    assert planned[0] == planned[1] > 0


def test_the_hook_for_solvers_is_not_always_called():
    """Why the budget is a partitioner: at the default share PyTorch asks no solver."""

    class Solver(CustomKnapsackSolver):
        def __call__(self, *_):
            raise AssertionError

        def uuid(self):
            return None

    model, x = built(1)
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget_solver=Solver()):
        torch.compile(model, dynamic=False)(x).backward()
