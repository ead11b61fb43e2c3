"""
Plans one training step into a hard memory budget: what to keep, drop and recompute, and the address
of every tensor in one fixed arena.

The public names are here; they are loaded when they are first used, so that importing this package
loads neither kernels nor PyTorch. `torch.compile(..., backend="coop")` needs no import at all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coop_plan.client.client import AsyncClient, Client
    from coop_plan.client.protocol import JobState, ServerAwayError, ServerError, ServerProblemError
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
    from coop_plan.runtime.train_step import train_step
    from coop_plan.schemas import Graph, InvalidInputError, Plan, load_graph, load_plan

__all__ = [
    "METHODS",
    "AsyncClient",
    "Client",
    "Fault",
    "Graph",
    "InfeasibleBudgetError",
    "InvalidInputError",
    "InvalidPlanError",
    "JobState",
    "Plan",
    "PlanOptions",
    "Progress",
    "ServerAwayError",
    "ServerError",
    "ServerProblemError",
    "StepReport",
    "TimeLimitError",
    "clear_reports",
    "find_faults",
    "load_graph",
    "load_plan",
    "plan",
    "reports",
    "train_step",
    "verify",
]

_SCHEMAS = {"Graph", "InvalidInputError", "Plan", "load_graph", "load_plan"}
_RUNTIME = {"StepReport", "clear_reports", "reports"}
_CALLS = {"JobState", "ServerAwayError", "ServerError", "ServerProblemError"}
_HOMES = (
    dict.fromkeys(_SCHEMAS, "schemas")
    | dict.fromkeys(_RUNTIME, "runtime")
    | dict.fromkeys(_CALLS, "client.protocol")
    | dict.fromkeys(("AsyncClient", "Client"), "client.client")
    | {"train_step": "runtime.train_step"}
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'planner')}"), name)
