"""Accelerate: `Accelerator(dynamo_plugin=budget_plugin("50%"))`.

Its own plugin takes the names of a closed list of backends.
"""

from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import DynamoBackend, TorchDynamoPlugin

from coop_plan.runtime.integrations.inplace import coop


@dataclass
class _Plugin(TorchDynamoPlugin):  # type: ignore[misc,unused-ignore]  # untyped
    """Says to Accelerate that there is a backend, and to `torch.compile` which one."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of `torch.compile`."""
        kept = {"dynamic": self.dynamic, "fullgraph": self.fullgraph, "disable": self.disable}
        return kept | self.arguments


def budget_plugin(budget: int | str | None = None, **options: Any) -> TorchDynamoPlugin:
    """A plugin by which `Accelerator.prepare` plans the model's step into a budget.

    Args:
        budget: as in `torch.compile(..., options={"budget": ...})`; `COOP_BUDGET` without one.
        options: the backend's other options.

    Raises:
        OptionsError: they cannot be used.
    """
    return _Plugin(backend=DynamoBackend.AOT_EAGER, arguments=coop(budget, options))
