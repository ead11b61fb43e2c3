"""`train_iteration(scaler=...)`: iterations of a loop with a GradScaler, to the bit."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import coop_plan
from coop_plan import runtime
from coop_plan.runtime import PartlyUpdatedError
from coop_plan.runtime.whole_iteration.all_or_none import AllOrNone
from tests.runtime.iterating import (
    OPTIMIZERS,
    WIDTH,
    eager,
    listed,
    preferring_host,
    runs_on_host,
)


class Reader(torch.optim.Optimizer):
    """An optimizer of another author, which reads GradScaler's attributes."""

    _step_supports_amp_scaling = True

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        if self.found_inf:
            return
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                scale = 1.0 if self.grad_scale is None else self.grad_scale
                state = self.state[parameter]
                state.setdefault("mean", torch.zeros_like(parameter)).lerp_(
                    parameter.grad / scale, 0.1
                )
                parameter.sub_(state["mean"], alpha=0.05)


AWARE = {
    "reader": Reader,
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.05, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
}
"""More optimizers that divide gradients by the scale themselves (as does `adamw-fused`)."""


def one_and_one(parameters):
    """An optimizer for matrices, a fused one for the rest."""
    given = [*parameters]
    return [
        torch.optim.SGD([p for p in given if p.dim() == 2], 0.05, momentum=0.9),
        torch.optim.AdamW([p for p in given if p.dim() != 2], 1e-2, fused=True),
    ]


ALL = OPTIMIZERS | AWARE | {"one-and-one": one_and_one}


class Net(nn.Module):
    """Layers of some dtypes under autocast, and a shift, whose gradient may be infinite alone."""

    def __init__(self, dtypes=(torch.float32,) * 3, empty=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.none = nn.Parameter(torch.zeros(0 if empty else 1))

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            for layer in self.layers:
                x = nn.functional.dropout(layer(x.to(layer.weight.dtype)).tanh(), 0.1)
        return x.float() + self.none.sum() + self.shift


class Scalars(Net):
    """Layers of several dtypes, and a scalar of each."""

    def __init__(self):
        super().__init__((torch.bfloat16, torch.float32, torch.float64))
        self.scales = nn.ParameterList(
            torch.tensor(1.5, dtype=layer.weight.dtype) for layer in self.layers
        )

    def forward(self, x):
        return super().forward(x) * sum(scale.float() for scale in self.scales)


def loss_of(model):
    def loss(batch):
        x, y, all_of, shift = batch
        return nn.functional.cross_entropy(model(x), y) * all_of + model.shift.sum() * shift

    return loss


def batches_of(step, count, all_of=1.0, shift=1.0, rows=8):
    """Micro-batches, one of which has factors of its gradients, and of the shift's."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for at in range(count):
        x = torch.randn(rows, WIDTH, generator=generator)
        y = torch.randint(0, WIDTH, (rows,), generator=generator)
        factors = (all_of, shift) if at == step % count else (1.0, 1.0)
        made.append((x, y, *map(torch.tensor, factors)))
    return made


def equal(first, second):
    """True if all bits are, but those of NaN."""
    same = [
        one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)
        for one, other in zip(first, second, strict=True)
    ]
    return all(same)


def states_of(optimizer):
    """Names and values of all states, by parameter."""
    return [
        (name, value)
        for one in listed(optimizer)
        for group in one.param_groups
        for parameter in group["params"]
        for name, value in sorted(one.state.get(parameter, {}).items())
    ]


class Pair:
    """A model trained by the loop, and one by `train_iteration`, compared after each call."""

    def __init__(self, optimizer, budget, clip_norm=None, model=Net, scale=None, **options):
        torch._dynamo.reset()
        runtime.clear_reports()
        self.clip_norm = clip_norm
        self.ours, self.theirs = model(), model()
        self.mine = ALL[optimizer](self.ours.parameters())
        self.other = ALL[optimizer](self.theirs.parameters())
        scale = {"init_scale": 2.0**10, "growth_interval": 2} | (scale or {})
        self.scaler, self.eager = (torch.amp.GradScaler("cpu", **scale) for _ in range(2))
        given = {"method": "coop"} | options
        self.iteration = coop_plan.train_iteration(
            loss_of(self.ours), self.mine, budget, clip_norm=clip_norm, scaler=self.scaler, **given
        )

    def compare(self, batches):
        torch.manual_seed(len(batches))
        losses, norm = eager(loss_of(self.theirs), self.other, batches, self.clip_norm, self.eager)
        torch.manual_seed(len(batches))
        made = self.iteration(*batches)
        assert equal(made if len(batches) > 1 else [made], losses)
        assert norm is None or equal([self.iteration.grad_norm], [norm])
        self.same()
        assert all(p.grad is None for p in self.ours.parameters())
        report = coop_plan.reports()[-1]
        assert report.measured_peak_bytes <= report.budget_bytes
        assert report.outside_bytes == 0
        return report

    def same(self):
        assert equal(self.ours.parameters(), self.theirs.parameters())
        (names, mine), (others, other) = (
            zip(*states_of(one), strict=True) if states_of(one) else ((), ())
            for one in (self.mine, self.other)
        )
        assert names == others
        tensors = [[v for v in one if torch.is_tensor(v)] for one in (mine, other)]
        assert equal(*tensors)
        assert self.scaler.state_dict() == self.eager.state_dict()
        copy.deepcopy(self.scaler)  # between iterations, as PyTorch asserts


INFINITE = [(1.0, 1.0), (float("inf"), 1.0), (1.0, 1e36), (1e37, 1.0), (float("nan"), 1.0)]
"""Factors of all gradients, and of the shift's: none is infinite, all are, one, all if scaled."""


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", ALL)
def test_an_iteration_is_the_loops(optimizer, clip_norm):
    pair = Pair(optimizer, "70%", clip_norm)
    for step, factors in enumerate([INFINITE[at] for at in (1, 0, 3, 0, 0)]):
        pair.compare(batches_of(step, 1, *factors))
    assert len(coop_plan.reports()) == 1
    assert pair.scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["momentum", "sgd-fused"])
