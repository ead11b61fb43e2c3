"""Accelerate: `Accelerator(dynamo_plugin=budget_plugin("50%"))`.

Accelerate's own plugin accepts a fixed list of backends. `plan_iterations(accelerator, ...)` plans
the optimizer's updates, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin

from coop_plan.runtime.integrations.inplace import coop, refuse
from coop_plan.runtime.integrations.internals import prepared_models
from coop_plan.runtime.integrations.waiting import WaitingBatches
from coop_plan.runtime.whole_iteration.train_iteration import train_iteration


@dataclass
class _Plugin(TorchDynamoPlugin):  # type: ignore[misc,unused-ignore]  # untyped
    """Plugin with a backend that Accelerate accepts and arguments for `torch.compile`."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        kept = {"dynamic": self.dynamic, "fullgraph": self.fullgraph, "disable": self.disable}
        return kept | self.arguments


def budget_plugin(budget: int | str | None = None, **options: Any) -> TorchDynamoPlugin:
    """Plugin with which `Accelerator.prepare` plans the model's step within a budget.

    Args:
        budget: as in `torch.compile(..., options={"budget": ...})`; default `COOP_BUDGET`.
        options: the backend's other options.

    Raises:
        OptionsError: an option is invalid.
    """
    return _Plugin(backend=DynamoBackend.AOT_EAGER, arguments=coop(budget, options))


def plan_iterations(
    accelerator: Accelerator,
    loss_fn: Callable[[Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    budget: int | str | None = None,
    *,
    clip_norm: float | None = None,
    **options: Any,
) -> "PlannedIterations":
    """Plan whole iterations of an Accelerator's loop, the optimizer's updates included.

    With `iteration = plan_iterations(accelerator, loss_fn, optimizer, "50%", clip_norm=1.0)` the
    call `iteration(batch)` does, within the budget and with equal numbers, what this does:

        loss = loss_fn(batch)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    Args:
        accelerator: prepared the model that `loss_fn` calls.
        loss_fn: returns the scalar loss of one batch.
        optimizer: prepared by the accelerator, or not.
        budget: as in `coop_plan.train_iteration`; default `COOP_BUDGET`.
        clip_norm: largest norm of all gradients together.
        options: the other options of `train_iteration`.

    Raises:
        OptionsError: at once, if an option is invalid, or the accelerator has something that does
            not go with it.
    """
    given = coop(budget, options)["options"]
    parameters = [p for model in prepared_models(accelerator) for p in model.parameters()]
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    refuse(
        {
            "the optimizer has a parameter that no prepared model has: pass the model to"
            " accelerator.prepare": clip_norm is not None and not updated <= {*parameters},
            "dynamo_plugin compiles the model a second time: leave it out": (
                accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
            ),
            "mixed_precision=fp16 scales the loss, and this optimizer does not unscale gradients:"
            " pass it to accelerator.prepare": (
                accelerator.scaler is not None and not isinstance(optimizer, AcceleratedOptimizer)
            ),
            f"{accelerator.distributed_type} is more than one device: use budget_plugin": (
                accelerator.distributed_type != DistributedType.NO
            ),
        }
    )
    return PlannedIterations(accelerator, loss_fn, optimizer, parameters, clip_norm, given)


class PlannedIterations:
    """Iterations of an Accelerator's loop; call it with each batch, within `accumulate`."""

    def __init__(
        self,
        accelerator: Accelerator,
        loss_fn: Callable[[Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        clip_norm: float | None,
        options: dict[str, Any],
    ) -> None:
        self._accelerator, self._optimizer = accelerator, optimizer
        self._waiting = WaitingBatches()
        self._losses: list[torch.Tensor] = []

        def loss_of(batch: tuple[Any, int]) -> Any:
            given, count = batch
            loss = loss_fn(given)
            self._losses.append(loss.detach())
            return loss / count

        updated = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        options = {**options, "clip_norm": clip_norm, "scaler": accelerator.scaler}
        self._iteration = train_iteration(loss_of, updated, **options)
        self._iteration.serve_loop()
        self._iteration.sum_norm_in_order_of(parameters)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the last iteration's gradients before they were clipped; else None."""
        return self._iteration.grad_norm

    def __call__(self, batch: Any) -> list[torch.Tensor]:
        """The losses of the iteration's batches at its last one, which runs them; else none.

        Raises:
            RuntimeRefusalError: the iteration cannot be planned, or a batch was overwritten while
                it waited.
            planner.InfeasibleBudgetError: the budget cannot be met.
        """
        self._waiting.add(batch, self._accelerator.gradient_accumulation_steps)
        if not self._accelerator.sync_gradients:
            return []
        self._losses.clear()
        self._iteration(*self._waiting.take())
        self._optimizer.step()
        return [*self._losses]
