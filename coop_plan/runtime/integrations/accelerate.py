"""Accelerate: `Accelerator(dynamo_plugin=budget_plugin("50%"))`.

Accelerate's own plugin accepts a fixed list of backends.
"""

from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from coop_plan.runtime.integrations.inplace import coop


@dataclass
class _Plugin(TorchDynamoPlugin):  # type: ignore[misc,unused-ignore]  # untyped
    """Plugin with a backend that Accelerate accepts and arguments for `torch.compile`."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        kept = {"dynamic": self.dynamic, "fullgraph": self.fullgraph, "disable": self.disable}
        return kept | self.arguments


def budget_plugin(budget: int | str | None = None, **options: Any) -> TorchDynamoPlugin:
    """Plugin with which `Accelerator.prepare` plans the model's step within a budget.

    Args:
        budget: as in `torch.compile(..., options={"budget": ...})`; default `COOP_BUDGET`.
        options: the backend's other options.

    Raises:
        OptionsError: an option is invalid.
    """
    return _Plugin(backend=DynamoBackend.AOT_EAGER, arguments=coop(budget, options))
