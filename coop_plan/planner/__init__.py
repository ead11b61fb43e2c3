"""Planner of training steps within a memory budget; uses neither PyTorch nor HTTP.

The names below are imported at first use, so that verifying alone loads no kernel.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coop_plan.planner.core.errors import InfeasibleBudgetError, TimeLimitError
    from coop_plan.planner.core.problem import Problem
    from coop_plan.planner.method import MethodInfo, Progress
    from coop_plan.planner.options import PlanOptions
    from coop_plan.planner.planning import plan
    from coop_plan.planner.registry import METHODS
    from coop_plan.planner.verifier import Fault, InvalidPlanError, find_faults, verify

if __name__ != "coop_plan.planner":  # found by a link of a checkout
    raise ImportError(f"import coop_plan.planner, not {__name__}")

__all__ = [
    "METHODS",
    "Fault",
    "InfeasibleBudgetError",
    "InvalidPlanError",
    "MethodInfo",
    "PlanOptions",
    "Problem",
    "Progress",
    "TimeLimitError",
    "find_faults",
    "plan",
    "verify",
]

_MODULE_OF = {
    name: module
    for module, *names in (
        ("core.errors", "InfeasibleBudgetError", "TimeLimitError"),
        ("core.problem", "Problem"),
        ("method", "MethodInfo", "Progress"),
        ("options", "PlanOptions"),
        ("planning", "plan"),
        ("registry", "METHODS"),
        ("verifier", "Fault", "InvalidPlanError", "find_faults", "verify"),
    )
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
