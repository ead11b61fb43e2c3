"""`package.module:function` becomes a graph, or one clear sentence."""

import logging

import pytest
import torch

from coop_plan.planner import plan
from coop_plan.runtime import CaptureError
from coop_plan.runtime.offline_capture.target import capture, capture_target, load_target
from coop_plan.schemas import InvalidInputError

SOURCE = """
import functools, sys, time
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)], torch.nn.Dropout(0.5))
def good(): return (lambda x: model(x).square().mean()), (torch.randn(64, 32),)
def not_a_pair(): return model
def no_gradient(): return torch.sin, (torch.randn(3),)
def raises(): return 1 / 0
def wrong_arguments(): return (lambda x: model(x).sum()), ()
def breaks():
    def step(x):
        torch._dynamo.graph_break()
        return model(x).sum()
    return step, (torch.randn(64, 32),)
@torch.library.custom_op("user::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor: return 2 * x
twice.register_autograd(lambda ctx, gradient: 2 * gradient)
def no_fake():
    def step(x):
        return twice(model(x)).sum()
    return step, (torch.randn(64, 32),)
def wrong_shapes():
    def step(x):
        return model(x).mm(x).sum()
    return step, (torch.randn(64, 32),)
def decides():
    def step(x):
        return model(x).sum() if x.sum().item() > 0 else model(x).mean()
    return step, (torch.randn(64, 32),)
def sleeps():
    def step(x):
        time.sleep(0)
        return model(x).sum()
    return step, (torch.randn(64, 32),)
def calls_backward():
    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss
    return step, (torch.randn(64, 32),)
def ends(): sys.exit(0)
def sized(batch): return (lambda x: model(x).sum()), (torch.randn(batch, 32),)
def other(a, batch=1): return good()
def long(batch, length=8): return (lambda x: model(x).sum()), (torch.randn(batch, length, 32),)
@functools.lru_cache
def power(): return 2
def cached(): return (lambda x: (model(x) ** power()).sum()), (torch.randn(64, 32),)
def ranks(): return torch.nn.parallel.DistributedDataParallel(model), (torch.randn(64, 32),)
def group(): torch.distributed.init_process_group("gloo")
scaler = torch.amp.GradScaler("cpu")
def inputs(): return (lambda x: model(x.cos().requires_grad_()).sum()), (torch.randn(64, 32),)
def scales(): return (lambda x: scaler.scale(model(x).sum())), (torch.randn(64, 32),)
"""


@pytest.fixture
def user_module(importable):
    return importable("user_steps", SOURCE)


def test_a_step_is_captured_with_its_facts(user_module):
    graph = capture_target(f"{user_module}:good")
    assert graph.name == "good"
    kinds = {tensor.kind for tensor in graph.tensors}
    assert {"parameter", "input", "activation", "output"} <= kinds
    assert {op.phase for op in graph.ops} == {"forward", "backward"}
    assert any(op.rng for op in graph.ops)
    assert all(op.cost_us > 0 for op in graph.ops)
    weights = [t for t in graph.tensors if t.kind == "parameter"]
    assert sum(t.bytes for t in weights) == 4 * (32 * 32 + 32) * 4
    assert plan(graph, "min").recomputed_ops > 0


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_colon", "package.module:function"),
        ("not_there:f", "no module named 'not_there'"),
        ("{}:missing", "no function 'missing'"),
        ("{}:not_a_pair", "must return a callable"),
        ("{}:raises", "user_steps.py, line .: ZeroDivisionError"),
        ("{}:ends", "ended in .*user_steps.py, line 41: SystemExit: 0"),
        ("{}:ranks", "line 48: ValueError: .*; a capture is of one process: leave out DDP"),
        ("{}:group", "line 49: .*; a capture is of one process: leave out DDP"),
        ("{}:sized", r"required argument: 'batch' \(--batch N\)"),
        ("{}:other", "cannot be called: missing a required argument: 'a'"),
    ],
)
def test_a_wrong_target_is_named(user_module, spec, said):
    with pytest.raises(InvalidInputError, match=said):
        capture_target(spec.format(user_module))


