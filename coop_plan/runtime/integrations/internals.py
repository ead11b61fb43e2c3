"""Private names of Accelerate and Lightning, which have no public ones for them."""

from collections.abc import Callable
from typing import Any


def prepared_models(accelerator: Any) -> list[Any]:
    """Models that an Accelerator prepared, in order."""
    return list(accelerator._models)


def accumulates(trainer: Any) -> bool:
    """True if Lightning's Trainer does not step after the current micro-batch."""
    return bool(trainer.fit_loop._should_accumulate())


def zero_grad_of(loop: Any, batch_index: int, optimizer: Any) -> Callable[[], None] | None:
    """The function that zeroes gradients before a micro-batch, if Lightning would do so there."""
    made: Callable[[], None] | None = loop._make_zero_grad_fn(batch_index, optimizer)
    return made


def log_of_batch(trainer: Any, batch: Any) -> None:
    """Let Lightning's log take the size of `batch` as that of the current one."""
    trainer._results.batch, trainer._results.batch_size = batch, None


def is_compiled(module: Any) -> bool:
    """True if a LightningModule was compiled by `torch.compile`."""
    return module._compiler_ctx is not None
