"""Measured peak of the first training step after the one that compiles.

The step lies between two steps of an optimizer of the graph's parameters, whose hooks PyTorch
calls. Memory is counted from outside: on the CPU by the allocator's counter, on CUDA by PyTorch's
statistics, whose peaks are reset once.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from coop_plan.runtime.device.arena import process_bytes, reset_peak

Check = Callable[[int], None]
"""Gets the most bytes beyond those before the step; gradients of the step before count as free."""


def measure_next_step(
    device: torch.device, parameters: Iterable[torch.Tensor], check: Check
) -> None:
    """Call `check` once, at the end of the next whole step between two steps of one optimizer.

    Optimizers of other tensors are not measured. If all `parameters` are freed, `check` is not
    called.
    """
    _register_hook()
    if device.type == "cpu":
        process_bytes()  # the counter begins with the first call
    _pending.append(_Measurement(device, parameters, check))


class _Measurement:
    def __init__(
        self, device: torch.device, parameters: Iterable[torch.Tensor], check: Check
    ) -> None:
        self._device, self._check = device, check
        self._parameters: Any = WeakIdKeyDictionary(dict.fromkeys(parameters))
        self._hook: RemovableHandle | None = None  # of the optimizer whose step is measured
        self._before = 0
        self._ended = False

    @property
    def is_over(self) -> bool:
        """True if the step was measured or the tensors are freed."""
        return self._ended or not self._parameters

    def end(self) -> None:
        """Remove the hook, if it has one."""
        if self._hook is not None:
            self._hook.remove()

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Start of a step of this optimizer, if it updates one of the tensors."""
        if self._hook is not None:
            return
        updated = [value for group in optimizer.param_groups for value in group["params"]]
        if not any(value in self._parameters for value in updated):
            return
        self._hook = optimizer.register_step_pre_hook(self._end)
        gradients = {
            storage.data_ptr(): storage.nbytes()
            for parameter in updated
            if parameter.grad is not None
            for storage in (parameter.grad.untyped_storage(),)
        }
        if self._device.type == "cpu":
            reset_peak()
            live = process_bytes()[0]
        else:
            torch.cuda.reset_peak_memory_stats(self._device)
            live = torch.cuda.memory_allocated(self._device)
        self._before = live - sum(gradients.values())

    def _end(self, *_: Any) -> None:
        if self._ended:
            return
        self._ended = True
        if self._device.type == "cpu":
            peak = process_bytes()[1]
        else:
            peak = torch.cuda.max_memory_allocated(self._device)
        self._check(peak - self._before)


_pending: list[_Measurement] = []


@cache
def _register_hook() -> None:
    """Once, for good: it runs after a step, and so hinders no optimizer."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Hooks before a step are removed here, as PyTorch does not iterate over them now."""
    for measurement in [each for each in _pending if each.is_over]:
        measurement.end()
        _pending.remove(measurement)
    for measurement in _pending:
        measurement.begin(optimizer)
