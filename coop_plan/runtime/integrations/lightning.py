"""Lightning: `Trainer(callbacks=[Budget("50%")])`, which plans `training_step`.

`callbacks=[IterationBudget("50%")]` plans the optimizer's updates, too.

`LightningModule.compile()` compiles `forward`, which a Trainer does not call.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from coop_plan.runtime.errors import RuntimeRefusalError
from coop_plan.runtime.integrations.inplace import Replacements, compile_method, coop, refuse
from coop_plan.runtime.integrations.internals import (
    accumulates,
    is_compiled,
    log_of_batch,
    zero_grad_of,
)
from coop_plan.runtime.integrations.waiting import WaitingBatches
from coop_plan.runtime.reports import steps_run
from coop_plan.runtime.torch_internals.ops import tree_map
from coop_plan.runtime.whole_iteration.train_iteration import TrainIteration, train_iteration

LOGGING = ("log", "log_dict")


class Budget(Callback):
    """Plans the module's `training_step` within a budget while it is fitted.

    Args:
        budget: as in `torch.compile(..., options={"budget": ...})`; default `COOP_BUDGET`.
        options: the backend's other options.

    Raises:
        OptionsError: an option is invalid.
        RuntimeRefusalError: after the first batch, if nothing was planned in it.
    """

    def __init__(self, budget: int | str | None = None, **options: Any) -> None:
        self._arguments = coop(budget, options)
        self._undo: Callable[[], None] | None = None
        self._before = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._before = steps_run()
        # Logging cannot be traced; it runs after the planned graph.
        for name in LOGGING:
            untraced: Any = torch.compiler.disable
            setattr(pl_module, name, untraced(getattr(pl_module, name)))
        self._undo = compile_method(pl_module, "training_step", self._arguments)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._before >= 0 and steps_run() == self._before:
            raise RuntimeRefusalError(
                "the Trainer ran a batch in which nothing was planned: see the log for the reason"
            )
        self._before = -1

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
            for name in LOGGING:
                delattr(pl_module, name)


class IterationBudget(Callback):
    """Plans whole iterations within a budget while a module is fitted: with optimizer's updates.

    The last micro-batch of an iteration runs all of them and the updates. Before it,
    `on_train_batch_end` has no outputs, and nothing of `training_step` is logged.

    Args:
        budget: as in `coop_plan.train_iteration`; default `COOP_BUDGET`.
        options: the other options of `train_iteration`.

    Raises:
        OptionsError: at once, if an option is invalid; when training begins, if the Trainer or the
            module has something that does not go with it.
        RuntimeRefusalError: when validation begins within an iteration, `accumulate_grad_batches`
            changes within one, or a batch is overwritten while it waits.
    """

    def __init__(self, budget: int | str | None = None, **options: Any) -> None:
        self._options = coop(budget, options)["options"]
        self._replaced = Replacements()
        self._waiting = WaitingBatches()
        """Arguments of `training_step` for the micro-batches of the iteration so far."""
        self._began = False
        self._logged: list[tuple[Any, Any]] = []
        """Arguments of `log` in the micro-batch that is traced."""
        self._made: list[tuple[Any, Any]] = []
        """For each micro-batch of a call: the output of `training_step`, what it logged."""
        self._stepping = False
        self._iteration: TrainIteration

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._end()
        _refuse(trainer, pl_module)
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop.automatic_optimization

        def loss_of(batch: tuple[Any, int]) -> Any:
            arguments, count = batch
            with trainer.precision_plugin.train_step_context():
                output = pl_module.training_step(*arguments)
            self._made.append((tree_map(_detached, output), [*self._logged]))
            self._logged.clear()
            loss = output["loss"] if isinstance(output, Mapping) else output
            return None if loss is None else loss / count

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(value, torch.Tensor):
                value = value.detach().clone()  # before it is overwritten
            self._logged.append(((name, value, *args), kwargs))

        def training_step(*_: Any) -> Any:
            if not self._stepping:
                raise RuntimeRefusalError(
                    f"{type(pl_module).__name__}.optimizer_step called its closure, which updates"
                    " the parameters: pass it to optimizer.step(closure=...), or use Budget"
                )
            return self._run(trainer, pl_module, log)

        def optimizer_step(*args: Any, **kwargs: Any) -> Any:
            self._stepping = True
            try:
                return type(strategy).optimizer_step(strategy, *args, **kwargs)
            finally:
                self._stepping = False

        def run(optimizer: Any, index: int, arguments: Mapping[str, Any]) -> Any:
            count = trainer.accumulate_grad_batches
            if index == 0:
                self._waiting.clear()
            if self._began and (index % count == 0) == bool(self._waiting):
                raise RuntimeRefusalError(
                    f"batch {index} is where Lightning would accumulate {count} batches with"
                    " gradients of an earlier iteration: have on_train_epoch_start change"
                    " accumulate_grad_batches, and batches that are not None"
                )
            self._began = True
            self._waiting.add(tuple(arguments.values()), count)
            if not accumulates(trainer):
                return type(loop).run(loop, optimizer, index, arguments)
            zero_grad = zero_grad_of(loop, index, optimizer)
            if zero_grad is not None:
                zero_grad()
            return {}

        (optimizer,) = trainer.optimizers
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options = {**self._options, "scaler": scaler}
        self._iteration = train_iteration(
            loss_of, optimizer, clip_norm=trainer.gradient_clip_val or None, **options
        )
        self._iteration.serve_loop()
        if scaler is not None:
            self._replaced.set(scaler, "unscale_", lambda _: None)  # the iteration did it
        self._replaced.set(loop, "run", run)
        self._replaced.set(strategy, "optimizer_step", optimizer_step)
        self._replaced.set(strategy, "training_step", training_step)
        self._replaced.set(strategy, "backward", lambda loss, *_, **__: loss)

    def _run(self, trainer: Any, module: Any, log: Callable[..., None]) -> Any:
        """Run the iteration and log; returns the output of the last `training_step`."""
        given = self._waiting.take()
        self._made.clear()
        self._logged.clear()
        module.log = log
        try:
            self._iteration(*given)
        finally:
            del module.log
        with trainer.precision_plugin.train_step_context():  # numbers have its dtype
            for ((batch, *_), _), (_, logged) in zip(given, self._made, strict=True):
                log_of_batch(trainer, batch)
                for args, kwargs in logged:
                    module.log(*args, **kwargs)
        output, _ = self._made.pop()
        self._made.clear()
        return output

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._waiting and not trainer.should_stop:
            raise RuntimeRefusalError(
                "validation within an iteration would find buffers of before its micro-batches:"
                " have val_check_interval be a multiple of accumulate_grad_batches"
            )

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        self._replaced.undo()
        self._waiting.clear()
        self._began = False


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


GRADIENT_HOOKS = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
)
BACKWARD = ("backward", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients")


def _refuse(trainer: Any, module: Any) -> None:
    """Raise an OptionsError for what iterations of a Trainer and its module cannot have."""
    hooks = itertools.product([module, *trainer.callbacks], GRADIENT_HOOKS)
    own = [
        f"{type(one).__name__}.{name}"
        for one, name in (*hooks, *((module, name) for name in BACKWARD))
        if is_overridden(name, one)
    ]
    reasons = {
        f"{', '.join(own)} would find no gradients: use on_train_batch_start or"
        " on_train_batch_end": own,
        "training_step takes a dataloader_iter: have it take a batch": (
            "dataloader_iter" in inspect.signature(module.training_step).parameters
        ),
        "automatic_optimization=False steps within training_step: use train_iteration there": (
            not module.automatic_optimization
        ),
        "torch.compile and Budget compile the module a second time: leave them out": (
            is_compiled(module) or any(isinstance(one, Budget) for one in trainer.callbacks)
        ),
        "StochasticWeightAveraging runs training_step without a backward: use WeightAveraging": (
            any(isinstance(one, StochasticWeightAveraging) for one in trainer.callbacks)
        ),
        'gradient_clip_algorithm="value" is not planned: use "norm"': (
            trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value"
        ),
        f"{type(trainer.strategy).__name__} is for several devices: use Budget": (
            not isinstance(trainer.strategy, SingleDeviceStrategy)
        ),
    }
    refuse(reasons)
