"""Training loops as people write them give eager's numbers, bit for bit, under a small budget.

Each test is one `loop(model, step, ...)`, run once with an eager step and once with a compiled one.
"""

import copy
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from coop_plan import runtime
from coop_plan.schemas import Compute

OPTIONS = {"budget": "min"}


class Net(nn.Module):
    """Shared and frozen parameters, BatchNorm, dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.shared = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = F.gelu(self.norm(self.first(x)))
        for _ in range(3):
            x = self.dropout(F.gelu(self.shared(torch.tanh(self.frozen(x))))) + x
        return self.head(x)


def data(steps=4, seed=5):
    source = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(64, 16, generator=source), torch.randint(0, 4, (64,), generator=source))
        for _ in range(steps)
    ]


def state_of(model, optimizer=None):
    """All tensors that a run leaves behind, and the stream of random numbers."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    state |= {f"grad.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    if optimizer is not None:
        for i, slots in optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{i}.{name}": value for name, value in slots.items()}
    state["random"] = torch.get_rng_state()
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def loss_step(model):
    def step(x, y):
        return F.cross_entropy(model(x), y)

    return step


def both(loop, make=Net, wrap=loss_step, options=OPTIONS, **compile_args):
    """Run `loop(model, step)` in eager and compiled; what it returns must be equal."""
    origin = make()
    results = []
    for backend in (None, "coop"):
        torch.manual_seed(7)
        model = copy.deepcopy(origin).train()
        step = wrap(model)
        if backend is not None:
            step = torch.compile(step, backend=backend, options=options, **compile_args)
        results.append(loop(model, step))
    assert_equal(results[1], results[0])
    for report in runtime.reports():
        assert report.measured_arena_bytes <= report.planned_arena_bytes
        assert report.outside_bytes == 0
    return results[1]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    def loop(model, step):
        optimizer = OPTIMIZERS[name](model.parameters())
        for x, y in data():
            optimizer.zero_grad()
            step(x, y).backward()
            optimizer.step()
        return state_of(model, optimizer)

    both(loop, fullgraph=True)
    (report,) = runtime.reports()
    assert report.plan.recomputed_ops > 0
    ran = [step.op for step in report.plan.steps if isinstance(step, Compute)]
    random = [i for i, op in enumerate(report.graph.ops) if op.rng]
    assert any(ran.count(i) > 1 for i in random)


