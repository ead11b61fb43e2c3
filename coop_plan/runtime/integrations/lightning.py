"""Lightning: `Trainer(callbacks=[Budget("50%")])`, which plans `training_step`.

`LightningModule.compile()` compiles `forward`, which a Trainer does not call.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback

from coop_plan.runtime.errors import RuntimeRefusalError
from coop_plan.runtime.integrations.inplace import compile_method, coop
from coop_plan.runtime.reports import steps_run

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
