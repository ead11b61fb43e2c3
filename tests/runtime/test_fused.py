"""Fused regions: the numbers of a step over them, its memory, and the choice of kernels."""

import copy
import gc
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from coop_plan import plan, runtime
from coop_plan.planner.core.memory_bounds import needs_with_resident_outputs
from coop_plan.planner.core.problem import Problem
from coop_plan.runtime.execute.first_plan import Planner
from coop_plan.runtime.fused import compiled
from coop_plan.runtime.fused.regions import REGION
from coop_plan.runtime.options import Options
from coop_plan.runtime.torch_internals import FUSED_SINCE, version
from tests.params import slow_after
from tests.runtime.starts import traced_ops

pytestmark = pytest.mark.skipif(version() < FUSED_SINCE, reason="fused kernels are refused")

TOLERANCE = 5e-6
"""Distance from eager of a float32 gradient, relative to its largest element, per step."""


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout, self.allowed = dropout, None

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mask = None
        if self.allowed is not None:  # each layer makes the same
            mask = torch.where(self.allowed, 0.0, -torch.inf)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        y = self.norms[1](x)
        return x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), self.dropout)


class Transformer(nn.Module):
    def __init__(self, layers=2, width=32, classes=64, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        # the gradient of a bias before the batch norm is zero but for rounding
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.batch_norm, self.group_norm = nn.BatchNorm2d(8), nn.GroupNorm(2, 8)

    def forward(self, x):
        x = F.relu(self.batch_norm(self.first(x)))
        y = F.interpolate(F.max_pool2d(x, 2), scale_factor=2)
        return (
            F.silu(self.group_norm(self.second(torch.cat([x, y], 1)[:, 4:12])) + x).square().mean()
        )


def ids():
    return torch.randint(0, 64, (4, 32))


NETWORKS = {
    "transformer": (Transformer, ids),
    "dropout": (lambda: Transformer(dropout=0.3), ids),
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 16, 16)),
}


@pytest.fixture
def always_fused(monkeypatch):
    """Take the plan over regions even if the other is better."""
    monkeypatch.setattr(Planner, "better", lambda self, fused, *_: self.plan(fused))