def test_an_optimizer_that_calls_the_step_itself():
    def loop(model, step):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        for x, y in data(2):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = step(x, y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return state_of(model)

    both(loop)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradient_accumulation(to_none):
    def loop(model, step):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i, (x, y) in enumerate(data(6)):
            (step(x, y) / 2).backward()
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
        return state_of(model, optimizer)

    both(loop)


def test_scheduler_and_loss_kept_in_a_list():
    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        losses = []
        for x, y in data():
            optimizer.zero_grad()
            loss = step(x, y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss)
        return state_of(model) | {"losses": torch.stack([loss.detach() for loss in losses])}

    both(loop)


def test_hooks_on_parameters():
    def loop(model, step):
        seen = {}
        model.shared.weight.register_hook(lambda g: g * 2)
        model.head.weight.register_hook(lambda g: seen.setdefault("head", []).append(g))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step_at_once(p):
            with torch.no_grad():
                p -= 0.01 * p.grad
            seen.setdefault("first", []).append(p.grad)
            p.grad = None

        model.first.weight.register_post_accumulate_grad_hook(step_at_once)
        for x, y in data():
            optimizer.zero_grad()
            step(x, y).backward()
            optimizer.step()
        kept = {f"{name}.{i}": g for name, gs in seen.items() for i, g in enumerate(gs)}
        return state_of(model) | kept

    both(loop)


def test_forward_hooks_on_modules():
    def loop(model, step):
        for x, y in data():
            step(x, y).backward()
        return state_of(model)

    def make():
        model = Net()
        model.norm.register_forward_hook(lambda module, args, out: out * 1.5)
        model.head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        return model

    both(loop, make)


class Unshared(nn.Module):
    """No weight is used twice.

    Under autocast, AOTAutograd casts one at each use and sums its gradients in float32, where eager
    casts it once and sums them in bfloat16.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norms = nn.ModuleList([nn.BatchNorm1d(32), nn.LayerNorm(32), nn.LayerNorm(32)])
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.first(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = F.dropout(torch.tanh(layer(F.gelu(norm(x)))), 0.15, training=self.training) + x
        return self.head(x)


class Broken(Unshared):
    """With a graph break before each of its layers."""

    def forward(self, x):
        x = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        x = F.dropout(self.norms[0](self.layers[0](x)), 0.2, self.training) + x
        torch._dynamo.graph_break()
        x = F.dropout(self.norms[1](self.layers[1](x)), 0.2, self.training) + x
        return self.head(x)


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_autocast(where, scaler):
    def wrap(model):
        def step(x, y):
            if where == "outside":
                return F.cross_entropy(model(x), y)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.cross_entropy(model(x), y)

        return step

    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scale = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaler)
        for x, y in data():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "outside"):
                loss = step(x, y)
            scale.scale(loss).backward()
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale.step(optimizer)
            scale.update()
        return state_of(model, optimizer)

    both(loop, Unshared, wrap=wrap)


def test_batchnorm_in_a_recomputed_region():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
                for _ in range(5)
            )

        def forward(self, x):
            for block in self.blocks:
                x = F.dropout2d(F.relu(block(x)), 0.1, training=self.training)
            return x.mean((2, 3))

    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        source = torch.Generator().manual_seed(3)
        for _ in range(3):
            optimizer.zero_grad()
            step(torch.randn(4, 4, 12, 12, generator=source), torch.arange(4)).backward()
            optimizer.step()
        return state_of(model)

    state = both(loop, Deep)
    assert state["model.blocks.4.1.num_batches_tracked"] == 3
    (report,) = runtime.reports()
    ran = [report.graph.ops[s.op].name for s in report.plan.steps if isinstance(s, Compute)]
    once = [op.name for op in report.graph.ops]
    norm = next(name for name in once if "batch_norm" in name and "backward" not in name)
    assert ran.count(norm) > once.count(norm)


def test_the_loss_is_made_outside():
    """Several outputs, one of them twice and one a view; part of the loss in eager code."""

    def wrap(model):
        def outputs(x):
            logits = model(x)
            return {"logits": logits, "half": logits[:, :2], "norm": model.first.weight.norm()}

        return outputs

    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in data():
            optimizer.zero_grad()
            out = step(x)
            loss = F.cross_entropy(out["logits"] * 2, y) + out["half"].square().mean()
            (loss + 0.1 * out["norm"] + model.head.weight.square().sum()).backward()
            optimizer.step()
        return state_of(model)

    both(loop, wrap=wrap)


def test_an_output_that_gets_no_gradient():
    def wrap(model):
        def outputs(x, y):
            logits = model(x)
            return F.cross_entropy(logits, y), logits, logits.argmax(-1)

        return outputs

    def loop(model, step):
        right = 0
        for x, y in data():
            loss, _, best = step(x, y)
            loss.backward()
            right += (best == y).sum()
        return state_of(model) | {"right": right}

    both(loop, wrap=wrap)


@pytest.mark.parametrize("used", [("loss",), ("aux",), ("loss", "aux"), ("more",)])
def test_what_no_loss_is_made_of_has_no_gradient(used):
    """AdamW passes over parameters without one, and makes those with a gradient of zeros decay."""

    def wrap(model):
        def outputs(x, y):
            hidden = model.norm(model.first(x))
            logits = model.head(torch.tanh(hidden))
            return {
                "loss": F.cross_entropy(logits, y),
                "aux": hidden.square().mean(),
                "more": model.shared(hidden).view(-1),  # a view of what is inside
            }

        return outputs

    def loop(model, step):
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        for x, y in data():
            optimizer.zero_grad()
            outputs = step(x, y)
            sum(outputs[name].sum() for name in used).backward()
            optimizer.step()
        return state_of(model)

    both(loop, wrap=wrap)


class Pixels(nn.Module):
    """Rows in memory as channels last; the loss is of enlarged logits, which are returned too."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(16, 16), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        rows = self.mix(x.view(1, 16, 4, 16)).repeat(2, 1, 4, 1)
        logits = self.head(rows.permute(0, 3, 1, 2))
        labels = torch.arange(2 * 64 * 64).view(2, 64, 64) % 5
        enlarged = F.interpolate(logits, size=(64, 64), mode="bilinear")
        return F.cross_entropy(enlarged, labels), logits


def test_an_output_beside_the_loss_does_not_change_how_its_gradient_lies():
    """The gradient of a bias is summed in the order of memory."""

    def loop(model, step):
        for x, _ in data(2):
            step(x)[0].backward()
        return state_of(model)

    both(loop, Pixels, wrap=lambda model: model, options={"budget": "100%"})


def test_what_is_held_is_never_overwritten():
    """Outputs and gradients of early steps, compared with clones after later steps."""

    def wrap(model):
        def outputs(x, y):
            hidden = torch.tanh(model.first(x))
            return F.cross_entropy(model(x), y), hidden, hidden.T

        return outputs

    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = []
        for x, y in data(6):
            optimizer.zero_grad(set_to_none=True)
            loss, hidden, turned = step(x, y)
            loss.backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            # An alias of one gradient, a view of another, a few whole ones.
            kept = [loss.detach(), hidden.detach(), turned.detach(), grads[0][1:], grads[0].T]
            kept += grads[2:4] if len(held) % 2 else grads
            held.append((kept, [t.clone() for t in kept]))
            optimizer.step()
        for kept, clones in held:
            assert all(map(torch.equal, kept, clones))
        return {f"{i}.{j}": t for i, (kept, _) in enumerate(held) for j, t in enumerate(kept)}

    both(loop, wrap=wrap)


def test_gradients_accumulated_into_held_tensors():
    """`.grad` set by the user before the first step is added to in place."""

    def loop(model, step):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.ones_like(p)
        own = [p.grad for p in model.parameters() if p.grad is not None]
        for x, y in data(3):
            step(x, y).backward()
        assert all(
            p.grad is g for p, g in zip(filter(_trained, model.parameters()), own, strict=True)
        )
        return state_of(model)

    both(loop)


def _trained(p):
    return p.requires_grad


def test_torch_autograd_grad():
    def loop(model, step):
        found = {}
        parameters = list(filter(_trained, model.parameters()))
        for i, (x, y) in enumerate(data(3)):
            for j, g in enumerate(torch.autograd.grad(step(x, y), parameters)):
                found[f"{i}.{j}"] = g
        return found

    both(loop)


def test_a_gradient_for_the_input():
    def loop(model, step):
        found = {}
        for i, (x, y) in enumerate(data(3)):
            x.requires_grad_()
            step(x, y).backward()
            found[str(i)] = x.grad
        return state_of(model) | found

    both(loop)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_validation_in_between(quiet):
    def wrap(model):
        return model

    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = {}
        for i, (x, y) in enumerate(data()):
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(step(x), y).backward()
            optimizer.step()
            model.eval()
            with quiet():
                seen[f"valid {i}"] = step(x).clone()
        return state_of(model) | seen

    both(loop, wrap=wrap)


def test_validation_between_forward_and_backward():
    def wrap(model):
        return model

    def loop(model, step):
        seen = {}
        for i, (x, y) in enumerate(data(3)):
            loss = F.cross_entropy(step(x), y)
            with torch.no_grad():
                seen[f"valid {i}"] = step(x + 1).clone()
            loss.backward()
        return state_of(model) | seen

    # BatchNorm's statistics move in between: a recomputation must not see that.
    both(loop, wrap=wrap)


def test_a_checkpoint_in_the_middle(tmp_path):
    file = tmp_path / "checkpoint.pt"

    def loop(model, step):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i, (x, y) in enumerate(data(6)):
            if i == 3:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                for p in model.parameters():
                    p.data.fill_(0.5)
                saved = torch.load(file)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            optimizer.zero_grad()
            step(x, y).backward()
            optimizer.step()
        return state_of(model, optimizer)

    both(loop)


def test_torch_compile_as_a_wrapper_and_in_place():
    origin = Net()
    results = []
    for how in ("eager", "wrapper", "in place"):
        torch.manual_seed(7)
        model = copy.deepcopy(origin)
        called = model
        if how == "wrapper":
            called = torch.compile(model, backend="coop", options=OPTIONS)
            assert list(called.state_dict()) == [f"_orig_mod.{name}" for name in model.state_dict()]
        elif how == "in place":
            model.compile(backend="coop", options=OPTIONS)
            assert list(model.state_dict()) == list(origin.state_dict())
        optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
        for x, y in data():
            called.train()
            optimizer.zero_grad()
            F.cross_entropy(called(x), y).backward()
            optimizer.step()
        results.append(state_of(model))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


def test_a_deep_copy_of_a_compiled_model_trains_on_its_own():
    origin = Net()
    results = []
    for backend in (None, "coop"):
        torch.manual_seed(7)
        model = copy.deepcopy(origin)
        if backend is not None:
            model.compile(backend=backend, options=OPTIONS)
        for x, y in data(2):
            F.cross_entropy(model(x), y).backward()
        other = copy.deepcopy(model)
        for x, y in data(2):
            F.cross_entropy(other(x), y).backward()
        results.append(state_of(model) | {f"other {k}": v for k, v in state_of(other).items()})
    assert_equal(results[1], results[0])


def penalty(loss, given):
    (gradient,) = torch.autograd.grad(loss, given, create_graph=True)
    return gradient.square().sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
def test_double_backward_is_refused_with_the_line_and_the_remedy():
    x, y = data(1)[0]
    model = Net()
    step = torch.compile(loss_step(model), backend="coop", options=OPTIONS)

    def inside(x, y):
        loss = F.cross_entropy(model(x), y)
        return loss + penalty(loss, model.head.weight)

    remedy = r"\.py:\d+: .*double backward.*call the function itself, not the compiled one"
    with pytest.raises(RuntimeError, match=remedy):
        penalty(step(x, y), model.head.weight).backward()
    with pytest.raises(RuntimeError, match=remedy):
        torch.compile(inside, backend="coop", options=OPTIONS)(x, y).backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_gradients_with_a_graph_leave_the_held_ones_alone():
    """Autograd adds in place, but with create_graph=True, where `.grad` is a new sum."""

    def loop(model, step):
        kept = []
        for i, (x, y) in enumerate(data(4)):
            step(x, y).backward(create_graph=i == 3)
            kept.append(model.head.weight.grad)
        found = {str(i): gradient.detach() for i, gradient in enumerate(kept)}
        model.zero_grad()
        return found

    both(loop)


@pytest.mark.parametrize("where", ["hook", "between", "loss"])
def test_the_step_after_an_exception_is_right(where):
    def loop(model, step):
        armed = []

        def fail(_):
            if armed:
                raise ValueError("on purpose")

        if where == "hook":
            model.shared.weight.register_hook(fail)
        for i, (x, y) in enumerate(data(6)):
            if i == 3:
                armed.append(True)
                before = torch.get_rng_state()
                with pytest.raises(ValueError, match="on purpose"):
                    loss = step(x, y)
                    if where == "between":
                        raise ValueError("on purpose")
                    if where == "loss":
                        loss.register_hook(fail)
                    loss.backward()
                armed.clear()
                model.zero_grad()
                torch.set_rng_state(before)
                loss = None
            step(x, y).backward()
        return state_of(model)

    both(loop)


def test_a_loss_that_is_skipped():
    def loop(model, step):
        for i, (x, y) in enumerate(data(6)):
            loss = step(x, y)
            if i % 2:
                del loss  # its step's memory is needed by the next
                continue
            loss.backward()
        return state_of(model)

    both(loop)


def test_the_batch_buffer_is_reused():
    def loop(model, step):
        x, y = torch.empty(64, 16), torch.empty(64, dtype=torch.long)
        for next_x, next_y in data():
            x.copy_(next_x)
            y.copy_(next_y)
            step(x, y).backward()
        return state_of(model)

    both(loop)


def test_a_batch_that_changes_before_the_backward_is_an_error_or_right():
    x, y = data(1)[0]
    model = Net()
    loss = torch.compile(loss_step(model), backend="coop", options=OPTIONS)(x, y)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_change_before_the_backward_are_an_error():
    x, y = data(1)[0]
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(loss_step(model), backend="coop", options=OPTIONS)
    step(x, y).backward()
    loss = step(x, y)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of Dynamo's own
def test_two_models_with_budgets_of_their_own():
    """A generator and a discriminator, trained alternately."""
    origin = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), Net()])
    results = []
    for compiled in (False, True):
        torch.manual_seed(7)
        pair = copy.deepcopy(origin)
        made, judged = pair
        if compiled:
            made = torch.compile(made, backend="coop", options={"budget": "100%"})
            judged = torch.compile(judged, backend="coop", options={"budget": "min"})
        optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in pair]
        for x, y in data():
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(judged(made(x)), y).backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(judged(made(x).detach()), 3 - y).backward()
            optimizers[1].step()
        results.append(state_of(pair))
    assert_equal(results[1], results[0])


