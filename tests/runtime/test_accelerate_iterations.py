"""Whole iterations of a loop of Accelerate's: numbers of the loop in eager."""

import pytest
import torch
from torch import nn

import coop_plan
from coop_plan import runtime
from tests.runtime.iterating import OPTIMIZERS, WIDTH, Net, equal, state_of

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

    def __init__(self, optimizer="adamw", **arguments):
        self.accelerator = accelerate.Accelerator(cpu=True, **arguments)
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
                    self.rates += self.schedule.get_last_lr()

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
                    self.rates += self.schedule.get_last_lr()


def assert_same(eager, ours):
    assert equal(eager.losses, ours.losses)
    assert equal(eager.norms, ours.norms)
    assert eager.rates == ours.rates
    assert equal(eager.state(), ours.state())


def assert_within_budget(steps):
    reports = coop_plan.reports()
    assert sum(report.steps_run for report in reports) == steps
    for report in reports:
        assert {op.phase for op in report.graph.ops} == {"forward", "backward", "optimizer"}
        assert report.outside_bytes == 0
        assert report.measured_peak_bytes <= report.budget_bytes


CASES = [
    ({}, None),
    ({"gradient_accumulation_steps": 3, "optimizer": "momentum"}, 0.05),
    ({"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}, 0.5),
    ({"optimizer": "adafactor", "mixed_precision": "bf16"}, None),
]


@pytest.mark.parametrize(("arguments", "clip_norm"), CASES)
def test_a_loop_has_its_numbers(arguments, clip_norm):
    """With a last accumulation of an epoch that is incomplete."""
    eager, ours = Loop(**arguments), Loop(**arguments)
    torch.manual_seed(2)
    eager.train_in_eager(clip_norm)
    torch.manual_seed(2)
    ours.train(ours.planned(clip_norm))
    assert len(ours.losses) == 14
    assert_same(eager, ours)
    assert_within_budget(2 * -(-7 // arguments.get("gradient_accumulation_steps", 1)))
