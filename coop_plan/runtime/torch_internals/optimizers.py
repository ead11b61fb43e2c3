"""Attributes of optimizers, and `torch.amp.GradScaler`: its code, its device, its checks."""

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

UNSCALING = ("scale", "unscale_", "_unscale_grads_", "_check_inf_per_device")
"""Methods that scale losses, and check and unscale gradients."""

CHECKED_ONCE = "_need_device_dtype_check_for_fused"
"""Attribute of a fused optimizer, which its first step with a gradient sets to False."""


def unscales_as_pytorch(scaler: GradScaler) -> bool:
    """True if a scaler's class scales and unscales by PyTorch's code."""
    return all(getattr(type(scaler), name) is getattr(GradScaler, name) for name in UNSCALING)


def device_type(scaler: GradScaler) -> str:
    """The type of the device that a scaler was made for."""
    return str(scaler._device)


def note_unscaled(scaler: GradScaler, optimizer: Optimizer, found: torch.Tensor) -> None:
    """Let a scaler know that an optimizer's gradients are unscaled, as `unscale_` does.

    `found` is 1 if one of them is not finite, else 0. `scaler.step(optimizer)` reads it.
    """
    scaler._per_optimizer_states[id(optimizer)] = {
        "stage": OptState.UNSCALED,
        "found_inf_per_device": {found.device: found},
    }


def unscales_itself(optimizer: Optimizer) -> bool:
    """True if an optimizer's step unscales by its attributes `grad_scale` and `found_inf`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