def test_two_threads_train_at_once():
    """Without dropout: threads share one stream of random numbers."""

    def make(width):
        return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 4))

    def train(model, step, found, key):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in data(20):
            optimizer.zero_grad()
            step(x, y).backward()
            optimizer.step()
        found[key] = [p.detach().clone() for p in model.parameters()]

    origins, expected, found = [make(48), make(96)], {}, {}
    threads = []
    for i, origin in enumerate(origins):
        train(eager := copy.deepcopy(origin), loss_step(eager), expected, i)
        options = {"budget": ["100%", "min"][i]}
        step = torch.compile(loss_step(origin), backend="coop", options=options)
        step(*data(1)[0]).backward()
        origin.zero_grad()
        threads.append(threading.Thread(target=train, args=(origin, step, found, i)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in expected:
        assert all(map(torch.equal, found[i], expected[i]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_the_model(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=reentrant)
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant)
            return self.head(x)

        def block(self, x):
            return self.dropout(torch.tanh(self.shared(x)))

    def loop(model, step):
        for x, y in data():
            model.zero_grad()  # a reentrant checkpoint adds to `.grad` in an order of its own
            step(x.requires_grad_(), y).backward()
        return state_of(model)

    both(loop, Checkpointed)


def test_channels_last():
    def make():
        convolutions = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)]
        return nn.Sequential(*convolutions, nn.Conv2d(4, 4, 3), *head).to(
            memory_format=torch.channels_last
        )

    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        source = torch.Generator().manual_seed(3)
        for _ in range(3):
            x = torch.randn(4, 4, 8, 8, generator=source).to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            step(x, torch.arange(4)).backward()
            optimizer.step()
        for p in model.parameters():
            assert p.grad.stride() == p.stride()
        return state_of(model, optimizer)

    both(loop, make)


def test_a_bfloat16_model():
    def loop(model, step):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x, y in data():
            optimizer.zero_grad()
            step(x.bfloat16(), y).backward()
            optimizer.step()
        return state_of(model)

    both(loop, lambda: Net().bfloat16())


def test_ema_and_swa_copies():
    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model)
        for x, y in data():
            optimizer.zero_grad()
            step(x, y).backward()
            optimizer.step()
            average.update_parameters(model)
        return state_of(average)

    both(loop)


