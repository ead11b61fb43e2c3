"""Whole iterations of Lightning's Trainer: numbers, logs and checkpoints of Lightning."""

import itertools
import os
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
from torch import nn

import coop_plan
from coop_plan import runtime
from tests.runtime.iterating import OPTIMIZERS, WIDTH, Net, assert_within_budget

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
        self.log_dict({"right": (scores.argmax(1) == y).float().mean(), "share": 1 / len(x)})
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


CASES = [
    ({}, {}),
    ({"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}, {"optimizer": "momentum"}),
    ({"accumulate_grad_batches": 2, "precision": "bf16-mixed"}, {"optimizer": "adam"}),
    (
        {"precision": "64-true", "gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        {"optimizer": "adafactor"},
    ),
]


@pytest.mark.parametrize(("arguments", "module"), CASES)
def test_a_trainer_has_its_numbers(arguments, module, tmp_path):
    """With an epoch that ends within an accumulation: losses, logs, states, checkpoints."""
    eager = fit(trainer_of(tmp_path, **arguments), Module(**module))
    ours = fit(trainer_of(tmp_path, planned(), **arguments), Module(**module))
    assert_equal_fits(eager, ours, tmp_path)
    assert_within_budget(2 * -(-7 // arguments.get("accumulate_grad_batches", 1)))


@pytest.mark.parametrize(
    ("arguments", "optimizer"),
    [
        ({}, "adamw"),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, "momentum"),
        ({"accumulate_grad_batches": 3}, "adamw-fused"),
    ],
)
def test_a_trainer_in_float16_has_its_numbers(arguments, optimizer, tmp_path):
    """With steps that its scaler leaves out; the scaler's state is in checkpoints."""
    fits = []
    for callbacks in ([], [planned()]):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
        half = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
        trainer = trainer_of(tmp_path, *callbacks, plugins=half, **arguments)
        fits.append(fit(trainer, Module(optimizer)))
    assert_equal_fits(*fits, tmp_path)
    assert scaler.get_scale() < 2.0**22
    assert_within_budget(2 * -(-7 // arguments.get("accumulate_grad_batches", 1)))


def test_a_trainer_saves_and_resumes(tmp_path):
    """From eager to planned and back, with a checkpoint in the middle of an epoch."""
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}

    def fitted(name, *callbacks, **given):
        every = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / name, "{step}", every_n_train_steps=3, save_top_k=-1
        )
        return fit(trainer_of(tmp_path, every, *callbacks, **arguments), Module(), **given)

    for name, callbacks in (("eager", []), ("ours", [planned("min")])):
        fitted(name, *callbacks)
    names = [f"step={step}.ckpt" for step in (3, 6)]
    states = [
        [torch.load(tmp_path / folder / name, weights_only=False) for name in names]
        for folder in ("eager", "ours")
    ]
    for state in itertools.chain(*states):
        state.pop("callbacks")
    assert_same(*states)
    path = {"ckpt_path": tmp_path / "eager" / names[0], "weights_only": False}
    eager = fitted("eager-again", **path)
    ours = fitted("ours-again", planned("min", link="8GB/s", method="coop-offline"), **path)
    other = fitted("other", **path | {"ckpt_path": tmp_path / "ours" / names[0]})
    assert_equal_fits(eager, ours, tmp_path)
    assert_equal_fits(eager, other, tmp_path)


class Warm(Module):
    """Steps by the optimizer itself, and sets learning rates before and after."""

    def optimizer_step(self, epoch, index, optimizer, closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.trainer.global_step)
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * epoch


class Growing(lightning.pytorch.callbacks.GradientAccumulationScheduler):
    def __init__(self):
        super().__init__({0: 1, 1: 3})


def test_a_trainer_validates_warms_up_and_changes_its_accumulation(tmp_path):
    fits = []
    for callbacks in ([], [planned()]):
        trainer = trainer_of(tmp_path, Growing(), *callbacks, val_check_interval=3)
        torch._dynamo.reset()
        torch.manual_seed(2)
        trainer.fit(Warm(), loader(), loader(60))
        fits.append(trainer)
    assert_equal_fits(*fits, tmp_path)
    assert_within_budget(7 + 3)


def test_batches_of_unknown_number(tmp_path):
    """The last accumulation is known to be incomplete at its end."""
    fits = []
    for callbacks in ([], [planned()]):
        trainer = trainer_of(tmp_path, *callbacks, accumulate_grad_batches=3, max_epochs=1)
        torch._dynamo.reset()
        torch.manual_seed(2)
        batches = [*loader(110)]
        trainer.fit(Module(), (batch for batch in batches))
        fits.append(trainer)
    assert_equal_fits(*fits, tmp_path)
    assert_within_budget(2)
    assert len(batches) == 4


class Stops(lightning.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == 4

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx == 4:
            raise StopIteration


class Plain(Module):
    """Without all that a micro-batch without a step changes: statistics, random numbers, logs."""

    def __init__(self):
        super().__init__(drop=0)
        self.net.norm = nn.Identity()

    def training_step(self, batch, index):
        return {"loss": super().training_step(batch, index)["loss"], "scores": batch[0]}

    def log(self, *_, **__):
        pass


def test_an_iteration_that_ends_early_updates_nothing(tmp_path):
    """An epoch skips its rest within an accumulation, another stops the training within one."""
    arguments = {"accumulate_grad_batches": 3, "max_epochs": 5}
    eager = fit(trainer_of(tmp_path, Stops(), **arguments), Plain())
    ours = fit(trainer_of(tmp_path, Stops(), planned(), **arguments), Plain())
    assert_equal_fits(eager, ours, tmp_path)
    assert_within_budget(2)


def test_a_trainer_without_the_callback_is_that_of_lightning(tmp_path):
    """After a training that it planned, and after one that failed."""

    class Fails(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2:
                raise ValueError("as of a disk")

    eager, ours = (
        fit(trainer_of(tmp_path, *callbacks), Module()) for callbacks in ([], [planned()])
    )
    coop_plan.clear_reports()
    for callback in (None, Fails()):
        for trainer in (eager, ours):
            trainer.callbacks = [trainer.callbacks[0], *([callback] if callback else ())]
            trainer.fit_loop.max_epochs += 1
            with suppress(ValueError):
                fit(trainer, trainer.lightning_module)
        assert_equal_fits(eager, ours, tmp_path)
    assert not coop_plan.reports()


class Skips(Module):
    def optimizer_step(self, epoch, index, optimizer, closure):
        closure()


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Fetches(Module):
    def training_step(self, dataloader_iter):
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


class Norms(lightning.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        lightning.pytorch.utilities.grad_norm(pl_module, 2)


class Averages(lightning.Callback):
    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        pass


class Sees(Module):
    def on_after_backward(self):
        pass


class Clips(Module):
    def configure_gradient_clipping(self, *args, **kwargs):
        pass


@pytest.mark.parametrize(
    ("arguments", "kind", "callbacks", "reason"),
    [
        ({}, Manual, [], "automatic_optimization=False"),
        ({}, Fetches, [], "dataloader_iter"),
        ({}, Sees, [], "Sees.on_after_backward"),
        ({}, Clips, [], "Clips.configure_gradient_clipping"),
        ({}, Module, [Norms()], "Norms.on_before_optimizer_step"),
        ({}, Module, [Averages()], "Averages.on_before_zero_grad"),
        ({}, Module, [lightning.pytorch.callbacks.StochasticWeightAveraging(0.1)], "Stochastic"),
        ({"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}, Module, [], '"value"'),
    ],
)
def test_what_a_trainer_cannot_have_is_refused(arguments, kind, callbacks, reason, tmp_path):
    trainer = trainer_of(tmp_path, *callbacks, planned(), **{"max_epochs": 1} | arguments)
    with pytest.raises(runtime.OptionsError, match=reason):
        fit(trainer, kind())
    with pytest.raises(runtime.OptionsError, match="bugdet"):
        planned(bugdet=1)


def test_a_strategy_of_several_devices_is_refused(tmp_path):
    with patch.dict(os.environ):  # where Lightning names the process group
        trainer = trainer_of(tmp_path, planned(), strategy="ddp")
        try:
            with pytest.raises(runtime.OptionsError, match="DDPStrategy"):
                fit(trainer, Module())
        finally:
            torch.distributed.destroy_process_group()


def test_a_compiled_module_is_refused(tmp_path):
    from coop_plan.runtime.integrations.lightning import Budget

    for callbacks, module in (([], torch.compile(Module())), ([Budget("50%")], Module())):
        with pytest.raises(runtime.OptionsError, match="a second time"):
            fit(trainer_of(tmp_path, *callbacks, planned()), module)


def test_a_closure_without_a_step_is_refused(tmp_path):
    with pytest.raises(runtime.RuntimeRefusalError, match=r"Skips.optimizer_step called its closu"):
        fit(trainer_of(tmp_path, planned()), Skips())


def test_validation_within_an_iteration_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, planned(), accumulate_grad_batches=2, val_check_interval=3)
    with pytest.raises(runtime.RuntimeRefusalError, match="val_check_interval"):
        trainer.fit(Module(), loader(), loader())


class Refills(lightning.Callback):
    """As a loader that has one buffer for all batches."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        batch[0].zero_()


def test_a_batch_that_is_overwritten_while_it_waits_is_refused(tmp_path):
    fit(trainer_of(tmp_path, Refills(), planned()), Module())
    with pytest.raises(runtime.RuntimeRefusalError, match="micro-batch 0 of 2 was overwritten"):
        fit(trainer_of(tmp_path, Refills(), planned(), accumulate_grad_batches=2), Module())


class Changes(lightning.Callback):
    """Changes the accumulation at each batch."""

    def __init__(self, counts):
        self.counts = counts

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.accumulate_grad_batches = self.counts[batch_idx]


def test_each_loss_is_divided_by_the_accumulation_of_its_batch(tmp_path):
    """Where Lightning begins with new gradients; else it would add those of before: refused."""
    counts = (4, 2, 2, 4, 2, 6, 3)
    eager = fit(trainer_of(tmp_path, Changes(counts)), Module())
    ours = fit(trainer_of(tmp_path, Changes(counts), planned()), Module())
    assert_equal_fits(eager, ours, tmp_path)
    for counts, batch in (((2, 2, 4, 2, 2, 2, 2), 2), ((3, 4, 2, 3, 1, 1, 1), 2)):
        with pytest.raises(runtime.RuntimeRefusalError, match=f"batch {batch} is where"):
            fit(trainer_of(tmp_path, Changes(counts), planned()), Module())
