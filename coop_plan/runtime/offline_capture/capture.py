"""`coop_plan.capture`: a training step that is named `package.module:function`, as a graph."""

import sys
from pathlib import Path

from coop_plan.runtime.kernels import Kernels
from coop_plan.runtime.offline_capture.devices import device as device_named
from coop_plan.runtime.offline_capture.fake_device import CaptureRequest, capture_for
from coop_plan.runtime.offline_capture.optimizer_spec import OPTIMIZERS, OptimizerSpec
from coop_plan.schemas import Graph, InvalidInputError


def capture(
    target: str,
    *,
    device: str | None = None,
    batch: int | None = None,
    optimizer: str | None = None,
    masters: bool = False,
    ema: bool = False,
    variants: bool = False,
    kernels: Kernels = "eager",
) -> Graph:
    """Returns the profiled graph of a training step.

    Args:
        target: `package.module:function`; the function returns a callable and its example
            arguments. The current folder is searched first.
        device: name or file of a device that is not here: the step is traced without memory, and
            its costs are a roofline. None: the step is profiled on this machine.
        batch: argument `batch` of the function.
        optimizer: optimizer whose states are resident, too: "sgd", "momentum", "adamw",
            "adamw8bit", "adafactor", "lion" or "muon".
        masters: float32 copies of parameters of fewer bits are resident, too.
        ema: an exponential moving average of the trained parameters is resident, too.
        variants: also measure other ways to run ops that return the same bits.
        kernels: "eager", or "fused" for a graph over the regions that Inductor compiles.

    Raises:
        InvalidInputError: no such function or device, or arguments that exclude each other.
        RuntimeRefusalError: the step cannot be captured, or this PyTorch has no fused kernels.
    """
    if (masters or ema) and optimizer is None:
        raise InvalidInputError("masters and ema are those of an optimizer: name one (--optimizer)")
    if variants and device is not None:
        raise InvalidInputError("variants are measured here, not on a --device that is not here")
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise InvalidInputError(f"'{optimizer}' is no optimizer of {', '.join(OPTIMIZERS)}")
    spec = None if optimizer is None else OptimizerSpec(name=optimizer, masters=masters, ema=ema)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if device is not None:
        return capture_for(
            CaptureRequest(
                target=target,
                spec=device_named(device),
                batch=batch,
                optimizer=spec,
                kernels=(kernels,),
            )
        )
    from coop_plan.runtime.offline_capture.target import capture_target  # imports PyTorch

    return capture_target(target, batch, spec, variants=variants, kernels=kernels)
