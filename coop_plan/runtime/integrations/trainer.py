"""transformers' Trainer and TRL's subclasses: `Trainer(..., callbacks=[Budget("50%")])`.

`plan_iterations(trainer, "50%")` plans the optimizer's updates, too.

`TrainingArguments(torch_compile_backend=...)` accepts a fixed list of names, without options.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback

from coop_plan.runtime.errors import OptionsError, RuntimeRefusalError
from coop_plan.runtime.integrations.inplace import Replacements, compile_module, coop, refuse
from coop_plan.runtime.reports import steps_run
from coop_plan.runtime.whole_iteration.train_iteration import TrainIteration, train_iteration


class Budget(TrainerCallback):
    """Plans the step of the Trainer's model within a budget during `train()`.

    Args:
        budget: as in `torch.compile(..., options={"budget": ...})`; default `COOP_BUDGET`.
        options: the backend's other options.

    Raises:
        OptionsError: at once, if an option is invalid; when training begins, if the Trainer
            compiles the model, too.
        RuntimeRefusalError: after the first step, if nothing was planned in it.
    """

    def __init__(self, budget: int | str | None = None, **options: Any) -> None:
        self._arguments = coop(budget, options)
        self._undo: Callable[[], None] | None = None
        self._before = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any
    ) -> None:
        if args.torch_compile:
            raise OptionsError("torch_compile=True compiles the model a second time: leave it out")
        self._before = steps_run()
        self._undo = compile_module(model, self._arguments)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._before >= 0 and steps_run() == self._before:
            raise RuntimeRefusalError(
                "the Trainer made a step in which nothing was planned: see the log for the reason"
            )
        self._before = -1

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None


def plan_iterations(trainer: Trainer, budget: int | str | None = None, **options: Any) -> None:
    """Plan whole iterations of a Trainer during `train()`, the optimizer's updates included.

    A second call for a Trainer replaces the first.

    The arguments `gradient_accumulation_steps` and `max_grad_norm` are those of the Trainer. The
    first micro-batch of an iteration runs all of them and the updates.

    Args:
        trainer: its `training_step` is that of `transformers.Trainer`.
        budget: as in `coop_plan.train_iteration`; default `COOP_BUDGET`.
        options: the other options of `train_iteration`.

    Raises:
        OptionsError: at once, if an option is invalid; when training begins, if the Trainer has
            an argument that does not go with it.
    """
    made = _Iterations(trainer, coop(budget, options)["options"])
    trainer.remove_callback(_Iterations)
    trainer.add_callback(made)


class _Iterations(TrainerCallback):
    """Replaces methods of a Trainer and its Accelerator from begin to end of the training."""

    def __init__(self, trainer: Trainer, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._options = options
        self._replaced = Replacements()
        self._given: tuple[list[Any], Any] = ([], None)
        self._losses: list[torch.Tensor] = []
        self._iteration: TrainIteration

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any
    ) -> None:
        trainer, accelerator = self._trainer, self._trainer.accelerator
        self._replaced.undo()  # what a training that failed left
        self._losses.clear()
        _refuse(trainer)
        model = trainer.model_wrapped

        def loss_of(batch: tuple[Any, Any]) -> Any:
            inputs, items = batch
            scaled = trainer.loss_is_scaled_for_ga
            if scaled is None:
                counted = trainer.model_accepts_loss_kwargs and items is not None
                scaled = counted or trainer.compute_loss_func is not None
            loss: Any = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            return loss if scaled else loss / trainer.current_gradient_accumulation_steps

        def training_step(model: Any, *_: Any) -> torch.Tensor:
            if not self._losses:
                model.train()
                optimizer.train()
                batches, items = self._given
                with trainer.compute_loss_context_manager():
                    made = self._iteration(*((dict(inputs), items) for inputs in batches))
                self._losses = made if isinstance(made, list) else [made]
            return self._losses.pop(0)

        def get_batch_samples(*given: Any) -> tuple[list[Any], Any]:
            if self not in trainer.callback_handler.callbacks:  # after a training that failed
                self._replaced.undo()
            self._losses.clear()
            self._given = type(trainer).get_batch_samples(trainer, *given)
            return self._given

        options = {**self._options, "scaler": accelerator.scaler}
        self._iteration = train_iteration(
            loss_of, optimizer.optimizer, clip_norm=args.max_grad_norm or None, **options
        )
        self._iteration.serve_loop()
        self._iteration.sum_norm_in_order_of(model.parameters())
        replace = self._replaced.set
        replace(trainer, "training_step", training_step)
        replace(trainer, "get_batch_samples", get_batch_samples)
        replace(accelerator, "clip_grad_norm_", lambda *_, **__: self._iteration.grad_norm)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._replaced.undo()


def _refuse(trainer: Trainer) -> None:
    """Raise an OptionsError for arguments of a Trainer that its iterations cannot have."""
    args, accelerator, optimizer = trainer.args, trainer.accelerator, trainer.optimizer
    assert optimizer is not None
    callbacks = trainer.callback_handler.callbacks
    own = [
        name
        for name in ("training_step", "_prepare_inputs", "_clip_grad_norm")
        if getattr(getattr(trainer, name, None), "__func__", None)
        is not getattr(Trainer, name, None)
    ]
    amid = [
        f"{type(one).__name__}.{name}"
        for one, name in itertools.product(callbacks, ("on_substep_end", "on_pre_optimizer_step"))
        if getattr(type(one), name) is not getattr(TrainerCallback, name)
    ]
    reasons = {
        f"{type(trainer).__name__}.{', '.join(own)} would not run: override compute_loss": bool(
            own
        ),
        f"{', '.join(amid)} would find the updates done: use on_step_begin or on_step_end": (
            bool(amid)
        ),
        "torch_compile=True and Budget compile the model a second time: leave them out": (
            args.torch_compile or any(isinstance(one, Budget) for one in callbacks)
        ),
        f"optim={args.optim} updates in the backward: use another": "lomo" in args.optim,
        "the optimizer has a parameter that the model has not, and that would be clipped, too": (
            not {p for group in optimizer.param_groups for p in group["params"]}
            <= {*trainer.model_wrapped.parameters()}
        ),
        f"{accelerator.distributed_type} is more than one device: use Budget": (
            args.n_gpu > 1 or accelerator.distributed_type != DistributedType.NO
        ),
    }
    refuse(reasons)
