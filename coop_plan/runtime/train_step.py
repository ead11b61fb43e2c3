"""`train_step`: compiles a training step that is planned, or raises."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from coop_plan.runtime import unplanned_calls
from coop_plan.runtime.errors import NothingPlannedError
from coop_plan.runtime.integrations.inplace import coop

P = ParamSpec("P")
T = TypeVar("T")


def train_step(
    step: Callable[P, T], budget: int | str | None = None, **options: object
) -> Callable[P, T]:
    """Compile `step` as one graph, planned within a budget; call `backward` on its result.

    As `torch.compile(step, backend="coop", fullgraph=True, options={"budget": budget, ...})`, but
    the first call with gradients raises if nothing was planned.

    Args:
        step: a model, or a function of a batch that returns its loss.
        budget: bytes, `"12GiB"`, `"60%"` or `"min"` [default: environment variable `COOP_BUDGET`].
        options: the backend's other options (`docs/training.md`).

    Raises:
        OptionsError: at once, if an option is invalid.
        NothingPlannedError: after the first call with gradients, if nothing was planned in it.
        torch._dynamo.exc.Unsupported: in a call, at a graph break, with the line.
    """
    compiled = torch.compile(step, fullgraph=True, **coop(budget, options))
    name = getattr(step, "__qualname__", type(step).__name__)
    planned = False

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal planned
        before = unplanned_calls.planned_forwards()
        made = compiled(*args, **kwargs)
        if not planned and torch.is_grad_enabled():
            planned = unplanned_calls.planned_forwards() > before
            if not planned:
                raise NothingPlannedError(
                    f"nothing was planned in the first training call of {name}: it must run PyTorch"
                    " ops and return something that needs a gradient, and leave the backward to"
                    " loss.backward()"
                )
        return made

    return run if isinstance(step, torch.nn.Module) else functools.wraps(step)(run)
