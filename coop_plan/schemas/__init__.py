"""The JSON contract: graph, plan, budgets, fingerprints; imports nothing else of coop-plan."""

from coop_plan.schemas.errors import InvalidInputError
from coop_plan.schemas.fingerprint import cost_signature, fingerprint
from coop_plan.schemas.graph import Device, Graph, Op, Tensor, Variant, load_graph, parse_graph
from coop_plan.schemas.plan import (
    BoundModel,
    Compute,
    Free,
    Home,
    Offload,
    Outputs,
    Plan,
    Prefetch,
    Step,
    TensorRead,
    Wait,
    Workspace,
    Write,
    load_plan,
    parse_plan,
)
from coop_plan.schemas.units import Budget, format_bytes, parse_budget, parse_bytes, parse_rate

if __name__ != "coop_plan.schemas":  # found by a link of a checkout
    raise ImportError(f"import coop_plan.schemas, not {__name__}")

__all__ = [
    "BoundModel",
    "Budget",
    "Compute",
    "Device",
    "Free",
    "Graph",
    "Home",
    "InvalidInputError",
    "Offload",
    "Op",
    "Outputs",
    "Plan",
    "Prefetch",
    "Step",
    "Tensor",
    "TensorRead",
    "Variant",
    "Wait",
    "Workspace",
    "Write",
    "cost_signature",
    "fingerprint",
    "format_bytes",
    "load_graph",
    "load_plan",
    "parse_budget",
    "parse_bytes",
    "parse_graph",
    "parse_plan",
    "parse_rate",
]
