"""Measured peak of the first training step after the one that compiles.

The step lies between two steps of an optimizer of the graph's parameters, whose hooks PyTorch
calls. Memory is counted from outside: on the CPU by the allocator's counter, on CUDA by PyTorch's
statistics, whose peaks are reset once.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
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
    _register_hooks()
    if device.type == "cpu":
        process_bytes()  # the counter begins with the first call
    _pending.append(_Measurement(device, parameters, check))


class _Measurement:
    def __init__(
        self, device: torch.device, parameters: Iterable[torch.Tensor], check: Check
    ) -> None:
        self._device, self.check = device, check
        self._parameters: Any = WeakIdKeyDictionary(dict.fromkeys(parameters))
        self.optimizer = 0  # its id
        self._before = 0

    def is_due(self) -> bool:
        """False if the tensors are freed."""
        return bool(self._parameters)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Start of a step of this optimizer, if it updates one of the tensors."""
        updated = [value for group in optimizer.param_groups for value in group["params"]]
        if self.optimizer or not any(value in self._parameters for value in updated):
            return
        self.optimizer = id(optimizer)
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

    def taken(self) -> int:
        """Most bytes since the start of the step, beyond those before it."""
        if self._device.type == "cpu":
            peak = process_bytes()[1]
        else:
            peak = torch.cuda.max_memory_allocated(self._device)
        return peak - self._before


_pending: list[_Measurement] = []


@cache
def _register_hooks() -> None:
    """Once: an optimizer's hooks cannot remove themselves while all are called."""
    register_optimizer_step_pre_hook(_end)
    register_optimizer_step_post_hook(_begin)


def _begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _pending[:] = [each for each in _pending if each.is_due()]
    for measurement in _pending:
        measurement.begin(optimizer)


def _end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    ended = [each for each in _pending if each.optimizer == id(optimizer)]
    _pending[:] = [each for each in _pending if each not in ended]
    for measurement in ended:
        measurement.check(measurement.taken())