def test_scalars_keep_their_dtypes(optimizer, clip_norm):
    pair = Pair(optimizer, "min", clip_norm, Scalars)
    for step, factors in enumerate([INFINITE[at] for at in (1, 0, 0)]):
        pair.compare(batches_of(step, 2, *factors))


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    optimizer=st.sampled_from(sorted(ALL)),
    budget=st.sampled_from(["100%", "60%", "min"]),
    clip_norm=st.sampled_from([None, None, 0.05, 100.0]),
    count=st.integers(1, 3),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), min_size=1, max_size=4
    ),
    empty=st.booleans(),
    scale=st.fixed_dictionaries(
        {
            "init_scale": st.sampled_from([1.0, 3.7, 2.0**16, 1e-3]),
            "growth_factor": st.sampled_from([2.0, 1.3]),
            "backoff_factor": st.sampled_from([0.5, 0.7]),
            "growth_interval": st.integers(1, 3),
        }
    ),
    infinite=st.lists(st.sampled_from(INFINITE), min_size=3, max_size=5),
    variants=st.booleans(),
    link=st.sampled_from([None, "8GB/s"]),
)
def test_any_iteration_is_the_loops(
    optimizer, budget, clip_norm, count, dtypes, empty, scale, infinite, variants, link
):
    linked = {"link": link, "method": "coop-offline"} if link else {}
    empty = empty and optimizer != "adafactor"  # which divides by the number of elements
    pair = Pair(
        *(optimizer, budget, clip_norm, lambda: Net(dtypes, empty), scale),
        **linked,
        variants=variants,
    )
    for step, factors in enumerate(infinite):
        pair.compare(batches_of(step, count, *factors))


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adamw-fused", "one-and-one"])
def test_updates_on_the_host_are_the_loops(optimizer, clip_norm, monkeypatch):
    """Those that overwrite their gradient, as fused ones that divide it, are on the device."""
    preferring_host(monkeypatch)
    pair = Pair(optimizer, "min", clip_norm, link="8GB/s", method="coop-offline")
    for step, factors in enumerate([INFINITE[at] for at in (1, 0, 2, 1, 0)]):
        report = pair.compare(batches_of(step, 2, *factors))
    assert report.plan.homes
    assert bool(runs_on_host(report)) == (optimizer != "adamw-fused" or clip_norm is not None)


def test_the_scale_may_change_between_calls():
    """By the user, or by a state that is loaded; no plan is made for it."""
    pair = Pair("adamw", "min")
    for step, scale in enumerate([8.0, 3.7, 2.0**40, 1.0]):
        pair.compare(batches_of(step, 1))
        for one in (pair.scaler, pair.eager):
            if step % 2:
                one.update(scale)
            else:
                one.load_state_dict(one.state_dict() | {"scale": scale, "_growth_tracker": 1})
    assert len(coop_plan.reports()) == 1


