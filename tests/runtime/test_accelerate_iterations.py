"""Whole iterations of a loop of Accelerate's: numbers of the loop in eager."""

import pytest
import torch
from torch import nn

from coop_plan import runtime
from tests.runtime.iterating import (
    OPTIMIZERS,
    WIDTH,
    Net,
    assert_within_budget,
    equal,
    in_float16,
    state_of,
)

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")  # the framework's own

ROWS, BATCH = 210, 32  # 7 batches an epoch, of which the last one is smaller


@pytest.fixture(autouse=True)
def _new_state():
    """Accelerate keeps precision and accumulation for the process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    torch._dynamo.reset()


class Loop:
    """A loop's parts: prepared model, optimizer, batches and schedule."""

    def __init__(self, optimizer="adamw", *, init_scale=None, **arguments):
        self.accelerator = accelerate.Accelerator(cpu=True, **arguments)
        if init_scale is not None:
            in_float16(self.accelerator, init_scale)
        model = Net(2)
        made = OPTIMIZERS[optimizer](model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.7)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        y = torch.randint(0, WIDTH, (ROWS,), generator=generator)
        data = torch.utils.data.TensorDataset(x, y)
        batches = torch.utils.data.DataLoader(data, BATCH, shuffle=True)
        self.model, self.optimizer, self.batches, self.schedule = self.accelerator.prepare(
            model, made, batches, schedule
        )
        self.losses, self.norms, self.rates = [], [], []

    def loss_of(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def state(self):
        return state_of(self.model, self.optimizer)

    def train_in_eager(self, clip_norm, epochs=2):
        for _ in range(epochs):
            for batch in self.batches:
                with self.accelerator.accumulate(self.model):
                    loss = self.loss_of(batch)
                    self.losses.append(loss.detach())
                    self.accelerator.backward(loss)
                    if clip_norm is not None and self.accelerator.sync_gradients:
                        parameters = self.model.parameters()
                        self.norms.append(self.accelerator.clip_grad_norm_(parameters, clip_norm))
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                    self.note()

    def planned(self, clip_norm, budget="60%", **options):
        from coop_plan.runtime.integrations.accelerate import plan_iterations

        given = {"method": "coop"} | options
        return plan_iterations(
            self.accelerator, self.loss_of, self.optimizer, budget, clip_norm=clip_norm, **given
        )

    def train(self, iteration, epochs=2):
        for _ in range(epochs):
            for batch in self.batches:
                with self.accelerator.accumulate(self.model):
                    losses = iteration(batch)
                    self.losses += losses
                    if losses and iteration.grad_norm is not None:
                        self.norms.append(iteration.grad_norm)
                    self.schedule.step()
                    self.note()

    def note(self):
        """Note what skipped steps change."""
        scaler = self.accelerator.scaler
        self.rates += self.schedule.get_last_lr()
        self.rates.append(getattr(self.optimizer, "step_was_skipped", False))
        self.rates += [] if scaler is None else scaler.state_dict().values()


def assert_same(eager, ours):
    assert equal(eager.losses, ours.losses)
    assert equal(*([norm.nan_to_num(-1.0) for norm in one.norms] for one in (eager, ours)))
    assert eager.rates == ours.rates
    assert equal(eager.state(), ours.state())


CASES = [
    ({}, None),
    ({"gradient_accumulation_steps": 3, "optimizer": "momentum"}, 0.05),
    ({"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}, 0.5),
    ({"optimizer": "adafactor", "mixed_precision": "bf16"}, None),
    ({"init_scale": 2.0**22}, None),
    ({"gradient_accumulation_steps": 2, "init_scale": 2.0**22, "optimizer": "momentum"}, 0.5),
    ({"gradient_accumulation_steps": 3, "init_scale": 2.0**8, "optimizer": "adamw-fused"}, None),
    ({"init_scale": 2.0**22, "optimizer": "adamw-fused"}, 0.5),
]


@pytest.mark.parametrize(("arguments", "clip_norm"), CASES)
def test_a_loop_has_its_numbers(arguments, clip_norm):
    """With a last accumulation of an epoch that is incomplete."""
    eager, ours = Loop(**arguments), Loop(**arguments)
    torch.manual_seed(2)
    eager.train_in_eager(clip_norm)
    torch.manual_seed(2)
    ours.train(ours.planned(clip_norm, "min" if "init_scale" in arguments else "60%"))
    assert len(ours.losses) == 14
    assert_same(eager, ours)
    assert_within_budget(2 * -(-7 // arguments.get("gradient_accumulation_steps", 1)))


def test_a_loop_saves_and_resumes(tmp_path):
    """From eager to planned and back, with `save_state` between epochs."""
    eager, ours = Loop(), Loop()
    iteration = ours.planned(0.1, "min")
    for train, loop, name in (
        (lambda: eager.train_in_eager(0.1, epochs=1), eager, "eager"),
        (lambda: ours.train(iteration, epochs=1), ours, "ours"),
    ):
        torch.manual_seed(2)
        train()
        loop.accelerator.save_state(str(tmp_path / name))
        train()
    assert_same(eager, ours)
    eager.accelerator.load_state(str(tmp_path / "ours"))  # with the random numbers of then
    eager.train_in_eager(0.1, epochs=1)
    ours.accelerator.load_state(str(tmp_path / "eager"))
    ours.train(iteration, epochs=1)
    assert_same(eager, ours)
    assert_within_budget(3 * 7)


def test_the_norm_is_summed_in_the_order_of_the_model():
    """Which `clip_grad_norm_(model.parameters(), ...)` has, in whatever groups they are."""
    loops = []
    for planned in (False, True):
        loop = Loop()
        groups = [{"params": []}, {"params": []}]
        for parameter in loop.model.parameters():
            groups[parameter.dim() == 2]["params"].append(parameter)
        loop.optimizer = loop.accelerator.prepare(torch.optim.SGD(groups, 0.05))
        torch.manual_seed(2)
        if planned:
            loop.train(loop.planned(0.01))
        else:
            loop.train_in_eager(0.01)
        loops.append(loop)
    assert_same(*loops)


def test_a_loss_within_autocast_and_an_optimizer_that_is_not_prepared():
    class Autocast(Loop):
        def loss_of(self, batch):
            with self.accelerator.autocast():
                return super().loss_of(batch)

    eager, ours = Autocast(mixed_precision="bf16"), Autocast(mixed_precision="bf16")
    torch.manual_seed(2)
    eager.train_in_eager(None)
    torch.manual_seed(2)
    prepared, ours.optimizer = ours.optimizer, ours.optimizer.optimizer
    ours.train(ours.planned(None))
    ours.optimizer = prepared
    assert_same(eager, ours)


def extra_parameter(loop):
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def unprepared(loop):
    in_float16(loop.accelerator, 2.0**8)
    loop.optimizer = loop.optimizer.optimizer


def processes(loop):
    loop.accelerator.state.distributed_type = accelerate.utils.DistributedType.MULTI_CPU


def compiles(loop):
    loop.accelerator.state.dynamo_plugin.backend = accelerate.utils.DynamoBackend.AOT_EAGER


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (extra_parameter, "no prepared model has"),
        (unprepared, "mixed_precision=fp16 scales the loss, and this optimizer"),
        (processes, "more than one device"),
        (compiles, "dynamo_plugin"),
    ],
)
def test_what_a_loop_cannot_have_is_refused(change, reason):
    loop = Loop()
    change(loop)
    with pytest.raises(runtime.OptionsError, match=reason):
        loop.planned(1.0)
    with pytest.raises(runtime.OptionsError, match="bugdet"):
        loop.planned(1.0, bugdet=1)


def refilled(batch):
    batch[0].add_(1)


def exchanged(batch):
    batch[1] = torch.zeros_like(batch[1])


def emptied(batch):
    batch.clear()


@pytest.mark.parametrize("overwrite", [refilled, exchanged, emptied])
def test_a_batch_that_is_overwritten_while_it_waits_is_refused(overwrite):
    """The loop in eager has its loss of before; the next iteration begins without it."""
    loop = Loop(gradient_accumulation_steps=2)
    iteration = loop.planned(None)
    first, second, third, fourth = ([*batch] for batch in list(loop.batches)[:4])
    calls = []
    for batch in (first, second, third, fourth):
        with loop.accelerator.accumulate(loop.model):
            if batch is second:
                overwrite(first)
                with pytest.raises(runtime.RuntimeRefusalError, match="micro-batch 0 of 2 was ov"):
                    iteration(batch)
            else:
                calls.append(len(iteration(batch)))
    assert calls == [0, 0, 2]


class Changing:
    """Batches before each of which the accelerator's accumulation changes."""

    def __init__(self, loop):
        self.loop, self.batches = loop, loop.batches

    def __iter__(self):
        for batch, steps in zip(self.batches, (4, 2, 3, 4, 1, 5, 3), strict=True):
            self.loop.accelerator.gradient_accumulation_steps = steps
            yield batch


def test_each_loss_is_divided_by_the_accumulation_of_its_batch():
    eager, ours = Loop(), Loop()
    for loop in (eager, ours):
        loop.batches = Changing(loop)
    torch.manual_seed(2)
    eager.train_in_eager(0.1)
    torch.manual_seed(2)
    ours.train(ours.planned(0.1))
    assert_same(eager, ours)