def test_batch_and_length_are_arguments_of_the_function(user_module):
    for given, shape in (((2,), (2, 8, 32)), ((2, 3), (2, 3, 32))):
        _, (x,) = load_target(f"{user_module}:long", *given)
        assert x.shape == shape
    with pytest.raises(InvalidInputError, match=r"no argument 'length'.* sized\(length=\.\.\.\)"):
        load_target(f"{user_module}:sized", 2, 3)
    with pytest.raises(InvalidInputError, match=r"'batch' \(--batch N\)"):
        load_target(f"{user_module}:long", None, 3)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("no_gradient", "needs no gradient"),
        ("breaks", "cannot be captured"),
        ("wrong_arguments", "missing 1 required positional argument"),
        ("no_fake", r"(?s)user::twice.*register_fake.*user_steps\.py, line 20"),
        (
            "decides",
            r"a branch depends on the values .*user_steps\.py, line 28\); use torch\.where",
        ),
        ("sleeps", r"`time\.sleep.*user_steps\.py, line 32\); move it out of the step"),
        (
            "calls_backward",
            r"calls backward\(\) .*user_steps\.py, line 38\); return the loss",
        ),
        ("scales", r"calls a GradScaler .*user_steps\.py, line 52\); return the loss as it is"),
        ("inputs", r"requires_grad_\(\) was called on .*leave out enable_input_require_grads"),
        ("wrong_shapes", r"\[64, 32\] X \[64, 32\].*user_steps\.py, line 24"),
    ],
)
def test_what_cannot_be_captured_is_named(user_module, function, said, caplog):
    with pytest.raises(CaptureError, match=said):
        capture_target(f"{user_module}:{function}")
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_the_users_line_is_named_before_that_of_a_library(importable):
    pytest.importorskip("transformers")
    source = """
import torch, transformers
def model():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
def inside():
    net = model()
    def step(ids):
        return net(net.generate(ids)).logits.sum()
    return step, (torch.ones(1, 4, dtype=torch.int64),)
def wrong(): return model()(torch.ones(1)), ()
"""
    name = importable("library_steps", source)
    said = r"calls generate\(\) \(.*library_steps\.py, line 9, in transformers/.*; call it outside"
    with pytest.raises(CaptureError, match=said):
        capture_target(f"{name}:inside")
    said = r"failed in .*library_steps\.py, line 11, in transformers/models/gpt2/.*, line \d+: "
    with pytest.raises(InvalidInputError, match=said):
        capture_target(f"{name}:wrong")


def test_ops_know_the_module_and_the_line_that_made_them(user_module):
    graph = capture_target(f"{user_module}:good")
    sources = {op.source for op in graph.ops if op.name == "aten.addmm.default"}
    assert sources == {f"model.{i}, user_steps.py:5" for i in range(4)}
    backward = {op.source for op in graph.ops if op.name == "aten.mm.default"}
    assert backward == sources


def test_a_syntax_error_is_named_with_its_own_line(importable):
    with pytest.raises(InvalidInputError, match=r"broken_steps\.py, line 2: SyntaxError"):
        capture_target(f"{importable('broken_steps', chr(10) + 'def f(:')}:f")


def test_what_dynamo_thinks_of_a_cache_is_not_the_users_matter(user_module):
    """Its warning would be an error here."""
    assert "aten.pow.Tensor_Scalar" in [
        op.name for op in capture_target(f"{user_module}:cached").ops
    ]


def test_a_transformer_whose_hidden_states_are_asked_for():
    """It puts hooks on its layers at the first call, under a lock that Dynamo does not know."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=10, intermediate_size=8, **sizes)
    model = transformers.BertModel(config)

    def step(x):
        return sum(state.sum() for state in model(x, output_hidden_states=True).hidden_states)

    graph = capture(step, (torch.ones(1, 4, dtype=torch.int64),))
    names = [op.name for op in graph.ops if op.phase == "forward"]
    assert names.count("aten.sum.default") == 3
