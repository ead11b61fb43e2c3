"""The options of `torch.compile(..., backend="coop", options={...})`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from coop_plan.environment import VARIABLE
from coop_plan.planner.options import OPTION_NAMES, PlanOptions
from coop_plan.runtime.errors import OptionsError
from coop_plan.schemas import InvalidInputError

MIN_ALIGNMENT = 64
"""PyTorch's CPU kernels expect this alignment, in bytes."""

CUDA_ALIGNMENT = 512
"""Of what PyTorch's CUDA allocator returns, in bytes; kernels are chosen by it."""

OURS = ("shapes", "strict", "server", "server_fallback", "variants")
"""Options that are no `PlanOptions`."""

OUTPUTS = "gradients"
"""Where outputs lie unless told otherwise."""


@dataclass(frozen=True)
class Options:
    """How to plan (`planner.options.PlanOptions`), and what happens otherwise than planned.

    `shapes` says what happens at another input shape. "plan": it is planned within the budget too;
    "eager": it runs as eager autograd, which the budget does NOT bound. With `strict`, a step that
    takes more than its budget is an error; otherwise it is warned of.

    Plans are those of a `server`, if there is one; where it is away, `server_fallback` is "error",
    or "local": they are made here.

    With `variants` the ways in which ops can be run with the same result to the bit are tried when
    a step is captured, and the plan chooses among them.
    """

    plan: PlanOptions
    shapes: Literal["plan", "eager"] = "plan"
    strict: bool = False
    server: str | None = None
    server_fallback: Literal["error", "local"] = "error"
    variants: bool = False

    def within(self, budget_bytes: int | None) -> "Options":
        """These options with a budget in bytes, or the smallest that can be met."""
        budget = "min" if budget_bytes is None else budget_bytes
        return replace(self, plan=self.plan.model_copy(update={"budget_": budget}))

    def on_cuda(self) -> "Options":
        """These options for a step on CUDA, where all outputs lie outside the arena.

        What the user still holds of an arena there could not keep its pages without the rest.

        Raises:
            OptionsError: an alignment by which PyTorch's kernels would not be eager's.
        """
        if self.plan.alignment % CUDA_ALIGNMENT:
            raise OptionsError(f"on CUDA, alignment must be a multiple of {CUDA_ALIGNMENT} bytes")
        return replace(self, plan=self.plan.model_copy(update={"outputs": "outside"}))

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> "Options":
        """Options as the user wrote them.

        Raises:
            OptionsError: no budget, an unknown name, or a value that cannot be used.
        """
        values = {"outputs": OUTPUTS} | dict(given or {})
        if "budget" not in values and os.environ.get(VARIABLE):
            values["budget"] = os.environ[VARIABLE]
        known = [*OPTION_NAMES, *OURS]
        for name in values:
            if name not in known:
                raise OptionsError(f"unknown option '{name}': known are {', '.join(known)}")
        if "budget" not in values:
            raise OptionsError(
                'the coop backend needs a budget: options={"budget": "12GiB"} (or bytes, "50%",'
                f' "min"), or {VARIABLE} in the environment'
            )
        if values["outputs"] not in ("gradients", "outside"):
            raise OptionsError(
                'outputs must be "gradients" (these in the arena, the outputs of the forward'
                ' outside it) or "outside" (all outputs outside it)'
            )
        shapes = values.pop("shapes", cls.shapes)
        if shapes not in ("plan", "eager"):
            raise OptionsError(
                'shapes must be "plan" (another input shape is planned too) or "eager" (it runs'
                " eagerly, outside the budget)"
            )
        strict = values.pop("strict", cls.strict)
        if not isinstance(strict, bool):
            raise OptionsError("strict must be true or false")
        variants = values.pop("variants", cls.variants)
        if not isinstance(variants, bool):
            raise OptionsError("variants must be true or false")
        server = values.pop("server", None)
        if server is not None and not isinstance(server, str):
            raise OptionsError("server must be a text: http://HOST:PORT")
        fallback = values.pop("server_fallback", cls.server_fallback)
        if fallback not in ("error", "local"):
            raise OptionsError(
                'server_fallback must be "error" (a server that is away is one) or "local" (the'
                " step is planned here then)"
            )
        alignment = values.get("alignment", MIN_ALIGNMENT)
        if not isinstance(alignment, int) or alignment % MIN_ALIGNMENT:
            raise OptionsError(f"alignment must be a multiple of {MIN_ALIGNMENT} bytes")
        try:
            return cls(PlanOptions.of(values), shapes, strict, server, fallback, variants)
        except InvalidInputError as error:
            name = error.pointer.strip("/").replace("/", ".")
            raise OptionsError(
                f"option '{name}': {error.message}" if name else error.message
            ) from None
