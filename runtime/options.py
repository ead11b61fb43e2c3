"""The options of `torch.compile(..., backend="coop", options={...})`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from runtime.errors import OptionsError
from schemas import Budget, InvalidInputError, parse_budget

MIN_ALIGNMENT = 64
"""PyTorch's CPU kernels expect this alignment, in bytes."""


@dataclass(frozen=True)
class Options:
    """Budget (required), and how to plan within it; the names are those of `planner.plan`."""

    budget: Budget
    method: str = "coop-offline"
    alignment: int = 512
    time_limit: float | None = None
    outputs: Literal["outside"] = "outside"
    switches: Mapping[str, bool] = field(default_factory=dict)

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
        if values.get("outputs", "outside") != "outside":
            raise OptionsError(
                'the runtime allocates outputs outside the arena: leave out "outputs" or set it to'
                ' "outside"'
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
