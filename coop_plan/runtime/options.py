"""The options of `torch.compile(..., backend="coop", options={...})`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from coop_plan.environment import VARIABLE
from coop_plan.planner.options import OPTION_NAMES, PlanOptions
from coop_plan.runtime.errors import OptionsError
from coop_plan.runtime.kernels import Kernels
from coop_plan.runtime.torch_internals import FUSED_SINCE, version
from coop_plan.schemas import InvalidInputError

MIN_ALIGNMENT = 64
"""Alignment that PyTorch's CPU kernels expect, in bytes."""

CUDA_ALIGNMENT = 512
"""Alignment of PyTorch's CUDA allocator, in bytes; PyTorch chooses kernels by it."""

VALUES = {
    "shapes": {
        "plan": "each input shape has its own plan",
        "eager": "other input shapes run as eager autograd, outside the budget",
    },
    "server_fallback": {
        "error": "a server that is away is an error",
        "local": "the step is then planned in this process",
    },
    "kernels": {
        "eager": "each op runs eager's kernel, with eager's bits",
        "fused": "Inductor compiles regions of ops, where the plan is better with them",
    },
    "outputs": {
        "gradients": "gradients in the arena, outputs of the forward outside it",
        "outside": "all outputs outside it",
    },
}
"""Allowed values and their effects. The runtime cannot place the forward's outputs in the arena."""


def check_fused() -> None:
    """Check that this version of PyTorch can have fused kernels.

    Raises:
        OptionsError: it is too old.
    """
    if version() < FUSED_SINCE:
        raise OptionsError(
            'kernels="fused" needs PyTorch {}.{} or newer: before, Inductor rounds otherwise'
            " than eager".format(*FUSED_SINCE)
        )


@dataclass(frozen=True)
class Options:
    """Planning options (`planner.options.PlanOptions`) and options of the runtime.

    Attributes:
        plan: the planning options.
        shapes: at other input shapes, "plan" makes another plan within the budget; "eager" runs
            eager autograd, which the budget does NOT bound.
        strict: a step that exceeds its budget is an error, not a warning.
        server: URL of a service that makes the plans.
        server_fallback: without the server, "error" fails and "local" plans in this process.
        variants: capture variants of ops with bitwise equal results, for the plan to choose from.
        kernels: "eager" runs eager's kernels; "fused" also captures the step over regions that
            Inductor compiles, and takes the better plan.
        cuda_graphs: on CUDA, capture both halves of a step into CUDA graphs after its first call,
            and replay them.
    """

    plan: PlanOptions
    shapes: Literal["plan", "eager"] = "plan"
    strict: bool = False
    server: str | None = None
    server_fallback: Literal["error", "local"] = "error"
    variants: bool = False
    kernels: Kernels = "eager"
    cuda_graphs: bool = False

    def within(self, budget_bytes: int | None) -> "Options":
        """These options with a budget in bytes; None for the smallest feasible one."""
        budget = "min" if budget_bytes is None else budget_bytes
        return replace(self, plan=self.plan.model_copy(update={"budget_": budget}))

    def check_on_cuda(self) -> None:
        """Check that a step on CUDA can have these options.

        Raises:
            OptionsError: PyTorch would choose other kernels than eager's at this alignment.
        """
        if self.plan.alignment % CUDA_ALIGNMENT:
            raise OptionsError(f"on CUDA, alignment must be a multiple of {CUDA_ALIGNMENT} bytes")

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> "Options":
        """Options from the user's mapping; the budget may come from the environment.

        Raises:
            OptionsError: the budget is missing, or a name or a value is wrong.
        """
        values = dict(given or {})
        if "budget" not in values and os.environ.get(VARIABLE):
            values["budget"] = os.environ[VARIABLE]
        own = [field.name for field in fields(cls) if field.name != "plan"]
        names = [*OPTION_NAMES, *own]
        for name in values:
            if name not in names:
                raise OptionsError(f"unknown option '{name}': options are {', '.join(names)}")
        if "budget" not in values:
            raise OptionsError(
                'the coop backend needs a budget: options={"budget": "12GiB"} (or bytes, "50%",'
                f' "min"), or {VARIABLE} in the environment'
            )
        for name, effects in VALUES.items():
            if name in values and values[name] not in list(effects):
                allowed = " or ".join(f'"{value}" ({effect})' for value, effect in effects.items())
                raise OptionsError(f"{name} must be {allowed}")
        if values.get("kernels") == "fused":
            check_fused()
        for name in ("strict", "variants", "cuda_graphs"):
            if not isinstance(values.get(name, False), bool):
                raise OptionsError(f"{name} must be true or false")
        if not isinstance(values.get("server"), str | None):
            raise OptionsError("server must be a text: http://HOST:PORT")
        alignment = values.get("alignment", MIN_ALIGNMENT)
        if not isinstance(alignment, int) or alignment % MIN_ALIGNMENT:
            raise OptionsError(f"alignment must be a multiple of {MIN_ALIGNMENT} bytes")
        others = {name: values.pop(name) for name in own if name in values}
        try:
            return cls(PlanOptions.of(values), **others)
        except InvalidInputError as error:
            name = error.pointer.strip("/").replace("/", ".")
            raise OptionsError(
                f"option '{name}': {error.message}" if name else error.message
            ) from None
