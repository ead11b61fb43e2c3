"""Measured peak of the first training step after the one that compiles.

The step lies between two steps of an optimizer, whose hooks PyTorch calls. Memory is counted from
outside: on the CPU by the allocator's counter, on CUDA by PyTorch's statistics, whose peaks are
reset once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from coop_plan.runtime.device.arena import process_bytes, reset_peak

Check = Callable[[int], None]
"""Gets the most bytes beyond those before the step; gradients of the step before count as free."""


def measure_next_step(device: torch.device, check: Check) -> None:
    """Call `check` once, at the end of the next whole step between two steps of one optimizer."""
    _Measurement(device, check)


class _Measurement:
    def __init__(self, device: torch.device, check: Check) -> None:
        self._device, self._check = device, check
        self._optimizer: torch.optim.Optimizer | None = None
        self._before = 0
        self._hooks = (
            register_optimizer_step_pre_hook(self._end),
            register_optimizer_step_post_hook(self._begin),
        )
        if device.type == "cpu":
            process_bytes()  # the counter begins with the first call

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is not None:
            return
        self._optimizer = optimizer
        gradients = {
            storage.data_ptr(): storage.nbytes()
            for group in optimizer.param_groups
            for parameter in group["params"]
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

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is not self._optimizer:
            return
        for hook in self._hooks:
            hook.remove()
        if self._device.type == "cpu":
            peak = process_bytes()[1]
        else:
            peak = torch.cuda.max_memory_allocated(self._device)
        self._check(peak - self._before)