def test_gradient_scaling_by_a_tensor_and_detach_in_the_loss():
    def wrap(model):
        def step(x, y):
            logits = model(x)
            weight = logits.detach().softmax(-1).max(-1).values
            return (F.cross_entropy(logits, y, reduction="none") * weight).mean()

        return step

    def loop(model, step):
        for x, y in data():
            step(x, y).backward(torch.tensor(0.5))
        return state_of(model)

    both(loop, wrap=wrap)


def test_parameters_frozen_and_thawed_on_the_way():
    def loop(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i, (x, y) in enumerate(data(6)):
            model.shared.requires_grad_(i < 2 or i >= 4)
            optimizer.zero_grad()
            step(x, y).backward()
            optimizer.step()
        return state_of(model)

    both(loop)


WORKER = Path(__file__).with_name("ddp_worker.py")


def test_ddp_on_two_processes(tmp_path):
    """Each worker compares eager DDP with a compiled model in DDP and with a compiled DDP."""
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / f"{rank}.txt").open("w+")) for rank in range(2)]
        workers = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), str(tmp_path)],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(WORKER.parents[2])},
            )
            for rank, file in enumerate(files)
        ]
        for worker in workers:
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        for worker, file in zip(workers, files, strict=True):
            status = worker.wait(timeout=1200)
            file.seek(0)
            assert status == 0, file.read()
