"""GradScaler in a whole iteration: the scale, and the checks of the gradients.

The plan reads the scale from a resident, and writes there which optimizers have a gradient that is
not finite. Updates read that. Afterwards the scaler itself steps and updates its scale.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from coop_plan.runtime.errors import OptionsError, RuntimeRefusalError
from coop_plan.runtime.torch_internals.optimizers import (
    device_type,
    note_unscaled,
    unscales_as_pytorch,
    unscales_itself,
)
from coop_plan.runtime.whole_iteration.graph import ScaledGradients


class Scaling:
    """The scale of some optimizers' gradients, for one call after the other.

    `record` is a float32 tensor: the scale, then for each optimizer 1 if one of its gradients is
    not finite, else 0.

    Args:
        scaler: has PyTorch's code for scaling.
        optimizers: share no parameter.
        clipped: gradients are unscaled before the step, as they are clipped.

    Raises:
        OptionsError: the scaler or an optimizer unscales by code that is called otherwise.
    """

    record: torch.Tensor

    def __init__(
        self, scaler: GradScaler, optimizers: Sequence[Optimizer], *, clipped: bool
    ) -> None:
        if not (isinstance(scaler, GradScaler) and unscales_as_pytorch(scaler)):
            raise OptionsError(
                f"{type(scaler).__name__} has code of its own for scaling: pass a"
                " torch.amp.GradScaler"
            )
        for one in optimizers:
            if "grad_scaler" in inspect.signature(type(one).step).parameters:
                raise OptionsError(
                    f"{type(one).__name__}.step takes the GradScaler, which train_iteration does"
                    " not pass: let it read its attributes grad_scale and found_inf"
                )
        self.scaler = scaler
        self._optimizers = optimizers
        self._clipped = clipped
        self._skipped: dict[int, bool] = {}

    def begin(self) -> None:
        """Begin a call: read the scale.

        Raises:
            RuntimeRefusalError: the scaler is for another device than the parameters'.
        """
        device = next(
            p.device for one in self._optimizers for g in one.param_groups for p in g["params"]
        )
        if device_type(self.scaler) != device.type:
            raise RuntimeRefusalError(
                f"the GradScaler is for {device_type(self.scaler)}, and the parameters are on"
                f' {device.type}: make it by torch.amp.GradScaler("{device.type}")'
            )
        self._skipped.clear()
        self.record = torch.zeros(1 + len(self._optimizers), device=device)
        self.record[0] = self.scaler.scale(torch.ones((), device=device))

    def gradients(
        self, parameters: Mapping[int, tuple[Optimizer, torch.Tensor]]
    ) -> ScaledGradients:
        """The scaled gradients of parameters of the optimizers, by position among the inputs.

        Raises:
            RuntimeRefusalError: a gradient has float16, which GradScaler does not unscale.
        """
        divided = {
            at for at, (one, _) in parameters.items() if unscales_itself(one) and not self._clipped
        }
        for at, (_, parameter) in parameters.items():
            if parameter.dtype == torch.float16 and at not in divided:
                raise RuntimeRefusalError(
                    f"a parameter of shape {tuple(parameter.shape)} is float16, and GradScaler"
                    " unscales no gradient of it: keep it in float32, and use torch.autocast"
                )
        owners = {at: self._number(one) for at, (one, _) in parameters.items()}
        return ScaledGradients(self.record, owners, divided)

    def _number(self, optimizer: Optimizer) -> int:
        return 1 + self._optimizers.index(optimizer)

    def skips(self, optimizer: Optimizer) -> bool:
        """True if updates of an optimizer are left out; known once its gradients are checked."""
        number = self._number(optimizer)
        if number not in self._skipped:  # one wait for the device
            found = not unscales_itself(optimizer) and bool(self.record[number])
            self._skipped[number] = found
        return self._skipped[number]

    def attributes(self, optimizer: Optimizer) -> dict[str, Any]:
        """Attributes that GradScaler gives to an optimizer whose step unscales by itself."""
        if not unscales_itself(optimizer):
            return {}
        scale = getattr(optimizer, "grad_scale", None)
        if not self._clipped:
            scale = self.record[0] if scale is None else self.record[0] * scale
        return {"grad_scale": scale, "found_inf": self.record[self._number(optimizer)]}

    def example(self, optimizer: Optimizer) -> dict[str, Any]:
        """Such attributes for a measurement: a scale that changes gradients, all of them finite."""
        given = self.attributes(optimizer)
        values = {"grad_scale": 2.0, "found_inf": 0.0}
        return {k: v if v is None else torch.full_like(v, values[k]) for k, v in given.items()}

    def note(self) -> None:
        """Let the scaler know the checks, for its `step` of each optimizer and its `update`."""
        for one in self._optimizers:
            note_unscaled(self.scaler, one, self.record[self._number(one)])
