"""A second start loads the joint graph that the first one traced, and differs in nothing."""

import gc
import os
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from coop_plan import runtime
from coop_plan.runtime import backend
from coop_plan.runtime.cache import traces
from coop_plan.runtime.capture import profiler
from tests.runtime.starts import traced_ops

pytestmark = pytest.mark.usefixtures("own_cache")


def start(loss, model, x, budget="min"):
    """Traced ops, loss, gradients and report of a step in what is as good as a new process."""
    profiler._profiles.clear()
    torch._dynamo.reset()
    model.zero_grad()
    torch.manual_seed(1)
    gc.collect()  # garbage of earlier tests, freed within the step, would lower its measured peak
    step = torch.compile(loss, backend="coop", options={"budget": budget})
    with traced_ops() as traced:
        value = step(model, x)
        value.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return len(traced), value.detach(), gradients, runtime.reports()[-1]


def eager(loss, model, x):
    model.zero_grad()
    torch.manual_seed(1)
    value = loss(model, x)
    value.backward()
    return value.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(first, second):
    return all((a is b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def files(tmp=None):
    folder = traces._folder()
    return sorted(folder.iterdir()) if folder.exists() else []


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU())])


def mean(model, x):
    return model(x).square().mean()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.5, batch_first=True)

    def forward(self, x):
        hidden = self.layer(self.embed(x))
        return hidden.masked_fill(x[..., None] == 3, torch.tensor(0.25)).flatten(0, 1)


class Overwriting(nn.Module):
    """Batch norm, whose statistics the step overwrites, and parameters that are views of one."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.randn(2 * 9 * 4))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        one, two = self.flat.view(2, 4, 9, 1)
        hidden = self.norm(torch.nn.functional.conv2d(x, one.view(4, 1, 3, 3), groups=4, padding=1))
        hidden = torch.nn.functional.conv2d(hidden, two.view(4, 1, 3, 3), groups=4)
        self.seen = hidden.detach()
        return torch.cat([hidden.flatten(), hidden.new_zeros(3)])


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(8, 8, 2, dropout=0.5)

    def forward(self, x):
        return checkpoint(lambda v: self.inner(v)[0].tanh(), x, use_reentrant=False)


KINDS = {
    "mlp": (mlp, lambda: torch.randn(64, 32)),
    "attention": (Attention, lambda: torch.randint(0, 16, (4, 8))),
    "overwriting": (Overwriting, lambda: torch.randn(2, 4, 8, 8)),
    "checkpointed": (Checkpointed, lambda: torch.randn(5, 3, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_start_traces_nothing_and_has_equal_results(kind):
    make, batch = KINDS[kind]
    torch.manual_seed(0)
    model, x = make(), batch()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    whole, value, gradients, report = start(mean, model, x)
    buffers = [value.clone() for value in model.buffers()]
    model.load_state_dict(state)
    again, value_again, gradients_again, report_again = start(mean, model, x)
    assert same(buffers, model.buffers())
    model.load_state_dict(state)
    expected, expected_gradients = eager(mean, model, x)
    assert (whole > 0, again) == (True, 0)
    assert torch.equal(value, value_again)
    assert torch.equal(value, expected)
    assert same(gradients, gradients_again)
    assert same(gradients, expected_gradients)
    facts = ("budget_bytes", "peak_bytes", "planned_arena_bytes", "measured_peak_bytes")
    first, second = ([getattr(r, fact) for fact in facts] for r in (report, report_again))
    assert first == second
    assert report_again.plan_cached


def test_ops_of_a_loaded_graph_have_their_source_lines():
    model, x = mlp(), torch.randn(64, 32)
    sources = []
    original = backend.plan_captured

    def see(captured, *args, **options):
        sources.append([op.source for op in captured.graph.ops])
        return original(captured, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "plan_captured", see)
        counts = [start(mean, model, x)[0] for _ in range(2)]
    assert counts[1] == 0
    assert sources[0] == sources[1]
    assert any("test_kept_trace.py:" in source for source in sources[0])


SETTINGS = {
    "a module": lambda model: setattr(model[1], "approximate", "tanh"),
    "a frozen parameter": lambda model: model[0].weight.requires_grad_(False),
    "a dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_another_graph_is_traced(change):
    model, x = mlp(), torch.randn(64, 32)
    assert start(mean, model, x)[0] > 0
    SETTINGS[change](model)
    x = x.to(model[0].bias.dtype)
    traced, value, gradients, _ = start(mean, model, x)
    expected, expected_gradients = eager(mean, model, x)
    assert traced > 0
    assert torch.equal(value, expected)
    assert same(gradients, expected_gradients)


def test_equal_code_at_another_line_is_traced_again():
    """Reports name lines, so those of another file must not be loaded."""
    model, x, loss = mlp(), torch.randn(64, 32), {}
    for begin in ("", "\n\n"):
        code = f"{begin}def mean(model, x):\n    return model(x).square().mean()\n"
        exec(compile(code, "program.py", "exec"), loss)
        assert start(loss["mean"], model, x)[0] > 0


def test_another_version_of_pytorch_traces_again(monkeypatch):
    model, x = mlp(), torch.randn(64, 32)
    assert start(mean, model, x)[0] > 0
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert start(mean, model, x)[0] > 0


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "another's object"])
def test_a_damaged_trace_costs_a_line_and_is_replaced(damage, caplog):
    model, x = mlp(), torch.randn(64, 32)
    start(mean, model, x)
    (path,) = files()
    whole = path.read_bytes()
    content = {
        "cut": whole[: len(whole) // 2],
        "text": b"no pickle\n",
        "empty": b"",
        "another's object": pickle.dumps(("entry", b"graph")),
    }
    path.write_bytes(content[damage])
    traced, value, _, _ = start(mean, model, x)
    assert traced > 0
    assert torch.equal(value, mean(model, x))
    (said,) = [m for m in caplog.messages if "without the cache" in m]
    assert str(path) in said
    assert start(mean, model, x)[0] == 0


class Trap:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("access", ["mode", "folder"])
def test_a_trace_that_others_could_write_is_not_unpickled(access, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    model, x = mlp(), torch.randn(64, 32)
    start(mean, model, x)
    (path,) = files()
    path.write_bytes(pickle.dumps(Trap()))
    if access == "mode":
        path.chmod(0o666)
    else:
        path.parent.chmod(0o777)
    assert start(mean, model, x)[0] > 0
    assert not (tmp_path / "trapped").exists()
    assert any("another user could have written" in message for message in caplog.messages)
    assert start(mean, model, x)[0] == 0


@torch.library.custom_op("coop_test::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


thrice.register_fake(torch.empty_like)
thrice.register_autograd(lambda _, gradient: 3 * gradient)


def test_a_gradient_of_another_library_is_traced_again():
    """No version of PyTorch says how its op is differentiated."""
    model, x = mlp(), torch.randn(64, 32)
    for _ in range(2):
        assert start(lambda model, x: thrice(model(x)).mean(), model, x)[0] > 0
    assert files() == []


def test_only_the_newest_traces_are_kept(monkeypatch):
    monkeypatch.setattr(traces, "KEPT_FILES", 3)
    for number in range(5):
        traces.write(f"{number}", b"record")
        os.utime(traces._folder() / f"{number}", (number, number))
    assert [path.name for path in files()] == ["2", "3", "4"]
    assert traces.read("2") == b"record"  # now the newest
    traces.write("5", b"record")
    assert [path.name for path in files()] == ["2", "4", "5"]