def test_hooks_run_after_the_steps_that_are_not_skipped():
    pair = Pair("one-and-one", "70%")
    calls = []
    for which, optimizers in (("ours", pair.mine), ("eager", pair.other)):
        for at, one in enumerate(optimizers):
            one.register_step_post_hook(lambda *_, key=(which, at): calls.append(key))
    for step, factors in enumerate(INFINITE[:4]):
        calls.clear()
        pair.compare(batches_of(step, 1, *factors))
        assert [at for which, at in calls if which == "ours"] == [
            at for which, at in calls if which == "eager"
        ]
        assert len(calls) == (4 if factors[0] == 1 else 2)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_loop_may_step_the_scaler(clip_norm):
    """As Accelerate's optimizer does, after the call that served it."""
    pair = Pair("one-and-one", "70%", clip_norm)
    pair.iteration.serve_loop()
    for step, factors in enumerate(INFINITE[:4] * 2):
        batches = batches_of(step, 1, *factors)
        torch.manual_seed(0)
        eager(loss_of(pair.theirs), pair.other, batches, clip_norm, pair.eager)
        torch.manual_seed(0)
        pair.iteration(*batches)
        for one in pair.mine:
            pair.scaler.step(one)
        pair.scaler.update()
        pair.same()


class FailureError(RuntimeError):
    pass


@pytest.mark.parametrize("factors", INFINITE[:3])
@pytest.mark.parametrize("fails_at", [0, 1, 3, 7])
def test_an_error_is_of_before_or_told(fails_at, factors, monkeypatch):
    """Updates that are left out leave the state of before; the scaler has that of before, too."""
    pair = Pair("muon-adamw", "70%")
    pair.compare(batches_of(0, 1))
    before = copy.deepcopy((states_of(pair.mine), [*pair.ours.parameters()]))
    saved = copy.deepcopy([one.state_dict() for one in (pair.ours, *pair.mine)])
    scale = pair.scaler.state_dict()
    begin, begun = AllOrNone.begin, []

    def failing(self, updates):
        if len(begun) == fails_at:
            raise FailureError
        begun.append(updates)
        begin(self, updates)

    with monkeypatch.context() as patch:
        patch.setattr(AllOrNone, "begin", failing)
        with pytest.raises((FailureError, PartlyUpdatedError)) as found:
            pair.iteration(*batches_of(1, 1, *factors))
    now = states_of(pair.mine), [*pair.ours.parameters()]
    same = all(
        torch.equal(*map(torch.as_tensor, pair))
        for pair in zip(
            [v for _, v in before[0]] + before[1], [v for _, v in now[0]] + now[1], strict=True
        )
    )
    assert same == (found.type is FailureError)
    assert pair.scaler.state_dict() == scale
    for one, state in zip((pair.ours, *pair.mine), saved, strict=True):
        one.load_state_dict(state)
    pair.iteration(*batches_of(2, 1))
    assert pair.scaler.state_dict() != scale


def test_a_scaler_that_is_disabled_is_as_none():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = Net()
    iteration = coop_plan.train_iteration(
        loss_of(model), ALL["sgd"](model.parameters()), "70%", method="coop", scaler=scaler
    )
    iteration(*batches_of(0, 1))
    assert not [op for op in coop_plan.reports()[-1].graph.ops if "write_input" in op.name]


class Own(torch.amp.GradScaler):
    def unscale_(self, optimizer):
        pass


class Passed(torch.optim.SGD):
    def step(self, closure=None, *, grad_scaler=None):
        pass


def test_what_does_not_fit_is_refused():
    model = Net()
    made = [*model.parameters()]
    sgd = torch.optim.SGD(made, 0.1)

    def call(optimizer=sgd, scaler=None, model=model):
        scaler = scaler or torch.amp.GradScaler("cpu")
        iteration = coop_plan.train_iteration(
            loss_of(model), optimizer, "100%", method="coop", scaler=scaler
        )
        iteration(*batches_of(0, 1))

    for refused, message in (
        ({"scaler": Own("cpu")}, "Own has code of its own"),
        ({"optimizer": Passed(made, 0.1)}, r"Passed\.step takes the GradScaler"),
    ):
        with pytest.raises(runtime.OptionsError, match=message):
            call(**refused)
    with pytest.raises(runtime.RuntimeRefusalError, match=r'GradScaler is for xpu.*"cpu"'):
        call(scaler=torch.amp.GradScaler("xpu"))
    unused = nn.Parameter(torch.ones(2))
    with pytest.raises(runtime.CaptureError, match="optimizer 2 of 2 has no gradient"):
        call(optimizer=[sgd, torch.optim.SGD([unused], 0.1)])
    half = Net((torch.float16,))
    with pytest.raises(runtime.RuntimeRefusalError, match="is float16, and GradScaler"):
        call(optimizer=torch.optim.SGD(half.parameters(), 0.1), model=half)
