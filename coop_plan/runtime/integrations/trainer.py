"""transformers' Trainer and TRL's subclasses: `Trainer(..., callbacks=[Budget("50%")])`.

`TrainingArguments(torch_compile_backend=...)` accepts a fixed list of names, without options.
"""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from coop_plan.runtime.errors import OptionsError, RuntimeRefusalError
from coop_plan.runtime.integrations.inplace import compile_module, coop
from coop_plan.runtime.reports import steps_run


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
