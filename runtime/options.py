"""The options of `torch.compile(..., backend="coop", options={...})`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from runtime.errors import OptionsError
from schemas import Budget, InvalidInputError, parse_budget

MIN_ALIGNMENT = 64
"""PyTorch's CPU kernels expect this alignment, in bytes."""

CUDA_ALIGNMENT = 512
"""Of what PyTorch's CUDA allocator returns, in bytes; kernels are chosen by it."""


@dataclass(frozen=True)
class Options:
    """Budget (required), and how to plan within it; most names are those of `planner.plan`.

    `shapes` says what happens at another input shape than the first of a function: "plan" plans it
    within the budget too, "eager" runs it as eager autograd, which the budget does NOT bound.
    """

    budget: Budget
    method: str = "coop-offline"
    alignment: int = 512
    time_limit: float | None = None
    outputs: Literal["gradients", "outside"] = "gradients"
    switches: Mapping[str, bool] = field(default_factory=dict)
    shapes: Literal["plan", "eager"] = "plan"

    def on_cuda(self) -> "Options":
        """These options for a step on CUDA, where all outputs lie outside the arena.

        What the user still holds of an arena there could not keep its pages without the rest.

        Raises:
            OptionsError: an alignment by which PyTorch's kernels would not be eager's.
        """
        if self.alignment % CUDA_ALIGNMENT:
            raise OptionsError(f"on CUDA, alignment must be a multiple of {CUDA_ALIGNMENT} bytes")
        return replace(self, outputs="outside")

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> "Options":
        """Options as the user wrote them.

        Raises:
            OptionsError: no budget, an unknown name, or a value that cannot be used.
        """
        values = dict(given or {})
        known = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in known:
                raise OptionsError(f"unknown option '{name}': known are {', '.join(known)}")
        if "budget" not in values:
            raise OptionsError(
                'the coop backend needs a budget: options={"budget": "12GiB"} (or bytes, "50%",'
                ' "min")'
            )
        if values.get("outputs", cls.outputs) not in ("gradients", "outside"):
            raise OptionsError(
                'outputs must be "gradients" (these in the arena, the outputs of the forward'
                ' outside it) or "outside" (all outputs outside it)'
            )
        if values.get("shapes", cls.shapes) not in ("plan", "eager"):
            raise OptionsError(
                'shapes must be "plan" (another input shape is planned too) or "eager" (it runs'
                " eagerly, outside the budget)"
            )
        alignment = values.get("alignment", cls.alignment)
        if not isinstance(alignment, int) or alignment % MIN_ALIGNMENT:
            raise OptionsError(f"alignment must be a multiple of {MIN_ALIGNMENT} bytes")
        budget = values["budget"]
        if not isinstance(budget, Budget):
            if not isinstance(budget, (int, str)):
                raise OptionsError(f"budget must be bytes or text, not {type(budget).__name__}")
            try:
                values["budget"] = parse_budget(budget)
            except InvalidInputError as error:
                raise OptionsError(str(error)) from None
        return cls(**values)
