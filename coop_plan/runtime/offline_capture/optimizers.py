"""Optimizers on fake parameters: PyTorch's own classes, and the memory of three that it lacks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.runtime.torch_internals.autograd import is_own_optimizer
from coop_plan.runtime.torch_internals.ops import TENSOR_ITEM
from coop_plan.runtime.torch_internals.tracing import TorchDispatchMode
from coop_plan.schemas import InvalidInputError

Parameters = Sequence[torch.Tensor]

BLOCK = 256
"""Elements of an 8-bit state that share a float32 scale (bitsandbytes, `optim/optimizer.py`)."""

FLOAT32_BELOW = 4096
"""Parameters of fewer elements have float32 states (bitsandbytes, `min_8bit_size`)."""


class _WithoutOptions(Optimizer):
    """Optimizer that has no options."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {})

    def with_gradients(self) -> list[Any]:
        """The parameters that have a gradient."""
        given = [p for group in self.param_groups for p in group["params"]]
        return [parameter for parameter in given if parameter.grad is not None]


class Lion(_WithoutOptions):
    """The memory of Lion (Chen et al., 2023, program 1): one buffer, one temporary a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient."""
        for parameter in self.with_gradients():
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
            update = state["exp_avg"].lerp(parameter.grad, 0.1).sign_()
            parameter.sub_(update)
            state["exp_avg"].lerp_(parameter.grad, 0.01)


class AdamW8bit(_WithoutOptions):
    """The memory of bitsandbytes' `AdamW8bit`: two bytes an element and scales; no temporaries."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make the states of parameters that have a gradient."""
        for parameter in self.with_gradients():
            state = self.state[parameter]
            count = parameter.numel()
            for moment in () if state else ("state1", "state2"):
                small = count < FLOAT32_BELOW
                state[moment] = torch.zeros_like(
                    parameter, dtype=torch.float32 if small else torch.uint8
                )
                if not small:
                    scales = parameter.new_zeros(-(-count // BLOCK), dtype=torch.float32)
                    state[f"{moment}_scales"] = scales


class _OnesForValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which every scalar that an update reads is 1: no size depends on it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return 1.0 if func is TENSOR_ITEM else func(*args, **(kwargs or {}))


def _adamw(parameters: Parameters, **options: Any) -> list[Optimizer]:
    return [AdamW(parameters, **options)]


def _muon(parameters: Parameters, **options: Any) -> list[Optimizer]:
    """Muon for matrices, AdamW for other parameters, as its authors recommend."""
    matrices = [p for p in parameters if p.ndim == 2]
    others = [p for p in parameters if p.ndim != 2]
    made: list[Optimizer] = [Muon(matrices)] if matrices else []
    return made + (_adamw(others, **options) if others else [])


MAKERS: dict[str, Callable[..., list[Optimizer]]] = {
    "sgd": lambda parameters, **options: [SGD(parameters, **options)],
    "momentum": lambda parameters, **options: [SGD(parameters, momentum=0.9, **options)],
    "adamw": _adamw,
    "adamw8bit": lambda parameters: [AdamW8bit(parameters)],
    "adafactor": lambda parameters, **options: [Adafactor(parameters, **options)],
    "lion": lambda parameters: [Lion(parameters)],
    "muon": _muon,
}
"""Constructors by name of `optimizer_spec.OPTIMIZERS`."""

OPTIONS = {"sgd": 2, "momentum": 2, "adamw": 2, "muon": 2, "adafactor": 1}
"""Number of options `foreach` and `fused` that a class takes; others have none."""


class Update:
    """One optimizer for some fake parameters of one device."""

    def __init__(self, spec: OptimizerSpec, parameters: Parameters) -> None:
        """
        Raises:
            InvalidInputError: the optimizer has no such update.
        """
        kind = parameters[0].device.type if parameters else "cpu"
        way = "plain" if spec.update == "backward" else spec.update
        way = way or ("foreach" if kind == "cuda" else "plain")
        known = {"foreach": 1, "fused": 2}
        count = OPTIONS.get(spec.name, 0)
        if spec.update in known and known[spec.update] > count:
            raise InvalidInputError(f"optimizer {spec.name} has no {spec.update} update")
        options = dict(list({"foreach": way == "foreach", "fused": way == "fused"}.items())[:count])
        self._pairs: list[tuple[Any, Any]] = []
        """Parameters of fewer bits, and their masters."""
        updated: list[Any] = []
        for parameter in parameters:
            master = parameter
            if spec.masters and parameter.element_size() < torch.float32.itemsize:
                master = parameter.detach().float()
                self._pairs.append((parameter, master))
            updated.append(master)
        self._clipped = list(parameters) if spec.clip_norm else []
        self._optimizers = MAKERS[spec.name](updated, **options)
        self._averages = [(p.detach().clone(), p) for p in updated] if spec.ema else []

    @property
    def masters(self) -> list[Any]:
        """Float32 copies of parameters."""
        return [master for _, master in self._pairs]

    @property
    def states(self) -> list[Any]:
        """Tensors that the optimizer keeps, and averages."""
        states = [s for optimizer in self._optimizers for s in optimizer.state.values()]
        kept = [value for state in states for value in state.values()]
        return kept + [average for average, _ in self._averages]

    @torch.no_grad()
    def step(self, own: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Clip gradients, run the optimizer's step; masters are copied back, averages follow.

        `own()` is the context of steps of PyTorch's optimizers.
        """
        if self._clipped:
            torch.nn.utils.clip_grad_norm_(self._clipped, 1.0)
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        with torch.device("cpu"), _OnesForValues():  # type: ignore[no-untyped-call]
            for optimizer in self._optimizers:
                with own() if is_own_optimizer(optimizer) else nullcontext():
                    optimizer.step()
        for parameter, master in self._pairs:
            master.grad = None
            parameter.copy_(master)
        for average, updated in self._averages:
            average.lerp_(updated, 0.001)
