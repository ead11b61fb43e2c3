"""Whole iterations of Lightning's Trainer: numbers, logs and checkpoints of the Trainer in eager."""

import itertools
from contextlib import suppress

import pytest
import torch
from torch import nn

import coop_plan
from coop_plan import runtime
from tests.runtime.iterating import OPTIMIZERS, WIDTH, Net, equal

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own

ROWS, BATCH = 210, 32  # 7 batches an epoch, of which the last one is smaller


class Module(lightning.LightningModule):
    """Logs by all means within `training_step`, and returns predictions, too."""

    def __init__(self, optimizer="adamw", depth=2, drop=0.2):
        super().__init__()
        self.net = Net(depth, drop)
        self.optimizer = optimizer

    def training_step(self, batch, index):
        x, y = batch
        scores = self.net(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        self.log_dict({"right": (scores.argmax(1) == y).float().mean(), "rows": len(x)})
        self.log("largest", scores.max(), reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": loss, "scores": scores}

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validation", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        made = OPTIMIZERS[self.optimizer](self.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.7)
        return [made], [{"scheduler": schedule, "interval": "step"}]


class Logger(lightning.pytorch.loggers.logger.DummyLogger):
    """Keeps all that is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, metrics))


class Outputs(lightning.Callback):
    """Keeps the outputs of the batches with a step, and the parameters after each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not trainer.fit_loop._should_accumulate():
            self.seen += [outputs["loss"], outputs["scores"].detach()]
        self.seen += [p.detach().clone() for p in pl_module.parameters()]


def loader(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, WIDTH, generator=generator)
    y = torch.randint(0, WIDTH, (rows,), generator=generator)
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, BATCH, shuffle=True)


def trainer_of(folder, *callbacks, **arguments):
    given = {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False}
    given |= {"log_every_n_steps": 1, "enable_model_summary": False, "logger": Logger()}
    return lightning.Trainer(
        default_root_dir=folder, callbacks=[Outputs(), *callbacks], **given | arguments
    )


def planned(budget="60%", **options):
    from coop_plan.runtime.integrations.lightning import IterationBudget

    return IterationBudget(budget, **{"method": "coop"} | options)


def fit(trainer, module, **given):
    torch._dynamo.reset()
    torch.manual_seed(2)  # of the order of the rows, and of dropout
    trainer.fit(module, loader(), **given)
    return trainer


def checkpoint_of(trainer, path):
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=False)


def assert_same(first, second):
    """Equal to the bit: tensors in nested states, and all other values."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second) or (first.isnan().all() and second.isnan().all())
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        assert_same([first[key] for key in first], [second[key] for key in first])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


def assert_equal_fits(eager, ours, folder):
    assert_same(eager.logger.lines, ours.logger.lines)
    assert_same(eager.callback_metrics, ours.callback_metrics)
    assert_same(eager.callbacks[0].seen, ours.callbacks[0].seen)
    states = [checkpoint_of(one, folder / f"{i}.ckpt") for i, one in enumerate((eager, ours))]
    for state in states:
        state.pop("callbacks")  # paths of checkpoints
    assert_same(*states)


def assert_within_budget(steps):
    reports = coop_plan.reports()
    assert sum(report.steps_run for report in reports) == steps
    for report in reports:
        assert {op.phase for op in report.graph.ops} == {"forward", "backward", "optimizer"}
        assert report.outside_bytes == 0
        assert report.measured_peak_bytes <= report.budget_bytes


CASES = [
    ({}, {}),
    ({"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}, {"optimizer": "momentum"}),
    ({"accumulate_grad_batches": 2, "precision": "bf16-mixed"}, {"optimizer": "adam"}),
    ({"precision": "64-true", "gradient_clip_val": 0.5}, {"optimizer": "adafactor"}),
]


@pytest.mark.parametrize(("arguments", "module"), CASES)
def test_a_trainer_has_its_numbers(arguments, module, tmp_path):
    """With an epoch that ends within an accumulation: losses, logs, states, checkpoints."""
    eager = fit(trainer_of(tmp_path, **arguments), Module(**module))
    ours = fit(trainer_of(tmp_path, planned(), **arguments), Module(**module))
    assert_equal_fits(eager, ours, tmp_path)
    assert_within_budget(2 * -(-7 // arguments.get("accumulate_grad_batches", 1)))
