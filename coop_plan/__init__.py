"""
Plans one training step into a hard memory budget: what to keep, drop and recompute, and the address
of every tensor in one fixed arena.

The public names are here; they are loaded when they are first used, so that importing this package
loads neither kernels nor PyTorch. `torch.compile(..., backend="coop")` needs no import at all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coop_plan.planner import (
        METHODS,
        Fault,
        InfeasibleBudgetError,
        InvalidPlanError,
        PlanOptions,
        Progress,
        TimeLimitError,
        find_faults,
        plan,
        verify,
    )
    from coop_plan.runtime import StepReport, clear_reports, reports
    from coop_plan.schemas import Graph, InvalidInputError, Plan, load_graph, load_plan

__all__ = [
    "METHODS",
    "Fault",
    "Graph",
    "InfeasibleBudgetError",
    "InvalidInputError",
    "InvalidPlanError",
    "Plan",
    "PlanOptions",
    "Progress",
    "StepReport",
    "TimeLimitError",
    "clear_reports",
    "find_faults",
    "load_graph",
    "load_plan",
    "plan",
    "reports",
    "verify",
]

_SCHEMAS = {"Graph", "InvalidInputError", "Plan", "load_graph", "load_plan"}
_RUNTIME = {"StepReport", "clear_reports", "reports"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    part = "schemas" if name in _SCHEMAS else "runtime" if name in _RUNTIME else "planner"
    return getattr(import_module(f"{__name__}.{part}"), name)