def train(model, x, step=None, steps=4):
    """Losses, gradients and parameters of some steps with an optimizer."""
    model = copy.deepcopy(model)
    call = model if step is None else step(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    torch.manual_seed(1)
    seen = []
    for _ in range(steps):
        loss = call(x)
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [value.clone() for value in model.state_dict().values()]


def fused(budget, **options):
    torch._dynamo.reset()
    options = {"budget": budget, "kernels": "fused", **options}
    return lambda model: torch.compile(model, backend="coop", fullgraph=True, options=options)


def distance(values, others):
    """Largest difference of two lists of tensors, relative to each one's largest element."""
    pairs = zip(values, others, strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs)


def regions(report):
    return [op for op in report.graph.ops if op.name.startswith("coop_plan.fused_")]


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize("network", slow_after(1, NETWORKS))
def test_a_step_equals_itself_at_every_budget_and_keeps_it(network):
    """To the bit, over steps with an optimizer; near eager, whose random numbers it draws."""
    make, batch = NETWORKS[network]
    torch.manual_seed(0)
    model, x = make(), batch()
    seen = []
    for budget in ("100%", "60%", "40%", "min"):
        gc.collect()
        seen.append(train(model, x, fused(budget)))
        report = runtime.reports()[-1]
        assert report.kernels == "fused"
        assert regions(report)
        assert report.outside_bytes == 0
        assert report.measured_peak_bytes <= report.peak_bytes <= report.budget_bytes
    assert all(all(map(torch.equal, seen[0], other)) for other in seen[1:])
    eager = train(model, x)
    first = 1 + len(list(model.parameters()))
    assert distance(seen[0][:first], eager[:first]) < TOLERANCE


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize("network", ["transformer", "convolutions"])
def test_gradients_are_those_of_float64(network):
    make, batch = NETWORKS[network]
    torch.manual_seed(0)
    model, x = make().double(), batch()
    x = x.double() if x.is_floating_point() else x
    wide = train(model, x, steps=1)
    assert distance(train(model, x, fused("60%"), steps=1), wide) < 1e-12
    assert regions(runtime.reports()[-1])
    x = x.float() if x.is_floating_point() else x
    narrow = train(model.float(), x, fused("60%"), steps=1)
    ours, theirs = distance(narrow, wide), distance(train(model.float(), x, steps=1), wide)
    assert ours < max(2 * theirs, TOLERANCE)


EXACT = {
    "mul, add": lambda a, b: a * b + a,
    "silu": lambda a, b: F.silu(a) * b,
    "relu": lambda a, b: F.relu(a) * b,
    "gelu": lambda a, b: F.gelu(a, approximate="tanh") * b,
    "exp": lambda a, b: a.exp() * b,
    "tanh": lambda a, b: a.tanh() / (b.abs() + 1),
    "sigmoid": lambda a, b: a.sigmoid() * b,
    "softmax": lambda a, b: a.softmax(-1) * b,
    "rms": lambda a, b: (a.float() * (a.float().square().mean(-1, True) + 1).rsqrt()).to(a) * b,
}


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize("kind", EXACT)
def test_results_in_bfloat16_are_rounded_as_eagers(kind):
    torch.manual_seed(0)
    a, b = (torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    step = fused("100%")(lambda a, b: EXACT[kind](a, b))
    made = step(a, b)
    assert regions(runtime.reports()[-1])
    assert torch.equal(made, EXACT[kind](a, b))


@pytest.mark.usefixtures("always_fused")
def test_equal_regions_are_one_op_at_any_depth():
    torch.manual_seed(0)
    names, allowed = [], torch.ones(32, 32, dtype=torch.bool).tril()
    for layers in (3, 5):
        model = Transformer(layers)
        for block in model.blocks:
            block.allowed = allowed
        train(model, ids(), fused("100%"), steps=1)
        names.append({op.name for op in regions(runtime.reports()[-1])})
    assert names[0] == names[1]
    assert len(regions(runtime.reports()[-1])) > 2 * len(names[0])


@pytest.mark.usefixtures("always_fused")
def test_what_pointwise_ops_make_again_is_not_kept():
    """Keeping everything keeps neither silu(gate) nor its product."""
    torch.manual_seed(0)
    model, x = Transformer(4), ids()
    kept = {}
    for kernels in ("eager", "fused"):
        train(model, x, fused("100%", kernels=kernels), steps=1)
        report = runtime.reports()[-1]
        last = max(op.id for op in report.graph.ops if op.phase == "forward")
        read = {t for op in report.graph.ops if op.phase == "backward" for t in op.inputs}
        made = {t for op in report.graph.ops[: last + 1] for t in op.outputs}
        kept[kernels] = sum(report.graph.tensors[t].bytes for t in read & made)
    assert kept["fused"] < 0.9 * kept["eager"]


# The choice between two graphs


@pytest.mark.parametrize("network", NETWORKS)
def test_kernels_are_never_worse_than_eagers(network):
    make, batch = NETWORKS[network]
    torch.manual_seed(0)
    model, x = make(), batch()
    train(model, x, fused("min", kernels="eager"), steps=1)
    least = runtime.reports()[-1]
    train(model, x, fused("min"), steps=1)
    assert runtime.reports()[-1].budget_bytes <= least.budget_bytes
    train(model, x, fused(least.budget_bytes), steps=1)
    assert runtime.reports()[-1].plan.cost_us <= least.plan.cost_us


class Narrow(nn.Module):
    """Sums of products, which a region reads all at once, between narrow layers."""

    def __init__(self, terms, width):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(terms))
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = self.first(x)
        parts = [layer(x) for layer in self.inner]
        y = F.relu(parts[0]) * x
        for part in parts[1:]:
            y = y * torch.sigmoid(part) + F.relu(part)
        return self.last(y).square().mean()


def needs(graph, options):
    """The bytes of each op's arguments, results and scratch, and of the residents."""
    problem = Problem.from_graph(graph, options.alignment, options.outputs)
    return [problem.fixed_bytes + b for b in needs_with_resident_outputs(problem)]


@pytest.mark.parametrize("seed", slow_after(1, range(4)))
def test_regions_are_split_where_ops_need_less_and_only_there(seed, monkeypatch):
    """The smallest budget is at most that of eager's kernels, and of whole regions."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Narrow(draw.randint(3, 6), draw.choice([32, 64]))
    x = torch.randn(draw.choice([256, 512]), model.first.in_features)
    seen = []
    better = Planner.better

    def noted(self, fused, eager, split):
        seen.append((fused, eager, split()))
        return better(self, fused, eager, split)

    monkeypatch.setattr(Planner, "better", noted)
    found = [train(model, x, fused("min"))]
    least = runtime.reports()[-1]
    whole, ops, parts = seen[-1]
    options = Options.parse({"budget": "min"}).plan
    most = max(needs(ops.graph, options))
    over = {
        node.meta[REGION]
        for node, need in zip(whole.ops, needs(whole.graph, options), strict=True)
        if need > most
    }
    assert over
    assert parts is not None
    for captured in (whole, ops):
        assert least.budget_bytes <= plan(captured.graph, options).budget_bytes
    assert max(needs(parts.graph, options)) < max(needs(whole.graph, options))
    kept = [
        [str(node.target) for node in captured.ops if node.meta.get(REGION) not in (None, *over)]
        for captured in (whole, parts)
    ]
    assert kept[0] == kept[1]
    assert len(kept[0]) == sum(REGION in node.meta for node in whole.ops) - len(over)
    # plans of one split are equal to the bit
    monkeypatch.setattr(Planner, "better", lambda self, fused, eager, split: self.plan(split()))
    for budget in ("100%", "min"):
        found.append(train(model, x, fused(budget)))
        report = runtime.reports()[-1]
        assert report.outside_bytes == 0
        assert report.measured_peak_bytes <= report.peak_bytes <= report.budget_bytes
    assert all(map(torch.equal, found[1], found[2]))
    first = 1 + len(list(model.parameters()))
    assert distance(found[1][:first], train(model, x)[:first]) < TOLERANCE


def test_eager_kernels_are_eagers_to_the_bit():
    """A graph whose regions cost more than its ops runs its ops."""
    torch.manual_seed(0)
    model, x = Transformer(), ids()
    with pytest.MonkeyPatch.context() as patch:
        kernels_of = compiled.compile_graphs

        def slow(regions):
            return [
                lambda given, kernel=kernel: [kernel([*given]) for _ in range(40)][-1]
                for kernel in kernels_of(regions)
            ]

        patch.setattr(compiled, "compile_graphs", slow)
        patch.setattr(compiled, "_ops", {})
        patch.setattr(compiled, "settings_digest", lambda: "slow")
        seen = train(model, x, fused("100%"))
    report = runtime.reports()[-1]
    assert report.kernels == "eager"
    assert not regions(report)
    assert all(map(torch.equal, seen, train(model, x)))


def test_a_machine_without_a_compiler_runs_eager_kernels(monkeypatch, caplog, tmp_path):
    torch.manual_seed(0)
    model, x = Transformer(), ids()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_ops", {})
    monkeypatch.setattr(compiled, "settings_digest", lambda: "without a compiler")
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        seen = train(model, x, fused("60%"))
    (line,) = [record.message for record in caplog.records if "eager kernels" in record.message]
    assert "Inductor cannot compile" in line
    assert runtime.reports()[-1].kernels == "eager"
    assert all(map(torch.equal, seen, train(model, x)))


def test_a_region_may_read_nothing(caplog):
    """Positions, from which a matrix is made that a product reads."""
    weight = torch.randn(32, 32, requires_grad=True)

    def step(x):
        wave = torch.arange(32, dtype=torch.float32).sin().mul(2).exp()
        return (x @ (wave[:, None] * wave[None]) @ weight).tanh().square().mean()

    options = {"budget": "100%", "kernels": "fused"}
    x = torch.randn(16, 32)
    torch.compile(step, backend="coop", options=options)(x).backward()
    found, weight.grad = weight.grad, None
    step(x).backward()
    torch.testing.assert_close(found, weight.grad, rtol=1e-4, atol=1e-5)
    assert not [r for r in caplog.records if "runs eager kernels" in r.getMessage()]


def test_a_version_whose_inductor_rounds_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(runtime.OptionsError, match=r"needs PyTorch 2\.13"):
        Options.parse({"budget": "60%", "kernels": "fused"})


def test_a_wrong_value_is_refused():
    with pytest.raises(Exception, match=r'kernels must be "eager" .* or "fused"'):
        fused("60%", kernels="inductor")(nn.Linear(2, 2))(torch.ones(2))


# Other ways to train


@pytest.mark.usefixtures("always_fused")
def test_micro_batches_accumulate():
    torch.manual_seed(0)
    model, batches = Transformer(), [ids() for _ in range(3)]

    def gradients(step):
        own = copy.deepcopy(model)
        call = step(own)
        for _ in range(3):
            own.zero_grad()
            for x in batches:
                call(x).backward()
        return [p.grad for p in own.parameters()]

    made, expected = gradients(fused("60%")), gradients(lambda own: own)
    report = runtime.reports()[-1]
    assert report.held_bytes
    assert report.measured_peak_bytes <= report.budget_bytes
    assert distance(made, expected) < TOLERANCE


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("always_fused")
def test_graphs_of_an_iteration_are_planned_jointly():
    torch.manual_seed(0)
    model, x = Transformer(3), ids()
    whole = train(model, x, fused("60%"), steps=5)

    def by_blocks(model):
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(backend="coop", options={"budget": "60%", "kernels": "fused"})
        return model

    seen = train(model, x, by_blocks, steps=5)
    joint = [r for r in runtime.reports() if r.name.startswith("iteration")]
    assert joint
    assert regions(joint[-1])
    assert joint[-1].measured_peak_bytes <= joint[-1].budget_bytes
    first = 1 + len(list(model.parameters()))
    assert distance(seen[:first], whole[:first]) < TOLERANCE


@pytest.mark.usefixtures("always_fused")
def test_checkpoints_of_the_user_bound_regions():
    torch.manual_seed(0)
    model, x = Transformer(dropout=0.2), ids()

    def checkpointed(model):
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        return fused("60%")(model)

    found = train(model, x, checkpointed, steps=1)
    report = runtime.reports()[-1]
    assert regions(report)
    assert report.measured_peak_bytes <= report.budget_bytes
    first = 1 + len(list(model.parameters()))
    assert distance(found[:first], train(model, x, steps=1)[:first]) < TOLERANCE


@pytest.mark.usefixtures("own_cache", "always_fused")
def test_a_kept_trace_of_a_start_is_used_by_the_next():
    torch.manual_seed(0)
    model, x = Transformer(), ids()
    seen, counts = [], []
    for _ in range(2):
        with traced_ops() as traced:
            seen.append(train(model, x, fused("60%"), steps=1))
        counts.append(len(traced))
        assert regions(runtime.reports()[-1])
    assert counts[0]
    assert not counts[1]
    assert all(map(torch.equal, *seen))


@pytest.mark.usefixtures("own_cache")
def test_a_kept_trace_of_eager_kernels_serves_fused_ones(always_fused):
    torch.manual_seed(0)
    model, x = Transformer(), ids()
    train(model, x, fused("60%", kernels="eager"), steps=1)
    with traced_ops() as traced:
        train(model, x, fused("60%"), steps=1)
    assert not traced
    assert regions(runtime.reports()[-1])


@pytest.mark.usefixtures("always_fused")
def test_each_input_size_has_regions_and_equals_itself_at_every_budget():
    """Those after the second borrow a plan of eager kernels at first."""
    torch.manual_seed(0)
    model = Transformer()
    batches = {length: torch.randint(0, 64, (4, length)) for length in (32, 24, 28, 16)}
    seen = []
    for budget in ("100%", "60%", "min"):
        torch._dynamo.reset()
        runtime.clear_reports()
        options = {"budget": budget, "kernels": "fused"}
        step = torch.compile(model, backend="coop", dynamic=True, options=options)
        for turn in range(4):
            for x in batches.values():
                model.zero_grad()
                step(x).backward()
                if turn == 3:
                    seen.append([p.grad.clone() for p in model.parameters()])
        assert len([r for r in runtime.reports() if r.kernels == "fused"]) == len(batches)
        for report in runtime.reports():
            assert report.outside_bytes == 0
            assert report.measured_peak_bytes <= report.budget_bytes
    expected = []
    for x in batches.values():
        model.zero_grad()
        model(x).backward()
        expected.append([p.grad.clone() for p in model.parameters()])
    sizes = len(batches)
    for i, found in enumerate(seen):
        assert all(map(torch.equal, found, seen[i % sizes]))
        assert distance(found, expected[i % sizes]) < TOLERANCE


START = """
import json, torch
from torch._inductor.codecache import FxGraphCache
torch.set_num_threads(1)
misses, load = [], FxGraphCache.load_with_key

def see(*args, **kwargs):
    found, info = load(*args, **kwargs)
    misses.append(found is None)
    return found, info

FxGraphCache.load_with_key = see
from torch._inductor.cpp_builder import CppBuilder
built, build = [], CppBuilder.build

def build_and_see(builder):
    build(builder)
    built.append(builder.get_target_file_path())

CppBuilder.build = build_and_see
from coop_plan import runtime
from tests.runtime.test_fused import Transformer, fused, ids, train
torch.manual_seed(0)
seen = train(Transformer(), ids(), fused("60%"), steps=2)
(report,) = runtime.reports()
built = sum(path.endswith(".main.so") for path in built)
print(json.dumps([misses, built, report.profiled_ops, report.plan_cached,
                  [op.name for op in report.graph.ops], seen[0].item()]))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    starts = []
    for _ in range(2):
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", START], cwd=root, capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stderr
        starts.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = starts
    assert first[0]
    assert all(first[0])
    assert first[1] == 1  # library for all regions
    assert first[2]
    assert second[0] == [False] * len(first[0])
    assert second[1:4] == [0, 0, True]
    assert second[4:] == first[4:]
